"""The packed value of a chunk against a model that knows nothing of its bytes."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.cluster import ALL_SHARDS, ChainQuery, LocationChange
from kvpool.core.errors import InvalidRequest
from kvpool.core.outcome import Tier
from kvpool_index.core.entries import (
    MAX_ENTRIES,
    Entry,
    Operation,
    TierMasks,
    apply_operation,
    decode_value,
    encode_entry,
    group_reads,
    operations_of,
    ordinals_in,
)

GRID = 0b1001001  # of two shards a layer group that are no whole chunk, behind one that is
bitmaps = st.one_of(st.just(GRID), st.integers(0, (1 << 9) - 1), st.just(ALL_SHARDS))
masks = st.tuples(*[bitmaps] * 3)
operations = st.builds(Operation, ordinal=st.integers(1, 4), full_shards=st.just(GRID), added=masks, removed=masks)


def apply_to_model(model: dict[int, list[set[int]]], operation: Operation) -> None:
    tiers = model.setdefault(operation.ordinal, [set(), set(), set()])
    for shards, added, removed in zip(tiers, operation.added, operation.removed, strict=True):
        shards |= {bit for bit in range(64) if added >> bit & 1}
        shards -= {bit for bit in range(64) if removed >> bit & 1}


def as_model(value: bytes) -> dict[int, list[set[int]]]:
    return {
        entry.ordinal: [{bit for bit in range(64) if shards >> bit & 1} for shards in entry.shards]
        for entry in decode_value(value, GRID)
    }


@given(st.lists(operations, max_size=12))
def test_operations_do_what_sets_do(history: list[Operation]) -> None:
    value, model = b"", dict[int, list[set[int]]]()
    for operation in history:
        value = apply_operation(value, operation)
        apply_to_model(model, operation)
    assert as_model(value) == {ordinal: tiers for ordinal, tiers in model.items() if any(tiers)}
    assert ordinals_in(value) == sorted(as_model(value))


@given(st.lists(operations.filter(lambda each: each.ordinal == 1), min_size=1, max_size=6))
def test_folded_operations_do_the_same_as_one_after_the_other(history: list[Operation]) -> None:
    one_by_one = folded = b""
    for operation in history:
        one_by_one = apply_operation(one_by_one, operation)
    whole = history[0]
    for operation in history[1:]:
        whole = whole.then(operation)
    folded = apply_operation(folded, whole)
    assert folded == one_by_one


@given(masks.filter(any))
def test_equal_locations_are_equal_bytes(shards: TierMasks) -> None:
    at_once = apply_operation(None, Operation(ordinal=7, full_shards=GRID, added=shards))
    value = b""
    for bit in range(64):
        step = tuple(mask & 1 << bit for mask in shards)
        value = apply_operation(value, Operation(ordinal=7, full_shards=GRID, added=(step[0], step[1], step[2])))
    assert value == at_once


def test_a_whole_chunk_takes_five_bytes() -> None:
    value = apply_operation(None, Operation(ordinal=0x01020304, full_shards=GRID, added=(0, GRID, GRID)))
    assert value == b"\x04\x03\x02\x01\x06"
    assert decode_value(value, GRID) == (Entry(0x01020304, (0, GRID, GRID)),)


def test_other_shards_than_a_whole_chunk_have_their_bitmap() -> None:
    for shards in (5, GRID | 1 << 1, ALL_SHARDS):
        value = encode_entry(Entry(1, (0, 0, shards)), GRID)
        assert value == b"\x01\0\0\0\x44" + shards.to_bytes(8, "little")
        assert decode_value(value, GRID) == (Entry(1, (0, 0, shards)),)


def test_a_whole_chunk_of_a_grid_that_is_not_known_stays_or_goes_as_a_whole() -> None:
    """Which shards it has cannot be said, so that no others may be made of it."""
    whole = apply_operation(None, Operation(ordinal=1, full_shards=GRID, added=(0, GRID, GRID)))
    beside = apply_operation(whole, Operation(ordinal=1, full_shards=0, added=(0, 0b10, 0)))
    assert decode_value(beside, GRID) == (Entry(1, (0, 0b10, GRID)),)
    removed = apply_operation(whole, Operation(ordinal=1, full_shards=0, removed=(0, 0, 1)))
    assert decode_value(removed, GRID) == (Entry(1, (0, GRID, 0)),)
    assert apply_operation(removed, Operation(ordinal=1, full_shards=0, removed=(0, ALL_SHARDS, 0))) == b""
    assert apply_operation(whole, Operation(ordinal=1, full_shards=0)) == whole


def test_other_nodes_entries_keep_their_bytes() -> None:
    unknown_grid = apply_operation(None, Operation(ordinal=1, full_shards=0, added=(0, GRID, 0)))
    both = apply_operation(unknown_grid, Operation(ordinal=2, full_shards=GRID, added=(0, GRID, 0)))
    assert both.startswith(unknown_grid)


def test_a_further_node_than_the_limit_is_not_recorded() -> None:
    value = b""
    for ordinal in range(1, MAX_ENTRIES + 2):
        value = apply_operation(value, Operation(ordinal=ordinal, full_shards=GRID, added=(GRID, 0, 0)))
    assert ordinals_in(value) == list(range(1, MAX_ENTRIES + 1))


def test_nothing_is_nothing() -> None:
    assert decode_value(None, GRID) == decode_value(b"", GRID) == ()
    assert apply_operation(None, Operation(ordinal=1, full_shards=GRID, removed=(GRID, GRID, GRID))) == b""


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
