"""Loads that a forward pass waits for layer by layer, so that the first layers compute while the last ones come in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvpool.client.engine_items import LoadResult
from kvpool.client.handle import AsyncHandle
from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.connectors.vllm.step_jobs import LoadJob
from kvpool.connectors.vllm.switch_interval import switch_interval

# The agent keeps to a load's deadline itself; so much longer is its answer waited for.
_GRACE_S = 1.0


@dataclass(slots=True)
class _Running:
    job: LoadJob
    begun_at_s: float
    handle: Future[AsyncHandle[LoadResult]]
    ended_at_s: Future[float]
    given_up: bool = False  # no layer is waited for any more


class LayerwiseLoads:
    """Layerwise loads of the current engine step. Call all methods on the engine's thread."""

    def __init__(
        self,
        connection: AgentConnection,
        on_ended: Callable[[LoadJob, float, LoadResult | Exception], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_ended: called with a load's job, its duration in seconds, and its result or error."""
        self._connection, self._on_ended, self._now_s = connection, on_ended, now_s
        self._running: list[_Running] = []

    def begin(self, job: LoadJob, load: Callable[[], Awaitable[AsyncHandle[LoadResult]]]) -> None:
        """Start a load. load: starts it on the pool's event loop. raises: ServiceUnavailable."""
        handle, begun_at_s = self._connection.start(load, job.trace), self._now_s()
        ended_at_s = self._connection.start(partial(self._end_s, handle))
        switch_interval.shorten_until(ended_at_s)
        self._running.append(_Running(job, begun_at_s, handle, ended_at_s))

    def wait_layers(self, layers: int) -> None:
        """Return when the first `layers` layers of all loads are in or have failed; `finish` reports failures."""
        for running in self._running:
            if not running.given_up:
                self._wait(running, layers)

    def finish(self) -> None:
        """End the step: return when nothing accesses the blocks any more, and report each load.

        Waits for an agent that does not stop writing, as long as it lives: there is no way to tell the engine that
        blocks of a step that has ended are still in use.
        """
        loads, self._running = self._running, []
        for running in loads:
            try:
                result: LoadResult | Exception = self._connection.start(partial(_end_of, running.handle)).result()
            except Exception as error:
                result = error
            self._on_ended(running.job, self._duration_s(running), result)

    def _wait(self, running: _Running, layers: int) -> None:
        limit_s = running.job.timeout_s + _GRACE_S
        try:
            handle = running.handle.result(limit_s)
            if handle.layers_loaded < layers and not handle.done:
                self._connection.start(lambda: handle.wait_layers(layers)).result(limit_s)
        except Exception:
            running.given_up = True  # `finish` says why

    async def _end_s(self, handle: Future[AsyncHandle[LoadResult]]) -> float:
        await (await asyncio.wrap_future(handle)).result()
        return self._now_s()

    def _duration_s(self, running: _Running) -> float:
        ended = running.ended_at_s
        known = ended.done() and not ended.cancelled() and ended.exception() is None
        return (ended.result() if known else self._now_s()) - running.begun_at_s


async def _end_of(handle: Future[AsyncHandle[LoadResult]]) -> LoadResult:
    result = await handle.result().result()
    # The engine computes in these very blocks what did not come: not before the agent has stopped writing there.
    await handle.result().wait_released()
    return result
