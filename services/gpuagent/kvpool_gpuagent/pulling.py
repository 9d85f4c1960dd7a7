"""Pulls into a session's cache from those of other ranks: whose slots, after which work, and whether it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, Overloaded, SessionUnknown, Stopped
from kvpool.core.ipc import EngineEvent
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.borrowing import CHECK_TIMEOUT_S, Borrowings, PeerAgents
from kvpool_gpuagent.core.pulls import (
    PullCells,
    SourceName,
    WantedPull,
    cells_of,
    check_source,
    check_wanted,
    check_writes,
)
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import Device, MappedHandle, PeerCache, PulledBytes, PullPart
from kvpool_gpuagent.session import CacheUse, EngineSession

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
        self._borrowings = Borrowings(device, agents)
        self._pulls: WeakKeyDictionary[EngineSession, _SessionPulls] = WeakKeyDictionary()

    async def pull(self, session_id: bytes, wanted: WantedPull) -> PullOutcome:
        """Copy; see the proto's PeerPull for what it raises. Once it has ended, no slot is touched any more."""
        session = self._session_of(session_id)
        gauge = self._metrics.active_requests.labels("pull")
        gauge.inc()
        try:
            accepted = self._of(session).one_more(_PULLS_PER_PLACE * self._max_running)
            with accepted, session.lend() as use, self._metrics.peer_pull_duration.time():
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
        """Give back what was borrowed; every session is closed."""
        await self._borrowings.close()

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
                sources[name] = await self._borrowed(session, use, name, held)
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
        lent = held.enter_context(source.lend(use.stop))

        async def check() -> None:
            if not source.is_open:
                raise Stopped("the source session ended while it was pulled from")

        return _Source(lent.cache, source.rank.keyspace, source.rank.layout, source.handles, check)

    async def _borrowed(self, session: EngineSession, use: CacheUse, name: SourceName, held: ExitStack) -> _Source:
        borrowed = await self._borrowings.get(name, session.rank)
        held.enter_context(borrowed.use(use.stop))
        loan = borrowed.loan
        return _Source(
            borrowed.cache, borrowed.keyspace, loan.layout, loan.handles, lambda: loan.check(CHECK_TIMEOUT_S)
        )

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
