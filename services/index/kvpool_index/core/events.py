"""Events as the log stores them, positions in it, and what its watchers get."""

import re
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

from kvpool.core.cluster import ChunkBatch, ChunkEvent, NodeEvent, NodeInfo
from kvpool.core.errors import InvalidRequest
from kvpool_index.core.nodes import pack_info, unpack_info

T = TypeVar("T")

ENTRY_CHUNKS: Final = 64
ENTRY_BYTES: Final = 7 << 10
"""Limit of one entry, so that a log of bounded entries has bounded bytes also where 64 nodes have each chunk."""

ORIGIN: Final = "0-0"  # before the first entry of any stream
_ENTRY_ID: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_ENTRY_ID_PART_MAX: Final = (1 << 64) - 1

# keyspace, group head, bytes of hash, bytes of value, version; then the hash and the value
_CHUNK: Final = struct.Struct("<16s16sBHQ")
_HASH_BYTES: Final = (8, 16)
_NODE: Final = struct.Struct("<BQ")  # alive, incarnation; then the packed info


class ChunkState(NamedTuple):
    """The whole value of one chunk after a change; versions of one chunk grow."""

    keyspace: bytes
    group_head: bytes
    chunk_hash: bytes  # 8 (truncated) or 16 bytes
    value: bytes  # b"": no node has the chunk
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node that registered or changed (alive), or whose lease ended."""

    info: NodeInfo
    alive: bool


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of one stream. The payload holds chunk states, or one node state in the nodes' stream."""

    entry_id: str
    payload: bytes


def pack_chunks(states: Iterable[ChunkState]) -> bytes:
    """The payload of an entry of a chunks' stream."""
    return b"".join(
        _CHUNK.pack(state.keyspace, state.group_head, len(state.chunk_hash), len(state.value), state.version)
        + state.chunk_hash
        + state.value
        for state in states
    )


def pack_entries(states: Sequence[ChunkState]) -> Iterator[bytes]:
    """The payloads of as few entries as ENTRY_CHUNKS and ENTRY_BYTES allow; one state has 2 KiB at most."""
    start = size_bytes = 0
    for at, state in enumerate(states):
        state_bytes = _CHUNK.size + len(state.chunk_hash) + len(state.value)
        if at > start and (at - start == ENTRY_CHUNKS or size_bytes + state_bytes > ENTRY_BYTES):
            yield pack_chunks(states[start:at])
            start, size_bytes = at, 0
        size_bytes += state_bytes
    if start < len(states):
        yield pack_chunks(states[start:])


def unpack_chunks(payload: bytes) -> list[ChunkState]:
    """The inverse of pack_chunks. Raises struct.error or ValueError for what no index wrote."""
    found: list[ChunkState] = []
    offset = 0
    while offset < len(payload):
        keyspace, group_head, hash_bytes, value_bytes, version = _CHUNK.unpack_from(payload, offset)
        hash_at = offset + _CHUNK.size
        value_at = hash_at + hash_bytes
        offset = value_at + value_bytes
        if offset > len(payload) or hash_bytes not in _HASH_BYTES:
            raise ValueError(f"a chunk's hash of {hash_bytes} bytes and value of {value_bytes} end at {offset}")
        found.append(
            ChunkState(
                keyspace=keyspace,
                group_head=group_head,
                chunk_hash=payload[hash_at:value_at],
                value=payload[value_at:offset],
                version=version,
            )
        )
    return found


def pack_node(state: NodeState) -> bytes:
    """The payload of an entry of the nodes' stream; the store's scripts write the same."""
    return _NODE.pack(state.alive, state.info.incarnation) + pack_info(state.info)


def unpack_node(payload: bytes) -> NodeState:
    """The inverse of pack_node. Raises struct.error, ValueError or InvalidRequest for what no index wrote."""
    alive, incarnation = _NODE.unpack_from(payload)
    return NodeState(info=unpack_info(payload[_NODE.size :], incarnation), alive=bool(alive))


def stream_of(group_head: bytes, chunk_stream_count: int) -> int:
    """The chunks' stream that a group's events go through, so that one chunk's events keep their order."""
    return int.from_bytes(group_head[-2:], "little") % chunk_stream_count


