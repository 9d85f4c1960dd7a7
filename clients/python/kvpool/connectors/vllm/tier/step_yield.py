"""How the end of a scheduler's step lets the threads run that requests wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Final, TypeAlias

_Answer: TypeAlias = Future[list[bool]]
_YIELD_S: Final = 20e-6
_IDLE_WAIT_S: Final = 2e-3  # a request that comes meanwhile waits so long


class StepYield:
    """Gives the GIL up at the end of a step while look-ups or loads are under way.

    An engine that computes nothing steps again and again in Python, where CPython lets threads that copy wait 5 ms for
    the GIL. So a step of such an engine waits for the next answer or load, as vLLM itself sleeps for a millisecond
    then; beside requests that are computed it yields for a moment only. A shorter switch interval would take the GIL
    away in the middle of all steps, also beside stores, for which no request waits.
    """

    def __init__(
        self,
        may_wait: bool,
        wait: Callable[[Sequence[_Answer], float, str], object] = futures.wait,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """may_wait: False where other engines wait for this one's steps."""
        self._may_wait, self._wait, self._sleep = may_wait, wait, sleep
        self._scheduled: set[str] = set()  # requests that are computed, or were until they were preempted

    def finish(self, request_id: str) -> None:
        """The request has finished."""
        self._scheduled.discard(request_id)

    def end_step(self, new_request_ids: Collection[str], running: Sequence[_Answer]) -> None:
        """new_request_ids: scheduled for the first time in this step. running: look-ups and loads that have not
        ended."""
        self._scheduled.update(new_request_ids)
        if running and self._may_wait and not self._scheduled:
            self._wait(running, _IDLE_WAIT_S, futures.FIRST_COMPLETED)
        elif running:
            self._sleep(_YIELD_S)
