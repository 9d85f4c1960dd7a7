"""The eviction policy against the naive model, and planted faults that the model must find."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.retained import PLAIN, Retention
from tests.stateful.eviction_model import EvictionMachine


class PolicyMachine(EvictionMachine):
    make = EvictionPolicy
    keeps_chains = True


TestPolicy = PolicyMachine.TestCase


class WithoutChains(EvictionPolicy[int]):
    """Knows no parents."""

    def insert(
        self,
        key: int,
        parent: int | None = None,
        *,
        position: int = 0,
        domain: Hashable = None,
        retention: Retention = PLAIN,
    ) -> None:
        super().insert(key, position=position, domain=domain, retention=retention)


class WithoutChainsMachine(EvictionMachine):
    make = WithoutChains
    keeps_chains = True


def must_fail(machine: type[EvictionMachine]) -> None:
    thorough = settings(
        max_examples=200,
        stateful_step_count=25,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=thorough)


def test_a_policy_that_gives_up_a_head_before_its_tail_is_caught() -> None:
    must_fail(WithoutChainsMachine)


def test_a_policy_that_forgets_a_child_when_a_sibling_goes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = EvictionPolicy._leave

    def forgetful(self: EvictionPolicy[int], row: int) -> None:
        above = self._parent[row]
        if above >= 0 and self._children[above] > 1:
            self._children[above] -= 1
        leave(self, row)

    monkeypatch.setattr(EvictionPolicy, "_leave", forgetful)
    must_fail(PolicyMachine)


def test_a_policy_that_ends_pins_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    note = EvictionPolicy._note

    def hasty(self: EvictionPolicy[int], row: int, retention: Retention) -> None:
        note(self, row, replace(retention, pinned_until_us=retention.pinned_until_us // 2))

    monkeypatch.setattr(EvictionPolicy, "_note", hasty)
    must_fail(PolicyMachine)
