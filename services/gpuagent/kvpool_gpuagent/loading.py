"""Loads: acquire pages window by window, have the device verify and scatter them, layer group by layer group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, PageMissing, Stopped
from kvpool_gpuagent.core.bandwidth import LoadSource
from kvpool_gpuagent.core.requests import ChunkSpan, LoadOutcome, Rank, window_of
from kvpool_gpuagent.events import EnginePassed
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import EngineCache, PageCopy, PagePool, PageWish, ReadSlot
from kvpool_gpuagent.waiting import until_stopped

_log = logging.getLogger(__name__)

ReportProgress = Callable[[int, Sequence[int]], None]
"""Told (layers of the rank that are in, failed positions so far)."""

_INTERNAL = "internal error in the agent; its log has the details"
# Small enough that copies begin early and overlap with what is asked for next, large enough that asking is no cost.
WINDOW_BYTES = 32 << 20  # at least; a device that takes large batches gets two at once


@dataclass(frozen=True, slots=True)
class _Wanted:
    position: int  # of the chunk in the request
    layer_group: int
    wish: PageWish


_Batch = Sequence[tuple[_Wanted, ReadSlot]]


class LoadRun:
    """One load request. Never cancelled from outside: `stop` makes it end after the copies that have begun.

    Pages are taken layer group by layer group, inside one in chunk order: an engine can start its first layers early.
    A chunk that fails in any group ends the loadable prefix before it; nothing of it or after it is asked for any more.
    """

    def __init__(
        self,
        rank: Rank,
        span: ChunkSpan,
        sources: Sequence[tuple[RemoteSource, ...]],
        pool: PagePool,
        cache: EngineCache,
        metrics: AgentMetrics,
        *,
        layers_per_progress: int = 0,
    ) -> None:
        """sources: per chunk, where else than on this host it may be. layers_per_progress: report no more often."""
        self._rank, self._span, self._sources = rank, span, sources
        self._pool, self._cache, self._metrics = pool, cache, metrics
        self._layers_per_progress = layers_per_progress
        self._progress = _Progress([], self._layers_before, layers_per_progress)
        self._report: ReportProgress = lambda layers, failed: None
        self._first_failed = len(span.chunks)
        self._error: KvPoolError | None = None
        self._source_of = [LoadSource.STAGING] * len(span.chunks)
        self.loaded_bytes = dict.fromkeys(LoadSource, 0)

    async def run(
        self, report: ReportProgress, stop: asyncio.Event, ends_at_s: float, passed: EnginePassed
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
        wanted = self._wanted()
        self._progress = _Progress(wanted, self._layers_before, self._layers_per_progress)
        self._report = report
        window_bytes = max(WINDOW_BYTES, 2 * self._cache.batch_bytes)
        pages = window_of(self._rank, self._pool.window_pages, window_bytes)
        # Together they never ask for more than the pool's window (invariant 8).
        places = asyncio.Semaphore(max(1, self._pool.window_pages // pages))

        async def one_window(window: Sequence[_Wanted]) -> None:
            try:
                await self._load_window(window, stop, ends_at_s)
            finally:
                places.release()

        tasks: list[asyncio.Task[None]] = []
        for start in range(0, len(wanted), pages):
            await places.acquire()
            tasks.append(asyncio.ensure_future(one_window(wanted[start : start + pages])))
        await asyncio.gather(*tasks)
        return self._outcome()

    def _wanted(self) -> list[_Wanted]:
        groups = self._rank.grid.head_groups
        chunks = range(len(self._span.chunks))
        metadata = [self._span.metadata(position, self._rank.spec.chunk_tokens) for position in chunks]
        return [
            _Wanted(position, shard // groups, self._wish(position, shard, metadata[position]))
            for layer_group in range(self._rank.grid.layer_groups)
            for position in chunks
            for shard in self._rank.shard_list
            if shard // groups == layer_group
        ]

    def _wish(self, position: int, shard: int, metadata: PageMetadata) -> PageWish:
        return PageWish(
            key=self._rank.key(self._span, position, shard),
            metadata=metadata,
            chain_head_hash=self._span.chain_head,
            sources=self._sources[position],
        )

    def _layers_before(self, layer_group: int) -> int:
        """Layers of the rank up to the end of a layer group."""
        grid = self._rank.grid
        return grid.layers_of(layer_group * grid.head_groups).stop - self._rank.layout.first_layer

    async def _load_window(self, window: Sequence[_Wanted], stop: asyncio.Event, ends_at_s: float) -> None:
        """Settle every page of a window: scattered, or its chunk failed. Never raises."""
        wanted = [item for item in window if item.position < self._first_failed]
        self._settle([item for item in window if item.position >= self._first_failed])
        if not wanted:
            return
        unsettled = dict(enumerate(wanted))
        try:
            await self._take_window(wanted, unsettled, stop, ends_at_s)
        except KvPoolError as error:
            self._fail_all(unsettled.values(), error)
        except Exception:
            _log.exception("a load failed")
            self._fail_all(wanted, KvPoolError(_INTERNAL))
        finally:
            self._settle(unsettled.values())

    async def _take_window(
        self, wanted: Sequence[_Wanted], unsettled: dict[int, _Wanted], stop: asyncio.Event, ends_at_s: float
    ) -> None:
        """Takes what settles out of `unsettled`; every slot that was yielded is released when this ends."""
        remaining_s = ends_at_s - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            raise DeadlineExceeded("the load's time is up")
        copies = _Copies(self._cache.batch_bytes, lambda batch: self._copy(batch, stop))
        try:
            await until_stopped(self._take_answers(wanted, unsettled, remaining_s, copies), stop, remaining_s)
        finally:
            await copies.ended()

    async def _take_answers(
        self, wanted: Sequence[_Wanted], unsettled: dict[int, _Wanted], wait_s: float, copies: _Copies
    ) -> None:
        # May be cancelled: between two answers nothing is awaited, so that each has an owner.
        async with aclosing(self._pool.acquire([item.wish for item in wanted], wait_s)) as answers:
            async for number, answer in answers:
                item = unsettled.pop(number)
                if isinstance(answer, ReadSlot):
                    copies.add(item, answer)
                    continue
                self._fail(item.position, answer or PageMissing(f"page {item.wish.key} is nowhere to be had"))
                self._settle([item])

    async def _copy(self, batch: _Batch, stop: asyncio.Event) -> None:
        """Scatter what is still wanted of a batch, and release all of it."""
        corrupt: list[ReadSlot] = []
        try:
            if stop.is_set():
                raise Stopped("the load was cancelled or its engine left")
            wanted = [(item, slot) for item, slot in batch if item.position < self._first_failed]
            copies = [self._page_copy(item, slot) for item, slot in wanted]
            faults = await self._cache.scatter(copies) if copies else []
            self._count_pages([pair for pair, fault in zip(wanted, faults, strict=True) if fault is None])
            for (item, slot), fault in zip(wanted, faults, strict=True):
                if fault is None:
                    continue
                corrupt.append(slot)
                self._metrics.verification_failures.inc()
                _log.warning("page %s fails its check and is not used: %s", item.wish.key, fault)
                self._fail(item.position, PageCorrupt(f"page {item.wish.key} fails its check in the agent: {fault}"))
        except KvPoolError as error:
            self._fail_all([item for item, _ in batch], error)
        except Exception:
            _log.exception("a copy into an engine's cache failed")
            self._fail_all([item for item, _ in batch], KvPoolError(_INTERNAL))
        finally:
            bad = {id(slot) for slot in corrupt}
            await self._pool.release([slot for _, slot in batch if id(slot) not in bad], corrupt)
            self._settle([item for item, _ in batch])

    def _page_copy(self, item: _Wanted, slot: ReadSlot) -> PageCopy:
        chunk = self._span.chunks[item.position]
        return PageCopy(key=item.wish.key, page=slot.page, block_ids=chunk.block_ids, skip_tokens=chunk.skip_tokens)

    def _count_pages(self, pages: _Batch) -> None:
        read_bytes: dict[int, int] = {}
        for item, slot in pages:
            self._source_of[item.position] = max(self._source_of[item.position], LoadSource(slot.source))
            read_bytes[slot.source] = read_bytes.get(slot.source, 0) + len(slot.page)
        for number, size_bytes in read_bytes.items():
            source = LoadSource(number)
            self.loaded_bytes[source] += size_bytes
            self._metrics.loaded_bytes.labels(source.name.lower()).inc(size_bytes)

    def _settle(self, items: Iterable[_Wanted]) -> None:
        """These pages are in, or their chunks failed. Reports what is due."""
        for item in items:
            self._progress.settled(item.layer_group)
        layers = self._progress.layers_in()
        if layers and self._first_failed:
            self._report(layers, range(self._first_failed, len(self._span.chunks)))

    def _fail_all(self, items: Iterable[_Wanted], error: KvPoolError) -> None:
        self._fail(min((item.position for item in items), default=len(self._span.chunks)), error)

    def _fail(self, position: int, error: KvPoolError) -> None:
        if position < self._first_failed:
            self._first_failed, self._error = position, error

    def _outcome(self) -> LoadOutcome:
        outcome = LoadOutcome(chunk_count=len(self._span.chunks), loaded_chunks=self._first_failed, error=self._error)
        for position in range(self._first_failed):
            tokens = self._rank.spec.chunk_tokens - self._span.chunks[position].skip_tokens
            outcome.tokens[self._source_of[position]] += tokens
        return outcome


class _Copies:
    """Hands pages to the device in batches, as they come."""

    def __init__(self, batch_bytes: int, copy: Callable[[_Batch], Coroutine[Any, Any, None]]) -> None:
        """copy: owns the slots of its batch."""
        self._batch_bytes, self._copy = batch_bytes, copy
        self._batch: list[tuple[_Wanted, ReadSlot]] = []
        self._size_bytes = 0
        self._running: list[asyncio.Task[None]] = []

    def add(self, item: _Wanted, slot: ReadSlot) -> None:
        """Own one slot."""
        self._batch.append((item, slot))
        self._size_bytes += len(slot.page)
        if self._size_bytes >= self._batch_bytes:
            self._hand_over()

    async def ended(self) -> None:
        """Hand over the rest and wait for all; raises what a copy raised."""
        if self._batch:
            self._hand_over()
        for result in await asyncio.gather(*self._running, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _hand_over(self) -> None:
        self._running.append(asyncio.ensure_future(self._copy(self._batch)))
        self._batch, self._size_bytes = [], 0


class _Progress:
    """Counts pages that settled; a layer group is in once it and all before it have none left."""

    def __init__(self, wanted: Sequence[_Wanted], layers_before: Callable[[int], int], step_layers: int) -> None:
        """layers_before: layers up to the end of a group. step_layers: of two reports, but for the last one."""
        self._layers_before, self._step_layers = layers_before, step_layers
        self._layers_in = self._reported_layers = 0
        self._left: dict[int, int] = {}  # by layer group, ascending
        for item in wanted:
            self._left[item.layer_group] = self._left.get(item.layer_group, 0) + 1

    def settled(self, layer_group: int) -> None:
        """One page of a group is in, or its chunk failed."""
        self._left[layer_group] -= 1

    def layers_in(self) -> int:
        """Layers to report now; 0 if there is nothing new to say."""
        last = None
        for group in list(self._left):
            if self._left[group]:
                break
            del self._left[group]
            last = group
        if last is not None:
            self._layers_in = self._layers_before(last)
        due = self._layers_in - self._reported_layers
        if not due or (self._left and due < self._step_layers):
            return 0
        self._reported_layers = self._layers_in
        return self._layers_in
