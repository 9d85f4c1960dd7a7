"""Event slots: never handed out early, never lost, first come first served."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvpool.client.engine_events import EventSlots
from kvpool.core.errors import DeadlineExceeded, InvalidRequest
from kvpool.core.ipc import EngineEvent, IpcEvent
from kvpool.testing import eventually_sync
from tests.fixtures.patience import PATIENCE_S

SESSION, OTHER = object(), object()


def slots(count: int) -> EventSlots:
    return EventSlots([IpcEvent("GPU-", bytes(64))] * count)


@pytest.mark.parametrize("waited_first", [True, False])
def test_a_slot_is_free_when_both_the_taker_and_the_agent_are_done_with_it(waited_first: bool) -> None:
    some = slots(1)
    event = some.take(1.0)
    assert some.announce(event, SESSION)
    assert not some.announce(event, SESSION)  # a second request of the same session
    ends: list[Callable[[], None]] = [lambda: some.waited(event, SESSION), lambda: some.give_back(event)]
    first, second = ends if waited_first else ends[::-1]
    first()
    assert some.free_count == 0
    second()
    assert some.free_count == 1
    first()
    second()
    assert some.free_count == 1
    assert some.take(1.0) == EngineEvent(slot=0, generation=2)


def test_what_was_never_announced_is_free_when_it_is_given_back() -> None:
    some = slots(1)
    event = some.take(1.0)
    some.give_back(event)
    assert some.free_count == 1
    with pytest.raises(InvalidRequest, match="is not taken"):
        some.announce(event, SESSION)


def test_the_word_of_another_session_or_of_an_older_recording_frees_nothing() -> None:
    some = slots(1)
    old = some.take(1.0)
    some.give_back(old)
    event = some.take(1.0)
    some.announce(event, SESSION)
    some.give_back(event)
    some.waited(event, OTHER)
    some.waited(old, SESSION)
    some.give_back(old)
    some.waited(EngineEvent(slot=9, generation=1), SESSION)
    some.end_session(OTHER)
    assert some.free_count == 0
    some.end_session(SESSION)
    assert some.free_count == 1


def test_an_announcement_that_was_not_sent_is_made_again() -> None:
    some = slots(1)
    event = some.take(1.0)
    assert some.announce(event, SESSION)
    some.retract(event, SESSION)
    assert some.announce(event, SESSION)
    some.retract(event, SESSION)
    some.give_back(event)
    assert some.free_count == 1


def test_threads_wait_their_turn_and_leave_nothing_behind_when_they_go() -> None:
    some = slots(1)
    event = some.take(1.0)
    with pytest.raises(DeadlineExceeded, match=r"none of 1 events became free within 0\.01 s"):
        some.take(0.01)
    got: list[EngineEvent] = []
    thread = threading.Thread(target=lambda: got.append(some.take(10.0)))
    thread.start()
    eventually_sync(lambda: len(some._waiting) == 1)
    some.give_back(event)
    thread.join(PATIENCE_S)
    assert got == [EngineEvent(slot=0, generation=2)]
    some.give_back(got[0])
    assert some.free_count == 1
    with pytest.raises(InvalidRequest, match="has no events"):
        slots(0).take(1.0)


def test_a_shared_event_is_free_when_all_its_holders_have_given_it_back() -> None:
    some = slots(1)
    event = some.try_take()
    assert event is not None
    some.share(event)
    some.give_back(event)
    assert some.announce(event, SESSION), "the other holder may still name it"
    some.waited(event, SESSION)
    assert some.try_take() is None
    some.give_back(event)
    assert some.free_count == 1
    with pytest.raises(InvalidRequest, match="is not taken"):
        some.share(event)
    with pytest.raises(InvalidRequest, match="has no events"):
        slots(0).try_take()
