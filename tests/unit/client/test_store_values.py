"""Settings, names and places of the pool without an agent: pure parts."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.client.object_store import object_hash
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_values import ChunkPlace, consecutive, wanted_pages
from kvpool.connectors.lmcache_objects import ObjectNames, layout_of_description, layout_of_object, object_key
from kvpool.core.errors import InvalidRequest
from kvpool.core.external_keys import foreign_chunk_hash, object_keyspace, object_range
from kvpool.core.grid import LARGEST_PAGE_BYTES, ShardGrid
from kvpool.core.payload import ShardPayload

GIVEN: dict[str, Any] = {"index_endpoints": ["a:1", "b:2"], "pagestore": "unix:/p"}


def test_settings_from_an_engines_json() -> None:
    config = StoreConfig.of({**GIVEN, "load_timeout_s": 3, "something of the engine": 1})
    assert config.index_endpoints == ("a:1", "b:2") and config.load_timeout_s == 3
    assert StoreConfig.of({**GIVEN, "index_endpoints": "a:1, b:2"}).index_endpoints == ("a:1", "b:2")
    assert config.client.index_endpoints == ("a:1", "b:2")
    assert "secret" not in repr(StoreConfig.of({**GIVEN, "bearer_token": "secret"}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pagestore": ""}, "pagestore"),
        ({"index_endpoints": []}, "index_endpoints"),
        ({"index_endpoints": [1]}, "index_endpoints"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
        ({"load_timeout_s": "1"}, "load_timeout_s"),
        ({"pages_in_flight": 0}, "pages_in_flight"),
        ({"copy_threads": True}, "copy_threads"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        StoreConfig.of({**GIVEN, **change})


@pytest.mark.parametrize(
    ("trusts_arena", "threads", "writers"), [(True, 12, 3), (True, 4, 2), (True, 1, 1), (False, 8, 8), (False, 1, 1)]
)
def test_stores_that_only_copy_take_a_quarter_of_the_threads(trusts_arena: bool, threads: int, writers: int) -> None:
    config = StoreConfig.of({**GIVEN, "trusts_arena": trusts_arena, "copy_threads": threads})
    assert config.store_threads == writers


def test_chains_are_asked_for_in_runs() -> None:
    hashes = [bytes([number]) * 16 for number in range(40)]
    chain = ChunkPlace.chain(hashes, 3)
    assert chain[0].parent_hash == hashes[2] and chain[13].group_head_hash == hashes[16]
    assert [(run.start, run.stop) for run in consecutive(chain, 30)] == [(0, 30), (30, 37)]
    alone = [ChunkPlace.alone(one) for one in hashes[:3]]
    assert [len(run) for run in consecutive([*alone, *chain], 100)] == [1, 1, 1, 37]
    assert not list(consecutive([], 10))


def test_objects_are_cut_into_pages_without_a_gap() -> None:
    largest = LARGEST_PAGE_BYTES
    for size_bytes in (
        1,
        4095,
        4096,
        1 << 20,
        largest - 4095,
        largest - 1,
        largest,
        largest + 1,
        2 * largest + 1,
        600 << 20,
    ):
        spec = object_keyspace(engine="e", kind="k", model_id="m", model_revision="r", size_bytes=size_bytes, salt=b"")
        grid = ShardGrid.of(spec)
        shapes = [ShardPayload.of(spec, grid, shard) for shard in range(grid.shard_count)]
        ranges = [object_range(shape, size_bytes) for shape in shapes]
        assert (len(ranges) == 1) == (size_bytes <= largest)
        assert ranges[0].offset_bytes == 0 and ranges[-1].end_bytes == size_bytes
        assert all(left.end_bytes == right.offset_bytes for left, right in pairwise(ranges))
        assert all(0 < part.size_bytes <= shape.payload_bytes for part, shape in zip(ranges, shapes, strict=True))
        assert len(wanted_pages([ChunkPlace.alone(bytes(16))], [grid.all_shards])) == len(ranges)
    with pytest.raises(InvalidRequest, match="at least one byte"):
        object_keyspace(engine="e", kind="k", model_id="m", model_revision="r", size_bytes=0, salt=b"")


def test_names_differ_in_every_part() -> None:
    key = bytes(32)
    names = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""]]
    assert len({foreign_chunk_hash(key, parts) for parts in names}) == 4
    assert foreign_chunk_hash(bytes([1] * 32), [b"abc"]) != foreign_chunk_hash(key, [b"abc"])
    one: dict[str, Any] = {"chunk_hash": b"1", "kv_rank": 1, "object_group_id": 0, "cache_salt": ""}
    others: list[dict[str, Any]] = [{"kv_rank": 2}, {"object_group_id": 1}, {"cache_salt": "x"}, {"chunk_hash": b"2"}]
    hashes = {object_hash(key, object_key(SimpleNamespace(**{**one, **change}))) for change in [{}, *others]}
    assert len(hashes) == 5


def test_layouts_of_lmcaches_objects() -> None:
    shape, dtype = torch.Size([2, 4, 256, 512]), torch.bfloat16
    described = layout_of_description(SimpleNamespace(shapes=[shape], dtypes=[dtype]))
    assert described is not None and described.size_bytes == 2 << 20 and "2x4x256x512 bfloat16" in described.kind

    def held(size_bytes: int) -> Any:
        metadata = SimpleNamespace(shapes=None, dtypes=None, shape=shape, dtype=dtype)
        return SimpleNamespace(metadata=metadata, get_size=lambda: size_bytes)

    assert layout_of_object(held(2 << 20)) == described
    assert layout_of_object(held(1000)) is None  # serialized: another size than its layout has
    assert layout_of_description(None) is None
    names = ObjectNames("r", "")
    other = layout_of_description(SimpleNamespace(shapes=[shape], dtypes=[torch.float16]))
    assert other is not None
    spaces = {names.space("m", described), names.space("m", other), names.space("n", described)}
    assert len(spaces | {ObjectNames("r2", "").space("m", described)}) == 4
