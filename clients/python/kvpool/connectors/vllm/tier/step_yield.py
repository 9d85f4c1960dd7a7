"""How the end of a scheduler's step lets the threads run that requests wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Final, TypeAlias

_Answer: TypeAlias = Future[list[bool]]
_YIELD_S: Final = 20e-6
_IDLE_WAIT_S: Final = 2e-3  # a request that comes meanwhile waits so long


class StepYield:
    """Gives the interpreter up while requests wait for the tier.

    An engine with nothing to compute steps again and again in Python, where CPython lets threads that copy wait 5 ms
    for their turn. So a step waits for an answer or a load where all requests do, as vLLM itself sleeps for a
    millisecond then, and yields for a moment where only some do. A shorter switch interval would take the interpreter
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
        self._requests: set[str] = set()
        self._unanswered: set[str] = set()

    def begin(self, request_id: str) -> None:
        """It has come."""
        self._requests.add(request_id)

    def finish(self, request_id: str) -> None:
        """It has ended."""
        self._requests.discard(request_id)

    def note_unanswered(self, request_id: str) -> None:
        """One of its look-ups of this step has no answer yet."""
        self._unanswered.add(request_id)

    def end_step(self, loads: Mapping[str, _Answer], answers: Sequence[_Answer]) -> None:
        """loads: that have not ended, by request. answers: to look-ups, that are on their way."""
        unanswered, self._unanswered = self._unanswered, set()
        if not loads and not answers:
            return
        if self._may_wait and self._requests <= loads.keys() | unanswered:
            self._wait([*loads.values(), *answers], _IDLE_WAIT_S, futures.FIRST_COMPLETED)
        else:
            self._sleep(_YIELD_S)
