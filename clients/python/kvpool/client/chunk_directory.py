"""Which chunks a node may hold, by digest range; what it holds of each, its owner is asked when it matters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvpool.core.cluster import LocationChange
from kvpool.core.location_digest import FIELD_BYTES, ChunkPlace, HeldChunk, fingerprint, holding, range_of
from kvpool.core.outcome import Tier

_HASH_BYTES = 16
_TIERS = (Tier.GPU, Tier.STAGING, Tier.DISK)


class LocationTruth(Protocol):
    """The owner of what is announced. Called on the event loop; each call tells what is true at that moment."""

    def chunks(self) -> Iterable[ChunkPlace]:
        """Every chunk held. Asked once, when the link is made; later ones are learnt from what is announced."""
        ...

    def settle(self) -> None:
        """Announce, before this returns, all changes that `locate` would already show."""
        ...

    def locate(self, keyspace: bytes, chunk_hash: bytes) -> Sequence[HeldChunk]:
        """What is held of a chunk now, under each group head it has; empty if nothing is."""
        ...

    def keyspace_encodings(self) -> Sequence[bytes]:
        """Canonical encodings of the keyspaces that chunks belong to."""
        ...


class NoLocations:
    """LocationTruth of a node that holds nothing."""

    def chunks(self) -> Iterable[ChunkPlace]:
        return ()

    def settle(self) -> None:
        pass

    def locate(self, keyspace: bytes, chunk_hash: bytes) -> Sequence[HeldChunk]:
        return ()

    def keyspace_encodings(self) -> Sequence[bytes]:
        return ()


class FixedLocations:
    """LocationTruth of a node whose chunks never change: each is held whole, in the tier it is said to be in."""

    def __init__(self, changes: Iterable[LocationChange]) -> None:
        self._changes = {(change.keyspace, change.chunk_hash): change for change in changes}

    def chunks(self) -> Iterable[ChunkPlace]:
        return [
            ChunkPlace(change.keyspace, change.chunk_hash, change.group_head_hash) for change in self._changes.values()
        ]

    def settle(self) -> None:
        pass

    def locate(self, keyspace: bytes, chunk_hash: bytes) -> Sequence[HeldChunk]:
        change = self._changes.get((keyspace, chunk_hash))
        if change is None:
            return ()
        gpu, staging, disk = (change.added_shards if change.tier == tier else 0 for tier in _TIERS)
        return (HeldChunk(change.group_head_hash, (gpu, staging, disk), change.added_shards),)

    def keyspace_encodings(self) -> Sequence[bytes]:
        return ()


class ChunkDirectory:
    """Sixteen bytes for each chunk that was held or announced since its range was last looked through.

    A chunk that is gone, or named twice, is dropped when its range is looked through. Each look at a range is one step
    without an await, so that what it says was true at one moment.
    """

    def __init__(self, truth: LocationTruth) -> None:
        self._truth = truth
        self._hashes: dict[int, dict[bytes, bytearray]] = {}  # by range and keyspace
        for place in truth.chunks():
            self._note(place.keyspace, place.chunk_hash, place.group_head)

    def note(self, change: LocationChange) -> int:
        """Remember the chunk of a change if something was added; the range that the change falls into."""
        if change.added_shards:
            return self._note(change.keyspace, change.chunk_hash, change.group_head_hash)
        return range_of(change.group_head_hash)

    def ranges(self) -> list[int]:
        """Ranges with chunks."""
        return list(self._hashes)

    def digest(self, range_number: int) -> int:
        """The digest of what is held in a range now."""
        found: dict[bytes, HeldChunk] = {}
        for place, held in self._held(range_number):
            # The index tells chunks of a group apart by their fields alone.
            at = place.keyspace + held.group_head + place.chunk_hash[:FIELD_BYTES]
            known = found.get(at)
            found[at] = held if known is None else _union(known, held)
        digest = 0
        packed: dict[tuple[tuple[int, int, int], int], bytes] = {}  # few differ
        for at, held in found.items():
            kind = (held.shards, held.full_shards)
            if kind not in packed:
                packed[kind] = holding(*kind)
            digest ^= fingerprint(at, packed[kind])
        return digest

    def changes(self, range_number: int) -> list[LocationChange]:
        """All that is held in a range now, one item for each chunk and tier, ordered by bucket."""
        items = [
            LocationChange(
                keyspace=place.keyspace,
                chunk_hash=place.chunk_hash,
                group_head_hash=held.group_head,
                tier=tier,
                added_shards=shards,
                removed_shards=0,
            )
            for place, held in self._held(range_number)
            for tier, shards in zip(_TIERS, held.shards, strict=True)
            if shards
        ]
        items.sort(key=lambda item: item.group_head_hash[-2:])
        return items

    def _note(self, keyspace: bytes, chunk_hash: bytes, group_head: bytes) -> int:
        at = range_of(group_head)
        self._packed(at, keyspace).extend(chunk_hash)
        return at

    def _packed(self, range_number: int, keyspace: bytes) -> bytearray:
        by_keyspace = self._hashes.get(range_number)
        if by_keyspace is None:
            by_keyspace = self._hashes[range_number] = {}
        packed = by_keyspace.get(keyspace)
        if packed is None:
            packed = by_keyspace[keyspace] = bytearray()
        return packed

    def _held(self, range_number: int) -> list[tuple[ChunkPlace, HeldChunk]]:
        """What is held in a range now; what is not held any more is forgotten."""
        self._truth.settle()
        noted = self._hashes.pop(range_number, {})
        found: list[tuple[ChunkPlace, HeldChunk]] = []
        try:
            for keyspace, packed in noted.items():
                raw = bytes(packed)
                for chunk_hash in {raw[at : at + _HASH_BYTES] for at in range(0, len(raw), _HASH_BYTES)}:
                    for held in self._truth.locate(keyspace, chunk_hash):
                        if range_of(held.group_head) == range_number and any(held.shards):
                            found.append((ChunkPlace(keyspace, chunk_hash, held.group_head), held))
        except BaseException:
            for keyspace, packed in noted.items():
                self._packed(range_number, keyspace).extend(packed)
            raise
        for place, _ in found:
            self._packed(range_number, place.keyspace).extend(place.chunk_hash)
        return found


def _union(one: HeldChunk, other: HeldChunk) -> HeldChunk:
    gpu, staging, disk = (mine | its for mine, its in zip(one.shards, other.shards, strict=True))
    return HeldChunk(one.group_head, (gpu, staging, disk), one.full_shards)
