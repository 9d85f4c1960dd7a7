"""Pulling pages from peers: streams per peer, a second source for what does not move, the first good copy wins.

A page that is asked of two sources has two slots, one for each: no two threads ever write into one. The slower source's
stream is stopped once no page needs it, and its slots come back when its thread has left them.

A stream takes a thread. So that peers that hang do not keep others from being asked, streams that have brought nothing
for a while do not count against the limit of streams; when all threads are taken, the quietest stream is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from kvpool.core.cancel import CancelToken
from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, StaleIncarnation, Stopped
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey, verify
from kvpool.core.tracing import BYTES, NO_TRACER, PAGES, PEER, SpanKind, Tracer
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.retention import inherited
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.engine.arena import ArenaSpace
from kvpool_pagestore.engine.context import EngineContext, Staging
from kvpool_pagestore.ports import IndexLink, PeerPages, PullItem, Workers

_SAMPLES = 128
_SAMPLES_MIN = 16
_SLOWER = 2.0  # than nearly all others: so many times the 95th percentile


class HedgeDelay:
    """How long a pull may bring nothing: twice what 95 of 100 pages took lately, within bounds.

    least_s: 0 never hedges. most_s: what a slow network cannot raise it beyond.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = max(least_s, most_s)
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def enabled(self) -> bool:
        return self._least_s > 0

    def note(self, waited_s: float) -> None:
        """A page came so long after the one before it, or after the start of its pull."""
        self._samples.append(waited_s)

    @property
    def delay_s(self) -> float:
        """Seconds without a page after which another source is asked."""
        if len(self._samples) < _SAMPLES_MIN:
            return self._least_s
        ordered = sorted(self._samples)
        p95_s = ordered[ceil(len(ordered) * 0.95) - 1]
        return min(self._most_s, max(self._least_s, _SLOWER * p95_s))


_log = logging.getLogger(__name__)

