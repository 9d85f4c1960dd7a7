"""However chunks come and go between the steps of a comparison: what it says of cells that did not change is true."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import reduce
from operator import xor
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core.cluster import LocationChange
from kvpool.core.location_digest import ChunkPlaces, HeldChunk, PartSpan, fingerprint, holding, part_of, range_of
from kvpool.core.outcome import Tier
from kvpool_server.node import chunk_directory, chunk_table
from kvpool_server.node.chunk_directory import Cell, ChunkDirectory

KEYSPACES = [b"a" * 16, b"b" * 16]
HEADS = [bytes(14) + tail for tail in (b"\x00\x00", b"\x00\x01", b"\x00\x02", b"\x00\x21")]  # the last in another range
HASHES = [bytes([number % 3, number % 5, number, 7]) * 4 for number in range(40)]
RANGES = [0, 2]
Place = tuple[bytes, bytes, bytes]  # keyspace, head, hash


class DirectoryMachine(RuleBasedStateMachine):
    """Small buckets and small steps, beside a model that has all chunks in one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Place, int] = {}
        self.directory = ChunkDirectory(self)
        self.refreshing: tuple[int, Iterator[None]] | None = None
        self.touched: set[Cell] = set()
        self.patches = [
            mock.patch.object(chunk_table, "_BUCKET_CHUNKS", 2),
            mock.patch.object(chunk_directory, "_STEP_CHUNKS", 1),
            mock.patch.object(chunk_directory, "_LOAD_CHUNKS", 2),
            mock.patch.object(chunk_directory, "_COUNTED_CHUNKS", 4),
            mock.patch.object(chunk_directory, "_LARGE_GROUP_CHUNKS", 6),
        ]
        for patch in self.patches:
            patch.start()

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()

    # LocationTruth

    def chunks(self) -> Iterator[ChunkPlaces]:
        places = [(keyspace, chunk_hash, head) for keyspace, head, chunk_hash in self.held]
        for start in range(0, len(places), 5):  # some come twice
            yield from ChunkPlaces.of(places[start : start + 7])

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> list[tuple[bytes, HeldChunk]]:
        return [
            (chunk_hash, HeldChunk(head, (0, 0, shards), 1))
            for chunk_hash in chunk_hashes
            for head in HEADS
            if (shards := self.held.get((keyspace, head, chunk_hash)))
        ]

    def keyspace_encodings(self) -> list[bytes]:
        return []

    # What happens

    @initialize(
        places=st.dictionaries(
            st.tuples(*map(st.sampled_from, (KEYSPACES, HEADS, HASHES))), st.integers(1, 3), max_size=60
        )
    )
    def load(self, places: dict[Place, int]) -> None:
        self.held |= places
        for _ in self.directory.load():
            pass

    @rule(
        keyspace=st.sampled_from(KEYSPACES),
        head=st.sampled_from(HEADS),
        hashes=st.sets(st.sampled_from(HASHES)),
        s=st.integers(0, 3),
    )
    def change(self, keyspace: bytes, head: bytes, hashes: set[bytes], s: int) -> None:
        for chunk_hash in hashes:
            self.held.pop((keyspace, head, chunk_hash), None)
            if s:
                self.held[keyspace, head, chunk_hash] = s
            change = LocationChange(
                keyspace=keyspace,
                chunk_hash=chunk_hash,
                group_head_hash=head,
                tier=Tier.DISK,
                added_shards=s,
                removed_shards=3 & ~s,
            )
            self.touched.add(self.directory.note(change))

    @rule(number=st.sampled_from(RANGES), groups=st.sets(st.tuples(st.sampled_from(KEYSPACES), st.sampled_from(HEADS))))
    def keep_apart(self, number: int, groups: set[tuple[bytes, bytes]]) -> None:
        self.refreshing = None
        here = {group for group in groups if range_of(group[1]) == number}
        self.directory.keep_apart(number, here)
        assert here <= set(self.directory.groups(number))

    @rule()
    def keep_large_apart(self) -> None:
        self.refreshing = None
        self.directory.keep_large_apart()

    @rule(number=st.sampled_from(RANGES))
    def clear(self, number: int) -> None:
        """All of a keyspace goes, and no change of it is announced."""
        keyspace = KEYSPACES[number // 2]
        self.refreshing = None
        self.held = {place: shards for place, shards in self.held.items() if place[0] != keyspace}
        self.directory.mark_changed(keyspace)

    @rule(number=st.sampled_from(RANGES), turn=st.integers(0, 64))
    def begin(self, number: int, turn: int) -> None:
        self.touched.clear()
        self.directory.recheck(number, turn)
        self.refreshing = number, self.directory.refresh(number)

    @precondition(lambda self: self.refreshing is not None)
    @rule(steps=st.integers(1, 20))
    def step(self, steps: int) -> None:
        assert self.refreshing is not None
        number, refresh = self.refreshing
        for _ in range(steps):
            if next(refresh, self) is self:
                self.refreshing = None
                return self.compare(number)
        return None

    def compare(self, number: int) -> None:
        groups = self.directory.groups(number)
        if number not in self.touched:
            wanted = {place for place in self._in_range(number) if place[:2] not in groups}
            assert self.directory.rest_digest(number) == self._digest(wanted)
        self.directory.digest(number)  # what changed in between: parts move between buckets
        for group in groups:
            digests = self.directory.part_digests(*group)
            for part in {part_of(chunk_hash) for chunk_hash in HASHES}:
                if PartSpan(*group, part) not in self.touched:
                    wanted = {place for place in self.held if place[:2] == group and part_of(place[2]) == part}
                    assert digests[part] == self._digest(wanted)

    @invariant()
    def contents_are_true(self) -> None:
        for number in RANGES:
            found = self.directory.changes(number)
            for keyspace, head in self.directory.groups(number):
                for part in {part_of(chunk_hash) for chunk_hash in HASHES}:
                    found += self.directory.part_changes(PartSpan(keyspace, head, part))
            places = [(one.keyspace, one.group_head_hash, one.chunk_hash) for one in found]
            assert len(places) == len(set(places)) and set(places) == self._in_range(number)

    @rule(number=st.sampled_from(RANGES))
    def digest(self, number: int) -> None:
        assert self.directory.digest(number) == self._digest(self._in_range(number))
        assert self.directory.chunk_count(number) >= len({(place[0], place[2]) for place in self._in_range(number)})

    def _in_range(self, number: int) -> set[Place]:
        return {place for place in self.held if range_of(place[1]) == number}

    def _digest(self, places: set[Place]) -> int:
        prints = [
            fingerprint(keyspace + head + chunk_hash[:8], holding((0, 0, self.held[keyspace, head, chunk_hash]), 1))
            for keyspace, head, chunk_hash in places
        ]
        return reduce(xor, prints, 0)


DirectoryMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestChunkDirectory = DirectoryMachine.TestCase
