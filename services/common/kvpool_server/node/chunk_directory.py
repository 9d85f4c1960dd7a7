"""Which chunks a node may hold, by digest range; what it holds of each, its owner is asked when it matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from operator import xor
from typing import Protocol

import numpy as np

from kvpool.core.cluster import LocationChange
from kvpool.core.location_digest import (
    FIELD_BYTES,
    PART_COUNT,
    ChunkPlaces,
    HeldChunk,
    PartSpan,
    fingerprint,
    holding,
    part_of,
    range_numbers,
    range_of,
)
from kvpool.core.outcome import Tier
from kvpool_server.node.chunk_table import ChunkTable

_KEYSPACE_BYTES = _HASH_BYTES = 16
_TIERS = (Tier.GPU, Tier.STAGING, Tier.DISK)
_STEP_CHUNKS = 128  # looked up between two pauses, give or take a bucket: half a millisecond
_LOAD_CHUNKS = 2048  # learnt between two pauses
_RECHECK_ROUNDS = 64  # in which everything is looked up once, though no change of it was announced
_COUNTED_CHUNKS = 4096  # of a keyspace in one range, from which on large groups are looked for
_COUNTED_GROUPS = 64  # a group with more than this share of the chunks that come then is found
_LARGE_GROUP_CHUNKS = 1024  # more than this are kept apart, as the index keeps them

Cell = int | PartSpan
"""What is compared and replaced at once: one part of a large group, or all else in the digest range of this number."""


def range_of_cell(cell: Cell) -> int:
    """The digest range that a cell lies in."""
    return cell if isinstance(cell, int) else range_of(cell.group_head)


class LocationTruth(Protocol):
    """The owner of what is announced. Called on the event loop; each answer is true at the moment of the call."""

    def chunks(self) -> Iterable[ChunkPlaces]:
        """Every chunk held, some at a time. Iterated once, before the node registers; each part is one step.

        Chunks that come later are learnt as they are announced. A chunk may be named twice.
        """
        ...

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> Iterable[tuple[bytes, HeldChunk]]:
        """Which of some chunks are held now: their hashes, each once for each group head it has, with what is held.

        All changes that this shows were announced before.
        """
        ...

    def keyspace_encodings(self) -> Sequence[bytes]:
        """Canonical encodings of keyspaces: at least of all that chunks belong to."""
        ...


class NoLocations:
    """LocationTruth of a node that holds nothing."""

    def chunks(self) -> Iterable[ChunkPlaces]:
        return ()

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> Iterable[tuple[bytes, HeldChunk]]:
        return ()

    def keyspace_encodings(self) -> Sequence[bytes]:
        return ()


class FixedLocations:
    """LocationTruth of a node whose chunks never change: each is held whole, in the tier it is said to be in."""

    def __init__(self, changes: Iterable[LocationChange]) -> None:
        self._changes = {(change.keyspace, change.chunk_hash): change for change in changes}

    def chunks(self) -> Iterable[ChunkPlaces]:
        return ChunkPlaces.of((one.keyspace, one.chunk_hash, one.group_head_hash) for one in self._changes.values())

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> Iterable[tuple[bytes, HeldChunk]]:
        for chunk_hash in chunk_hashes:
            change = self._changes.get((keyspace, chunk_hash))
            if change is not None:
                gpu, staging, disk = (change.added_shards if change.tier == tier else 0 for tier in _TIERS)
                yield chunk_hash, HeldChunk(change.group_head_hash, (gpu, staging, disk), change.added_shards)

    def keyspace_encodings(self) -> Sequence[bytes]:
        return ()


class ChunkDirectory:
    """Sixteen bytes for each chunk that was held or announced since it was last looked up, and digests of some 64 each.

    What is announced is to be noted first: then only the digests that it concerns are computed again. Groups with very
    many chunks are kept apart, so that each of their parts has a digest of its own.

    Work that grows with the number of chunks comes as iterators of short steps. Others may run between two of them, and
    what they change is noted; a result holds if nothing was noted of its cell since the first step.
    """

    def __init__(self, truth: LocationTruth) -> None:
        self._truth = truth
        self._tables: dict[int, dict[bytes, ChunkTable]] = {}  # by range, then keyspace, or keyspace + head of a group
        self._table_counts: Counter[bytes] = Counter()  # by keyspace
        self._groups: dict[int, set[bytes]] = {}  # keyspace + head of those that are kept apart, by range
        self._counts: dict[tuple[int, bytes], Counter[bytes]] = {}  # of chunks by group, where there are very many
        self._is_loaded = False
        self.was_used = False  # something was held or announced

    def load(self) -> Iterator[None]:
        """Learn what is held at the start, in short steps. Later calls do nothing."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for places in self._truth.chunks():
            yield  # finding them was a step of its own
            for part in _by_range(places):
                for number, hashes, heads in part:
                    self._learn(places.keyspace, number, hashes, heads)
                yield
            self.keep_large_apart()

    def note(self, change: LocationChange) -> Cell:
        """Remember the chunk of a change; the cell that the change falls into."""
        keyspace, chunk_hash, head, _, added_shards, _ = change
        number = self._note(keyspace, chunk_hash, head, is_added=added_shards != 0)
        return number if number not in self._groups else self.cell_of(change)

    def cell_of(self, change: LocationChange) -> Cell:
        """The cell that a change falls into."""
        head = change.group_head_hash
        number = range_of(head)
        groups = self._groups.get(number)
        if not groups or change.keyspace + head not in groups:
            return number
        return PartSpan(change.keyspace, head, part_of(change.chunk_hash))

    def mark_changed(self, keyspace: bytes) -> None:
        """What is held of a keyspace changed without being announced."""
        for tables in self._tables.values():
            for name, table in tables.items():
                if name.startswith(keyspace):
                    table.mark_every(0, 1)

    def chunk_count(self, range_number: int) -> int:
        """At least as many as are held in a range."""
        return sum(table.chunk_count for table in self._tables.get(range_number, {}).values())

    def may_hold(self, keyspace: bytes) -> bool:
        """Whether anything of a keyspace is held, as far as was looked."""
        return self._table_counts[keyspace] > 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, as far as was looked."""
        return not self._tables

    # Digests

    def refresh(self, range_number: int) -> Iterator[None]:
        """Compute the digests of a range that are stale, in short steps."""
        looked_up = 0
        keyspaces = [name for name in self._tables.get(range_number, ()) if len(name) == _KEYSPACE_BYTES]
        # Groups come last: chunks may be moved to them.
        for name in (*keyspaces, *self._groups.get(range_number, ())):
            table = self._table(range_number, name)
            for _ in range(table.stale_count if table is not None else 0):  # once each, though they change all the time
                table = self._table(range_number, name)
                if table is None or not table.stale_count:
                    break
                looked_up += self._refresh_bucket(range_number, name, table)
                if looked_up >= _STEP_CHUNKS:
                    looked_up = 0
                    yield

    def recheck(self, range_number: int, round_number: int) -> None:
        """Have some of a range looked up again, others in each round, for the case that a change was not announced."""
        for table in self._tables.get(range_number, {}).values():
            table.mark_every(-(range_number + round_number) % _RECHECK_ROUNDS, _RECHECK_ROUNDS)

    def digest(self, range_number: int) -> int:
        """The digest of what is held in a range now. One step, and a short one after `refresh`.

        It holds unless the range changed meanwhile, which is noted.
        """
        for _ in self.refresh(range_number):
            pass
        return reduce(xor, (table.digest for table in self._tables.get(range_number, {}).values()), 0)

    def rest_digest(self, range_number: int) -> int:
        """The digest of a range but for groups that are kept apart, as of its last refresh."""
        tables = self._tables.get(range_number, {}).items()
        return reduce(xor, (table.digest for name, table in tables if len(name) == _KEYSPACE_BYTES), 0)

    def part_digests(self, keyspace: bytes, group_head: bytes) -> list[int]:
        """The digests of the parts of a group that is kept apart, as of its last refresh."""
        table = self._table(range_of(group_head), keyspace + group_head)
        return table.part_digests() if table is not None else [0] * PART_COUNT

    # Groups

    def groups(self, range_number: int) -> list[tuple[bytes, bytes]]:
        """Keyspace and head of the groups of a range that are kept apart."""
        return [_group(name) for name in self._groups.get(range_number, ())]

    def cells(self, range_number: int) -> list[Cell]:
        """All of a range in which something is held, the parts of groups last."""
        tables = self._tables.get(range_number, {})
        groups = [group for group in self.groups(range_number) if b"".join(group) in tables]
        return [range_number, *(PartSpan(*group, part) for group in groups for part in range(PART_COUNT))]

    def keep_apart(self, range_number: int, split: Iterable[tuple[bytes, bytes]]) -> list[PartSpan]:
        """Keep those groups of a range apart that the index has split, and those that are large; the parts of new ones.

        Their chunks are moved when they are looked up next.
        """
        wanted = {keyspace + head for keyspace, head in split}
        tables, before = self._tables.get(range_number, {}), self._groups.get(range_number, set())
        wanted |= {name for name in before if name in tables and tables[name].chunk_count > _LARGE_GROUP_CHUNKS}
        wanted |= self._take_large(range_number)
        if wanted:
            self._groups[range_number] = wanted
        else:
            self._groups.pop(range_number, None)
        for name in before - wanted:
            table = tables.get(name)
            if table is None:
                continue
            self._remove_table(tables, name)
            for chunk_hash in table.hashes():
                self._note(name[:_KEYSPACE_BYTES], chunk_hash, name[_KEYSPACE_BYTES:], is_added=True)
        added = wanted - before
        for keyspace in {name[:_KEYSPACE_BYTES] for name in added} & tables.keys():
            tables[keyspace].mark_every(0, 1)
        return [PartSpan(*_group(name), part) for name in added for part in range(PART_COUNT)]

    def keep_large_apart(self) -> list[PartSpan]:
        """Keep all groups apart that have become large; the parts of new ones."""
        numbers = {number for (number, _), counts in self._counts.items() if max(counts.values()) > _LARGE_GROUP_CHUNKS}
        return [span for number in numbers for span in self.keep_apart(number, self.groups(number))]

    # Contents: one step each, so that they are true at one moment

    def changes(self, range_number: int) -> list[LocationChange]:
        """What is held now in a range but for groups that are kept apart, ordered by bucket, an item for each tier."""
        groups, locate = self._groups.get(range_number, ()), self._truth.locate
        items: list[LocationChange] = []
        for name, table in self._tables.get(range_number, {}).items():
            if len(name) != _KEYSPACE_BYTES:
                continue
            for chunk_hash, held in locate(name, table.hashes()):
                head, (gpu, staging, disk), _ = held
                if range_of(head) != range_number or (groups and name + head in groups):
                    continue
                if gpu or staging:
                    items += _changes(name, chunk_hash, held)
                elif disk:  # nearly always
                    items.append(LocationChange(name, chunk_hash, head, Tier.DISK, disk, 0))
        items.sort(key=lambda item: item[2][-2:] + item[2])  # by bucket, then by group
        return items

    def part_changes(self, span: PartSpan) -> list[LocationChange]:
        """What is held now in one part of a group."""
        tables = self._tables.get(range_of(span.group_head), {})
        own, others = tables.get(span.keyspace + span.group_head), tables.get(span.keyspace)
        hashes = own.part_hashes(span.part) if own is not None else set()
        if others is not None and (own is None or others.stale_count):  # some may not have been moved yet
            hashes |= others.part_hashes(span.part)
        return [
            item
            for chunk_hash, held in self._truth.locate(span.keyspace, hashes)
            if held.group_head == span.group_head
            for item in _changes(span.keyspace, chunk_hash, held)
        ]

    # Inside

    def _table(self, range_number: int, name: bytes) -> ChunkTable | None:
        return self._tables.get(range_number, {}).get(name)

    def _note(self, keyspace: bytes, chunk_hash: bytes, head: bytes, *, is_added: bool) -> int:
        """Remember a chunk; the number of its range."""
        self.was_used = True
        number = range_of(head)
        groups = self._groups.get(number)
        name = keyspace + head if groups is not None and keyspace + head in groups else keyspace
        tables = self._tables.get(number)
        if tables is None:
            tables = self._tables[number] = {}
        table = tables.get(name)
        if not is_added:
            if table is not None:
                table.mark_changed(chunk_hash)
            if name is not keyspace and keyspace in tables:  # it may not have been moved yet
                tables[keyspace].mark_changed(chunk_hash)
            return number
        if table is None:
            table = tables[name] = ChunkTable() if name is keyspace else ChunkTable(PART_COUNT)
            self._table_counts[keyspace] += 1
        if table.add(chunk_hash) and name is keyspace and table.chunk_count > _COUNTED_CHUNKS:
            self._count(number, keyspace, head)
        return number

    def _learn(self, keyspace: bytes, number: int, hashes: bytes, heads: bytes) -> None:
        """Do as `_note` for chunks that are held in one range; `hashes` and `heads` lie one after the other."""
        self.was_used = True
        if number in self._groups:
            for start in range(0, len(hashes), _HASH_BYTES):
                at = slice(start, start + _HASH_BYTES)
                self._note(keyspace, hashes[at], heads[at], is_added=True)
            return
        tables = self._tables.setdefault(number, {})
        table = tables.get(keyspace)
        if table is None:
            table = tables[keyspace] = ChunkTable()
            self._table_counts[keyspace] += 1
        table.extend(hashes)
        if table.chunk_count > _COUNTED_CHUNKS:
            for start in range(0, len(heads), _HASH_BYTES):
                self._count(number, keyspace, heads[start : start + _HASH_BYTES])

    def _count(self, number: int, keyspace: bytes, head: bytes) -> None:
        """Count the groups of chunks that come, in bounded memory (Misra and Gries): none is counted too high."""
        counts = self._counts.setdefault((number, keyspace), Counter())
        counts[head] += 1
        if len(counts) > _COUNTED_GROUPS:
            self._counts[number, keyspace] = Counter({group: count - 1 for group, count in counts.items() if count > 1})

    def _take_large(self, number: int) -> set[bytes]:
        """Groups of a range that were counted to be large, which starts afresh for them."""
        found: set[bytes] = set()
        for (counted, keyspace), counts in self._counts.items():
            large = [head for head, count in counts.items() if counted == number and count > _LARGE_GROUP_CHUNKS]
            for head in large:
                counts[head] = 1
                found.add(keyspace + head)
        return found

    def _refresh_bucket(self, number: int, name: bytes, table: ChunkTable) -> int:
        """Look the chunks of a stale bucket up: forget those that are not held, move those of groups kept apart."""
        keyspace, own_head = name[:_KEYSPACE_BYTES], name[_KEYSPACE_BYTES:]
        groups = self._groups.get(number, ())
        at, hashes = table.begin_refresh()
        kept: set[bytes] = set()
        held_at: dict[bytes, HeldChunk] = {}
        try:
            for chunk_hash, held in self._truth.locate(keyspace, hashes):
                head = held.group_head
                if not any(held.shards) or (head != own_head if own_head else range_of(head) != number):
                    continue
                if not own_head and groups and keyspace + head in groups:
                    self._note(keyspace, chunk_hash, head, is_added=True)
                    continue
                kept.add(chunk_hash)
                # The index distinguishes chunks of a group by their fields alone.
                place = keyspace + head + chunk_hash[:FIELD_BYTES]
                known = held_at.get(place)
                held_at[place] = held if known is None else _union(known, held)
        except BaseException:
            table.mark(at)
            raise
        table.end_refresh(at, kept, _digest(held_at))
        if not table.chunk_count and not table.stale_count:
            self._drop_table(number, name)
        return max(1, len(hashes))

    def _drop_table(self, number: int, name: bytes) -> None:
        tables = self._tables[number]
        self._remove_table(tables, name)
        self._counts.pop((number, name), None)
        if not tables:
            del self._tables[number]

    def _remove_table(self, tables: dict[bytes, ChunkTable], name: bytes) -> None:
        del tables[name]
        keyspace = name[:_KEYSPACE_BYTES]
        self._table_counts[keyspace] -= 1
        if not self._table_counts[keyspace]:
            del self._table_counts[keyspace]


def _by_range(places: ChunkPlaces) -> Iterator[list[tuple[int, bytes, bytes]]]:
    """The chunks of each digest range, some at a time: its number, their hashes, and the heads of their groups."""
    heads = np.frombuffer(places.group_heads, np.uint8).reshape(-1, _HASH_BYTES)
    hashes = np.frombuffer(places.chunk_hashes, np.uint8).reshape(-1, _HASH_BYTES)
    numbers = range_numbers(heads)
    order = np.argsort(numbers, kind="stable")
    for start in range(0, len(order), _LOAD_CHUNKS):
        rows = order[start : start + _LOAD_CHUNKS]
        begins = np.flatnonzero(np.diff(numbers[rows], prepend=-1)).tolist()
        part_hashes, part_heads, part = hashes[rows].tobytes(), heads[rows].tobytes(), []
        for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
            at = slice(begin * _HASH_BYTES, end * _HASH_BYTES)
            part.append((int(numbers[rows[begin]]), part_hashes[at], part_heads[at]))
        yield part


def _group(name: bytes) -> tuple[bytes, bytes]:
    return name[:_KEYSPACE_BYTES], name[_KEYSPACE_BYTES:]


def _digest(held_at: dict[bytes, HeldChunk]) -> int:
    digest = 0
    packed: dict[tuple[tuple[int, int, int], int], bytes] = {}  # few differ
    for place, held in held_at.items():
        kind = (held.shards, held.full_shards)
        if kind not in packed:
            packed[kind] = holding(*kind)
        digest ^= fingerprint(place, packed[kind])
    return digest


def _changes(keyspace: bytes, chunk_hash: bytes, held: HeldChunk) -> list[LocationChange]:
    head = held.group_head
    return [
        LocationChange(keyspace, chunk_hash, head, tier, shards, 0)
        for tier, shards in zip(_TIERS, held.shards, strict=True)
        if shards
    ]


def _union(one: HeldChunk, other: HeldChunk) -> HeldChunk:
    gpu, staging, disk = (mine | its for mine, its in zip(one.shards, other.shards, strict=True))
    return HeldChunk(one.group_head, (gpu, staging, disk), one.full_shards)
