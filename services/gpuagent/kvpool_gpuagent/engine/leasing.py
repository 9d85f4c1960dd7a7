"""Leases: chunks of waiting requests are brought into this host's staging memory, and kept there until they are loaded.

A load takes its pages itself and finds them staged; a lease that was refused, or is lost, costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed, Overloaded
from kvpool.core.grid import shards_in
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.core.leases import LeaseBudget, LeaseShare, PageNeed
from kvpool_gpuagent.core.pages import PageSlots
from kvpool_gpuagent.core.requests import ChunkSource, Rank, page_span
from kvpool_gpuagent.engine.locations import ChainLocations
from kvpool_gpuagent.engine.waiting import cancellation, until_cancelled
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import PagePool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOutcome:
    """held_chunks: leading ones that stay in staging until the lease ends. staged_chunks: leading ones that are there
    now, the held ones included."""

    held_chunks: int
    staged_chunks: int


class LeaseRun:
    """One lease: `take`, then `keep`. What it holds is released when `keep` returns, or `give_back`."""

    def __init__(
        self, rank: Rank, span: ChunkRange, sources: Sequence[ChunkSource], pool: PagePool, share: LeaseShare
    ) -> None:
        """sources: of each chunk. share: of the agent's budget; given back with the slots."""
        self._rank, self._span, self._pool, self._share = rank, span, pool, share
        self._remote = [source[0] for source in sources]
        self._shards = [list(shards_in(source[1])) for source in sources]
        self._slots: list[PageSlots] = []

    async def take(self, stop: CancelToken, ends_at_s: float) -> LeaseOutcome:
        """Have chunks staged, leading ones first, and hold as many of them as the share allows. Never raises
        KvPoolError: what was not to be had ends the lease before it."""
        held = await self._take_range(range(self._share.held_chunks), stop, ends_at_s, keeps=True)
        staged = held
        if held == self._share.held_chunks:
            staged += await self._take_range(range(held, self._share.staged_chunks), stop, ends_at_s, keeps=False)
        self._share.keep_only(held)
        return LeaseOutcome(held_chunks=held, staged_chunks=staged)

    async def keep(self, stop: CancelToken, ends_at_s: float) -> None:
        """Hold what was taken until `stop`, the time's end, or the end of the pool's session."""
        waits = [asyncio.ensure_future(cancellation(stop)), asyncio.ensure_future(self._pool.broken.wait())]
        try:
            if self._slots:
                remaining_s = max(0.0, ends_at_s - asyncio.get_running_loop().time())
                await asyncio.wait(waits, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await self.give_back()

    async def give_back(self) -> None:
        """Hold nothing any more. Idempotent."""
        slots, self._slots = self._slots, []
        for some in slots:
            await self._pool.release(some)
        self._share.end()

    async def _take_range(self, chunks: range, stop: CancelToken, ends_at_s: float, *, keeps: bool) -> int:
        """How many leading chunks of the range came."""
        at = chunks.start
        while at < chunks.stop:
            window = range(at, min(chunks.stop, at + self._share.window_chunks))
            came = await self._take_window(window, stop, ends_at_s, keeps)
            at += came
            if came < len(window):
                break
        return at - chunks.start

    async def _take_window(self, chunks: range, stop: CancelToken, ends_at_s: float, keeps: bool) -> int:
        positions = np.repeat(
            np.arange(len(chunks), dtype=np.int32), [len(self._shards[position]) for position in chunks]
        )
        shards = np.array([shard for position in chunks for shard in self._shards[position]], dtype=np.uint8)
        span = page_span(self._rank, self._span, chunks, positions, shards, self._remote)
        missing: npt.NDArray[np.bool_] = np.ones(positions.size, dtype=np.bool_)
        slots: list[PageSlots] = []
        remaining_s = ends_at_s - asyncio.get_running_loop().time()

        async def take() -> None:
            async with aclosing(self._pool.acquire(span, remaining_s)) as answers:
                async for answer in answers:
                    if answer.slots.count:
                        slots.append(answer.slots)
                        missing[answer.slots.pages] = False

        came = 0
        try:
            if remaining_s > 0:
                await until_cancelled(take(), stop, remaining_s)
        except KvPoolError as error:
            _log.debug("a lease ends early: %s", error)
        finally:
            came = int(positions[missing].min()) if missing.any() else len(chunks)
            for some in slots:
                held_here = positions[some.pages] < (came if keeps else 0)
                if held_here.any():
                    self._slots.append(some.where(held_here))
                await self._pool.release(some.where(~held_here))
        return came


@dataclass(slots=True)
class _Running:
    stop: CancelToken = field(default_factory=CancelToken)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Task[None] | None = None  # once its request is answered


class SessionLeases:
    """Leases of one engine session. Belongs to one event loop."""

    def __init__(
        self,
        rank: Rank,
        locations: ChainLocations,
        pool: PagePool,
        budget: LeaseBudget,
        config: GpuAgentConfig,
        metrics: AgentMetrics,
    ) -> None:
        """budget: of all sessions of the agent."""
        self._rank, self._locations, self._pool = rank, locations, pool
        self._budget, self._config, self._metrics = budget, config, metrics
        self._running: dict[int, _Running] = {}  # by request id

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._running

    async def lease(self, request_id: int, span: ChunkRange, hold_s: float, *, hold_only: bool = False) -> LeaseOutcome:
        """Begin a lease; it goes on when this returns. hold_s: 0 or less: as long as may be. hold_only: what cannot be
        held is not staged either.

        Raises NotServed without a local pagestore, Overloaded when leases hold as much as they may.
        """
        if request_id <= 0 or request_id in self._running:
            raise InvalidRequest(f"request id {request_id} must be > 0 and unique in the session")
        if not self._pool.arena_bytes:
            raise NotServed("no local pagestore is in reach: nothing can be kept in staging memory")
        if len(self._running) >= self._config.max_running_leases:
            raise Overloaded(f"{len(self._running)} leases run in this session; end one of them")
        most_s = self._config.lease_ms_max / 1e3
        ends_at_s = asyncio.get_running_loop().time() + (min(hold_s, most_s) if hold_s > 0 else most_s)
        running = self._running[request_id] = _Running()
        run: LeaseRun | None = None
        try:
            sources = await self._locations.sources_of(span, running.stop, ends_at_s)
            run = LeaseRun(self._rank, span, sources, self._pool, self._share(sources, hold_only))
            outcome = await run.take(running.stop, ends_at_s)
        except BaseException:
            if run is not None:
                await run.give_back()
            self._forget(request_id)
            raise
        running.holding = asyncio.ensure_future(self._hold(request_id, run, ends_at_s))
        self._count(outcome, span.chunk_count)
        return outcome

    def cancel(self, request_id: int) -> None:
        """End a lease; unknown ones are ignored (they may have ended)."""
        running = self._running.get(request_id)
        if running is not None:
            running.stop.cancel()

    def stop_all(self) -> None:
        """End all soon."""
        for running in self._running.values():
            running.stop.cancel()

    async def wait_ended(self) -> None:
        """Return when none holds a slot any more; none is begun meanwhile, and `stop_all` was called."""
        for running in list(self._running.values()):
            await running.ended.wait()

    async def _hold(self, request_id: int, run: LeaseRun, ends_at_s: float) -> None:
        try:
            await run.keep(self._running[request_id].stop, ends_at_s)
        finally:
            self._forget(request_id)
            self._metrics.leased_pages.set(self._budget.page_count)

    def _forget(self, request_id: int) -> None:
        self._running.pop(request_id).ended.set()

    def _share(self, sources: Sequence[ChunkSource], hold_only: bool) -> LeaseShare:
        sizes, needed = self._rank.page_sizes, dict[int, PageNeed]()
        for _, readable in sources:
            if readable not in needed:  # nearly always all are alike
                needed[readable] = PageNeed.of(sizes[list(shards_in(readable))])
        needs = [needed[readable] for _, readable in sources]
        return self._budget.share(
            self,
            needs,
            window_pages=self._pool.window_pages,
            arena_bytes=self._pool.arena_bytes,
            hold_only=hold_only,
        )

    def _count(self, outcome: LeaseOutcome, chunk_count: int) -> None:
        self._metrics.leased_pages.set(self._budget.page_count)
        counter = self._metrics.leased_chunks
        counter.labels("held").inc(outcome.held_chunks)
        counter.labels("staged").inc(outcome.staged_chunks - outcome.held_chunks)
        counter.labels("left").inc(chunk_count - outcome.staged_chunks)
