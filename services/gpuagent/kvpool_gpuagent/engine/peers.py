"""Pulls into a session's cache from those of other ranks: whose slots, after which work, and whether it counts.

Caches that other agents of this host share are mapped once for all pulls, until their session ends. A mapping outlives
the engine: its memory stays allocated and readable after the engine has died, or has begun to use its slots for
something else. So each pull asks that agent, after its copy, whether the session was alive all the while; when the
session ends, that agent waits until the memory is unmapped here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvPoolError,
    NotServed,
    Overloaded,
    SessionUnknown,
    Stopped,
)
from kvpool.core.ipc import EngineEvent
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.core.pulls import (
    PullCells,
    SourceName,
    WantedPull,
    cells_of,
    check_source,
    check_wanted,
    check_writes,
)
from kvpool_gpuagent.core.requests import Rank
from kvpool_gpuagent.engine.session import CacheUse, EngineSession
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import CacheLoan, Device, MappedHandle, PeerAgents, PeerCache, PulledBytes, PullPart

_log = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 2.0
MAX_LEASED_CACHES = 64  # idle ones beyond it are given back, the longest unused first

_Wanted = tuple[SourceName, bytes]  # and the keyspace


class PeerCacheLease:
    """A cache that another agent shares, mapped, and the pulls that use it."""

    def __init__(self, loan: CacheLoan, cache: PeerCache, keyspace: bytes) -> None:
        self.loan, self.cache, self.keyspace = loan, cache, keyspace
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

    async def get(self, name: SourceName, rank: Rank) -> PeerCacheLease:
        """Return a session's cache, leased now or before. rank: of the session that wants it. Raises as
        PeerAgents.lease; InvalidRequest for a layout that does not fit the keyspace."""
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

    async def close(self) -> None:
        """Give all back; no pull runs any more."""
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
        return PeerCacheLease(loan, cache, rank.keyspace)

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


DEFAULT_WAIT_S = 10.0
_MAX_ENDED_IDS = 1024
_PULLS_PER_PLACE = 2  # so many are accepted for each that may run


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """A pull that is in and counts. cells: of each of the pulls asked for, in order."""

    moved: PulledBytes
    cells: tuple[PullCells, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A source rank while it is held. check: returns if it has been alive until now."""

    cache: PeerCache
    keyspace: bytes
    layout: EngineLayout
    handles: Sequence[MappedHandle]
    check: Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _SessionPulls:
    """Pulls into one session. ended_ids: that must not run any more; floor: nor any up to it."""

    accepted: int = 0  # those that run, and those whose event has not been announced yet
    running: dict[int, CacheUse] = field(default_factory=dict)
    ended_ids: set[int] = field(default_factory=set)
    floor: int = 0

    @contextmanager
    def one_more(self, limit: int) -> Iterator[None]:
        if self.accepted >= limit:
            raise Overloaded(f"{self.accepted} pulls into this session run or wait; wait for one to end")
        self.accepted += 1
        try:
            yield
        finally:
            self.accepted -= 1

    def end(self, pull_id: int) -> None:
        self.ended_ids.add(pull_id)
        if len(self.ended_ids) > _MAX_ENDED_IDS:
            self.floor = sorted(self.ended_ids)[_MAX_ENDED_IDS // 2]
            self.ended_ids = {number for number in self.ended_ids if number > self.floor}


class PeerPulls:
    """Serves PeerPull and EndPeerPull. Belongs to one event loop."""

    def __init__(
        self,
        session_of: Callable[[bytes], EngineSession],
        device: Device,
        agents: PeerAgents | None,
        metrics: AgentMetrics,
        max_running: int,
    ) -> None:
        """session_of: raises SessionUnknown. max_running: pulls into one session at once."""
        self._session_of, self._device, self._metrics, self._max_running = session_of, device, metrics, max_running
        self._leases = PeerCacheTable(device, agents)
        self._pulls: WeakKeyDictionary[EngineSession, _SessionPulls] = WeakKeyDictionary()

    async def pull(self, session_id: bytes, wanted: WantedPull) -> PullOutcome:
        """Copy; see the proto's PeerPull for what it raises. Once it has ended, no slot is touched any more."""
        session = self._session_of(session_id)
        gauge = self._metrics.active_requests.labels("pull")
        gauge.inc()
        try:
            accepted = self._of(session).one_more(_PULLS_PER_PLACE * self._max_running)
            with accepted, session.share() as use, self._metrics.peer_pull_duration.time():
                outcome = await self._pull(session, use, wanted)
        except KvPoolError as error:
            self._metrics.failed_peer_pulls.labels(error.reason).inc()
            raise
        finally:
            gauge.dec()
        self._metrics.peer_pulled_bytes.inc(outcome.moved.size_bytes)
        return outcome

    async def end(self, session_id: bytes, pull_id: int, after: EngineEvent | None) -> None:
        """Stop a pull and wait for its end; one that comes later is refused. Raises SessionUnknown, InvalidRequest."""
        session = self._session_of(session_id)
        if pull_id <= 0:
            raise InvalidRequest(f"pull_id must be > 0, got {pull_id}")
        pulls = self._of(session)
        pulls.end(pull_id)
        use = pulls.running.get(pull_id)
        if use is not None:
            use.stop.cancel()
            await use.ended.wait()
        elif after is not None and session.is_open:
            self._drop_event(session, after)

    async def close(self) -> None:
        """Give back what was leased; every session is closed."""
        await self._leases.close()

    async def _pull(self, session: EngineSession, use: CacheUse, wanted: WantedPull) -> PullOutcome:
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + (wanted.wait_ms / 1e3 if wanted.wait_ms > 0 else DEFAULT_WAIT_S)
        # The event first: whatever is refused after it, its slot goes back to the engine.
        after = await session.events.use_announced(wanted.after, use.stop, ends_at_s - loop.time())
        with after.ended_after(), ExitStack() as held:
            check_wanted(wanted)
            held.enter_context(self._numbered(session, wanted.pull_id, use))
            sources = await self._sources(session, use, wanted, held)
            cells = self._checked(session, sources, wanted)
            await after.passed(use.cache.event_passed, use.stop, max(0.0, ends_at_s - loop.time()))
            if loop.time() > ends_at_s:
                raise DeadlineExceeded("the pull had not begun within wait_ms")
            moved = await self._device.pull(use.cache, _parts(sources, cells, wanted), use.stop)
            await asyncio.gather(*(source.check() for source in sources.values()))
        return PullOutcome(moved, tuple(cells))

    async def _sources(
        self, session: EngineSession, use: CacheUse, wanted: WantedPull, held: ExitStack
    ) -> dict[SourceName, _Source]:
        """Each source, held: the close of its session stops the pull and waits for its end."""
        sources: dict[SourceName, _Source] = {}
        for number, pull in enumerate(wanted.pulls):
            name = pull.source
            if name in sources:
                continue
            if name.agent:
                sources[name] = await self._leased(session, use, name, held)
            else:
                sources[name] = self._own(session, use, number, name, held)
            source = sources[name]
            check_source(number, source.keyspace, source.layout, session.rank.keyspace, session.rank.layout)
            if _memory(source.handles) & _memory(session.handles):
                raise InvalidRequest(f"pulls[{number}].source_session_id lends the destination's own memory")
        return sources

    def _own(self, session: EngineSession, use: CacheUse, number: int, name: SourceName, held: ExitStack) -> _Source:
        try:
            source = self._session_of(name.session_id)
        except SessionUnknown as error:
            raise SessionUnknown(f"pulls[{number}].source_session_id: {error.message}") from error
        if source is session:
            raise InvalidRequest(f"pulls[{number}].source_session_id is the destination's own session")
        lent = held.enter_context(source.share(use.stop))

        async def check() -> None:
            if not source.is_open:
                raise Stopped("the source session ended while it was pulled from")

        return _Source(lent.cache, source.rank.keyspace, source.rank.layout, source.handles, check)

    async def _leased(self, session: EngineSession, use: CacheUse, name: SourceName, held: ExitStack) -> _Source:
        lease = await self._leases.get(name, session.rank)
        held.enter_context(lease.use(use.stop))
        loan = lease.loan
        return _Source(lease.cache, lease.keyspace, loan.layout, loan.handles, lambda: loan.check(CHECK_TIMEOUT_S))

    def _checked(
        self, session: EngineSession, sources: dict[SourceName, _Source], wanted: WantedPull
    ) -> list[PullCells]:
        rank = session.rank
        cells = [
            cells_of(number, pull, rank.spec, sources[pull.source].layout, rank.layout)
            for number, pull in enumerate(wanted.pulls)
        ]
        check_writes(cells, rank.layout, partial=wanted.partial)
        return cells

    @contextmanager
    def _numbered(self, session: EngineSession, pull_id: int, use: CacheUse) -> Iterator[None]:
        pulls = self._of(session)
        if pull_id in pulls.ended_ids or pull_id <= pulls.floor:
            raise Stopped(f"pull {pull_id} was ended before it came")
        if pull_id in pulls.running:
            raise InvalidRequest(f"pull_id {pull_id} is that of a pull that runs")
        if len(pulls.running) >= self._max_running:
            raise Overloaded(f"{len(pulls.running)} pulls into this session run; wait for one to end")
        pulls.running[pull_id] = use
        try:
            yield
        finally:
            del pulls.running[pull_id]

    def _drop_event(self, session: EngineSession, after: EngineEvent) -> None:
        """Give the event's slot back, in place of a pull that never came."""
        try:
            session.events.use(after).end()
        except InvalidRequest:
            return  # it was given back, or never announced

    def _of(self, session: EngineSession) -> _SessionPulls:
        return self._pulls.setdefault(session, _SessionPulls())


def _parts(sources: dict[SourceName, _Source], cells: Sequence[PullCells], wanted: WantedPull) -> list[PullPart]:
    """All tokens of a source together."""
    parts: list[PullPart] = []
    for name, source in sources.items():
        own = [each for each, pull in zip(cells, wanted.pulls, strict=True) if pull.source == name]
        slots = np.concatenate([each.slots for each in own])
        parts.append(PullPart(source.cache, own[0].layers, own[0].heads, slots))
    return parts


def _memory(handles: Sequence[MappedHandle]) -> set[tuple[str, bytes, int]]:
    return {(each.ipc.device_uuid, each.ipc.handle, each.ipc.allocation_offset) for each in handles if each.ipc}
