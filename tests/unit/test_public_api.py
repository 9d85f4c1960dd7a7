"""The public API: what `kvpool` exports is what its page names."""

from __future__ import annotations

import re
from pathlib import Path

import kvpool

PAGE = Path(__file__).parents[2] / "docs" / "python-client.md"


def test_the_page_names_what_the_package_exports() -> None:
    table = PAGE.read_text().split("\n## Names\n")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(kvpool.__all__)


def test_everything_that_is_exported_can_be_imported() -> None:
    assert kvpool.__all__ == sorted(kvpool.__all__)
    for name in kvpool.__all__:
        assert getattr(kvpool, name) is not None
    assert set(dir(kvpool)) == {*kvpool.__all__, "__version__"}
