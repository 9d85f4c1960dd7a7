"""Stores: reserve a window of pages, gather it, ask the engine whether its blocks were kept, commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvpool.core.errors import KvPoolError, Stopped
from kvpool.core.grid import shards_in
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.core.requests import ChunkSpan, Rank, StoreOutcome, windows
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import EngineCache, PageCopy, PagePool, PageWish, StopFlag, WriteSlot
from kvpool_gpuagent.workers import Workers

AskKept = Callable[[int], Awaitable[bool]]
"""Tells the engine that the first N chunks are gathered and returns its answer; False when the engine is gone."""


@dataclass(slots=True)
class _Window:
    """Slots of one window by position of their chunk in the request."""

    chunks: range
    slots: list[tuple[int, WriteSlot]]


class StoreRun:
    """One store request. Never cancelled from outside: `stop` makes it give its slots back and end."""

    def __init__(
        self, rank: Rank, span: ChunkSpan, pool: PagePool, cache: EngineCache, workers: Workers, metrics: AgentMetrics
    ) -> None:
        self._rank, self._span = rank, span
        self._pool, self._cache, self._workers, self._metrics = pool, cache, workers, metrics
        self._shards = list(shards_in(rank.shards))
        self._page_bytes = {s: page_bytes(payload_bytes(rank.spec, rank.grid, s)) for s in self._shards}
        self._outcome = StoreOutcome()
        self._written = [0] * len(span.chunks)

    async def run(self, ask_kept: AskKept, stop: StopFlag) -> StoreOutcome:
        """Store all chunks. A failure of some pages fails their chunks, never the request.

        Raises only when the pool's session broke, after every slot's copy has ended.
        """
        # Half a session's leases: the window being gathered and the one being committed overlap.
        cuts = windows([len(self._shards)] * len(self._span.chunks), max(1, self._pool.window_pages // 2))
        committing: asyncio.Task[None] | None = None
        try:
            for chunks in cuts:
                window = await self._reserve(chunks)
                kept = await self._gather(window, ask_kept, stop)
                if committing is not None:
                    await committing
                committing = asyncio.ensure_future(self._commit(window) if kept else self._give_up(window, stop))
                if not kept:
                    self._fail(range(chunks.stop, len(self._span.chunks)), _stopped(stop))
                    break
        finally:
            if committing is not None:
                await committing
        self._count()
        return self._outcome

    async def _reserve(self, chunks: range) -> _Window:
        wishes = [self._wish(position, shard) for position in chunks for shard in self._shards]
        answers = await self._pool.reserve(wishes, [self._page_bytes[wish.key.shard] for wish in wishes])
        window = _Window(chunks, [])
        for number, answer in enumerate(answers):
            position = chunks.start + number // len(self._shards)
            if isinstance(answer, WriteSlot):
                window.slots.append((position, answer))
            elif isinstance(answer, KvPoolError):
                self._outcome.failed.setdefault(position, answer)
            else:
                self._metrics.deduplicated_pages.labels(Admission(answer).name.lower()).inc()
        return window

    def _wish(self, position: int, shard: int) -> PageWish:
        span = self._span
        return PageWish(
            key=PageKey(self._rank.keyspace, span.chunks[position].chunk_hash, shard),
            chunk_index=span.first_index + position,
            parent_hash=span.parent(position),
            group_head_hash=span.group_head(position),
            chain_head_hash=span.chain_head,
            sources=(),
        )

    async def _gather(self, window: _Window, ask_kept: AskKept, stop: StopFlag) -> bool:
        copies = [
            PageCopy(key=slot.key, page=slot.page, block_ids=self._span.chunks[position].block_ids)
            for position, slot in window.slots
        ]
        done = True
        if copies:
            try:
                done = await self._workers.gather(self._cache, copies, stop)
            except Exception:
                await self._pool.abort([slot for _, slot in window.slots])
                raise
        return done and await ask_kept(window.chunks.stop)

    async def _commit(self, window: _Window) -> None:
        slots = [slot for _, slot in window.slots]
        results = await self._pool.commit(slots) if slots else []
        for (position, slot), error in zip(window.slots, results, strict=True):
            if error is None:
                self._written[position] += 1
                self._metrics.stored_bytes.inc(len(slot.page))
            else:
                self._outcome.failed.setdefault(position, error)

    async def _give_up(self, window: _Window, stop: StopFlag) -> None:
        await self._pool.abort([slot for _, slot in window.slots])
        self._fail(window.chunks, _stopped(stop))

    def _fail(self, chunks: Sequence[int], error: KvPoolError) -> None:
        for position in chunks:
            self._outcome.failed.setdefault(position, error)

    def _count(self) -> None:
        for position, written in enumerate(self._written):
            if position in self._outcome.failed:
                continue
            if written:
                self._outcome.stored_chunks += 1
            else:
                self._outcome.deduplicated_chunks += 1


def _stopped(stop: StopFlag) -> KvPoolError:
    if stop():
        return Stopped("the store was cancelled or its engine left before the chunk was committed")
    return Stopped("the engine did not keep the blocks until they were gathered; nothing of the window was stored")
