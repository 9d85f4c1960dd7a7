"""Arming fault points from the environment."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvpool.core.errors import ArenaFull, StartupFailed, StoreFault
from kvpool.core.fault_points import disarm_all, reach
from kvpool_server.faults import arm_faults
from tests.fixtures.patience import PATIENCE_S

_POINT = "pagestore.write.synced"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    disarm_all()


def _env(wish: str) -> dict[str, str]:
    return {"KVPOOL_FAULT": wish, "KVPOOL_ALLOW_FAULTS": "1"}


def test_nothing_is_armed_without_a_wish() -> None:
    arm_faults({"KVPOOL_ALLOW_FAULTS": "1"})
    reach(_POINT)


@pytest.mark.parametrize("allow", [{}, {"KVPOOL_ALLOW_FAULTS": ""}, {"KVPOOL_ALLOW_FAULTS": "yes"}])
def test_a_wish_without_permission_keeps_the_process_from_starting(allow: dict[str, str]) -> None:
    with pytest.raises(StartupFailed, match="KVPOOL_ALLOW_FAULTS=1"):
        arm_faults({"KVPOOL_FAULT": f"{_POINT}:kill", **allow})
    reach(_POINT)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("pagestore.nowhere:kill", "not a fault point"),
        (f"{_POINT}:kill:0", "counts reaches from 1"),
        (f"{_POINT}:kill:often", "counts reaches from 1"),
        (f"{_POINT}:kill:²", "counts reaches from 1"),
        (f"{_POINT}", "knows kill, stop"),
        (f"{_POINT}:kill=3", "knows kill, stop"),
        (f"{_POINT}:explode", "'explode'"),
        (f"{_POINT}:fail=NO_SUCH_REASON", "NO_SUCH_REASON"),
        (f"{_POINT}:delay", "needs seconds"),
        (f"{_POINT}:delay=soon", "needs seconds"),
    ],
)
def test_a_malformed_wish_is_refused_by_name(wish: str, said: str) -> None:
    with pytest.raises(StartupFailed, match=said):
        arm_faults(_env(wish))


def test_the_nth_reach_fails_and_no_other() -> None:
    arm_faults(_env(f"{_POINT}:fail:2"))
    reach(_POINT)
    with pytest.raises(StoreFault, match=_POINT):
        reach(_POINT)
    reach(_POINT)


def test_a_failure_can_be_any_error_of_the_protocol() -> None:
    arm_faults(_env(f"{_POINT}:fail=ARENA_FULL"))
    with pytest.raises(ArenaFull):
        reach(_POINT)


def test_several_points_are_armed_at_once() -> None:
    arm_faults(_env(f"{_POINT}:fail, pagestore.write.begin:fail=ARENA_FULL"))
    with pytest.raises(ArenaFull):
        reach("pagestore.write.begin")
    with pytest.raises(StoreFault):
        reach(_POINT)


def test_a_delay_holds_the_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kvpool_server.faults.time.sleep", slept.append)
    arm_faults(_env(f"{_POINT}:delay=0.25"))
    reach(_POINT)
    reach(_POINT)
    assert slept == [0.25]


def test_a_kill_ends_the_process_at_once() -> None:
    script = (
        "import atexit, os\n"
        "from kvpool.core.fault_points import reach\n"
        "from kvpool_server.faults import arm_faults\n"
        "atexit.register(print, 'cleaned up')\n"
        "arm_faults(os.environ)\n"
        f"reach({_POINT!r})\n"
        "print('still here', flush=True)\n"
    )
    env = {**os.environ, **_env(f"{_POINT}:kill")}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
