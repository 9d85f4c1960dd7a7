"""Which recording of which interprocess event is meant, and when its slot may be recorded again.

Waiting for an event that was not recorded yet is a no-op, and an event that was recorded again stands for other work.
So an engine announces each recording after it was made, requests name what was announced, and a slot is recorded again
only after it was given back: once for each recording, as soon as the agent will not look at it any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import EngineEvent


@dataclass(slots=True)
class _Slot:
    generation: int = 0  # of the last recording announced
    users: int = 0  # requests that name it and have not ended
    passed: bool = False  # the engine's work before it has ended
    given_back: bool = True


class EventLedger:
    """The events of one session. Decides only: the caller looks at events and answers the engine."""

    def __init__(self, slot_count: int) -> None:
        self._slots = [_Slot() for _ in range(slot_count)]

    def announce(self, event: EngineEvent) -> None:
        """The engine has recorded the event. Raises InvalidRequest and forgets it if it must not have."""
        slot = self._slot(event)
        if not slot.given_back:
            raise InvalidRequest(
                f"event slot {event.slot} was recorded again (generation {event.generation}) before `event_waited` "
                f"came for generation {slot.generation}; wait for it, or use another slot"
            )
        if event.generation <= slot.generation:
            raise InvalidRequest(
                f"generation {event.generation} of event slot {event.slot} does not grow; the last was "
                f"{slot.generation}"
            )
        slot.generation, slot.users, slot.passed, slot.given_back = event.generation, 0, False, False

    def use(self, event: EngineEvent) -> None:
        """A request names the event; end it with `end_use`. Raises InvalidRequest for one that cannot be waited for."""
        slot = self._slot(event)
        if event.generation != slot.generation:
            raise InvalidRequest(
                f"generation {event.generation} of event slot {event.slot} was not announced (the last was "
                f"{slot.generation}); send `event_recorded` before the request that names it"
            )
        if slot.given_back and not slot.passed:
            raise InvalidRequest(
                f"event slot {event.slot} was given back when the last request that named generation "
                f"{event.generation} ended; record it again"
            )
        slot.users += 1

    def has_passed(self, event: EngineEvent) -> bool:
        """Whether the engine's work before the event is known to have ended. The event is in use."""
        slot = self._slots[event.slot]
        # Under a request that still uses it a slot is recorded again only if it was given back, that is, had passed.
        return slot.passed or slot.generation != event.generation

    def note_passed(self, event: EngineEvent) -> bool:
        """The engine's work before the event has ended. Returns whether the slot is to be given back now."""
        slot = self._slots[event.slot]
        if slot.generation != event.generation:
            return False
        slot.passed = True
        return self._give_back(slot)

    def end_use(self, event: EngineEvent) -> bool:
        """The request has ended. Returns whether the slot is to be given back now, because no other request waits for
        the event."""
        slot = self._slots[event.slot]
        if slot.generation != event.generation:
            return False
        slot.users -= 1
        return not slot.users and self._give_back(slot)

    @staticmethod
    def _give_back(slot: _Slot) -> bool:
        first, slot.given_back = not slot.given_back, True
        return first

    def _slot(self, event: EngineEvent) -> _Slot:
        if not 0 <= event.slot < len(self._slots):
            raise InvalidRequest(f"event slot {event.slot} does not exist; {len(self._slots)} events were registered")
        return self._slots[event.slot]
