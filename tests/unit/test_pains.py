"""The table of pains in tests/README.md names tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_every_pain_is_held_by_tests_that_exist() -> None:
    rows = [line for line in (TESTS / "README.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test holds: {row}"
        for path, name in named:
            assert f"def {name}(" in (TESTS / path).read_text(), f"{path} has no {name}"
