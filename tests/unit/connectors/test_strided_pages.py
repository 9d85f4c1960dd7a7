"""Copies between host pages and payloads equal the slow, obvious ones, for every layout that connectors use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpool.connectors.contrib.lightllm.settings import _PAGES, _PAGES_WITH_SCALES
from kvpool.connectors.sglang_pools import HOST_LAYOUTS
from kvpool.connectors.strided_pages import StridedPages, bytes_of
from kvpool.core.cache_axes import CacheAxes
from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.payload import payload_bytes
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference

GROUPS = {"gqa": KvGroup(layers=6, kv_heads=4, head_dim=64), "mla": KvGroup.mla(6, 576)}
PAGES = 3


def spec_of(group: KvGroup, codec: Codec = Codec.RAW) -> KeyspaceSpec:
    return KeyspaceSpec(
        model_id="m", model_revision="r", groups=(group,), dtype=Dtype.BF16, codec=codec, chunk_tokens=64
    )


CASES = [(name, axes, group, Codec.RAW) for name, axes in HOST_LAYOUTS.items() for group in GROUPS]
CASES += [("lightllm", _PAGES, group, Codec.RAW) for group in GROUPS]
CASES += [("lightllm int8", _PAGES_WITH_SCALES, "gqa", Codec.INT8_GROUP8)]


@pytest.mark.parametrize(("name", "axes", "group", "codec"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_pages_equal_the_reference(name: str, axes: CacheAxes, group: str, codec: Codec) -> None:
    spec = spec_of(GROUPS[group], codec)
    grid = ShardGrid.of(spec)
    heads = range(2, 4) if group == "gqa" else range(1)
    layout = axes.layout(spec, range(spec.group.layers), heads, 64, PAGES)
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, layout.handle_sizes, dtype=np.uint8)
    pages = StridedPages(spec, layout, memory.copy())
    written = np.zeros_like(memory)
    other = StridedPages(spec, layout, written)
    assert pages.page_count == PAGES
    wanted = np.zeros_like(memory)
    for page in range(PAGES):
        for shard in shards_in(pages.shards):
            payload = np.empty(payload_bytes(spec, grid, shard), dtype=np.uint8)
            pages.gather(page, shard, payload.data)
            blocks = np.array([page])
            assert np.array_equal(payload, gather_payload_reference(spec, grid, shard, layout, [memory], blocks))
            if page != 1:
                other.scatter(page, shard, payload.data)
                scatter_payload_reference(spec, grid, shard, layout, [wanted], blocks, payload)
    assert np.array_equal(written, wanted)
    # What ranks of other TP degrees wrote.
    for shard in shards_in(grid.touching(pages.shards)):
        payload = rng.integers(0, 256, payload_bytes(spec, grid, shard), dtype=np.uint8)
        other.scatter(1, shard, payload.data)
        scatter_payload_reference(spec, grid, shard, layout, [wanted], np.array([1]), payload)
        assert np.array_equal(written, wanted)


def test_what_does_not_fit_is_named() -> None:
    spec = spec_of(GROUPS["gqa"])
    axes = HOST_LAYOUTS["page_first"]
    layout = axes.layout(spec, range(6), range(4), 64, PAGES)
    memory = np.zeros(layout.handle_sizes, dtype=np.uint8)
    with pytest.raises(InvalidRequest, match="no chunks"):
        StridedPages(spec, axes.layout(spec, range(6), range(4), 32, PAGES), memory)
    with pytest.raises(InvalidRequest, match="bytes, the memory"):
        StridedPages(spec, layout, memory[1:])
    with pytest.raises(PartitionRefused, match="no union"):
        StridedPages(spec, axes.layout(spec, range(5), range(4), 64, PAGES), memory[: len(memory) // 6 * 5])
    pages = StridedPages(spec, layout, memory)
    with pytest.raises(InvalidRequest, match="page 3"):
        pages.gather(3, 0, memoryview(bytearray(payload_bytes(spec, ShardGrid.of(spec), 0))))
    with pytest.raises(InvalidRequest, match="a payload of"):
        pages.scatter(0, 0, memoryview(b"1"))
    part = StridedPages(spec, axes.layout(spec, range(6), range(2), 64, PAGES), memory[: len(memory) // 2])
    grid = ShardGrid.of(spec)
    with pytest.raises(InvalidRequest, match=r"shard 0 has heads range\(0, 4\), the memory range\(0, 2\)"):
        part.gather(0, 0, memoryview(bytearray(payload_bytes(spec, grid, 0))))
    other = grid.shard(0, 2, 1)
    with pytest.raises(InvalidRequest, match="no layers and heads of the memory"):
        part.scatter(0, other, memoryview(bytearray(payload_bytes(spec, grid, other))))


def test_a_tensors_memory_is_not_copied() -> None:
    tensor = torch.zeros(4, 3, dtype=torch.bfloat16)
    found = bytes_of(tensor)
    found[0] = 255
    assert found.nbytes == 24 and tensor.view(torch.uint8).reshape(-1)[0] == 255
    with pytest.raises(InvalidRequest, match="contiguous"):
        bytes_of(tensor.t())
