"""Malformed loads and stores are refused by name, before anything is touched."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.core.chunks import ROOT_HASH, ChunkRange
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.geometry import KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.retention import Retention
from kvpool.core.spans import PageSpan
from kvpool_gpuagent.core.requests import Rank, check_load, check_store, page_span, window_of
from tests.fixtures.layout_presets import contiguous_layout, vllm_cpu_opaque_layout
from tests.unit.gpuagent.runs import LAYOUT, RANK, SPEC, chunk_hash, span

MAX_CHUNKS = 64


def change_blocks(whole: ChunkRange, position: int, *ids: int) -> ChunkRange:
    block_ids = whole.block_ids.copy()
    block_ids[position] = ids
    return replace(whole, block_ids=block_ids)


def test_what_engines_ask_passes() -> None:
    for numbers in (range(1), range(3), range(16), range(15, 40), [17]):
        check_store(span(numbers), RANK, max_chunks=MAX_CHUNKS)
        check_load(span(numbers, skip_tokens=31), RANK, max_chunks=MAX_CHUNKS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"chunk_hashes": b""}, "1 to 64 chunks, got 0"),
        ({"first_chunk_index": -1}, "first_chunk_index"),
        ({"parent_hash": b"short"}, "parent_hash must have 16 bytes"),
        ({"parent_hash": chunk_hash(9)}, "parent_hash must be 16 zero bytes for chunk 0"),
        ({"first_chunk_index": 1}, "parent_hash must be 16 zero bytes for chunk 0, and for no other"),
        ({"group_head_hashes": ()}, "1 chain groups but group_head_hashes has 0"),
        ({"group_head_hashes": (chunk_hash(0), chunk_hash(1))}, "has 2"),
        ({"group_head_hashes": (b"x",)}, r"group_head_hashes\[0\] must have 16 bytes"),
        ({"group_head_hashes": (chunk_hash(7),)}, r"group_head_hashes\[0\] must be the hash of chunks\[0\]"),
        ({"block_ids": np.arange(9).reshape(3, 3)}, "block_ids must name 4 blocks of 8 tokens for each of 3 .* got 9"),
        ({"block_ids": np.zeros((3, 0), np.int64)}, "block_ids must name 4 blocks of 8 tokens for each of 3 .* got 0"),
        ({"block_ids": np.arange(8).reshape(2, 4)}, "block_ids must name 4 blocks of 8 tokens for each of 3 .* got 8"),
        ({"block_ids": np.arange(12)}, "block_ids must name 4 blocks"),
        ({"block_ids": np.arange(12).reshape(3, 2, 2)}, "block_ids must name 4 blocks"),
    ],
)
def test_a_malformed_span_is_refused(changes: dict[str, Any], named: str) -> None:
    for check in (check_store, check_load):
        with pytest.raises(InvalidRequest, match=named):
            check(replace(span(range(3)), **changes), RANK, max_chunks=MAX_CHUNKS)


def test_a_group_that_begins_in_the_middle_must_be_named_after_its_first_chunk() -> None:
    whole = span(range(14, 18))
    check_load(whole, RANK, max_chunks=MAX_CHUNKS)
    wrong = replace(whole, group_head_hashes=(whole.group_head_hashes[0], chunk_hash(17)))
    with pytest.raises(InvalidRequest, match=r"group_head_hashes\[1\]") as refused:
        check_load(wrong, RANK, max_chunks=MAX_CHUNKS)
    assert refused.value.item_index == 2


@pytest.mark.parametrize(
    ("block_ids", "named"),
    [
        ((0, 1, 2, 400), r"chunks\[1\].block_ids must lie in \[0, 400\), got 0 to 400"),
        ((0, 1, -1, 3), r"got -1 to 3"),
        ((0, 1, 2, (1 << 63) - 1), r"chunks\[1\].block_ids must lie in"),
        ((-(1 << 63), 1, 2, 3), r"chunks\[1\].block_ids must lie in"),
    ],
)
def test_a_block_outside_of_the_cache_is_refused_with_its_chunk(block_ids: tuple[int, ...], named: str) -> None:
    for check in (check_store, check_load):
        with pytest.raises(InvalidRequest, match=named) as refused:
            check(change_blocks(span(range(3)), 1, *block_ids), RANK, max_chunks=MAX_CHUNKS)
        assert refused.value.item_index == 1


def test_too_many_chunks_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="1 to 2 chunks, got 3"):
        check_store(span(range(3)), RANK, max_chunks=2)


def test_a_load_names_no_block_twice_but_a_store_may() -> None:
    twice = change_blocks(span(range(3)), 2, 8, 9, 10, 5)
    with pytest.raises(InvalidRequest, match="block 5 twice"):
        check_load(twice, RANK, max_chunks=MAX_CHUNKS)
    check_store(twice, RANK, max_chunks=MAX_CHUNKS)


def test_blocks_that_are_skipped_whole_may_repeat() -> None:
    whole = change_blocks(span(range(2), skip_tokens=16), 0, 4, 4, 1, 2)
    check_load(whole, RANK, max_chunks=MAX_CHUNKS)
    with pytest.raises(InvalidRequest, match="block 4 twice"):
        check_load(replace(whole, skip_tokens=15), RANK, max_chunks=MAX_CHUNKS)


@pytest.mark.parametrize("skip_tokens", [-1, 32, (1 << 63) - 1, -(1 << 63)])
def test_tokens_skipped_lie_in_the_chunk(skip_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match=r"chunks\[0\].skip_tokens"):
        check_load(span(range(1), skip_tokens=skip_tokens), RANK, max_chunks=MAX_CHUNKS)


def test_an_opaque_cell_is_not_skipped_in_part() -> None:
    opaque = OpaqueLayout(engine="e", layout_id="l", isa="", block_tokens=8, cell_bytes=64)
    spec = replace(SPEC, payload=PayloadKind.OPAQUE, opaque=opaque)
    layout = vllm_cpu_opaque_layout(spec, range(4), range(4), 8, 16)
    rank = Rank.of(spec, layout)
    check_load(span(range(1), skip_tokens=8), rank, max_chunks=MAX_CHUNKS)
    with pytest.raises(InvalidRequest, match="multiple of the block"):
        check_load(span(range(1), skip_tokens=4), rank, max_chunks=MAX_CHUNKS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"chain_head_hash": b""}, "chain_head_hash must have 16 bytes, got 0"),
        ({"chain_head_hash": chunk_hash(5)}, "chain_head_hash must be the hash of chunk 0"),
        ({"retention": Retention(ttl_ms=-1)}, "retention.ttl_ms"),
        ({"retention": Retention(priority=101)}, "retention.priority"),
        ({"retention": Retention(pinned_until_us=-5)}, "retention.pinned_until_us"),
    ],
)
def test_what_only_a_store_names_is_checked(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_store(replace(span(range(2)), **changes), RANK, max_chunks=MAX_CHUNKS)


def pages_of(whole: ChunkRange, chunks: range, sources: Sequence[tuple[RemoteSource, ...]] = ()) -> PageSpan:
    """Two pages of each of some chunks."""
    positions = np.repeat(np.arange(len(chunks), dtype=np.int32), 2)
    shards = np.tile(np.array([0, 3], dtype=np.uint8), len(chunks))
    return page_span(RANK, whole, chunks, positions, shards, sources)


def test_retention_is_kept_beside_every_page() -> None:
    retained = replace(span(range(2)), retention=Retention(ttl_ms=5, priority=-3, pinned_until_us=7))
    first, kept = pages_of(retained, range(2)).metadata
    assert (kept.ttl_ms, kept.priority, kept.pinned_until_us) == (5, -3, 7)
    assert (first.parent_hash, kept.parent_hash) == (ROOT_HASH, chunk_hash(0))
    assert pages_of(span(range(2)), range(2)).retention == ()


def test_each_page_has_the_retention_and_the_prompt_length_of_its_request() -> None:
    wanted = replace(span(range(3)), retention=Retention(priority=4, ttl_ms=7), prompt_tokens=60)
    kept = pages_of(wanted, range(3)).metadata
    assert [(one.ttl_ms, one.priority, one.prompt_tokens) for one in kept] == [(7, 4, 60)] * 3


def test_pages_of_some_chunks_of_a_request_are_those_of_the_chain() -> None:
    whole = span(range(13, 20))
    source = RemoteSource(node_id=b"r" * 16, incarnation=3, bulk_endpoint="host:1")
    pages = pages_of(whole, range(2, 5), [()] * 3 + [(source,)] * 4)
    assert [key.chunk_hash[0] for key in pages.page_keys] == [15, 15, 16, 16, 17, 17]
    assert [key.shard for key in pages.page_keys] == [0, 3] * 3
    assert [one.chunk_index for one in pages.metadata] == [15, 16, 17]
    assert [one.parent_hash for one in pages.metadata] == [chunk_hash(14), chunk_hash(15), chunk_hash(16)]
    assert [one.group_head_hash for one in pages.metadata] == [chunk_hash(0), chunk_hash(16), chunk_hash(16)]
    assert pages.chunk_sources == ((), (source,), (source,))
    assert pages_of(whole, range(2, 5)).sources == ()


@pytest.mark.parametrize(("window_bytes", "pages"), [(1, 1), (6_000, 1), (4 * 4096, 4), (20_000, 5), (1 << 30, 7)])
def test_a_window_has_about_so_many_bytes_and_no_more_pages_than_the_pool_allows(window_bytes: int, pages: int) -> None:
    assert RANK.page_sizes[0] == 4096 + 64
    assert window_of(RANK, 7, window_bytes) == pages


def test_a_rank_owns_the_shards_of_its_layers_and_heads() -> None:
    wide = replace(SPEC, groups=(KvGroup(32, 8, 128),), chunk_tokens=256)  # 4 layer groups x (1 + 2 + 4 + 8) parts
    upper = Rank.of(wide, contiguous_layout(wide, range(16, 32), range(2, 4), 16, 64))
    assert upper.shard_list == [2 * 15 + 1 + 2 + 1, 3 * 15 + 1 + 2 + 1]
    assert Rank.of(wide, contiguous_layout(wide, range(32), range(8), 16, 64)).shard_list == [0, 15, 30, 45]
    assert upper.blocks_per_chunk == 16
    assert upper.opened(b"k" * 16).keyspace == b"k" * 16


def test_a_partition_that_is_no_union_of_shards_is_refused_naming_the_grid() -> None:
    wide = replace(SPEC, groups=(KvGroup(32, 8, 128),), chunk_tokens=256)
    with pytest.raises(PartitionRefused, match=r"4 layer groups .* 8 KV heads in 1, 2, 4, 8 parts"):
        Rank.of(wide, contiguous_layout(wide, range(4), range(8), 16, 64))


def test_a_layout_that_does_not_fit_is_refused_naming_the_argument() -> None:
    with pytest.raises(InvalidRequest, match="block_tokens 7"):
        Rank.of(SPEC, replace(LAYOUT, block_tokens=7))
