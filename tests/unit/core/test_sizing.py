"""What is said to fit is what the tiers' own budgets say."""

from __future__ import annotations

import pytest

from kvpool.core.grid import shards_in
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.page import page_bytes
from kvpool.core.payload import ShardPayload
from kvpool.core.sizing import KeyspaceSize
from kvpool_pagestore.core.extents import ExtentBudget, charged_bytes
from kvpool_pagestore.core.slots import slot_bytes_for

MODELS = {
    "llama-8b": KvGroup(32, 8, 128),
    "llama-405b": KvGroup(126, 8, 128),  # its layer groups are not equal
    "deepseek-v3": KvGroup.mla(61, 576),
    "tiny": KvGroup(2, 2, 16),
}


def size_of(group: KvGroup, codec: Codec = Codec.RAW, chunk_tokens: int = 256) -> KeyspaceSize:
    return KeyspaceSize(
        KeyspaceSpec(
            model_id="m", model_revision="1", groups=(group,), dtype=Dtype.BF16, codec=codec, chunk_tokens=chunk_tokens
        )
    )


def pages_of(sizes: KeyspaceSize) -> list[int]:
    grid = sizes.grid
    return [ShardPayload.of(sizes.spec, grid, shard).slot_bytes for shard in shards_in(grid.all_shards)]


def test_a_token_takes_its_rows_and_no_more() -> None:
    assert size_of(MODELS["llama-8b"]).token_bytes == 2 * 32 * 8 * 128 * 2
    assert size_of(MODELS["deepseek-v3"]).token_bytes == 61 * 576 * 2
    assert size_of(MODELS["llama-8b"], Codec.INT8_GROUP8).token_bytes == 2 * 32 * 8 * 128 * (1 + 2 / 8)


@pytest.mark.parametrize("name", MODELS)
def test_slots_are_those_of_the_pagestore(name: str) -> None:
    sizes = size_of(MODELS[name])
    pages = pages_of(sizes)
    assert all(slot_bytes_for(each) == each for each in pages)
    assert sizes.chunk_staging_bytes == sum(pages)
    # A chunk more would need more segments than there are, if each size has whole segments of its own.
    segment_bytes, arena_bytes = 64 << 20, 64 << 30
    chunks = sizes.staging_tokens(arena_bytes, segment_bytes) // 256
    needed = {each: -(-pages.count(each) * chunks // (segment_bytes // each)) for each in set(pages)}
    assert (
        arena_bytes // segment_bytes - len(needed) <= sum(needed.values()) <= arena_bytes // segment_bytes + len(needed)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("disk_bytes", [0, 1 << 20, 1 << 30, 1 << 40])
def test_a_disk_holds_what_its_budget_allows(name: str, disk_bytes: int) -> None:
    sizes = size_of(MODELS[name])
    grid = sizes.grid
    shards = [ShardPayload.of(sizes.spec, grid, shard) for shard in shards_in(grid.all_shards)]
    charged = sum(charged_bytes(page_bytes(shard.payload_bytes)) for shard in shards)
    assert sizes.chunk_disk_bytes == charged
    assert sizes.disk_tokens(disk_bytes) // 256 == pytest.approx(
        ExtentBudget(disk_bytes).live_limit_bytes // charged, abs=1
    )


def test_a_page_that_does_not_fit_a_segment_holds_nothing() -> None:
    assert size_of(MODELS["llama-8b"]).staging_tokens(1 << 30, 1 << 20) == 0


def test_degrees_of_tp_and_memory_of_the_index() -> None:
    sizes = size_of(MODELS["llama-8b"])
    assert sizes.tp_degrees == (1, 2, 4, 8)
    assert sizes.index_bytes(1_000_000) == 3906 * 40
    assert sizes.index_bytes(1_000_000, copies=3) == 3906 * 50
