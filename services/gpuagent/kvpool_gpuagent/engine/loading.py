"""Loads: acquire pages window by window, have the device move them into the engine's blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import ChunkRange, Int64s
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, PageMissing, Stopped
from kvpool.core.grid import shards_in
from kvpool.core.spans import Bytes, Int32s
from kvpool_gpuagent.core.pages import FIRST_WINDOW_ORDER, CopyBatch, PageSlots
from kvpool_gpuagent.core.requests import ChunkSource, LoadOutcome, Rank, page_span, window_of
from kvpool_gpuagent.core.sources import CopiedBytes, LoadSource
from kvpool_gpuagent.engine.events import EnginePassed
from kvpool_gpuagent.engine.waiting import until_cancelled
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import EngineCache, PagePool

_log = logging.getLogger(__name__)

ReportProgress = Callable[[int, Sequence[int]], None]
"""Gets (layers of the rank that are in, failed positions so far)."""

_INTERNAL = "internal error in the agent; its log has the details"
# The first window is small, so that copying begins early: it takes about as long as the next one's answer. Later ones
# are large, as each costs a loop time that the thread which keeps the link busy waits for.
# First windows go over the link before others, so that small loads do not wait for large ones, though only a few before
# one that waits. Of the others, those of the oldest load go first: loads that share the link evenly would all end as
# late as the last one, and their engine would compute nothing until then.
FIRST_WINDOW_BYTES, WINDOW_BYTES = 64 << 20, 256 << 20


class LoadRun:
    """One load request. Never cancelled from outside: `stop` makes it end after the copies that have begun.

    Pages are taken chunk by chunk, or layer group by layer group for an engine that starts its first layers early. A
    chunk of which a page fails ends the loadable prefix before it; nothing of it or after it is asked for any more.
    """

    def __init__(
        self,
        rank: Rank,
        span: ChunkRange,
        sources: Sequence[ChunkSource],
        pool: PagePool,
        cache: EngineCache,
        metrics: AgentMetrics,
        copied: CopiedBytes,
        *,
        by_layer: bool = False,
    ) -> None:
        """sources: of each chunk. copied: of all loads of the agent. by_layer: the engine starts its first layers
        early."""
        self._rank, self._span = rank, span
        self._pool, self._cache, self._metrics = pool, cache, metrics
        self._remote = [source[0] for source in sources]
        self._positions, self._shards = _pages_of(rank, [source[1] for source in sources], by_layer)
        self._skip_tokens: Int64s = np.zeros(span.chunk_count, dtype=np.int64)
        self._skip_tokens[0] = span.skip_tokens
        self._page_bytes = rank.page_sizes
        self._progress = _Progress(rank, self._shards)
        self._report: ReportProgress = lambda layers, failed: None
        self._first_failed = span.chunk_count
        self._error: KvPoolError | None = None
        self._source_of = np.full(span.chunk_count, int(LoadSource.STAGING), dtype=np.uint8)
        self.loaded_bytes = dict.fromkeys(LoadSource, 0)
        # Seconds from the first copy's begin to the last one's end, times this load's share of the bytes that were
        # copied in them: other loads at the same time do not count.
        self.copying_s = 0.0
        self._copied, self._copied_before = copied, 0
        copied.loads += 1
        self._number = copied.loads
        self._copy_began_s = float("inf")

    async def run(
        self, report: ReportProgress, stop: CancelToken, ends_at_s: float, passed: EnginePassed
    ) -> LoadOutcome:
        """Load what can be loaded; never raises. When it returns nothing touches the blocks any more.

        ends_at_s: on the loop's clock; what is not in by then is failed. passed: awaited before anything is acquired.
        """
        try:
            await passed(max(0.0, ends_at_s - asyncio.get_running_loop().time()))
        except KvPoolError as error:
            self._fail(0, error)
            return self._outcome()
        except Exception:
            _log.exception("a load's event could not be waited for")
            self._fail(0, KvPoolError(_INTERNAL))
            return self._outcome()
        self._report = report
        most_pages = max(1, self._pool.window_pages // 2)
        pages = window_of(self._rank, most_pages, FIRST_WINDOW_BYTES)
        largest = window_of(self._rank, most_pages, WINDOW_BYTES)
        # Together they never ask for more than the pool's window: a larger request would wait for its own pages.
        places = asyncio.Semaphore(max(1, self._pool.window_pages // largest))
        tasks: list[asyncio.Task[None]] = []
        start, count = 0, int(self._positions.size)
        while start < count:
            await places.acquire()
            end, pages = min(count, start + pages), largest
            loading = self._load_window(
                slice(start, end), self._number if start else FIRST_WINDOW_ORDER, stop, ends_at_s
            )
            if not start and end == count:
                await loading  # mostly there is one: a task would cost more than it does
                break
            task = asyncio.ensure_future(loading)
            task.add_done_callback(lambda _: places.release())
            tasks.append(task)
            start = end
        if tasks:
            await asyncio.gather(*tasks)
        return self._outcome()

    async def _load_window(self, window: slice, order: int, stop: CancelToken, ends_at_s: float) -> None:
        """Copy every page of a window, or fail its chunk. Never raises."""
        positions, shards = self._positions[window], self._shards[window]
        wanted = positions < self._first_failed
        self._report_progress(shards[~wanted])
        positions, shards = positions[wanted], shards[wanted]
        if not positions.size:
            return
        pending = np.ones(positions.size, dtype=np.bool_)
        try:
            await self._take_window(positions, shards, order, pending, stop, ends_at_s)
        except KvPoolError as error:
            self._fail_pages(positions[pending], error)
        except Exception:
            _log.exception("a load failed")
            self._fail_pages(positions, KvPoolError(_INTERNAL))
        finally:
            self._report_progress(shards[pending])

    async def _take_window(
        self,
        positions: Int32s,
        shards: Bytes,
        order: int,
        pending: np.ndarray[tuple[int], np.dtype[np.bool_]],
        stop: CancelToken,
        ends_at_s: float,
    ) -> None:
        """Clear in `pending` what has been answered; every slot that was yielded is released when this ends."""
        remaining_s = ends_at_s - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            raise DeadlineExceeded("the load's time is up")
        first, end = int(positions.min()), int(positions.max()) + 1
        span = page_span(self._rank, self._span, range(first, end), positions - first, shards, self._remote)
        copies: list[asyncio.Task[None]] = []
        alone: list[Coroutine[Any, Any, None]] = []  # of all pages at once, as mostly: it needs no task

        async def take() -> None:
            # May be cancelled: between two answers nothing is awaited, so that each has an owner.
            async with aclosing(self._pool.acquire(span, remaining_s)) as answers:
                async for answer in answers:
                    if answer.slots.count:
                        pages = answer.slots.pages
                        pending[pages] = False
                        copy = self._copy(answer.slots, positions[pages], shards[pages], order, stop)
                        if copies or pending.any():
                            copies.append(asyncio.ensure_future(copy))
                        else:
                            alone.append(copy)
                    for page, cause in answer.failed:
                        pending[page] = False
                        if isinstance(cause, PageCorrupt):
                            self._metrics.verification_failures.inc()
                        missing = PageMissing(f"page {span.page_key(page)} is nowhere to be had")
                        self._fail(int(positions[page]), cause or missing)
                        self._report_progress(shards[page : page + 1])

        try:
            await until_cancelled(take(), stop, remaining_s)
        finally:
            for copy in alone:
                await copy
            for result in await asyncio.gather(*copies, return_exceptions=True) if copies else ():
                if isinstance(result, BaseException):
                    raise result

    async def _copy(self, slots: PageSlots, positions: Int32s, shards: Bytes, order: int, stop: CancelToken) -> None:
        """Move what is still wanted of the pages, and release all of them."""
        loop = asyncio.get_running_loop()
        try:
            if stop.cancelled:
                raise Stopped("the load was cancelled or its engine left")
            wanted = positions < self._first_failed
            if wanted.any():
                chunks = positions[wanted]
                if self._copy_began_s > (began_s := loop.time()):
                    self._copy_began_s, self._copied_before = began_s, self._copied.total
                await self._cache.scatter(
                    CopyBatch(
                        slots.addresses[wanted],
                        shards[wanted],
                        self._span.block_ids[chunks],
                        self._skip_tokens[chunks],
                        order,
                    )
                )
                self._count_pages(chunks, shards[wanted], slots.sources[wanted])
                share = sum(self.loaded_bytes.values()) / (self._copied.total - self._copied_before)
                self.copying_s = share * (loop.time() - self._copy_began_s)
        except KvPoolError as error:
            self._fail_pages(positions, error)
        except Exception:
            _log.exception("a copy into an engine's cache failed")
            self._fail_pages(positions, KvPoolError(_INTERNAL))
        finally:
            await self._pool.release(slots)
            self._report_progress(shards)

    def _count_pages(self, chunks: Int32s, shards: Bytes, sources: Bytes) -> None:
        np.maximum.at(self._source_of, chunks, sources)
        by_source = np.bincount(sources, self._page_bytes[shards], minlength=len(LoadSource) + 1)
        for source in LoadSource:
            size_bytes = int(by_source[source])
            if size_bytes:
                self.loaded_bytes[source] += size_bytes
                self._copied.total += size_bytes
                self._metrics.loaded_bytes.labels(source.name.lower()).inc(size_bytes)

    def _report_progress(self, shards: Bytes) -> None:
        """Count pages of these shards as in, or their chunks as failed, and report what is due."""
        if not shards.size:
            return
        layers = self._progress.note_ended(shards)
        if layers and self._first_failed:
            self._report(layers, range(self._first_failed, self._span.chunk_count))

    def _fail_pages(self, positions: Int32s, error: KvPoolError) -> None:
        if positions.size:
            self._fail(int(positions.min()), error)

    def _fail(self, position: int, error: KvPoolError) -> None:
        if position < self._first_failed:
            self._first_failed, self._error = position, error

    def _outcome(self) -> LoadOutcome:
        outcome = LoadOutcome(
            chunk_count=self._span.chunk_count,
            loaded_chunks=self._first_failed,
            error=self._error,
            copying_s=self.copying_s,
        )
        tokens = self._rank.spec.chunk_tokens - self._skip_tokens[: self._first_failed]
        by_source = np.bincount(self._source_of[: self._first_failed], tokens, minlength=len(LoadSource) + 1)
        for source in LoadSource:
            outcome.tokens[source] += int(by_source[source])
        return outcome


def _pages_of(rank: Rank, readable: Sequence[int], by_layer_group: bool) -> tuple[Int32s, Bytes]:
    """Chunk position and shard of every page to load, in the order in which they are loaded, [N] each."""
    positions, shards, start = [], [], 0
    for end in range(1, len(readable) + 1):  # runs of chunks with the same shards
        if end < len(readable) and readable[end] == readable[start]:
            continue
        numbers = np.fromiter(shards_in(readable[start]), dtype=np.uint8)
        positions.append(np.repeat(np.arange(start, end, dtype=np.int32), numbers.size))
        shards.append(np.tile(numbers, end - start))
        start = end
    all_positions, all_shards = np.concatenate(positions), np.concatenate(shards)
    if by_layer_group:
        order = np.lexsort((all_positions, all_shards // rank.grid.group_shards))
        return all_positions[order], all_shards[order]
    return all_positions, all_shards


class _Progress:
    """Counts pages that are in or failed; a layer group is in once it and all before it have none left."""

    def __init__(self, rank: Rank, shards: Bytes) -> None:
        """shards: of all pages."""
        self._rank = rank
        self._left = np.bincount(shards // rank.grid.group_shards, minlength=rank.grid.layer_groups)
        self._groups = [group for group in range(rank.grid.layer_groups) if self._left[group]]

    def note_ended(self, shards: Bytes) -> int:
        """Count pages of these shards as ended. Return the layers to report now; 0 without news."""
        self._left -= np.bincount(shards // self._rank.grid.group_shards, minlength=self._left.size)
        layers_in = 0
        while self._groups and not self._left[self._groups[0]]:
            layers_in = self._rank.grid.layers_of_group(self._groups.pop(0)).stop - self._rank.layout.first_layer
        return layers_in
