"""Stores: reserve a window of pages, copy it out, ask the engine whether its blocks are still valid, commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import ArenaFull, KvPoolError, Stopped
from kvpool.core.fault_points import reach
from kvpool.core.outcome import Admission
from kvpool.core.spans import Bytes, Int32s, PageSpan
from kvpool_gpuagent.core.pages import CopyBatch, PageSlots, no_slots
from kvpool_gpuagent.core.requests import Rank, StoreOutcome, page_span, window_of
from kvpool_gpuagent.engine.events import EnginePassed
from kvpool_gpuagent.engine.waiting import until_cancelled
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import EngineCache, PagePool

_log = logging.getLogger(__name__)

# Each window is a round trip to the pagestore and one to the engine. So many at a time hide them behind copying.
WINDOW_BYTES, WINDOWS = 128 << 20, 4

AskStillValid = Callable[[int], Coroutine[Any, Any, bool]]
"""Report to the engine that the first N chunks are copied out; return whether they are still valid, False without an
answer."""


@dataclass(slots=True, eq=False)
class _Window:
    """One window of a store. slots: those that it still owns."""

    chunks: range
    span: PageSpan
    slots: PageSlots

    def take(self, only: Int32s | None = None) -> PageSlots:
        """Slots whose owner is the caller from now on: all, or those of chunk positions in `only`."""
        if only is None:
            taken, self.slots = self.slots, no_slots()
            return taken
        wanted = np.isin(self.positions, only)
        taken, self.slots = self.slots.where(wanted), self.slots.where(~wanted)
        return taken

    @property
    def positions(self) -> Int32s:
        """Chunk position in the request of each slot."""
        return self.span.positions[self.slots.pages] + self.chunks.start


class StoreRun:
    """One store request. Never cancelled from outside: `stop` makes it give its slots back and end.

    Every slot that was reserved is committed or aborted, whatever fails.
    """

    def __init__(self, rank: Rank, span: ChunkRange, pool: PagePool, cache: EngineCache, metrics: AgentMetrics) -> None:
        self._rank, self._span = rank, span
        self._pool, self._cache, self._metrics = pool, cache, metrics
        self._shards: Bytes = np.array(rank.shard_list, dtype=np.uint8)
        self._outcome = StoreOutcome()
        self._written = np.zeros(span.chunk_count, dtype=np.int64)
        self._ended: KvPoolError | None = None  # why nothing more is stored

    async def run(self, ask_still_valid: AskStillValid, stop: CancelToken, passed: EnginePassed) -> StoreOutcome:
        """Store what can be stored. A failure of some pages fails their chunks, never the request.

        passed: awaited before anything is reserved, so that no slot waits behind an engine's work, and before the first
        window, so that all windows come after it however they overlap.
        """
        stored = 0  # leading chunks whose windows were begun
        windows: list[asyncio.Task[None]] = []
        places = asyncio.Semaphore(self._places())
        before: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        before.set_result(True)
        try:
            await passed(None)
            for chunks in self._windows():
                await places.acquire()
                if self._ended is not None:
                    break
                # One after the other: a window that waits for slots waits for none of a later window.
                window = await self._reserve(chunks, stop)
                stored = chunks.stop
                asked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                storing = self._store_window(window, before, asked, ask_still_valid, stop)
                if not windows and stored == self._span.chunk_count:
                    await storing  # mostly there is one: a task would cost more than it does
                    break
                windows.append(asyncio.ensure_future(storing))
                windows[-1].add_done_callback(lambda _: places.release())
                before = asked
        except Exception as error:
            self._end(error)
        finally:
            if windows:
                await asyncio.gather(*windows)
        if self._ended is not None:
            self._fail(range(stored, self._span.chunk_count), self._ended)
        self._count()
        return self._outcome

    def _end(self, error: Exception) -> KvPoolError:
        """Store nothing more. The first reason counts."""
        if not isinstance(error, KvPoolError):
            _log.error("a store failed", exc_info=error)
            error = KvPoolError("internal error in the agent; its log has the details")
        self._ended = self._ended or error
        return self._ended

    def _places(self) -> int:
        """Windows at a time: together they never ask for more than the pool's window."""
        return max(1, min(WINDOWS, self._pool.window_pages // self._shards.size))

    def _windows(self) -> list[range]:
        # A chunk's pages are reserved together: its blocks are still valid or not as one.
        if self._shards.size > self._pool.window_pages:
            raise ArenaFull(
                f"a chunk of this rank has {self._shards.size} pages, but the agent may hold {self._pool.window_pages} "
                f"at once; raise the pagestore's max_leases or the agent's bounce_bytes"
            )
        pages = window_of(self._rank, self._pool.window_pages // self._places(), WINDOW_BYTES)
        step, count = max(1, pages // int(self._shards.size)), self._span.chunk_count
        return [range(start, min(count, start + step)) for start in range(0, count, step)]

    async def _store_window(
        self,
        window: _Window,
        before: asyncio.Future[bool],
        asked: asyncio.Future[bool],
        ask_still_valid: AskStillValid,
        stop: CancelToken,
    ) -> None:
        """Copy a window out and commit it. Never raises. before, asked: whether the blocks of all earlier
        windows were still valid, and those of this one too."""
        try:
            await self._abort_failed(window)
            await self._gather(window, stop)
            # In order: the engine is asked about leading chunks.
            if not await before or not await until_cancelled(ask_still_valid(window.chunks.stop), stop):
                raise Stopped("the engine did not keep the blocks until they were copied out")
            asked.set_result(True)
        except Exception as error:
            self._fail(window.chunks, self._end(error))
        else:
            await self._commit(window)
        finally:
            if not asked.done():
                asked.set_result(False)
            if window.slots.count:
                await self._pool.abort(window.take())

    async def _reserve(self, chunks: range, stop: CancelToken) -> _Window:
        positions = np.repeat(np.arange(len(chunks), dtype=np.int32), self._shards.size)
        span = page_span(self._rank, self._span, chunks, positions, np.tile(self._shards, len(chunks)))
        answer = await until_cancelled(self._pool.reserve(span, self._span.chain_head_hash), stop)
        for admission, pages in ((Admission.EXISTS, answer.exists), (Admission.PENDING, answer.pending)):
            if pages.size:
                self._metrics.deduplicated_pages.labels(admission.name.lower()).inc(pages.size)
        for page, error in answer.failed:
            self._fail([chunks.start + int(span.positions[page])], error)
        return _Window(chunks, span, answer.slots)

    async def _abort_failed(self, window: _Window) -> None:
        """A chunk of which some page got no slot cannot become complete: its other slots serve others better."""
        failed = np.array(list(self._outcome.failed), dtype=np.int32)
        if failed.size and window.slots.count:
            await self._pool.abort(window.take(failed))

    async def _gather(self, window: _Window, stop: CancelToken) -> None:
        slots = window.slots
        if slots.count:
            batch = CopyBatch(
                slots.addresses,
                window.span.shards[slots.pages],
                self._span.block_ids[window.positions],
                np.zeros(slots.count, dtype=np.int64),
            )
            if not await self._cache.gather(batch, stop):
                raise Stopped("the store was cancelled or its engine left before all was copied out")
        reach("gpuagent.store.gathered")

    async def _commit(self, window: _Window) -> None:
        positions, shards = window.positions, window.span.shards[window.slots.pages]
        committed = np.ones(positions.size, dtype=np.bool_)
        for index, error in await self._commit_slots(window.span, window.take()):
            committed[index] = False
            self._fail([int(positions[index])], error)
        np.add.at(self._written, positions[committed], 1)
        self._metrics.stored_bytes.inc(int(self._rank.page_sizes[shards[committed]].sum()))

    async def _commit_slots(self, span: PageSpan, slots: PageSlots) -> Iterable[tuple[int, KvPoolError]]:
        try:
            reach("gpuagent.store.committing")
            answers = await self._pool.commit(span, slots) if slots.count else ()
            reach("gpuagent.store.committed")
            return answers
        except KvPoolError as error:
            return [(index, error) for index in range(slots.count)]
        except Exception as error:
            _log.exception("a commit failed")
            failure = KvPoolError(f"the pages could not be committed ({error})")
            return [(index, failure) for index in range(slots.count)]

    def _fail(self, chunks: Iterable[int], error: KvPoolError) -> None:
        for position in chunks:
            self._outcome.failed.setdefault(position, error)

    def _count(self) -> None:
        written = np.delete(self._written, list(self._outcome.failed))
        self._outcome.stored_chunks = int(np.count_nonzero(written))
        self._outcome.deduplicated_chunks = written.size - self._outcome.stored_chunks
