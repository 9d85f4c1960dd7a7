"""The pool as one engine reaches it through its gpuagent, for engines without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import EngineMatchRun, LoadResult, StoreResult
from kvpool.client.engine_registration import EngineRegistration, OfferFd
from kvpool.client.fds import offer_fd
from kvpool.client.handle import AsyncHandle
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.client.retry import LATER, Backoff
from kvpool.client.sync import BackgroundLoop, Handle
from kvpool.connectors.block_memory import BlockMemory
from kvpool.connectors.prefix_pool import ChunkSpan
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.core.ipc import EngineEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

_log = logging.getLogger(__name__)


class AgentPool:
    """Implements PrefixPool for layouts whose blocks are chunks, in one piece of memory. Thread-safe.

    An agent that cannot be reached, at first or later, is tried again in the background.
    """

    def __init__(
        self,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        keyspace_name: str,
        engine_name: str,
        config: ClientConfig,
        memory: BlockMemory,
        *,
        offer: OfferFd = offer_fd,
    ) -> None:
        """config: agent_endpoint names the agent. memory: of the layout's one handle; closed with the pool."""
        self._memory = memory
        self._config, self._offer = config, offer
        self._chunk_tokens = spec.chunk_tokens
        self._plan = EngineRegistration(
            endpoint=config.agent_endpoint,
            engine_name=engine_name,
            keyspace_name=keyspace_name,
            spec=spec,
            layout=layout,
            regions=memory.regions,
            events=memory.events,
        )
        self._loop = BackgroundLoop()
        self._pool: AsyncPool | None = None
        self._opening: Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the loop only

    def open(self) -> None:
        """Register with the agent; one that cannot be reached is tried again in the background.

        raises: KeyspaceMismatch, PartitionRefused, GeometryUnsupported, InvalidRequest, NotServed: what the
        configuration must change.
        """
        try:
            self._loop.run(self._open)
        except LATER as error:
            _log.warning("kvpool: computing everything until the agent can be reached: %s", error)
            self._opening = self._loop.start(self._open_later)

    def hash_key(self) -> bytes | None:
        """See PrefixPool."""
        return self._pool.session.hash_key if self._pool is not None else None

    def match(self, chain: Sequence[bytes], held_chunks: int) -> Sequence[EngineMatchRun]:
        """See PrefixPool."""
        pool = self._reached()
        found = self._loop.run(lambda: pool.match(self._prompt(chain), held_chunks=held_chunks))
        if found.error is not None:
            raise found.error
        return found.runs

    def start_load(
        self,
        span: ChunkSpan,
        timeout_s: float,
        on_released: Callable[[], None],
        compute_us_per_token: float = 0.0,
    ) -> Handle[LoadResult]:
        """See PrefixPool."""
        pool, event = self._reached(), self._memory.record()
        handle = self._loop.run_begun(
            pool.start_load(
                self._prompt(span.chain),
                _block_table(span),
                first_chunk=span.first_index,
                end_chunk=len(span.chain),
                timeout_s=timeout_s,
                wait_event=event,
                compute_us_per_token=compute_us_per_token,
            )
        )
        self._loop.start(lambda: self._begin(_release_after(handle, on_released)))
        return Handle(self._loop, handle)

    def store(self, span: ChunkSpan, on_released: Callable[[], None], on_done: Callable[[StoreResult], None]) -> None:
        """See PrefixPool."""
        try:
            pool, event = self._reached(), self._memory.record()
            self._loop.start(lambda: self._begin(self._store(pool, span, event, on_released, on_done)))
        except KvPoolError as error:
            on_released()
            on_done(_failed(span, error))

    def close(self) -> None:
        """See PrefixPool."""
        if self._opening is not None:
            self._opening.cancel()
        with contextlib.suppress(ServiceUnavailable):  # closed before
            untouched = self._loop.run(self._close)
            self._loop.stop()
            self._memory.close(untouched=untouched)

    def _reached(self) -> AsyncPool:
        if self._pool is None:
            raise ServiceUnavailable("the agent was never reached")
        return self._pool

    def _prompt(self, hashes: Sequence[bytes]) -> Prompt:
        # One token more than the chunks have: the connector sees to it that the prompt's last token is computed.
        return Prompt(self._chunk_tokens, len(hashes) * self._chunk_tokens + 1, b"".join(hashes))

    async def _open(self) -> None:
        self._pool = await AsyncPool.open(self._plan, self._config, offer=self._offer)

    async def _open_later(self) -> None:
        backoff = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s)
        while self._pool is None:
            await asyncio.sleep(backoff.next_s())
            try:
                await self._open()
                _log.info("kvpool: the agent is reached now")
            except LATER as error:
                _log.debug("kvpool: the agent cannot be reached yet: %s", error)
            except KvPoolError as error:
                _log.error("kvpool: not used in this process: %s", error)
                return

    async def _store(
        self,
        pool: AsyncPool,
        span: ChunkSpan,
        event: EngineEvent | None,
        on_released: Callable[[], None],
        on_done: Callable[[StoreResult], None],
    ) -> None:
        result = _failed(span, ServiceUnavailable("the pool was closed"))
        try:
            handle = await pool.store(
                self._prompt(span.chain),
                _block_table(span),
                first_chunk=span.first_index,
                end_chunk=len(span.chain),
                wait_event=event,
            )
            await self._begin(_release_after(handle, on_released))
            result = await handle.result()
        except KvPoolError as error:
            on_released()  # it was refused before anything began
            result = _failed(span, error)
        finally:
            on_done(result)

    async def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> bool:
        """Whether nothing touches the blocks any more."""
        if self._pool is not None and not await self._pool.close():
            _log.warning("kvpool: the agent did not confirm the end of the session")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._pool is None or self._pool.session.released.is_set()


async def _release_after(handle: AsyncHandle[Any], on_released: Callable[[], None]) -> None:
    await handle.wait_released()
    on_released()


def _block_table(span: ChunkSpan) -> npt.NDArray[np.int64]:
    """Blocks of the whole chain; those before the span are not looked at."""
    return np.array([*([0] * span.first_index), *span.blocks], dtype=np.int64)


def _failed(span: ChunkSpan, error: KvPoolError) -> StoreResult:
    return StoreResult(failed_chunks=dict.fromkeys(range(span.first_index, len(span.chain)), error))
