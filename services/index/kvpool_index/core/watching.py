"""News of the event log as watchers get it: converted once for all of them, with the positions around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.core.cluster import ChunkBatch, ChunkEvent, NodeEvent
from kvpool_index.core.events import LogEntry, Position

OwnedEvent = tuple[str | None, ChunkEvent | NodeEvent]
"""An event and the tenant that may see it; None: everybody may."""


@dataclass(frozen=True, slots=True)
class Interest:
    """What a watcher wants to see. An empty keyspace: all of the tenant's."""

    tenant: str
    keyspace: bytes

    def wants(self, owned: OwnedEvent) -> bool:
        """Whether this event is for this watcher."""
        tenant, event = owned
        if tenant is None:
            return True
        return tenant == self.tenant and not (
            self.keyspace and isinstance(event, ChunkEvent) and event.keyspace != self.keyspace
        )


@dataclass(slots=True, eq=False)
class EntryNews:
    """The events of one log entry. Until all have been received the position stays before it."""

    owned: Sequence[OwnedEvent]
    before: Position
    after: Position
    _wanted: dict[Interest, tuple[ChunkEvent | NodeEvent, ...]] = field(default_factory=dict)
    _batches: dict[Interest, ChunkBatch] = field(default_factory=dict)

    def wanted(self, interest: Interest) -> tuple[ChunkEvent | NodeEvent, ...]:
        """The events that are for these watchers; picked once for all of them."""
        found = self._wanted.get(interest)
        if found is None:
            found = tuple(owned[1] for owned in self.owned if interest.wants(owned))
            self._wanted[interest] = found
        return found

    def batch(self, interest: Interest) -> ChunkBatch | None:
        """The wanted chunk events as one: the same object for all watchers. None for an entry without any."""
        found = self._batches.get(interest)
        if found is None:
            chunks = tuple(event for event in self.wanted(interest) if isinstance(event, ChunkEvent))
            if not chunks:
                return None
            found = self._batches[interest] = ChunkBatch(events=chunks)
        return found


@dataclass(frozen=True, slots=True)
class Checked:
    """The log's end was looked up at this time, and everything before it lies before this in the buffer."""

    checked_at_s: float
    position: Position


def news_of(
    entries: Sequence[LogEntry], stream: int, start: Position, owned: Mapping[str, Sequence[OwnedEvent]]
) -> list[EntryNews]:
    """News of consecutive entries of one stream, read from `start` on. owned: the events of each, by entry id."""
    found: list[EntryNews] = []
    for entry in entries:
        after = start.advanced(stream, entry.entry_id)
        found.append(EntryNews(owned[entry.entry_id], start, after))
        start = after
    return found
