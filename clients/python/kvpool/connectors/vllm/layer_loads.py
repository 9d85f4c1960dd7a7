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
from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.orders import LoadOrder

# The agent keeps to a load's deadline itself; so much longer is its answer waited for.
_GRACE_S = 1.0


@dataclass(slots=True)
class _Running:
    order: LoadOrder
    begun_at_s: float
    handle: Future[AsyncHandle[LoadResult]]
    ended_at_s: Future[float]
    given_up: bool = False  # no layer is waited for any more


class LayerLoads:
    """Of one engine step. On the engine's thread."""

    def __init__(
        self,
        link: PoolLink,
        on_ended: Callable[[LoadOrder, float, LoadResult | Exception], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_ended: takes a load's seconds, and its result or why there is none."""
        self._link, self._on_ended, self._now_s = link, on_ended, now_s
        self._running: list[_Running] = []

    def begin(self, order: LoadOrder, load: Callable[[], Awaitable[AsyncHandle[LoadResult]]]) -> None:
        """load: begins it, on the pool's loop. raises: ServiceUnavailable."""
        handle = self._link.start(load, order.trace)
        self._running.append(_Running(order, self._now_s(), handle, self._link.start(partial(self._end_s, handle))))

    def wait_layers(self, layers: int) -> None:
        """Return when so many leading layers of everything are in, or will not come: then `finish` says so."""
        for running in self._running:
            if not running.given_up:
                self._wait(running, layers)

    def finish(self) -> None:
        """The step is over: nothing touches the blocks after this. Those that did not come are reported.

        Waits for an agent that does not stop to write, as long as it lives: there is no way to tell the engine that a
        step has not ended well and its blocks cannot be had yet.
        """
        loads, self._running = self._running, []
        for running in loads:
            try:
                result: LoadResult | Exception = self._link.start(partial(_end_of, running.handle)).result()
            except Exception as error:
                result = error
            self._on_ended(running.order, self._duration_s(running), result)

    def _wait(self, running: _Running, layers: int) -> None:
        limit_s = running.order.timeout_s + _GRACE_S
        try:
            handle = running.handle.result(limit_s)
            if handle.layers_loaded < layers and not handle.done:
                self._link.start(lambda: handle.wait_layers(layers)).result(limit_s)
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
