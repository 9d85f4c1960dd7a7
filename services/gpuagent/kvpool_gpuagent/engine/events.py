"""Waits for an engine's GPU work, by its interprocess events.

The agent asks the host side of each event again and again (ports.EngineCache.event_passed) instead of enqueueing device
work behind it. An engine that hangs or dies may never let its event fire: a stream that waits for it can be neither
cancelled nor closed, whereas a loop that asks ends at once when it is cancelled. It costs up to MAX_PAUSE_S between
the engine's work and the first copy, and in exchange a session's close never waits for another process's GPU work, and
a slot can be given back the moment its last request has ended, whether its event fired or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from kvpool.core.cancel import CancelToken
from kvpool.core.ipc import EngineEvent
from kvpool_gpuagent.core.events import EventLedger
from kvpool_gpuagent.engine.waiting import until_cancelled

_FIRST_PAUSE_S = 0.0002  # the event loop rounds it up to a millisecond
MAX_PAUSE_S = 0.002

OnEventWaited = Callable[[EngineEvent], None]
"""Called once for each recording that was announced and named: its slot may be recorded again."""

EnginePassed = Callable[[float | None], Awaitable[None]]
"""Returns when the engine work that a request waits for has ended, in so many seconds; raises as UsedEvent.passed."""


class SessionEvents:
    """The events of one session. Belongs to its event loop. When the session ends they are simply asked no more."""

    def __init__(self, slot_count: int, on_waited: OnEventWaited) -> None:
        self._ledger, self._on_waited = EventLedger(slot_count), on_waited

    def announce(self, event: EngineEvent) -> None:
        """See EventLedger.announce."""
        self._ledger.announce(event)

    def use(self, event: EngineEvent | None) -> UsedEvent:
        """A request names the event, or none; to be called in the order of the engine's messages. Raises as
        EventLedger.use does. The caller ends it."""
        if event is not None:
            self._ledger.use(event)
        return UsedEvent(event, self._ledger, self._on_waited)


class UsedEvent:
    """What one request waits for."""

    def __init__(self, event: EngineEvent | None, ledger: EventLedger, on_waited: OnEventWaited) -> None:
        """Made by SessionEvents.use."""
        self._event, self._ledger, self._on_waited = event, ledger, on_waited

    @contextmanager
    def ended_after(self) -> Iterator[None]:
        """End the use when the block ends."""
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """The request has ended. Idempotent."""
        event, self._event = self._event, None
        if event is not None and self._ledger.end_use(event):
            self._on_waited(event)

    async def passed(self, ask: Callable[[int], Awaitable[bool]], stop: CancelToken, wait_s: float | None) -> None:
        """Return when the engine's work has ended. Raises Stopped, DeadlineExceeded, what `ask` raises.

        ask: ports.EngineCache.event_passed.
        """
        event = self._event
        if event is None or self._ledger.has_passed(event):
            return
        await until_cancelled(self._asked(ask, event), stop, wait_s)
        if self._ledger.note_passed(event):
            self._on_waited(event)

    async def _asked(self, ask: Callable[[int], Awaitable[bool]], event: EngineEvent) -> None:
        pause_s = _FIRST_PAUSE_S
        # Another request with the same event may be the first to know, and then the slot may stand for other work.
        while not self._ledger.has_passed(event) and not await ask(event.slot):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
