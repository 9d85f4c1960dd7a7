"""The eviction policy against the naive model, and planted faults that the model must find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.retained import PLAIN, Retention
from tests.stateful.eviction_model import EvictionMachine, parent_of


class PolicyMachine(EvictionMachine):
    make = EvictionPolicy
    keeps_chains = True


TestPolicy = PolicyMachine.TestCase


class WithoutChains(EvictionPolicy[int]):
    """Knows no parents."""

    def insert(self, key: int, parent: int | None = None, **more: Any) -> None:
        super().insert(key, **more)


class WithoutChainsMachine(EvictionMachine):
    make = WithoutChains
    keeps_chains = True


def must_fail(machine: type[EvictionMachine]) -> None:
    thorough = settings(
        max_examples=1000,
        stateful_step_count=40,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=thorough)


def test_a_policy_that_gives_up_a_head_before_its_tail_is_caught() -> None:
    must_fail(WithoutChainsMachine)


class ForgettingMachine(PolicyMachine):
    """When a child goes, the policy takes its siblings for heads: they come in once more, as they were otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.inside_before: set[int] = set()

    @invariant()
    def forget_siblings(self) -> None:
        parents = {parent_of(gone) for gone in self.inside_before - self.inside.keys()}
        self.inside_before = set(self.inside)
        for sibling, entry in self.inside.items():
            if parent_of(sibling) in parents:
                self.policy.remove(sibling)
                self.policy.restore(sibling, domain=entry.domain, retention=entry.retention)
                if entry.is_held:
                    self.policy.hold(sibling)


def test_a_policy_that_forgets_a_child_when_a_sibling_goes_is_caught() -> None:
    must_fail(ForgettingMachine)


class Hasty(EvictionPolicy[int]):
    """Ends pins early."""

    def insert(self, key: int, parent: int | None = None, *, retention: Retention = PLAIN, **more: Any) -> None:
        super().insert(key, parent, retention=_shorter(retention), **more)

    def restore(self, key: int, parent: int | None = None, *, retention: Retention = PLAIN, **more: Any) -> None:
        super().restore(key, parent, retention=_shorter(retention), **more)

    def retain(self, key: int, retention: Retention) -> None:
        super().retain(key, _shorter(retention))


def _shorter(retention: Retention) -> Retention:
    return replace(retention, pinned_until_us=retention.pinned_until_us // 2)


class HastyMachine(EvictionMachine):
    make = Hasty
    keeps_chains = True


def test_a_policy_that_ends_pins_early_is_caught() -> None:
    must_fail(HastyMachine)
