"""Points in an engine's GPU work that stores and loads come after: one event a step, shared by all of its orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvpool.client.engine_events import EventSlots
from kvpool.core.ipc import EngineEvent


class Events(Protocol):
    """kvpool.client.gpu.GpuEvents."""

    @property
    def slots(self) -> EventSlots: ...
    def try_record(self) -> EngineEvent | None: ...


@dataclass(frozen=True, slots=True)
class WorkPoint:
    """event: fires when the engine's work up to the point has ended. None: it has."""

    event: EngineEvent | None = None


_PAST = WorkPoint()


class EngineWork:
    """Of one worker. `point` and `new_step` on the engine's thread, the rest on any."""

    def __init__(self, events: Events | None) -> None:
        """events: None for an engine whose work has ended whenever it gives orders, as on a CPU."""
        self._events = events
        self._point: WorkPoint | None = None  # of this step; one of its holders is this object

    @property
    def slots(self) -> EventSlots | None:
        """For EngineRegistration."""
        return self._events.slots if self._events is not None else None

    def new_step(self) -> None:
        """The next point comes after all work that the engine has launched by then."""
        point, self._point = self._point, None
        self.give_back(point)

    def point(self) -> WorkPoint | None:
        """Where the engine's work is now, for one order, which gives it back. None: no event is free, ask in a later
        step. That is never waited for: an agent that hangs does not hold up the engine."""
        if self._events is None:
            return _PAST
        if self._point is None:
            event = self._events.try_record()
            self._point = WorkPoint(event) if event is not None else None
        return self.share(self._point) if self._point is not None else None

    def share(self, point: WorkPoint) -> WorkPoint:
        """The same point for one more request, which gives it back too."""
        if point.event is not None and self._events is not None:
            self._events.slots.share(point.event)
        return point

    def give_back(self, point: WorkPoint | None) -> None:
        """A request names the point no more."""
        if point is not None and point.event is not None and self._events is not None:
            self._events.slots.give_back(point.event)
