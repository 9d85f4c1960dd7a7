"""The way to an agent: opened in the background, tried again for as long as it takes, never in the engine's way."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration, OfferFd
from kvpool.client.fds import offer_fd
from kvpool.client.pool import AsyncPool
from kvpool.client.retry import LATER, Backoff
from kvpool.client.sync import BackgroundLoop
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.core.tracing import TraceParent

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
ResultT = TypeVar("ResultT")
_CLOSE_TIMEOUT_S = 10.0
# CPython lets the engine's thread run for 5 ms while the pool's waits to run Python, for each message again: a load has
# several. The engine has one such thread, so that others pay nothing.
_SWITCH_INTERVAL_S = 0.0005


class PoolLink:
    """One engine rank's, or a scheduler's, with a session for each of its KV cache groups. Thread-safe."""

    def __init__(
        self, make_plans: Callable[[], Sequence[EngineRegistration]], config: ClientConfig, *, offer: OfferFd = offer_fd
    ) -> None:
        """make_plans: one for each group; runs on a thread of its own, and may take its time. It is called again after
        ServiceUnavailable (no agent is there yet); anything else that it raises ends the use of kvpool."""
        self._make_plans, self._config, self._offer = make_plans, config, offer
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._loop = BackgroundLoop("kvpool-vllm")
        self._opened: list[AsyncPool] = []  # touched on the loop only
        self._pools: tuple[AsyncPool, ...] = ()  # once all are open
        self._closed = False
        self._tried = threading.Event()
        self._opening = self._loop.start(self._open)

    @property
    def pools(self) -> tuple[AsyncPool, ...]:
        """The pool as each group sees it, if all of them can be asked now; else empty."""
        pools = self._pools
        return pools if all(pool.connected for pool in pools) else ()

    def wait_tried(self, timeout_s: float) -> bool:
        """Wait until the agent was reached, or could not be at first; an engine that starts has time for that."""
        return self._tried.wait(timeout_s)

    def start(self, work: Callable[[], Awaitable[ResultT]], trace: TraceParent | None = None) -> Future[ResultT]:
        """Begin work on the pool's loop. trace: of the request it is for. raises: ServiceUnavailable once closed."""
        return self._loop.start(work if trace is None else partial(self._traced, work, trace))

    def close(self) -> bool:
        """Let go of the pools. False: an agent may still touch the engine's memory. Idempotent."""
        if self._closed:
            return True
        self._closed = True
        self._opening.cancel()
        try:
            return self._loop.run(self._close, _CLOSE_TIMEOUT_S)
        except KvPoolError:
            return False
        finally:
            self._loop.stop()

    async def _traced(self, work: Callable[[], Awaitable[ResultT]], trace: TraceParent) -> ResultT:
        with self._config.tracer.within(trace):
            return await work()

    async def _open(self) -> None:
        try:
            await self._try_to_open()
        finally:
            self._tried.set()

    async def _try_to_open(self) -> None:
        plans: Sequence[EngineRegistration] | None = None
        backoff, warned = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s), False
        while not self._pools:
            try:
                if plans is None:
                    plans = await asyncio.to_thread(self._make_plans)
                for plan in plans[len(self._opened) :]:
                    self._opened.append(await AsyncPool.open(plan, self._config, offer=self._offer))
                    name = plan.engine_name
                    _log.info("kvpool: %s uses agent %s, keyspace %s", name, plan.endpoint, plan.keyspace_name)
                self._pools = tuple(self._opened)
            except LATER as error:
                if not warned:
                    _log.warning("kvpool: everything is computed until the agent can be reached: %s", error)
                warned = True
                self._tried.set()
                await asyncio.sleep(backoff.next_s())
            except KvPoolError as error:
                _log.error("kvpool: not used in this process: %s", error)
                return
            except Exception:
                _log.exception("kvpool: not used in this process")
                return

    async def _close(self) -> bool:
        self._pools, opened = (), self._opened
        await asyncio.gather(*(pool.close() for pool in opened))
        return all(pool.session.released.is_set() for pool in opened)


def unreachable() -> ServiceUnavailable:
    """What stands for the answer of an agent that cannot be asked."""
    return ServiceUnavailable("the agent cannot be reached now")
