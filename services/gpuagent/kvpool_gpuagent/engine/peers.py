"""Copies from caches of other ranks into the blocks of loads, and whether what was copied counts.

Caches that other agents of this host share are mapped once for all pulls, until their session ends. A mapping outlives
the engine: its memory stays allocated and readable after the engine has died, or has begun to use its blocks for
something else. So each pull asks that agent, after its copy, for the generations of the blocks, which also says that
the session was alive all the while; when the session ends, that agent waits until the memory is unmapped here.

A copy that has begun has no time limit: until it has ended the GPU may write the destination's blocks, so these are not
given back, and sessions of this agent that it writes to or reads from do not end, whatever a clock says. What bounds
it: a load has at most max_request_chunks chunks, so the copy is a fixed number of bytes over a link; it waits only for
pulls into the same GPU that came before it, at most max_running_requests of each session; and it waits for no process:
events are waited for before it, other agents asked before and after. A GPU that fails ends it with an error. One that
hangs for good holds the blocks until the agent's process is ended, which its engines learn from the kernel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed, Stopped
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.core.cached_chunks import PulledChunks, Share, SourceName
from kvpool_gpuagent.core.pulls import Int64s, cells_of
from kvpool_gpuagent.core.requests import Rank
from kvpool_gpuagent.engine.session import CacheUse, EngineSession
from kvpool_gpuagent.engine.waiting import until_cancelled
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import CacheLoan, Device, MappedHandle, PeerAgents, PeerCache, PullPart

_log = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 2.0
MAX_LEASED_CACHES = 64  # idle ones beyond it are given back, the longest unused first

_Wanted = tuple[SourceName, bytes]  # and the keyspace


class PeerCacheLease:
    """A cache that another agent shares, mapped, and the pulls that use it."""

    def __init__(self, loan: CacheLoan, cache: PeerCache) -> None:
        self.loan, self.cache = loan, cache
        self._uses: set[CancelToken] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending = False

    @property
    def is_idle(self) -> bool:
        """Whether no pull uses it."""
        return self._idle.is_set()

    @contextmanager
    def use(self, stop: CancelToken) -> Iterator[None]:
        """Read it as long as the block runs; `stop` is cancelled when it has to end. Raises Stopped."""
        if self._ending or self.loan.ended.is_set():
            raise Stopped("the source session has ended, or its agent cannot be reached any more")
        self._uses.add(stop)
        self._idle.clear()
        try:
            yield
        finally:
            self._uses.discard(stop)
            if not self._uses:
                self._idle.set()

    async def end(self) -> None:
        """Cancel the pulls that use it, wait for them, unmap, give back. Never raises."""
        self._ending = True
        for stop in self._uses:
            stop.cancel()
        await self._idle.wait()
        try:
            await self.cache.close()
        except Exception:
            _log.exception("the cache of another agent could not be unmapped")
        await self.loan.close()


class PeerCacheTable:
    """Caches of other agents that this agent has leased. Belongs to one event loop."""

    def __init__(self, device: Device, agents: PeerAgents | None) -> None:
        """agents: None where no other agent is ever asked."""
        self._device, self._agents = device, agents
        self._opening: dict[_Wanted, asyncio.Future[PeerCacheLease]] = {}
        self._open_leases: dict[_Wanted, PeerCacheLease] = {}  # the longest unused first
        self._watchers: set[asyncio.Future[None]] = set()
        self._closed = False

    async def get(self, name: SourceName, rank: Rank) -> PeerCacheLease:
        """Return a session's cache, leased now or before. rank: of the session that wants it. Raises as
        PeerAgents.lease; InvalidRequest for a layout that does not fit the keyspace; Stopped once it is closed."""
        if self._closed:  # a match that had asked other agents before
            raise Stopped("this agent is shutting down")
        wanted = (name, rank.keyspace)  # a request in another keyspace is refused, which must not affect the others
        lease = self._open_leases.pop(wanted, None)
        # One that has ended stays here until its watcher has run: a pull could not use it any more.
        if lease is not None and not lease.loan.ended.is_set():
            self._open_leases[wanted] = lease
            return lease
        opening = self._opening.get(wanted)
        if opening is None:
            opening = self._opening[wanted] = asyncio.ensure_future(self._open(name, rank))
            opening.add_done_callback(lambda done: self._opened(wanted, done))
        return await asyncio.shield(opening)  # others may wait for the same

    def is_open(self, name: SourceName, rank: Rank) -> bool:
        """Whether a session's cache is leased and mapped."""
        lease = self._open_leases.get((name, rank.keyspace))
        return lease is not None and not lease.loan.ended.is_set()

    async def close(self) -> None:
        """Give all back and take no more; no pull runs any more."""
        self._closed = True
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for lease in list(self._open_leases.values()):
            lease.loan.ended.set()
        if self._watchers:
            await asyncio.wait(self._watchers)

    async def _open(self, name: SourceName, rank: Rank) -> PeerCacheLease:
        if self._agents is None:
            raise NotServed("this agent reaches no other agents; pull from sessions of its own")
        loan = await self._agents.lease(name.agent, name.session_id, rank.keyspace, LEASE_TIMEOUT_S)
        try:
            loan.layout.validate(rank.spec)
            if any(handle.ipc is None for handle in loan.handles):
                raise InvalidRequest("the source's cache is not GPU memory")
            cache = await self._device.map_peer(rank.spec, loan.layout, loan.handles)
        except BaseException:
            await loan.close()
            raise
        return PeerCacheLease(loan, cache)

    def _opened(self, wanted: _Wanted, opening: asyncio.Future[PeerCacheLease]) -> None:
        del self._opening[wanted]
        if opening.cancelled() or opening.exception() is not None:
            return
        self._open_leases[wanted] = opening.result()
        watcher = asyncio.ensure_future(self._watch(wanted, opening.result()))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        # Not the new one: the pull that wanted it is about to use it.
        idle = [lease for lease in list(self._open_leases.values())[:-1] if lease.is_idle]
        for lease in idle[: max(0, len(self._open_leases) - MAX_LEASED_CACHES)]:
            lease.loan.ended.set()

    async def _watch(self, wanted: _Wanted, lease: PeerCacheLease) -> None:
        await lease.loan.ended.wait()
        if self._open_leases.get(wanted) is lease:
            del self._open_leases[wanted]
        await lease.end()


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A source rank while it is held. check: the generations of blocks now, if it has been alive until now."""

    cache: PeerCache
    layout: EngineLayout
    handles: Sequence[MappedHandle]
    check: Callable[[Int64s], Coroutine[Any, Any, Int64s]]


class PeerPulls:
    """Pulls into the caches of one agent's sessions. Belongs to one event loop."""

    def __init__(
        self,
        session_of: Callable[[bytes], EngineSession],
        device: Device,
        agents: PeerAgents | None,
        metrics: AgentMetrics,
    ) -> None:
        """session_of: raises SessionUnknown."""
        self._session_of, self._device, self._metrics = session_of, device, metrics
        self._leases = PeerCacheTable(device, agents)

    async def pull(
        self, session: EngineSession, span: ChunkRange, shares: Sequence[Share], stop: CancelToken, ends_at_s: float
    ) -> PulledChunks:
        """Copy what was chosen of other ranks' caches (see `covering`) into the blocks of a load.

        A chunk counts if the generations of all its source blocks are after the copy what they were when the chunk was
        announced. `stop`, the session's close and `ends_at_s`, on the loop's clock, end it before the copy, or its wait
        for other agents after it. Once it has ended no block is touched any more. Raises what PeerAgents.lease,
        CacheLoan.check and Device.pull raise; InvalidRequest for shares that do not fit their caches.
        """
        clock = asyncio.get_running_loop().time
        try:
            with session.share() as use, self._metrics.peer_pull_duration.time(), ExitStack() as held:
                held.callback(stop.on_cancel(use.stop.cancel))
                finding = self._sources(session, use, shares, held)
                sources = await until_cancelled(finding, use.stop, max(0.0, ends_at_s - clock()))
                rank = session.rank
                cells = [
                    cells_of(share, span, rank.spec, source.layout, rank.layout)
                    for share, source in zip(shares, sources, strict=True)
                ]
                parts = [
                    PullPart(source.cache, each.layers, each.heads, each.slots)
                    for source, each in zip(sources, cells, strict=True)
                ]
                moved = await self._device.pull(use.cache, parts, use.stop)
                blocks = [share.held.found.block_ids[share.rows] for share in shares]
                # Each for itself: checks that wait for no other agent have an answer however late it is.
                remaining_s = max(0.0, ends_at_s - clock())
                checks = [
                    until_cancelled(source.check(block_ids), use.stop, remaining_s)
                    for source, block_ids in zip(sources, blocks, strict=True)
                ]
                now = await asyncio.gather(*checks) if len(checks) > 1 else [await checks[0]]
        except KvPoolError as error:
            self._metrics.failed_peer_pulls.labels(error.reason).inc()
            raise
        self._metrics.peer_pulled_bytes.inc(moved.size_bytes)
        loaded = np.zeros(span.chunk_count, dtype=np.bool_)
        for share in shares:
            loaded[share.positions] = True
        for share, generations in zip(shares, now, strict=True):
            changed = (generations != share.held.found.generations[share.rows]).any(axis=1)
            loaded[share.positions[changed]] = False
        return PulledChunks(loaded, moved.size_bytes, moved.copy_s)

    def is_mapped(self, session: EngineSession, source: SourceName) -> bool:
        """Whether a pull of this session from there would not have to map it first."""
        return not source.agent or self._leases.is_open(source, session.rank)

    async def map(self, session: EngineSession, source: SourceName) -> None:
        """Have another agent lend a session's cache, and map it. Goes on if the caller leaves; raises as `pull`."""
        await self._leases.get(source, session.rank)

    async def close(self) -> None:
        """Give back what was leased; every session is closed."""
        await self._leases.close()

    async def _sources(
        self, session: EngineSession, use: CacheUse, shares: Sequence[Share], held: ExitStack
    ) -> list[_Source]:
        """The source of each share, held: the close of its session stops the pull and waits for its end."""
        sources: list[_Source] = []
        for share in shares:
            name = share.held.source
            if name.agent:
                sources.append(await self._leased(session, use, name, held))
            else:
                sources.append(self._own(use, name, held))
            if _memory(sources[-1].handles) & _memory(session.handles):
                raise InvalidRequest(f"session {name.session_id.hex()} lends the destination's own memory")
        return sources

    def _own(self, use: CacheUse, name: SourceName, held: ExitStack) -> _Source:
        source = self._session_of(name.session_id)
        lent = held.enter_context(source.share(use.stop))

        async def check(block_ids: Int64s) -> Int64s:
            if not source.is_open:
                raise Stopped("the source session ended while it was pulled from")
            return source.generations(block_ids)

        return _Source(lent.cache, source.rank.layout, source.handles, check)

    async def _leased(self, session: EngineSession, use: CacheUse, name: SourceName, held: ExitStack) -> _Source:
        lease = await self._leases.get(name, session.rank)
        held.enter_context(lease.use(use.stop))
        loan = lease.loan

        async def check(block_ids: Int64s) -> Int64s:
            generations = await loan.check(block_ids, CHECK_TIMEOUT_S)
            if generations.size != block_ids.size:
                raise InvalidRequest("the source's agent knows no generations of these blocks")
            return generations.reshape(block_ids.shape)

        return _Source(lease.cache, loan.layout, loan.handles, check)


def _memory(handles: Sequence[MappedHandle]) -> set[tuple[str, bytes, int]]:
    return {(each.ipc.device_uuid, each.ipc.handle, each.ipc.allocation_offset) for each in handles if each.ipc}
