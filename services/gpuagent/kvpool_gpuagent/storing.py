"""Stores: reserve a window of pages, gather it, ask the engine whether its blocks were kept, commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.core.errors import ArenaFull, KvPoolError, Stopped
from kvpool.core.fault_points import reach
from kvpool.core.outcome import Admission
from kvpool_gpuagent.core.requests import ChunkSpan, Rank, StoreOutcome, window_of, windows
from kvpool_gpuagent.events import EnginePassed
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import EngineCache, PageCopy, PagePool, PageWish, WriteSlot
from kvpool_gpuagent.waiting import until_stopped

_log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20  # enough to gather that a window's round trips cost little; or two of the device's batches

AskKept = Callable[[int], Coroutine[Any, Any, bool]]
"""Tells the engine that the first N chunks are gathered and returns its answer; False when it does not come."""


@dataclass(slots=True)
class _Window:
    """Slots of one window, each with the position of its chunk in the request."""

    slots: list[tuple[int, WriteSlot]]

    def take_slots(self, but: Callable[[int], bool] = lambda position: False) -> list[WriteSlot]:
        """Slots whose owner is the caller from now on; those of positions that `but` holds for stay."""
        taken = [slot for position, slot in self.slots if not but(position)]
        self.slots = [(position, slot) for position, slot in self.slots if but(position)]
        return taken


class StoreRun:
    """One store request. Never cancelled from outside: `stop` makes it give its slots back and end.

    Every slot that was reserved is committed or aborted, whatever fails.
    """

    def __init__(self, rank: Rank, span: ChunkSpan, pool: PagePool, cache: EngineCache, metrics: AgentMetrics) -> None:
        self._rank, self._span = rank, span
        self._pool, self._cache, self._metrics = pool, cache, metrics
        self._shards = rank.shard_list
        self._outcome = StoreOutcome()
        self._written = [0] * len(span.chunks)
        self._committing: asyncio.Future[None] | None = None

    async def run(self, ask_kept: AskKept, stop: asyncio.Event, passed: EnginePassed) -> StoreOutcome:
        """Store what can be stored. A failure of some pages fails their chunks, never the request.

        passed: awaited before anything is reserved, so that no slot waits behind an engine's work, and before the first
        window, so that all windows come after it however they overlap.
        """
        next_chunk = 0
        try:
            await passed(None)
            for chunks in self._windows():
                await self._store_window(chunks, ask_kept, stop)
                next_chunk = chunks.stop
        except KvPoolError as error:
            self._fail(range(next_chunk, len(self._span.chunks)), error)
        except Exception:
            _log.exception("a store failed")
            internal = KvPoolError("internal error in the agent; its log has the details")
            self._fail(range(next_chunk, len(self._span.chunks)), internal)
        finally:
            await self._commit_ended()
        self._count()
        return self._outcome

    def _windows(self) -> list[range]:
        # A chunk's pages are reserved together: its blocks are kept or not kept as one.
        if len(self._shards) > self._pool.window_pages:
            raise ArenaFull(
                f"a chunk of this rank has {len(self._shards)} pages, but the agent may hold {self._pool.window_pages} "
                f"at once; raise the pagestore's max_leases or the agent's bounce_bytes"
            )
        # The window being gathered and the one being committed overlap.
        window_bytes = max(WINDOW_BYTES, 2 * self._cache.batch_bytes)
        pages = window_of(self._rank, self._pool.window_pages, window_bytes)
        return windows([len(self._shards)] * len(self._span.chunks), pages)

    async def _store_window(self, chunks: range, ask_kept: AskKept, stop: asyncio.Event) -> None:
        """Gather one window and start its commit. Raises KvPoolError when nothing more is to be stored."""
        window = await self._reserve(chunks, stop)
        try:
            await self._abort_failed(window)
            await self._gather(window, stop)
            if not await until_stopped(ask_kept(chunks.stop), stop):
                raise Stopped("the engine did not keep the blocks until they were gathered")
            await self._commit_ended()
        except BaseException:
            await self._pool.abort(window.take_slots())
            raise
        self._committing = asyncio.ensure_future(self._commit(window))

    async def _reserve(self, chunks: range, stop: asyncio.Event) -> _Window:
        wishes = [self._wish(position, shard) for position in chunks for shard in self._shards]
        sizes_bytes = [self._rank.page_bytes(wish.key.shard) for wish in wishes]
        answers = await until_stopped(self._pool_reserve(wishes, sizes_bytes), stop)
        window = _Window([])
        for number, answer in enumerate(answers):
            position = chunks.start + number // len(self._shards)
            if isinstance(answer, WriteSlot):
                window.slots.append((position, answer))
            elif isinstance(answer, KvPoolError):
                self._fail([position], answer)
            else:
                self._metrics.deduplicated_pages.labels(Admission(answer).name.lower()).inc()
        return window

    async def _pool_reserve(
        self, wishes: Sequence[PageWish], sizes_bytes: Sequence[int]
    ) -> Sequence[WriteSlot | int | KvPoolError]:
        return await self._pool.reserve(wishes, sizes_bytes)

    def _wish(self, position: int, shard: int) -> PageWish:
        return PageWish(
            key=self._rank.key(self._span, position, shard),
            metadata=self._span.metadata(position, self._rank.spec.chunk_tokens),
            chain_head_hash=self._span.chain_head,
        )

    async def _abort_failed(self, window: _Window) -> None:
        """A chunk of which some page got no slot cannot become complete: its other slots serve others better."""
        failed = self._outcome.failed
        await self._pool.abort(window.take_slots(but=lambda position: position not in failed))

    async def _gather(self, window: _Window, stop: asyncio.Event) -> None:
        copies = [
            PageCopy(key=slot.key, page=slot.page, block_ids=self._span.chunks[position].block_ids)
            for position, slot in window.slots
        ]
        if copies and not await self._cache.gather(copies, stop.is_set):
            raise Stopped("the store was cancelled or its engine left before all was gathered")
        reach("gpuagent.store.gathered")

    async def _commit(self, window: _Window) -> None:
        owners = [(position, len(slot.page)) for position, slot in window.slots]
        for (position, size_bytes), error in zip(owners, await self._commit_slots(window.take_slots()), strict=True):
            if error is None:
                self._written[position] += 1
                self._metrics.stored_bytes.inc(size_bytes)
            else:
                self._fail([position], error)

    async def _commit_slots(self, slots: Sequence[WriteSlot]) -> Sequence[KvPoolError | None]:
        try:
            reach("gpuagent.store.committing")
            answers = await self._pool.commit(slots) if slots else []
            reach("gpuagent.store.committed")
            return answers
        except KvPoolError as error:
            return [error] * len(slots)
        except Exception as error:
            _log.exception("a commit failed")
            return [KvPoolError(f"the pages could not be committed ({error})")] * len(slots)

    async def _commit_ended(self) -> None:
        committing, self._committing = self._committing, None
        if committing is not None:
            await committing

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