_PULL_PAGES = 32  # of one stream: what it may hold of the arena
_HEDGED_MAX = 256  # pages asked of two sources at once
_QUIET_S = 0.25  # a stream that brings nothing for so long leaves its place to another one
_VERIFY_TIMEOUT_S = 5.0  # for a source to verify pages that came corrupt from it
QUIET_STREAMS_MAX = 64
"""Threads for streams whose peers are slow or hang, on top of those for streams that move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """Bounds of pulls."""

    stall_s: float  # a stream that brings nothing for so long is given up
    hedge_s: float  # least time without a page after which the next source is asked too; 0: never
    streams_per_peer: int
    moving_streams: int  # to all peers together; a stream that has brought nothing for a while does not count


@dataclass(slots=True, eq=False)
class PagePull:
    """One page that is wanted from peers. `on_done` is called once, on the loop."""

    record: PageRecord
    keyspace: Keyspace
    sources: list[RemoteSource]  # not asked yet, best first
    on_done: Callable[[PagePull, Slot | None, KvPoolError | None, bool], None]
    tried: set[RemoteSource] = field(default_factory=set)
    attempts: int = 0  # under way, or waiting for a stream
    hedge: RemoteSource | None = None  # asked because the one before it was slow
    done: bool = False
    cause: object | None = None  # trace of the request that began it


@dataclass(slots=True, eq=False)
class PullStream:
    """One call to one peer. pages: by their position in the call, those that are still open."""

    source: RemoteSource
    pages: dict[int, tuple[PagePull, Slot]] = field(default_factory=dict)
    metadata: dict[int, PageMetadata] = field(default_factory=dict)  # of the source, written by its thread
    stop: CancelToken = field(default_factory=CancelToken)
    moved_s: float = 0.0
    complete: bool = False  # all its pages are in `pages`, or were
    stalled: bool = False


@dataclass(slots=True, eq=False)
class PeerPulls:
    """What is asked of one peer."""

    waiting: deque[tuple[PagePull, RemoteSource]] = field(default_factory=deque)
    streams: set[PullStream] = field(default_factory=set)


class PullCaller:
    """Calls peers on threads: one call a stream."""

    def __init__(
        self, peers: PeerPages, workers: Workers, space: ArenaSpace, timeout_s: float, tracer: Tracer = NO_TRACER
    ) -> None:
        self._peers = peers
        self._workers = workers
        self._space = space
        self._timeout_s = timeout_s  # of one stream
        self._tracer = tracer

    @property
    def threads(self) -> int:
        """Streams that may be open at once."""
        return self._workers.threads

    async def call(
        self,
        stream: PullStream,
        pages: list[tuple[PagePull, Slot]],
        on_page: Callable[[int, KvPoolError | None, bool], None],
    ) -> None:
        """Pull pages of one keyspace from the stream's source into their slots; `on_page` runs on the loop.

        When this returns or raises, the thread has left all slots, and each `on_page` has run. Raises Overloaded.
        """
        loop = asyncio.get_running_loop()

        corrupt: list[PageKey] = []

        def received(position: int, error: KvPoolError | None, hit: bool) -> None:  # on the pulling thread
            page, slot = pages[position]
            reach("pagestore.pull.received")
            if hit and error is None:
                error = _verify(page, self._space.view(slot))
                if error is not None:
                    corrupt.append(page.record.key)
            loop.call_soon_threadsafe(on_page, position, error, hit)

        causes = [page.cause for page, _ in pages]
        with self._tracer.part_of(causes, "pagestore.pull", kind=SpanKind.CLIENT) as span:
            if span.recording:
                size_bytes = sum(page.record.page_bytes for page, _ in pages)
                span.set({PEER: stream.source.bulk_endpoint, PAGES: len(pages), BYTES: size_bytes})
            # In this context, so that the span goes to the peer with the call.
            await self._workers.run(copy_context().run, self._call_blocking, stream, pages, received, corrupt)

    def _call_blocking(
        self,
        stream: PullStream,
        pages: list[tuple[PagePull, Slot]],
        on_page: Callable[[int, KvPoolError | None, bool], None],
        corrupt: list[PageKey],
    ) -> None:
        items = [
            PullItem(
                key=page.record.key,
                destination=self._space.view(slot),
                on_metadata=partial(stream.metadata.__setitem__, position),
            )
            for position, (page, slot) in enumerate(pages)
        ]
        spec = pages[0][0].keyspace.spec
        self._peers.pull(stream.source, spec, items, self._timeout_s, on_page, stream.stop)
        if corrupt:  # else the source would announce them again and again
            self._peers.verify(stream.source, spec, corrupt, min(self._timeout_s, _VERIFY_TIMEOUT_S))


class Pulls:
    """Fetches pages from peers into slots of the arena. Use on one event loop."""

    def __init__(
        self,
        limits: PullLimits,
        staging: Staging,
        caller: PullCaller,
        index: IndexLink,
        context: EngineContext,
    ) -> None:
        self._limits = limits
        self._table, self._space = staging.table, staging.space
        self._caller = caller
        self._index = index
        self._tasks, self._metrics, self._clock = context.tasks, context.metrics, context.clock
        self._peers: dict[str, PeerPulls] = {}  # by endpoint; only those that are asked for something
        self._delay = HedgeDelay(limits.hedge_s, limits.stall_s)
        self._hedged_count = 0
        self._pumping = False
        self._watch: asyncio.TimerHandle | None = None

    def start(self, page: PagePull) -> None:
        """Ask the first of the page's sources; pages asked of one peer in one turn of the loop go together."""
        self._ask(page, page.sources.pop(0))

    # Inside

    def _ask(self, page: PagePull, source: RemoteSource) -> None:
        page.tried.add(source)
        page.attempts += 1
        peer = self._peers.get(source.bulk_endpoint)
        if peer is None:
            peer = self._peers[source.bulk_endpoint] = PeerPulls()
        peer.waiting.append((page, source))
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        while startable := self._startable():
            for endpoint, peer in startable:  # one stream each, then the next round
                stream = PullStream(peer.waiting[0][1], moved_s=self._clock.monotonic_s())
                pages = self._take(peer, stream.source)
                if pages:
                    peer.streams.add(stream)
                    self._peers[endpoint] = self._peers.pop(endpoint)  # the others come first next time
                    self._tasks.start(self._run(peer, stream, pages), "pull")
        for endpoint, peer in list(self._peers.items()):
            if not peer.waiting and not peer.streams:
                del self._peers[endpoint]
        if self._peers and self._watch is None:
            self._check_later()

    def _startable(self) -> list[tuple[str, PeerPulls]]:
        """Peers that may be asked now: as many as there are places for streams."""
        streams = self._streams()
        quiet_before_s = self._clock.monotonic_s() - _QUIET_S
        moving_count = sum(stream.moved_s > quiet_before_s for stream in streams)
        places = min(self._limits.moving_streams - moving_count, self._caller.threads - len(streams))
        return self._waiting_peers()[: max(0, places)]

    def _streams(self) -> list[PullStream]:
        return [stream for peer in self._peers.values() for stream in peer.streams]

    def _waiting_peers(self) -> list[tuple[str, PeerPulls]]:
        """Those that would get a stream if there were a place for it."""
        most = self._limits.streams_per_peer
        return [(at, peer) for at, peer in self._peers.items() if peer.waiting and len(peer.streams) < most]

    def _take(self, peer: PeerPulls, source: RemoteSource) -> list[PagePull]:
        """Pages of one keyspace and source for one stream. They do not have to be next to each other in the queue."""
        taken: list[PagePull] = []
        left: deque[tuple[PagePull, RemoteSource]] = deque()
        for page, wanted in peer.waiting:
            # Under way from elsewhere; not if that has failed meanwhile: this attempt is the last one then.
            elsewhere = page.hedge not in (None, wanted) and page.attempts > 1
            if page.done or elsewhere:
                page.attempts -= 1
                page.tried.discard(wanted)
            elif wanted == source and len(taken) < _PULL_PAGES and _same_keyspace(page, taken):
                taken.append(page)
            else:
                left.append((page, wanted))
        peer.waiting = left
        return taken

    async def _run(self, peer: PeerPulls, stream: PullStream, pages: list[PagePull]) -> None:
        failure: KvPoolError = KvPoolError(f"the pull from {stream.source.bulk_endpoint} ended early")
        going: list[tuple[PagePull, Slot]] = []
        unplaced = deque(pages)
        try:
            while unplaced:
                slot = await self._slot(unplaced[0])
                page = unplaced.popleft()
                if isinstance(slot, Slot):
                    stream.pages[len(going)] = (page, slot)
                    going.append((page, slot))
                elif page.hedge == stream.source and page.attempts > 1 and not page.done:
                    self._unhedge(page, stream.source)
                else:
                    self._finish_attempt(page, None, slot, False)
            stream.moved_s = self._clock.monotonic_s()
            stream.complete = True
            if going:
                await self._caller.call(stream, going, partial(self._arrived, stream))
        except KvPoolError as error:
            failure = error
        finally:
            # What the call reported has been handled by now, and its thread has left all slots.
            for position in list(stream.pages):
                self._arrived(stream, position, failure, False)
            for page in unplaced:
                self._finish_attempt(page, None, failure, False)
            peer.streams.discard(stream)
            self._pump()

    async def _slot(self, page: PagePull) -> Slot | KvPoolError | None:
        """Return a slot, or None if the page came from elsewhere meanwhile."""
        return await self._space.find(
            page.keyspace.tenant,
            page.record.page_bytes,
            lambda: None if page.done else self._table.begin_fill(page.keyspace.tenant, page.record),
        )

    def _arrived(self, stream: PullStream, position: int, error: KvPoolError | None, hit: bool) -> None:
        going = stream.pages.pop(position, None)
        if going is None:
            return
        page, slot = going
        now_s = self._clock.monotonic_s()
        if hit:
            self._delay.note(now_s - stream.moved_s)
        if not isinstance(error, Stopped):
            stream.moved_s = now_s
        elif stream.stalled:
            silent_s = min(now_s - stream.moved_s, self._limits.stall_s)
            error = DeadlineExceeded(f"{stream.source.bulk_endpoint} sent nothing for {silent_s:g} s")
        self._report_source(page, stream.source, error, hit)
        self._table.describe_fill(slot, inherited(page.record.metadata, stream.metadata.pop(position, None)))
        self._finish_attempt(page, slot, error, hit)

    def _report_source(self, page: PagePull, source: RemoteSource, error: KvPoolError | None, hit: bool) -> None:
        """Report a source that did not have what the index said it has."""
        if isinstance(error, PageCorrupt):
            self._metrics.verification_failures.labels("peer").inc()
            _log.error("page %s from %s fails verification", page.record.key, source.bulk_endpoint)
        if isinstance(error, PageCorrupt | StaleIncarnation) or (error is None and not hit):
            self._index.report_stale(page.record.key, page.record.metadata.group_head_hash, source)

    def _finish_attempt(self, page: PagePull, slot: Slot | None, error: KvPoolError | None, hit: bool) -> None:
        """One attempt has ended. The first good copy counts; a failure only when no other attempt is under way."""
        page.attempts -= 1
        good = hit and error is None
        if not page.done and (good or not page.attempts):
            page.done = True
            if page.hedge is not None:
                self._hedged_count -= 1
            page.on_done(page, slot, error, hit)
            if page.attempts:
                self._stop_unwanted(page)
        elif slot is not None:
            present = self._table.finish_fill(slot, verified=False)
            if present is not None:
                self._table.unpin(present)

    def _stop_unwanted(self, page: PagePull) -> None:
        """The page is here: streams that no page needs any more are stopped."""
        for source in page.tried:
            peer = self._peers.get(source.bulk_endpoint)
            for stream in peer.streams if peer is not None else ():
                if stream.complete and all(one.done for one, _ in stream.pages.values()):
                    stream.stop.cancel()

    # Hedging

    def _check_later(self) -> None:
        pause_s = min(self._delay.delay_s if self._delay.enabled else self._limits.stall_s, _QUIET_S) / 2
        self._watch = asyncio.get_running_loop().call_later(pause_s, self._check_streams)

    def _check_streams(self) -> None:
        """Ask others for what does not move, and give up what has not moved for long."""
        self._watch = None
        now_s, delay_s = self._clock.monotonic_s(), self._delay.delay_s
        for peer in list(self._peers.values()):
            late = [stream for stream in peer.streams if stream.complete and now_s - stream.moved_s >= delay_s]
            hung = [stream for stream in late if now_s - stream.moved_s >= self._limits.stall_s]
            for stream in hung:
                if not stream.stalled:
                    self._abandon(stream)
            if hung and len(hung) == len(peer.streams):
                self._abandon_waiting(peer)
            for stream in late:
                for page, _ in list(stream.pages.values()):
                    self._hedge(page)
            if len(late) == len(peer.streams):  # pages that only wait for one of them are as late
                for page, _ in list(peer.waiting):
                    self._hedge(page)
        if self._waiting_peers():
            self._abandon_quietest(now_s)
            self._pump()
        if self._peers and self._watch is None:
            self._check_later()

    def _abandon_quietest(self, now_s: float) -> None:
        """Give up the quietest stream that a peer was asked on, if all threads are taken and none will soon be free."""
        streams = self._streams()
        if len(streams) < self._caller.threads or any(stream.stalled for stream in streams):
            return
        asked = [stream for stream in streams if stream.complete]
        if not asked:
            return  # all wait for slots: none has a thread yet
        quietest = min(asked, key=lambda stream: stream.moved_s)
        if now_s - quietest.moved_s >= _QUIET_S:
            self._abandon(quietest)

    def _abandon_waiting(self, peer: PeerPulls) -> None:
        """Pages that no stream of a silent peer has asked for yet: the next one would be as silent, and as long."""
        waiting, peer.waiting = peer.waiting, deque()
        for page, source in waiting:
            silent = DeadlineExceeded(f"{source.bulk_endpoint} sent nothing for {self._limits.stall_s:g} s")
            self._finish_attempt(page, None, silent, False)

    def _abandon(self, stream: PullStream) -> None:
        stream.stalled = True
        stream.stop.cancel()

    def _hedge(self, page: PagePull) -> None:
        if not self._delay.enabled or page.done or page.hedge is not None or not page.sources:
            return
        if self._hedged_count >= _HEDGED_MAX:
            return
        page.hedge = page.sources.pop(0)
        self._hedged_count += 1
        self._metrics.hedged_pages.inc()
        self._ask(page, page.hedge)

    def _unhedge(self, page: PagePull, source: RemoteSource) -> None:
        """Forget the second source, for whose copy there is no room, until it is tried again."""
        page.hedge = None
        self._hedged_count -= 1
        page.attempts -= 1
        page.tried.discard(source)
        page.sources.insert(0, source)


def _same_keyspace(page: PagePull, taken: list[PagePull]) -> bool:
    return not taken or taken[0].record.key.keyspace == page.record.key.keyspace


def _verify(page: PagePull, view: memoryview) -> PageCorrupt | None:
    key: PageKey = page.record.key
    fault = verify(view, key, page.keyspace.spec.codec, page.keyspace.payload_bytes(key.shard))
    return None if fault is None else PageCorrupt(f"page {key} from a peer: {fault}")
