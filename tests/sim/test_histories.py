"""Thousands of short histories of a simulated cluster, and bugs planted to see that they would be found.

Each chunk runs in a process of its own, so that a seed does there what it does on the command line:
`python -m tests.sim --seed N --trace` replays one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS

pytestmark = pytest.mark.timeout(600)  # a minute of processor time is several on a busy machine
_ROOT = Path(__file__).parents[2]
_CHUNK = 125  # histories of one process: to start one costs as much as 30 of them
_HISTORIES = 1000  # `python -m tests.sim --seeds 1000-100000` plays others
_MUTANT_PARTS = 4
_SEEDS_FOR_A_MUTANT = 1000  # nearly all are found within 100; which seed is first changes with every change of the code


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("first", range(0, _HISTORIES, _CHUNK))
def test_histories_keep_every_promise(first: int) -> None:
    ended = _simulate("--seeds", f"{first}-{first + _CHUNK - 1}", "--keep-going")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_bug_can_be_planted_where_the_code_is_now(mutant: str) -> None:
    try:
        with MUTANTS[mutant]():
            pass
    except AttributeError as error:
        pytest.fail(f"the code has moved from where {mutant} is planted, see tests/sim/mutants.py: {error}")


@pytest.mark.parametrize("part", range(_MUTANT_PARTS))
def test_planted_bugs_are_found(part: int) -> None:
    mutants = sorted(MUTANTS)[part::_MUTANT_PARTS]
    ended = _simulate("--seeds", str(_SEEDS_FOR_A_MUTANT), "--mutants", *mutants)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" is found by seed ") == len(mutants)


def test_a_seed_does_the_same_in_every_process() -> None:
    """Else a failing seed could not be replayed."""
    first, second = (_simulate("--seeds", "3-5", "--trace") for _ in range(2))
    assert first.returncode == second.returncode == 0
    assert _without_rate(first.stdout) == _without_rate(second.stdout)


def _without_rate(text: str) -> list[str]:
    return [line for line in text.splitlines() if "per second of processor time" not in line]
