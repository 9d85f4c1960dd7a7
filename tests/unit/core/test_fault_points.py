"""Fault points: every name that exists is placed in the code, and nothing else is."""

import re
from collections import Counter
from pathlib import Path

import pytest

from kvpool.core.fault_points import POINTS, arm, disarm_all, reach

_ROOT = Path(__file__).parents[3]
_PLACED = re.compile(r"\breach\(([^)]*)\)")


def _placed_names() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in [*(_ROOT / "services").rglob("*.py"), *(_ROOT / "clients").rglob("*.py")]:
        if path.name != "fault_points.py":
            found.update(name for name in _PLACED.findall(path.read_text()))
    return found


def test_every_point_is_placed_and_every_place_is_a_known_point() -> None:
    placed = {name.strip('"') for name in _placed_names()}
    assert placed == set(POINTS)


def test_places_name_their_points_literally() -> None:
    assert all(re.fullmatch(r'"[a-z.]+"', name) for name in _placed_names())


def test_a_point_that_is_not_armed_does_nothing() -> None:
    for name in POINTS:
        reach(name)


def test_an_armed_point_acts_at_each_reach_until_it_is_disarmed() -> None:
    reached: list[str] = []
    arm("pagestore.write.begin", lambda: reached.append("write"))
    try:
        reach("pagestore.write.begin")
        reach("pagestore.write.synced")
        reach("pagestore.write.begin")
    finally:
        disarm_all()
    reach("pagestore.write.begin")
    assert reached == ["write", "write"]


def test_an_unknown_point_cannot_be_armed() -> None:
    with pytest.raises(KeyError, match=r"pagestore\.nowhere"):
        arm("pagestore.nowhere", lambda: None)
