"""The connection to an agent: opened and reopened in the background, so that it never blocks the engine."""

from __future__ import annotations

import asyncio
import logging
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


class AgentConnection:
    """Connection of one engine rank, or of a scheduler, with a session for each KV cache group. Thread-safe."""

    def __init__(
        self,
        make_registrations: Callable[[], Sequence[EngineRegistration]],
        config: ClientConfig,
        *,
        offer: OfferFd = offer_fd,
    ) -> None:
        """make_registrations: returns one for each group; runs on its own thread and may block. Called again after
        ServiceUnavailable (no agent is running yet); any other error turns kvpool off in this process."""
        self._make_registrations, self._config, self._offer = make_registrations, config, offer
        self._loop = BackgroundLoop("kvpool-vllm")
        self._opened: list[AsyncPool] = []  # touched on the loop only
        self._pools: tuple[AsyncPool, ...] = ()  # once all are open
        self._closed = False
        self._attempted = threading.Event()
        self._opening = self._loop.start(self._open)

    @property
    def pools(self) -> tuple[AsyncPool, ...]:
        """Return the pool of each group if all of them are connected; else an empty tuple."""
        pools = self._pools
        return pools if all(pool.connected for pool in pools) else ()

    def wait_first_attempt(self, timeout_s: float) -> bool:
        """Wait until the first attempt to reach the agent has succeeded or failed. Returns False after `timeout_s`."""
        return self._attempted.wait(timeout_s)

    def start(self, work: Callable[[], Awaitable[ResultT]], trace: TraceParent | None = None) -> Future[ResultT]:
        """Start work on the pool's event loop. trace: of its request. raises: ServiceUnavailable once closed."""
        return self._loop.start(work if trace is None else partial(self._traced, work, trace))

    def close(self) -> bool:
        """Close the pools. Returns False if an agent may still access the engine's memory. Idempotent."""
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
            self._attempted.set()

    async def _try_to_open(self) -> None:
        registrations: Sequence[EngineRegistration] | None = None
        backoff, warned = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s), False
        while not self._pools:
            try:
                if registrations is None:
                    registrations = await asyncio.to_thread(self._make_registrations)
                for registration in registrations[len(self._opened) :]:
                    self._opened.append(await AsyncPool.open(registration, self._config, offer=self._offer))
                    name = registration.engine_name
                    _log.info(
                        "kvpool: %s uses agent %s, keyspace %s", name, registration.endpoint, registration.keyspace_name
                    )
                self._pools = tuple(self._opened)
            except LATER as error:
                if not warned:
                    _log.warning("kvpool: everything is computed until the agent can be reached: %s", error)
                warned = True
                self._attempted.set()
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
    """Return the error of a call for which there is no connected agent."""
    return ServiceUnavailable("the agent cannot be reached now")
