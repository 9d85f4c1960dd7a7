"""Every eviction policy against the naive model, and planted faults that the model must find."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.core.eviction import ChainPolicy, LruPolicy, Retention, S3FifoPolicy
from kvpool.core.eviction.chain_nodes import NONE, ChainNodes
from kvpool.core.eviction.retention import RetentionBook
from tests.stateful.eviction_model import EvictionMachine


class ChainMachine(EvictionMachine):
    make = ChainPolicy
    keeps_chains = True


class LruMachine(EvictionMachine):
    make = LruPolicy


class S3FifoMachine(EvictionMachine):
    make = S3FifoPolicy


TestChain = ChainMachine.TestCase
TestLru = LruMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase


class LruAsChain(EvictionMachine):
    make = LruPolicy
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
    must_fail(LruAsChain)


def test_a_chain_policy_that_forgets_a_child_when_a_sibling_goes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = ChainNodes.drop

    def forgetful(self: ChainNodes[int], node: int) -> int:
        above = self.parent[node]
        if above != NONE and self.children[above] > 1:
            self.children[above] -= 1
        return drop(self, node)

    monkeypatch.setattr(ChainNodes, "drop", forgetful)
    must_fail(ChainMachine)


def test_a_book_that_ends_pins_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    note = RetentionBook.note

    def hasty(self: RetentionBook[int], key: int, retention: Retention) -> None:
        note(self, key, Retention(retention.priority, retention.pinned_until_us // 2, retention.expires_us))

    monkeypatch.setattr(RetentionBook, "note", hasty)
    must_fail(ChainMachine)