@dataclass(frozen=True, slots=True)
class Position:
    """How far a watcher has come: the last entry seen of each stream."""

    entry_ids: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Read what `str` wrote. Raises InvalidRequest."""
        entry_ids = tuple(text.split(","))
        if not all(map(_is_entry_id, entry_ids)):
            raise InvalidRequest("after_position is not one that this service sent; leave it empty to start from now")
        return cls(entry_ids)

    def __str__(self) -> str:
        return ",".join(self.entry_ids)

    def advanced(self, stream: int, entry_id: str) -> "Position":
        """The position after one more entry of a stream."""
        return Position((*self.entry_ids[:stream], entry_id, *self.entry_ids[stream + 1 :]))


def _is_entry_id(text: str) -> bool:
    """Whether a store takes it for one; what it does not would look like a store that is out of order."""
    parts = _ENTRY_ID.fullmatch(text)
    return parts is not None and all(int(part) <= _ENTRY_ID_PART_MAX for part in parts.groups())


def entry_order(entry_id: str) -> tuple[int, int]:
    """What entry ids sort by."""
    major, _, minor = entry_id.partition("-")
    return int(major), int(minor)


class WatchBuffer(Generic[T]):
    """What waits for one watcher. When it would overflow, all of it is dropped and `take` says that items were lost."""

    def __init__(self, limit: int) -> None:
        """limit: what the sizes of all items may sum up to."""
        self._items: deque[T] = deque()
        self._limit = limit
        self._size = 0
        self._lost = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_news(self) -> bool:
        """Whether `take` has anything to say."""
        return self._lost or bool(self._items)

    def put(self, items: Sequence[T], size: int | None = None) -> None:
        """Add items in order. size: of all of them together; one each if not given."""
        size = len(items) if size is None else size
        if self._size + size > self._limit:
            self.lose()
        else:
            self._items.extend(items)
            self._size += size

    def lose(self) -> None:
        """Note that items were lost before they reached the buffer."""
        self._items.clear()
        self._size = 0
        self._lost = True

    def take(self) -> tuple[bool, list[T]]:
        """Whether items were lost since the last call, and those that came after the loss."""
        lost, items = self._lost, list(self._items)
        self._lost = False
        self._items.clear()
        self._size = 0
        return lost, items


OwnedEvent = tuple[str | None, ChunkEvent | NodeEvent]
"""An event and the tenant that may see it; None: all tenants may."""


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
class EntryEvents:
    """The events of one log entry. Until all have been received the position stays before it."""

    owned: Sequence[OwnedEvent]
    before: Position
    after: Position
    _wanted: dict[Interest, tuple[ChunkEvent | NodeEvent, ...]] = field(default_factory=dict)
    # What `batch` has returned, for the last of the entries.
    _batches: dict[Interest, tuple["EntryEvents", ChunkBatch]] = field(default_factory=dict)

    def wanted(self, interest: Interest) -> tuple[ChunkEvent | NodeEvent, ...]:
        """The events that are for these watchers; picked once for all of them."""
        found = self._wanted.get(interest)
        if found is None:
            found = tuple(owned[1] for owned in self.owned if interest.wants(owned))
            self._wanted[interest] = found
        return found

    def batch(self, interest: Interest, following: Sequence["EntryEvents"] = ()) -> ChunkBatch | None:
        """The wanted chunk events of this entry and of those that follow it as one: the same object for all watchers
        that get the same entries. None without any."""
        last = following[-1] if following else self
        known = self._batches.get(interest)
        if known is None or known[0] is not last:
            wanted = chain.from_iterable(entry.wanted(interest) for entry in (self, *following))
            chunks = tuple(event for event in wanted if isinstance(event, ChunkEvent))
            if not chunks:
                return None
            known = self._batches[interest] = (last, ChunkBatch(events=chunks))
        return known[1]

    def is_of_chunks(self, interest: Interest) -> bool:
        """Whether there are wanted events, and of chunks: all of an entry are, or none."""
        return isinstance(next(iter(self.wanted(interest)), None), ChunkEvent)


@dataclass(frozen=True, slots=True)
class CheckedEnd:
    """The log's end was looked up at this time, and everything before it lies before this in the buffer."""

    checked_at_s: float
    position: Position


def events_of_entries(
    entries: Sequence[LogEntry], stream: int, start: Position, owned: Mapping[str, Sequence[OwnedEvent]]
) -> list[EntryEvents]:
    """News of consecutive entries of one stream, read from `start` on. owned: the events of each, by entry id."""
    found: list[EntryEvents] = []
    for entry in entries:
        after = start.advanced(stream, entry.entry_id)
        found.append(EntryEvents(owned[entry.entry_id], start, after))
        start = after
    return found
