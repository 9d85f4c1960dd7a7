"""The lists of phases of bench.vllm_gpu."""

import sys

import pytest

from bench.vllm_gpu.__main__ import LISTS, Step, _arguments, _plan, _step_arguments
from bench.vllm_gpu.copies import PHASES as COPIES
from bench.vllm_gpu.engines import KINDS
from bench.vllm_gpu.faults import PHASES as FAULTS
from bench.vllm_gpu.phases import PHASES
from bench.vllm_gpu.pull_kills import PHASES as PULL_KILLS
from bench.vllm_gpu.ranks import PHASES as RANKS
from bench.vllm_gpu.ranks import need_gpus
from bench.vllm_gpu.transfers import PHASES as TRANSFERS

STEPS = [pytest.param(step, id=f"{name} {step.name}") for name, steps in LISTS.items() for step in steps]


@pytest.mark.parametrize("step", STEPS)
def test_steps_are_phases_of_known_engines(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *step.arguments.split()])
    arguments = _arguments()
    assert arguments.phase in {**PHASES, **TRANSFERS, **FAULTS, **RANKS, **COPIES, **PULL_KILLS}
    assert set(_plan(arguments).kinds) <= set(KINDS)


@pytest.mark.parametrize(
    "name", ["quick", "final-1", "final-2", "final-3", "transfers", "two-gpus-1", "two-gpus-2", "two-gpus-3", "hybrid"]
)
def test_lists_for_a_gpu_fit_their_time(name: str) -> None:
    assert sum(step.seconds for step in LISTS[name]) <= 540
    assert len({step.name for step in LISTS[name]}) == len(LISTS[name])


def test_a_steps_own_numbers_count_for_the_shape_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("ranks", "ranks --blocks 2000 --prefix-tokens 2048 --eager", 1)
    plans = []
    for shape in ("8b", "tiny"):
        asked = ["--shape", shape, "--blocks", "64", "--prefix-tokens", "1024"]
        monkeypatch.setattr(sys, "argv", ["bench", "all", *asked])
        monkeypatch.setattr(sys, "argv", ["bench", *_step_arguments(_arguments(), step)])
        plans.append(_plan(_arguments()))
    assert [(plan.options.blocks, plan.prefix_tokens) for plan in plans] == [(2000, 2048), (64, 1024)]
    assert all(plan.options.eager for plan in plans)


def test_a_list_is_eager_in_all_its_steps_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "all", "--list", "quick", "--eager", "--agent", "unix:/a"])
    arguments = _arguments()
    for step in LISTS["quick"]:
        monkeypatch.setattr(sys, "argv", ["bench", *_step_arguments(arguments, step)])
        options = _plan(_arguments()).options
        assert (options.eager, options.agent) == (True, "unix:/a")


def test_counts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "press", "--concurrency", "4,24", "--clients", "4,8", "--kills", "20"])
    plan = _plan(_arguments())
    assert (plan.concurrency, plan.clients, plan.kills) == ((4, 24), (4, 8), 20)
    monkeypatch.setattr(sys, "argv", ["bench", "press"])
    assert _plan(_arguments()).clients == ()


@pytest.mark.parametrize("phase", [*RANKS, *COPIES])
def test_phases_for_two_gpus_refuse_a_host_with_one_by_name(phase: str) -> None:
    with pytest.raises(ValueError, match=f"phase {phase} needs a host with 2 GPUs, this one has 1"):
        need_gpus(phase, lambda: 1)
    need_gpus(phase, lambda: 2)
