"""What happens to pages, as values, and the one place that delivers them to those who are concerned.

A transition publishes its events when its own state is consistent; every subscriber has handled an event when `publish`
returns, in the same turn of the event loop. The engine lists all subscribers, in order.

Several are made for each page that is stored: named tuples, which take a third of the time of dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.core.policy import KeyspacePolicy
from kvpool_pagestore.core.slots import PageRecord, Slot


class BytesHeld(NamedTuple):
    """Bytes were taken for pages of a keyspace, in the arena or on disk, or (< 0) came back."""

    keyspace: bytes
    size_bytes: int


class StagingChanged(NamedTuple):
    """Pages that others may know of became visible in staging, or left it."""

    records: Sequence[PageRecord]
    present: bool


class DiskChanged(NamedTuple):
    """Pages, each with the head of its chain group, became durable, or are on disk no more."""

    pages: Sequence[tuple[PageKey, bytes]]
    present: bool


class PagesArrived(NamedTuple):
    """Pages are here now, with this metadata: committed, read from disk or pulled, or found at the start."""

    records: Sequence[PageRecord]


class PagesLeft(NamedTuple):
    """A slot of each page came back, or it left the disk. It may still be elsewhere on this node."""

    keys: Sequence[PageKey]


class ChunksLeft(NamedTuple):
    """All pages of chunks left the disk: names (keyspace id and chunk hash), and the bitmaps of their shards."""

    chunks: Sequence[tuple[bytes, int]]


class PagesEvicted(NamedTuple):
    """Pages were given up to make room."""

    tier: Tier
    page_count: int


class PagesUsed(NamedTuple):
    """Visible pages were leased, or asked to be stored again."""

    slots: Sequence[Slot]


class PagesRead(NamedTuple):
    """Readers got read leases on these pages."""

    records: Sequence[PageRecord]


class DiskHealthChanged(NamedTuple):
    """The disk tier can be written again, or (fault is not empty) it cannot."""

    fault: str


class PolicyChanged(NamedTuple):
    """A keyspace has this policy from now on."""

    keyspace: bytes
    policy: KeyspacePolicy


PageEvent = (
    BytesHeld
    | StagingChanged
    | DiskChanged
    | PagesArrived
    | PagesLeft
    | ChunksLeft
    | PagesEvicted
    | PagesUsed
    | PagesRead
    | DiskHealthChanged
    | PolicyChanged
)
E = TypeVar("E", bound=PageEvent)


@dataclass(frozen=True, slots=True)
class Subscription(Generic[E]):
    """A handler of one kind of event."""

    kind: type[E]
    handle: Callable[[E], None]


class PageEvents:
    """Delivers events. Use from one thread only."""

    def __init__(self) -> None:
        self._handlers: dict[type[PageEvent], tuple[Callable[[Any], None], ...]] = {}
        self._merging = False
        self._changed: list[StagingChanged] = []  # all with the same `present`
        self._left: list[PageKey] = []
        self._evicted: dict[Tier, int] = {}

    def subscribe(self, subscriptions: Sequence[Subscription[Any]]) -> None:
        """List all subscribers, once; those of one kind are called in this order."""
        if self._handlers:
            raise RuntimeError("the subscribers are listed already; add to that list")
        for one in subscriptions:
            self._handlers[one.kind] = (*self._handlers.get(one.kind, ()), one.handle)

    def publish(self, event: PageEvent) -> None:
        """Return when all subscribers of the event's kind have handled it; but see `merged`."""
        if not (self._merging and self._merge(event)):
            for handle in self._handlers.get(type(event), ()):
                handle(event)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Many changes as one: StagingChanged, PagesLeft and PagesEvicted are delivered when the block ends.

        Nothing may be awaited in the block, and blocks do not lie in each other.
        """
        assert not self._merging
        self._merging = True
        try:
            yield
        finally:
            self._merging = False
            left, self._left = self._left, []
            evicted, self._evicted = self._evicted, {}
            try:
                self._deliver_changed()
            finally:  # a handler that fails keeps nothing from the others
                if left:
                    self.publish(PagesLeft(left))
                for tier, page_count in evicted.items():
                    self.publish(PagesEvicted(tier, page_count))

    def _merge(self, event: PageEvent) -> bool:
        """Keep an event for the end of the block, if it is of a kind that can be merged."""
        if isinstance(event, StagingChanged):
            before = self._changed
            if before and before[0].present != event.present:
                self._changed = [event]
                self._deliver(before)
            else:
                before.append(event)
        elif isinstance(event, PagesLeft):
            self._left += event.keys
        elif isinstance(event, PagesEvicted):
            self._evicted[event.tier] = self._evicted.get(event.tier, 0) + event.page_count
        else:
            return False
        return True

    def _deliver_changed(self) -> None:
        changed, self._changed = self._changed, []
        if changed:
            self._deliver(changed)

    def _deliver(self, changed: Sequence[StagingChanged]) -> None:
        event = StagingChanged([record for one in changed for record in one.records], changed[0].present)
        for handle in self._handlers.get(StagingChanged, ()):
            handle(event)
