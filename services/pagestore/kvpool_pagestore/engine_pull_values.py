"""Values of pulls: a page that is wanted, a call to a peer, what is asked of one peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.core.errors import KvPoolError
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.engine_stop import StopSignal
from kvpool_pagestore.ports import PageMetadata, RemoteSource

QUIET_STREAMS_MAX = 64
"""Threads for streams whose peers are slow or hang, on top of those for streams that move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """Bounds of pulls."""

    timeout_s: float  # of one stream
    stall_s: float  # a stream that brings nothing for so long is given up
    hedge_s: float  # least time without a page after which the next source is asked too; 0: never
    streams_per_peer: int
    moving_streams: int  # to all peers together; a stream that has brought nothing for a while does not count


@dataclass(slots=True, eq=False)
class Pulled:
    """One page that is wanted from peers. `on_settled` is called once, on the loop."""

    record: PageRecord
    keyspace: Keyspace
    sources: list[RemoteSource]  # not asked yet, best first
    on_settled: Callable[[Pulled, Slot | None, KvPoolError | None, bool], None]
    tried: set[RemoteSource] = field(default_factory=set)
    attempts: int = 0  # under way, or waiting for a stream
    hedge: RemoteSource | None = None  # asked because the one before it was slow
    settled: bool = False
    cause: object | None = None  # trace of the request that began it


@dataclass(slots=True, eq=False)
class PullStream:
    """One call to one peer. pages: by their position in the call, those that it has not settled."""

    source: RemoteSource
    pages: dict[int, tuple[Pulled, Slot]] = field(default_factory=dict)
    told: dict[int, PageMetadata] = field(default_factory=dict)  # what the source keeps beside them; by its thread
    stop: StopSignal = field(default_factory=StopSignal)
    moved_s: float = 0.0
    complete: bool = False  # all its pages are in `pages`, or were
    stalled: bool = False


@dataclass(slots=True, eq=False)
class PulledPeer:
    """What is asked of one peer."""

    waiting: deque[tuple[Pulled, RemoteSource]] = field(default_factory=deque)
    streams: set[PullStream] = field(default_factory=set)
