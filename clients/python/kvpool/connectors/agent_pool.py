"""The pool as one engine reaches it through its gpuagent, for engines without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
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
from kvpool.client.pool_values import LoadTicket
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.client.sync import BackgroundLoop
from kvpool.connectors.block_memory import BlockMemory
from kvpool.connectors.prefix_pool import ChunkSpan, LoadedChunks, RunningLoad, StoredChunks
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, StoreUnavailable, WireVersionRefused
from kvpool.core.ipc import EngineEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

_log = logging.getLogger(__name__)
# The cluster is not there now, but it may come: everything else needs another configuration.
_LATER: tuple[type[KvPoolError], ...] = (*TRANSIENT, DeadlineExceeded, StoreUnavailable, WireVersionRefused)


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
        self._plan = EnginePlan(
            endpoint=config.agent_endpoint,
            engine_name=engine_name,
            keyspace_name=keyspace_name,
            spec=spec,
            layout=layout,
            regions=memory.regions,
            events=memory.events,
        )
        self._loop = BackgroundLoop()
        self._pool: KvPool | None = None
        self._opening: Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the loop only

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

    def begin_load(
        self,
        span: ChunkSpan,
        timeout_s: float,
        on_released: Callable[[], None],
        compute_us_per_token: float = 0.0,
    ) -> RunningLoad:
        """See PrefixPool."""
        pool, after, started_s = self._reached(), self._memory.record(), time.perf_counter()

        async def begin() -> LoadTicket:
            return pool.begin_load(
                self._chain(span.chain),
                _block_table(span),
                first_chunk=span.first_index,
                end_chunk=len(span.chain),
                timeout_s=timeout_s,
                after=after,
                compute_us_per_token=compute_us_per_token,
            )

        ticket = self._loop.run(begin)
        ended = self._loop.start(lambda: self._end_load(ticket, started_s, on_released))
        return _AgentLoad(self._loop, ticket, ended, len(span.blocks))

    def store(self, span: ChunkSpan, on_released: Callable[[], None], on_done: Callable[[StoredChunks], None]) -> None:
        """See PrefixPool."""
        try:
            pool, after = self._reached(), self._memory.record()
            self._loop.start(lambda: self._begin(self._store(pool, span, after, on_released, on_done)))
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

    def _reached(self) -> KvPool:
        if self._pool is None:
            raise ServiceUnavailable("the agent was never reached")
        return self._pool

    def _chain(self, hashes: Sequence[bytes]) -> Chain:
        # One token more than the chunks have: the connector sees to it that the prompt's last token is computed.
        return Chain(self._chunk_tokens, len(hashes) * self._chunk_tokens + 1, b"".join(hashes))

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

    async def _end_load(self, ticket: LoadTicket, started_s: float, on_released: Callable[[], None]) -> LoadedChunks:
        report = await ticket.report()
        duration_s = time.perf_counter() - started_s
        if report.hold.ended:
            on_released()
        else:
            await self._begin(_release_after(report.hold.wait(), on_released))
        failure = str(report.error) if report.error is not None else ""
        return LoadedChunks(
            chunk_count=report.loaded_chunks, tokens=report.tokens, duration_s=duration_s, failure=failure
        )

    async def _store(
        self,
        pool: KvPool,
        span: ChunkSpan,
        after: EngineEvent | None,
        on_released: Callable[[], None],
        on_done: Callable[[StoredChunks], None],
    ) -> None:
        outcome = _failed(span, ServiceUnavailable("the pool was closed"))
        try:
            ticket = await pool.store(
                self._chain(span.chain),
                _block_table(span),
                first_chunk=span.first_index,
                end_chunk=len(span.chain),
                after=after,
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

    async def _close(self) -> bool:
        """Whether nothing touches the blocks any more."""
        if self._pool is not None and not await self._pool.close():
            _log.warning("kvpool: the agent did not confirm the end of the session")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._pool is None or self._pool.session.released.is_set()


class _AgentLoad:
    """Implements RunningLoad."""

    def __init__(self, loop: BackgroundLoop, ticket: LoadTicket, ended: Future[LoadedChunks], chunk_count: int) -> None:
        self._loop, self._ticket, self._ended, self._chunk_count = loop, ticket, ended, chunk_count

    def wait_layers(self, layers: int) -> bool:
        """See RunningLoad."""
        in_time = self._ticket.layers_loaded >= layers or self._loop.run(lambda: self._ticket.wait_layers(layers))
        if in_time and not self._ticket.failed_chunks:
            return True
        return self.result().chunk_count == self._chunk_count

    def result(self) -> LoadedChunks:
        """See RunningLoad."""
        return self._ended.result()


async def _release_after(hold: Coroutine[Any, Any, None], on_released: Callable[[], None]) -> None:
    await hold
    on_released()


def _block_table(span: ChunkSpan) -> npt.NDArray[np.int64]:
    """Blocks of the whole chain; those before the span are not looked at."""
    return np.array([*([0] * span.first_index), *span.blocks], dtype=np.int64)


def _failed(span: ChunkSpan, error: KvPoolError) -> StoredChunks:
    return StoredChunks(failed=tuple(range(len(span.blocks))), failure=str(error))
