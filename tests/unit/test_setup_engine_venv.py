"""The lists of the engines' environments can be read, and the README names the versions in them."""

from __future__ import annotations

import pytest

from tests.engines.environments import ENGINES, REPOSITORY
from tools.setup_engine_venv import LISTS, requirements


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_a_list_of_pinned_parts(engine: str) -> None:
    with_them, alone = requirements((LISTS / f"{engine}.txt").read_text())
    assert any(line.startswith("torch==") for line in with_them)
    pinned = next(line for line in alone if line.startswith(f"{engine}=="))
    reported = (REPOSITORY / "clients/python/kvpool/connectors/README.md").read_text().lower()
    assert pinned.replace("==", " ") in reported, "the README names another version than the one that is tested"


def test_a_list_without_its_dividing_line_is_refused() -> None:
    with pytest.raises(ValueError, match="one line"):
        requirements("torch==1\n")
