"""The ledger of interprocess events: each recording is given back exactly once, and never under one who looks at it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import EngineEvent
from kvpool_gpuagent.core.events import EventLedger


def event(generation: int, slot: int = 0) -> EngineEvent:
    return EngineEvent(slot=slot, generation=generation)


def test_an_event_is_given_back_when_it_has_passed() -> None:
    ledger = EventLedger(1)
    ledger.announce(event(1))
    ledger.use(event(1))
    assert not ledger.has_passed(event(1))
    assert ledger.note_passed(event(1))
    assert not ledger.note_passed(event(1))
    assert not ledger.end_use(event(1))
    ledger.announce(event(2))


def test_who_uses_a_generation_that_is_over_does_no_harm_to_the_next() -> None:
    ledger = EventLedger(1)
    ledger.announce(event(1))
    ledger.use(event(1))
    ledger.use(event(1))
    assert ledger.note_passed(event(1))
    ledger.announce(event(2))
    ledger.use(event(2))
    assert ledger.has_passed(event(1))
    assert not ledger.has_passed(event(2))
    assert not ledger.note_passed(event(1))
    assert not ledger.end_use(event(1))
    assert not ledger.end_use(event(1))
    assert not ledger.has_passed(event(2))
    assert ledger.end_use(event(2))


def test_generations_may_skip_but_not_fall() -> None:
    ledger = EventLedger(1)
    ledger.announce(event(7))
    ledger.use(event(7))
    assert ledger.end_use(event(7))
    for generation in (7, 6, 0):
        with pytest.raises(InvalidRequest, match="does not grow"):
            ledger.announce(event(generation))
    with pytest.raises(InvalidRequest, match="was given back"):
        ledger.use(event(7))


class LedgerMachine(RuleBasedStateMachine):
    """Against a model that keeps every recording ever made."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = EventLedger(1)
        self.generation = 0
        self.users: list[int] = []  # generation of each request that runs
        self.passed: set[int] = set()
        self.given_back: list[int] = []

    def note(self, generation: int, given_back: bool) -> None:
        if given_back:
            self.given_back.append(generation)

    @rule(step=st.integers(1, 3))
    def announce(self, step: int) -> None:
        allowed = self.generation == 0 or self.generation in self.given_back
        try:
            self.ledger.announce(event(self.generation + step))
        except InvalidRequest:
            assert not allowed
        else:
            assert allowed
            self.generation += step

    @rule(back=st.integers(0, 2))
    def use(self, back: int) -> None:
        wanted = self.generation - back
        known = wanted == self.generation > 0
        allowed = known and (wanted in self.passed or wanted not in self.given_back)
        try:
            self.ledger.use(event(wanted))
        except InvalidRequest:
            assert not allowed
        else:
            assert allowed
            self.users.append(wanted)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end_use(self, data: st.DataObject) -> None:
        generation = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.note(generation, self.ledger.end_use(event(generation)))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def pass_event(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(self.users))
        if not self.ledger.has_passed(event(generation)):
            self.passed.add(generation)
        self.note(generation, self.ledger.note_passed(event(generation)))
        assert self.ledger.has_passed(event(generation))

    @invariant()
    def each_comes_back_once_and_not_under_its_users(self) -> None:
        assert len(self.given_back) == len(set(self.given_back))
        for generation in self.users:
            assert generation not in self.given_back or generation in self.passed
            assert self.ledger.has_passed(event(generation)) == (generation in self.passed)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
