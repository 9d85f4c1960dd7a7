"""Cutting chains into groups, and folding announcements."""

import secrets

import pytest

from kvpool.core.cluster import ChainQuery, LocationChange
from kvpool.core.errors import InvalidRequest
from kvpool.core.outcome import Tier
from kvpool_index.core.entries import group_reads, operations_of

KEYSPACE = bytes(16)


def query(count: int, first: int = 0, head: bytes = b"") -> ChainQuery:
    hashes = b"".join(number.to_bytes(16, "big") for number in range(first, first + count))
    return ChainQuery(keyspace=KEYSPACE, chunk_hashes=hashes, first_chunk_index=first, group_head_hash=head)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 63, 512])
@pytest.mark.parametrize("first", [0, 16, 1, 7, 15, 31])
def test_every_chunk_is_read_once_from_its_group(count: int, first: int) -> None:
    within = first % 16
    head = (first - within).to_bytes(16, "big") if within else b""
    reads = group_reads(query(count, first, head))
    found = [(int.from_bytes(read.head, "big"), field) for read in reads for field in read.fields]
    expected = [(index // 16 * 16, index.to_bytes(16, "big")[:8]) for index in range(first, first + count)]
    assert found == expected
    assert all(read.fields for read in reads)


def test_fields_are_the_first_half_of_the_hash() -> None:
    hashes = secrets.token_bytes(32)
    (read,) = group_reads(ChainQuery(keyspace=KEYSPACE, chunk_hashes=hashes))
    assert list(read.fields) == [hashes[:8], hashes[16:24]]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (ChainQuery(keyspace=KEYSPACE, chunk_hashes=b"x" * 17), "17 bytes"),
        (ChainQuery(keyspace=KEYSPACE, chunk_hashes=b"x" * 16, first_chunk_index=-1), "first_chunk_index"),
        (ChainQuery(keyspace=KEYSPACE, chunk_hashes=b"x" * 16, first_chunk_index=17), "chunk 16"),
        (ChainQuery(keyspace=KEYSPACE, chunk_hashes=b"x" * 16, group_head_hash=b"y" * 16), "group_head_hash"),
    ],
)
def test_what_is_refused(bad: ChainQuery, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        group_reads(bad)


def change(chunk: bytes, tier: Tier, added: int, removed: int, keyspace: bytes = KEYSPACE) -> LocationChange:
    return LocationChange(
        keyspace=keyspace,
        chunk_hash=chunk,
        group_head_hash=b"h" * 16,
        tier=tier,
        added_shards=added,
        removed_shards=removed,
    )


def test_changes_of_one_chunk_are_folded_in_order() -> None:
    a, b = b"a" * 16, b"b" * 16
    changes = [
        change(a, Tier.STAGING, 0b11, 0),
        change(b, Tier.DISK, 0b1, 0),
        change(a, Tier.DISK, 0b11, 0),
        change(a, Tier.STAGING, 0, 0b01),
        change(a, Tier.STAGING, 0b100, 0),
        change(a, Tier.STAGING, 0b001, 0, keyspace=b"k" * 16),
    ]
    grids = {KEYSPACE: 0b111, b"k" * 16: 0}
    first, second, third = operations_of(changes, ordinal=9, full_shards=grids.__getitem__)
    assert (first.chunk_hash, first.operation.added, first.operation.removed) == (a, (0, 0b111, 0b11), (0, 0b001, 0))
    assert (second.chunk_hash, second.operation.added) == (b, (0, 0, 0b1))
    assert (third.keyspace, third.operation.full_shards, first.operation.full_shards) == (b"k" * 16, 0, 0b111)
    assert {each.operation.ordinal for each in (first, second, third)} == {9}
