"""The slots of an engine's interprocess events: which is free to be recorded, and which an agent may still look at."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from kvpool.core.errors import DeadlineExceeded, InvalidRequest
from kvpool.core.ipc import EngineEvent, IpcEvent


@dataclass(slots=True)
class _Slot:
    generation: int = 0
    holders: int = 0  # who took it, and whom it was shared with: requests may still name it
    session: object = None  # that this generation was announced to
    looked_at: bool = False  # by that session's agent, perhaps


class EventSlots:
    """Hands out events to record and takes them back. Thread-safe; outlives the sessions that it is registered with.

    A taken event is recorded by the engine, named in stores and loads (the session announces it), and given back. Its
    slot is free again when its taker has given it back and the agent has said that it looks at it no more.
    """

    def __init__(self, handles: Sequence[IpcEvent]) -> None:
        """handles: of the events, by slot."""
        self.handles = tuple(handles)
        self._lock = threading.Lock()
        self._slots = [_Slot() for _ in self.handles]
        self._free = deque(range(len(self._slots)))
        self._waiting: deque[Future[EngineEvent]] = deque()

    @property
    def free_count(self) -> int:
        """Events that can be had at once."""
        return len(self._free)

    def take(self, timeout_s: float) -> EngineEvent:
        """An event to record, once one is free; for threads. raises: DeadlineExceeded; InvalidRequest without events.

        First come, first served. The caller gives it back, whatever comes of it.
        """
        future = self._ask()
        try:
            return future.result(timeout_s)
        except BaseException as error:
            self._abandon(future)
            if isinstance(error, TimeoutError):
                raise self._too_late(timeout_s) from None
            raise

    def try_take(self) -> EngineEvent | None:
        """An event to record, if one is free now. raises: InvalidRequest without events."""
        self._check_any()
        with self._lock:
            return self._hand_out(self._free.popleft()) if self._free else None

    def share(self, event: EngineEvent) -> None:
        """One more holder gives the event back. The caller holds it, so it is not free meanwhile."""
        with self._lock:
            if not self._is_held(event):
                raise _not_taken(event)
            self._slots[event.slot].holders += 1

    def give_back(self, event: EngineEvent) -> None:
        """One holder names the event in no further request. Does nothing once all of them have given it back."""
        with self._lock:
            if self._is_held(event):
                self._slots[event.slot].holders -= 1
                self._free_if_unused(event.slot)

    def announce(self, event: EngineEvent, session: object) -> bool:
        """A request of this session will name the event; True if it must be announced to the agent first.

        raises: InvalidRequest for an event that was given back, or is none of these.
        """
        with self._lock:
            if not self._is_held(event):
                raise _not_taken(event)
            slot = self._slots[event.slot]
            first = slot.session is not session
            if first:
                slot.session, slot.looked_at = session, True
            return first

    def retract(self, event: EngineEvent, session: object) -> None:
        """The announcement was not sent after all."""
        with self._lock:
            slot = self._slots[event.slot]
            if slot.generation == event.generation and slot.session is session:
                self._end_look(event.slot, session)
                slot.session = None

    def waited(self, event: EngineEvent, session: object) -> None:
        """The agent looks at this recording no more."""
        with self._lock:
            if 0 <= event.slot < len(self._slots) and self._slots[event.slot].generation == event.generation:
                self._end_look(event.slot, session)

    def end_session(self, session: object) -> None:
        """The session's agent looks at nothing any more that was announced to it."""
        with self._lock:
            for number in range(len(self._slots)):
                self._end_look(number, session)

    def _end_look(self, number: int, session: object) -> None:
        slot = self._slots[number]
        if slot.session is session and slot.looked_at:
            slot.looked_at = False
            self._free_if_unused(number)

    def _free_if_unused(self, number: int) -> None:
        if self._slots[number].holders or self._slots[number].looked_at:
            return
        while self._waiting:
            if self._serve(self._waiting.popleft(), number):
                return
        self._free.append(number)

    def _is_held(self, event: EngineEvent) -> bool:
        known = 0 <= event.slot < len(self._slots)
        return known and self._slots[event.slot].generation == event.generation and self._slots[event.slot].holders > 0

    def _check_any(self) -> None:
        if not self._slots:
            raise InvalidRequest("this engine has no events; make some (kvpool.client.gpu) before it registers")

    def _ask(self) -> Future[EngineEvent]:
        self._check_any()
        future: Future[EngineEvent] = Future()
        with self._lock:
            if self._free:
                self._serve(future, self._free.popleft())
            else:
                self._waiting.append(future)
        return future

    def _serve(self, future: Future[EngineEvent], number: int) -> bool:
        slot = self._slots[number]
        try:
            future.set_result(EngineEvent(slot=number, generation=slot.generation + 1))
        except InvalidStateError:  # its taker has left
            return False
        self._hand_out(number)
        return True

    def _hand_out(self, number: int) -> EngineEvent:
        slot = self._slots[number]
        slot.generation, slot.holders, slot.session = slot.generation + 1, 1, None
        return EngineEvent(slot=number, generation=slot.generation)

    def _abandon(self, future: Future[EngineEvent]) -> None:
        """Its taker has left: an event that came in the same instant goes back."""
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(future)
        if not future.cancel() and not future.cancelled():
            self.give_back(future.result())

    def _too_late(self, timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"none of {len(self._slots)} events became free within {timeout_s:g} s: the agent waits for engine work "
            f"that has not ended; make more events, or store less often"
        )


def _not_taken(event: EngineEvent) -> InvalidRequest:
    return InvalidRequest(f"event {event.slot} (generation {event.generation}) is not taken; take and record one first")
