"""Waits that end early: when a request is told to stop, or when its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvpool.core.errors import DeadlineExceeded, Stopped

T = TypeVar("T")


class StopSignal(asyncio.Event):
    """Tells work to end. Whatever waits in `until_stopped` is interrupted when it is set; it is never cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._interrupted: set[_Interruption] = set()

    def set(self) -> None:
        if not self.is_set():
            super().set()
            for one in self._interrupted:
                one.soon()

    def interrupts(self, one: _Interruption) -> None:
        self._interrupted.add(one)

    def spares(self, one: _Interruption) -> None:
        self._interrupted.discard(one)


class _Interruption:
    """Cancels the current task's wait, as asyncio.timeout does: no task of its own is needed."""

    __slots__ = ("_cancelling", "_handles", "_loop", "_task", "fired")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        self._handles: list[asyncio.Handle] = []
        self.fired = 0

    def soon(self) -> None:
        # From the loop: a task that set the signal itself is to be cancelled where it waits, not while it runs.
        self._handles.append(self._loop.call_soon(self._fire))

    def after(self, timeout_s: float) -> None:
        self._handles.append(self._loop.call_later(timeout_s, self._fire))

    def end(self) -> bool:
        """Fire no more and undo what was fired. Return whether no other caller has cancelled the task."""
        for handle in self._handles:
            handle.cancel()
        for _ in range(self.fired):
            self._task.uncancel()
        return self._task.cancelling() <= self._cancelling

    def _fire(self) -> None:
        self.fired += 1
        self._task.cancel()


async def until_stopped(work: Coroutine[Any, Any, T], stop: StopSignal, timeout_s: float | None = None) -> T:
    """The work's result, unless `stop` is set or the time is up first: then the work is cancelled and waited for.

    Work that was already done, or ends with a result although it was cancelled, is never lost. Raises what the work
    raises, Stopped, DeadlineExceeded.
    """
    if stop.is_set():
        work.close()
        raise _stopped()
    interruption, alone = _Interruption(), False
    stop.interrupts(interruption)
    if timeout_s is not None:
        interruption.after(timeout_s)
    try:
        try:
            return await work
        finally:
            stop.spares(interruption)
            alone = interruption.end()
    except asyncio.CancelledError:
        if not interruption.fired or not alone:
            raise
        if stop.is_set():
            raise _stopped() from None
        raise DeadlineExceeded(f"it was not done within {timeout_s or 0:g} s") from None


def _stopped() -> Stopped:
    return Stopped("the request was cancelled or its engine left")
