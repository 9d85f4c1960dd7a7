"""How a scheduler's steps let the threads run that requests wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Final, TypeAlias

from kvpool.connectors.vllm.switch_interval import switch_interval

_Answer: TypeAlias = Future[list[bool]]
_YIELD_S: Final = 20e-6
_IDLE_WAIT_S: Final = 2e-3  # a request that comes meanwhile waits so long


class StepYield:
    """Lets other threads have the GIL while look-ups or loads are under way, for which requests wait.

    An engine steps in Python, again and again where it computes nothing, and CPython lets a thread that needs the GIL
    wait 5 ms for it: for each message of a load, and after each page that was copied. So the interval is shortened to
    50 us meanwhile, not for longer: beside stores, for which no request waits, steps are not interrupted. A step that
    begins where nothing is computed waits for the next answer or load, which it can use at once, as vLLM itself sleeps
    for a millisecond then. Beside requests that are computed a step yields for a moment at its end.
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
        self._is_short = False  # the interval

    def finish(self, request_id: str) -> None:
        """The request has finished."""
        self._scheduled.discard(request_id)

    def begin_step(self, running: Sequence[_Answer]) -> None:
        """running: look-ups and loads that have not ended."""
        if running and self._waits:
            self._wait(running, _IDLE_WAIT_S, futures.FIRST_COMPLETED)

    def end_step(self, new_request_ids: Collection[str], running: Sequence[_Answer]) -> None:
        """new_request_ids: scheduled for the first time in this step."""
        self._scheduled.update(new_request_ids)
        if not running:
            self.close()
            return
        if not self._is_short:
            self._is_short = True
            switch_interval.shorten()
        if not self._waits:
            self._sleep(_YIELD_S)

    @property
    def _waits(self) -> bool:
        return self._may_wait and not self._scheduled

    def close(self) -> None:
        """Nothing is under way: the interval is as it was."""
        if self._is_short:
            self._is_short = False
            switch_interval.restore()
