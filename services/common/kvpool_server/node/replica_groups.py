"""The chain groups of a replica: bounded by bytes, forgotten least recently used first, with floors for what was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from kvpool.core.cluster import CHAIN_GROUP_CHUNKS, ChainQuery, Location
from kvpool_server.node.replica_values import Lens, SharedValue, SharedValues, View

HASH_BYTES: Final = 16
FIELD_BYTES: Final = 8  # of a chunk hash; enough to tell the chunks of a group apart

_PART_BYTES: Final = HASH_BYTES * CHAIN_GROUP_CHUNKS
_GROUP_BYTES: Final = 700  # what the parts of the table weigh; measured, see test_replica_memory
_CHUNK_BYTES: Final = 230
_VIEW_BYTES: Final = 800
_VIEWS_MAX: Final = 4  # of one group
_GROUP_CHUNKS_MAX: Final = 1024  # many chains may fork within their first group
_FLOORS: Final = 1024


class Group:
    """Chunks of one chain group, by field: version, whether it is an event's (else a floor), value."""

    __slots__ = ("chunks", "views")

    def __init__(self) -> None:
        self.chunks: dict[bytes, tuple[int, bool, SharedValue]] = {}
        self.views: dict[tuple[Lens, bytes], View] = {}

    @property
    def size_bytes(self) -> int:
        """What it takes, without its values."""
        return _GROUP_BYTES + _CHUNK_BYTES * len(self.chunks) + _VIEW_BYTES * len(self.views)


class GroupStore:
    """Groups by key: keyspace and the hash of the group's head."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.groups: OrderedDict[bytes, Group] = OrderedDict()  # the most recently used one is last
        self._group_bytes = 0
        self._values = SharedValues()
        self._floors = [0] * _FLOORS

    @property
    def used_bytes(self) -> int:
        """What the groups take, by measured weights of their parts."""
        return self._group_bytes + self._values.used_bytes

    def known(self, key: bytes, field: bytes) -> tuple[int, bool, SharedValue | None]:
        """Version or floor of a chunk, whether it is a version, and the value; the floor and None if there is none."""
        group = self.groups.get(key)
        return (group.chunks.get(field) if group else None) or (self._floors[_bucket(key)], False, None)

    def open(self, key: bytes, *, asked_for: bool) -> Group:
        """A group to be changed; `close` must follow at once. One that was not asked for does not evict others."""
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group()
            if not asked_for and self.used_bytes > self._capacity_bytes * 3 // 4:
                self.groups.move_to_end(key, last=False)
        else:
            self._group_bytes -= group.size_bytes
        return group

    def close(self, key: bytes, group: Group) -> None:
        """The group has been changed."""
        group.views.clear()
        self._group_bytes += group.size_bytes
        if not group.chunks:
            self.drop(key)

    def put(
        self, key: bytes, group: Group, field: bytes, version: int, ordered: bool, where: Iterable[Location]
    ) -> None:
        """Set a chunk of an open group."""
        value = self._values.hold(where)
        before = group.chunks.pop(field, None)
        if before is not None:
            self._values.release(before[2])
        elif len(group.chunks) >= _GROUP_CHUNKS_MAX:
            head = key[-HASH_BYTES:][:FIELD_BYTES]  # each chain of the group begins with it
            self.remove(key, group, next(each for each in group.chunks if each != head), 0)
        group.chunks[field] = (version, ordered, value)

    def remove(self, key: bytes, group: Group, field: bytes, version: int) -> None:
        """Forget a chunk of an open group as of a version."""
        known = group.chunks.pop(field, None)
        self.raise_floor(key, max(version, known[0] if known else 0))
        if known is not None:
            self._values.release(known[2])

    def raise_floor(self, key: bytes, version: int) -> None:
        """Remember that a version of this group was seen and is not kept."""
        bucket = _bucket(key)
        self._floors[bucket] = max(self._floors[bucket], version)

    def raise_floors(self, version: int) -> None:
        """The same for all groups."""
        self._floors = [max(floor, version) for floor in self._floors]

    def look(self, group: Group, lens: Lens, part: bytes) -> View:
        """What the chunks of a part are to a lens; kept for the next one who asks."""
        runs: list[tuple[int, tuple[Location, ...]]] = []
        matched = 0
        for at in range(0, len(part), HASH_BYTES):
            known = group.chunks.get(part[at : at + FIELD_BYTES])
            where = lens.judge(known[2]) if known is not None else ()
            if not where:
                break
            matched += 1
            if runs and runs[-1][1] == where:
                runs[-1] = (runs[-1][0] + 1, where)
            else:
                runs.append((1, where))
        view = View(tuple(runs), matched)
        self._group_bytes -= group.size_bytes
        if len(group.views) >= _VIEWS_MAX:
            group.views.clear()
        group.views[lens, part] = view
        self._group_bytes += group.size_bytes
        return view

    def use(self, keys: list[bytes]) -> None:
        """These groups of a chain, in its order, were asked for. The head counts as used last: chains end first."""
        for key in reversed(keys):
            self.groups.move_to_end(key)

    def shrink(self) -> None:
        """Forget what was not used for longest until the rest fits."""
        while self.used_bytes > self._capacity_bytes and self.groups:
            self.drop(next(iter(self.groups)))

    def drop(self, key: bytes) -> None:
        """Forget a group."""
        group = self.groups.pop(key, None)
        if group is None:
            return
        self._group_bytes -= group.size_bytes
        for version, _, value in group.chunks.values():
            self.raise_floor(key, version)
            self._values.release(value)

    def clear(self) -> None:
        """Forget all groups; the caller raises the floors."""
        self.groups.clear()
        self._values.clear()
        self._group_bytes = 0


def parts(query: ChainQuery) -> Iterator[tuple[bytes, bytes]]:
    """The key of each chain group that a query touches, and the hashes of its chunks that are asked for."""
    keyspace, hashes, within = query.keyspace, query.chunk_hashes, query.first_chunk_index % CHAIN_GROUP_CHUNKS
    start = 0
    if within and hashes:
        start = (CHAIN_GROUP_CHUNKS - within) * HASH_BYTES
        yield keyspace + query.group_head_hash, hashes[:start]
    for at in range(start, len(hashes), _PART_BYTES):
        part = hashes[at : at + _PART_BYTES]
        yield keyspace + part[:HASH_BYTES], part


def _bucket(key: bytes) -> int:
    return int.from_bytes(key[-2:], "little") % _FLOORS
