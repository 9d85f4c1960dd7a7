"""CUDA events that loads and stores of an engine step wait for: one event a step, shared by all its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvpool.client.engine_events import EventSlots
from kvpool.core.ipc import EngineEvent


class Events(Protocol):
    """Interface of kvpool.client.gpu.GpuEvents."""

    @property
    def slots(self) -> EventSlots: ...
    def try_record(self) -> EngineEvent | None: ...


@dataclass(frozen=True, slots=True)
class StepEvent:
    """An event after the engine's work so far; None if that work has ended already."""

    event: EngineEvent | None = None


_PAST = StepEvent()


class StepEvents:
    """Events of one worker. Call `record` and `new_step` on the engine's thread, the others on any."""

    def __init__(self, events: Events | None) -> None:
        """events: None for engines whose work has ended when they send jobs, as on a CPU."""
        self._events = events
        self._current: StepEvent | None = None  # of this step; one of its holders is this object

    @property
    def slots(self) -> EventSlots | None:
        """Event slots for EngineRegistration."""
        return self._events.slots if self._events is not None else None

    def new_step(self) -> None:
        """Make `record` return a new event, after all work launched until it is called."""
        step_event, self._current = self._current, None
        self.give_back(step_event)

    def record(self) -> StepEvent | None:
        """Return an event after the work launched so far, for one job, which gives it back.

        Returns None if no event is free: try again in a later step. Never waits for one: an agent that hangs must not
        block the engine.
        """
        if self._events is None:
            return _PAST
        if self._current is None:
            event = self._events.try_record()
            self._current = StepEvent(event) if event is not None else None
        return self.share(self._current) if self._current is not None else None

    def share(self, step_event: StepEvent) -> StepEvent:
        """Return the same event for one more job, which gives it back too."""
        if step_event.event is not None and self._events is not None:
            self._events.slots.share(step_event.event)
        return step_event

    def give_back(self, step_event: StepEvent | None) -> None:
        """A job no longer refers to the event."""
        if step_event is not None and step_event.event is not None and self._events is not None:
            self._events.slots.give_back(step_event.event)
