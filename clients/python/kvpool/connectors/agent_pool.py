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
from kvpool.client.engine_items import EngineMatchRun
from kvpool.client.engine_registration import EnginePlan, OfferFd
from kvpool.client.fds import offer_fd
from kvpool.client.hashing import Chain
from kvpool.client.pool import KvPool
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.client.sync import BackgroundLoop
from kvpool.connectors.prefix_pool import ChunkSpan, LoadedChunks, StoredChunks
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, StoreUnavailable
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

_log = logging.getLogger(__name__)
# The cluster is not there now, but it may come: everything else needs another configuration.
_LATER: tuple[type[KvPoolError], ...] = (*TRANSIENT, DeadlineExceeded, StoreUnavailable)


class AgentPool:
    """Implements PrefixPool for layouts whose blocks are chunks, in one region of shared memory. Thread-safe.

    An agent that cannot be reached, at first or later, is tried again in the background.
    """

    def __init__(
        self,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        keyspace_name: str,
        engine_name: str,
        config: ClientConfig,
        *,
        offer: OfferFd = offer_fd,
    ) -> None:
        """config: agent_endpoint names the agent. Raises StartupFailed if there is not so much shared memory."""
        (size_bytes,) = layout.handle_sizes
        self._region = SharedMemoryRegion(size_bytes)
        self._config, self._offer = config, offer
        self._chunk_tokens = spec.chunk_tokens
        self._plan = EnginePlan(
            endpoint=config.agent_endpoint,
            engine_name=engine_name,
            keyspace_name=keyspace_name,
            spec=spec,
            layout=layout,
            regions=(self._region,),
        )
        self._loop = BackgroundLoop()
        self._pool: KvPool | None = None
        self._opening: Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the loop only

    @property
    def memory(self) -> memoryview:
        """The engine's blocks, writable."""
        return self._region.buffer

    def open(self) -> None:
        """Register with the agent; one that cannot be reached is tried again in the background.

        raises: KeyspaceMismatch, PartitionRefused, GeometryUnsupported, InvalidRequest, NotServed: what the
        configuration must change.
        """
        try:
            self._loop.run(self._open)
        except _LATER as error:
            _log.warning("kvpool: computing everything until the agent can be reached: %s", error)
            self._opening = self._loop.start(self._open_later)

    def hash_key(self) -> bytes | None:
        """See PrefixPool."""
        return self._pool.session.hash_key if self._pool is not None else None

    def match(self, chain: Sequence[bytes], held_chunks: int) -> Sequence[EngineMatchRun]:
        """See PrefixPool."""
        pool = self._reached()
        found = self._loop.run(lambda: pool.match(self._chain(chain), held_chunks=held_chunks))
        if found.error is not None:
            raise found.error
        return found.runs

    def load(self, span: ChunkSpan, timeout_s: float, on_released: Callable[[], None]) -> LoadedChunks:
        """See PrefixPool."""
        pool = self._reached()
        # A caller who is interrupted leaves; the load goes on to its end, which is soon, and then releases the blocks.
        return self._loop.start(lambda: self._load(pool, span, timeout_s, on_released)).result()

    def store(self, span: ChunkSpan, on_released: Callable[[], None], on_done: Callable[[StoredChunks], None]) -> None:
        """See PrefixPool."""
        try:
            pool = self._reached()
            self._loop.start(lambda: self._begin(self._store(pool, span, on_released, on_done)))
        except KvPoolError as error:
            on_released()
            on_done(_failed(span, error))

    def close(self) -> None:
        """See PrefixPool. Blocks that an agent may still touch stay mapped there; ours are unmapped."""
        if self._opening is not None:
            self._opening.cancel()
        with contextlib.suppress(ServiceUnavailable):  # closed before
            self._loop.run(self._close)
        self._loop.stop()
        self._region.close()

    def _reached(self) -> KvPool:
        if self._pool is None:
            raise ServiceUnavailable("the agent was never reached")
        return self._pool

    def _chain(self, hashes: Sequence[bytes]) -> Chain:
        # One token more than the chunks have: the connector sees to it that the prompt's last token is computed.
        return Chain(self._chunk_tokens, len(hashes) * self._chunk_tokens + 1, tuple(hashes))

    async def _open(self) -> None:
        self._pool = await KvPool.open(self._plan, self._config, offer=self._offer)

    async def _open_later(self) -> None:
        backoff = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s)
        while self._pool is None:
            await asyncio.sleep(backoff.next_s())
            try:
                await self._open()
                _log.info("kvpool: the agent is reached now")
            except _LATER as error:
                _log.debug("kvpool: the agent cannot be reached yet: %s", error)
            except KvPoolError as error:
                _log.error("kvpool: not used in this process: %s", error)
                return

    async def _load(
        self, pool: KvPool, span: ChunkSpan, timeout_s: float, on_released: Callable[[], None]
    ) -> LoadedChunks:
        report = await pool.load(
            self._chain(span.chain),
            _block_table(span),
            first_chunk=span.first_index,
            end_chunk=len(span.chain),
            timeout_s=timeout_s,
        )
        if report.hold.ended:
            on_released()
        else:
            await self._begin(_release_after(report.hold.wait(), on_released))
        failure = str(report.error) if report.error is not None else ""
        return LoadedChunks(chunk_count=report.loaded_chunks, tokens=report.tokens, failure=failure)

    async def _store(
        self,
        pool: KvPool,
        span: ChunkSpan,
        on_released: Callable[[], None],
        on_done: Callable[[StoredChunks], None],
    ) -> None:
        outcome = _failed(span, ServiceUnavailable("the pool was closed"))
        try:
            ticket = await pool.store(
                self._chain(span.chain), _block_table(span), first_chunk=span.first_index, end_chunk=len(span.chain)
            )
            await self._begin(_release_after(ticket.wait_reusable(), on_released))
            report = await ticket.report(self._config.store_timeout_s)
            failed = tuple(sorted(index - span.first_index for index in report.failed_chunks))
            outcome = StoredChunks(failed=failed, failure="; ".join({str(e) for e in report.failed_chunks.values()}))
        except KvPoolError as error:
            on_released()  # it was refused before anything began
            outcome = _failed(span, error)
        finally:
            on_done(outcome)

    async def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        if self._pool is not None and not await self._pool.close():
            _log.warning("kvpool: the agent did not confirm the end of the session")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _release_after(hold: Coroutine[Any, Any, None], on_released: Callable[[], None]) -> None:
    await hold
    on_released()


def _block_table(span: ChunkSpan) -> npt.NDArray[np.int64]:
    """Blocks of the whole chain; those before the span are not looked at."""
    return np.array([*([0] * span.first_index), *span.blocks], dtype=np.int64)


def _failed(span: ChunkSpan, error: KvPoolError) -> StoredChunks:
    return StoredChunks(failed=tuple(range(len(span.blocks))), failure=str(error))
