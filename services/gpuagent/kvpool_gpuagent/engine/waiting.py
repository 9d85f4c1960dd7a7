"""Waits that end early: when their request is cancelled, or when its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import DeadlineExceeded, Stopped

T = TypeVar("T")


async def cancellation(token: CancelToken) -> None:
    """Return when the token is cancelled, from whichever thread."""
    loop, cancelled = asyncio.get_running_loop(), asyncio.Event()
    remove = token.on_cancel(lambda: loop.call_soon_threadsafe(cancelled.set))
    try:
        await cancelled.wait()
    finally:
        remove()


class _Interruption:
    """Cancels the current task's wait, as asyncio.timeout does: no task of its own is needed."""

    __slots__ = ("_cancelling", "_ended", "_handles", "_loop", "_task", "fired")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        self._handles: list[asyncio.Handle] = []
        self._ended = False
        self.fired = 0

    def soon(self) -> None:
        # From the loop: a task that cancels the token itself is to be cancelled where it waits, not while it runs.
        self._handles.append(self._loop.call_soon_threadsafe(self._fire))

    def after(self, timeout_s: float) -> None:
        self._handles.append(self._loop.call_later(timeout_s, self._fire))

    def end(self) -> bool:
        """Fire no more and undo what was fired. Return whether no other caller has cancelled the task."""
        self._ended = True
        for handle in self._handles:
            handle.cancel()
        for _ in range(self.fired):
            self._task.uncancel()
        return self._task.cancelling() <= self._cancelling

    def _fire(self) -> None:
        if not self._ended:  # another thread may have asked while the wait ended
            self.fired += 1
            self._task.cancel()


async def until_cancelled(work: Coroutine[Any, Any, T], stop: CancelToken, timeout_s: float | None = None) -> T:
    """Return the work's result, unless `stop` is cancelled or the time is up first: then the work's task is cancelled,
    and its end awaited.

    Work that was already done, or ends with a result although it was cancelled, is never lost. Raises what the work
    raises, Stopped, DeadlineExceeded.
    """
    if stop.cancelled:
        work.close()
        raise _stopped()
    interruption, alone = _Interruption(), False
    remove = stop.on_cancel(interruption.soon)
    if timeout_s is not None:
        interruption.after(timeout_s)
    try:
        try:
            return await work
        finally:
            remove()
            alone = interruption.end()
    except asyncio.CancelledError:
        if not interruption.fired or not alone:
            raise
        if stop.cancelled:
            raise _stopped() from None
        raise DeadlineExceeded(f"it was not done within {timeout_s or 0:g} s") from None


def _stopped() -> Stopped:
    return Stopped("the request was cancelled or its engine left")
