"""The CPU device against the slow reference: every layout, any block order, partial first chunks."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core import layout_presets, reference
from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import AttentionKind, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import HEADER_BYTES, PageKey, page_bytes, verify
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.adapters.cpu_device import CpuCache, CpuDevice
from kvpool_gpuagent.ports import MappedHandle, PageCopy

LAYERS, HEADS, DIM, CHUNK = 4, 4, 8, 32
KEYSPACE, CHUNK_HASH = b"k" * 16, b"c" * 16


def make_spec(kind: str) -> KeyspaceSpec:
    """canonical GQA, MLA, or opaque cells."""
    if kind == "mla":
        group = KvGroup(layers=LAYERS, kv_heads=1, head_dim=0, latent_dim=20, attention=AttentionKind.FULL)
        return KeyspaceSpec(model_id="m", model_revision="r", groups=(group,), dtype=Dtype.BF16, chunk_tokens=CHUNK)
    group = KvGroup(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, attention=AttentionKind.FULL)
    if kind == "opaque":
        opaque = OpaqueLayout(engine="e", layout_id="l", isa="", block_tokens=8, cell_bytes=8 * 2 * DIM * 2)
        return KeyspaceSpec(
            model_id="m",
            model_revision="r",
            groups=(group,),
            dtype=Dtype.BF16,
            chunk_tokens=CHUNK,
            payload=PayloadKind.OPAQUE,
            opaque=opaque,
        )
    dtype = Dtype.FP32 if kind == "fp32" else Dtype.BF16
    return KeyspaceSpec(model_id="m", model_revision="r", groups=(group,), dtype=dtype, chunk_tokens=CHUNK)


PRESETS = {
    "contiguous": ("gqa", layout_presets.contiguous_layout),
    "contiguous-fp32": ("fp32", layout_presets.contiguous_layout),
    "vllm-nhd": ("gqa", layout_presets.vllm_nhd_layout),
    "vllm-hnd": ("gqa", layout_presets.vllm_hnd_layout),
    "sglang": ("gqa", layout_presets.sglang_layout),
    "lightllm": ("gqa", layout_presets.lightllm_layout),
    "mla": ("mla", layout_presets.mla_layout),
    "vllm-cpu": ("opaque", layout_presets.vllm_cpu_opaque_layout),
}


@dataclass
class Cache:
    """A mapped cache and the same memory as the test sees it."""

    spec: KeyspaceSpec
    grid: ShardGrid
    layout: EngineLayout
    memory: list[npt.NDArray[np.uint8]]
    mapped: CpuCache

    def key(self, shard: int) -> PageKey:
        return PageKey(KEYSPACE, CHUNK_HASH, shard)

    def slot(self, shard: int) -> memoryview:
        return memoryview(bytearray(b"\xa5" * page_bytes(payload_bytes(self.spec, self.grid, shard))))


def offer(sizes_bytes: Sequence[int]) -> tuple[list[MappedHandle], list[npt.NDArray[np.uint8]]]:
    handles, memory = [], []
    for size_bytes in sizes_bytes:
        descriptor = os.memfd_create("cache")
        os.ftruncate(descriptor, size_bytes)
        memory.append(np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8))
        handles.append(MappedHandle(size_bytes=size_bytes, descriptor=descriptor))
    return handles, memory


def make_cache(preset: str, block_tokens: int, block_count: int = 23) -> Cache:
    kind, make_layout = PRESETS[preset]
    spec = make_spec(kind)
    grid = ShardGrid.of(spec)
    layout = make_layout(spec, range(LAYERS), range(spec.group.kv_heads), block_tokens, block_count)
    layout.validate(spec)
    handles, memory = offer(layout.handle_sizes)
    mapped = CpuDevice().map_cache(spec, grid, layout, handles)
    assert isinstance(mapped, CpuCache)
    return Cache(spec, grid, layout, memory, mapped)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_gather_and_scatter_equal_the_reference(preset: str, data: st.DataObject) -> None:
    block_tokens = 8 if preset == "vllm-cpu" else data.draw(st.sampled_from([1, 2, 8, 16, 32]), "block_tokens")
    cache = make_cache(preset, block_tokens, block_count=2 * CHUNK // block_tokens + 3)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    for part in cache.memory:
        part[:] = random.integers(0, 256, part.size, dtype=np.uint8)
    wanted = CHUNK // block_tokens
    order = random.permutation(cache.layout.block_count)
    ids = np.sort(order[: 2 * wanted]) if data.draw(st.booleans(), "sorted") else order[: 2 * wanted]
    source, target = ids[:wanted].astype(np.int64), ids[wanted:].astype(np.int64)
    step = block_tokens if preset == "vllm-cpu" else 1
    skip_tokens = data.draw(st.integers(0, (CHUNK - 1) // step), "skip") * step

    for shard in range(cache.grid.shard_count):
        slot = cache.slot(shard)
        copy = PageCopy(key=cache.key(shard), page=slot, block_ids=source)
        assert cache.mapped.gather([copy], None, lambda: False) == 1
        assert verify(slot, cache.key(shard), Codec.RAW) is None
        expected = reference.gather_payload_reference(cache.spec, cache.grid, shard, cache.layout, cache.memory, source)
        assert bytes(slot[HEADER_BYTES : HEADER_BYTES + expected.size]) == expected.tobytes()

        after = [part.copy() for part in cache.memory]
        reference.scatter_payload_reference(
            cache.spec, cache.grid, shard, cache.layout, after, target, expected, skip_tokens=skip_tokens
        )
        layers = cache.grid.layers_of(shard)
        into = PageCopy(key=cache.key(shard), page=slot, block_ids=target, skip_tokens=skip_tokens)
        cache.mapped.scatter(into, layers.start, layers.stop)
        for ours, theirs in zip(cache.memory, after, strict=True):
            assert np.array_equal(ours, theirs)


def test_a_stopped_gather_reports_what_is_complete() -> None:
    cache = make_cache("vllm-nhd", 8)
    ids = np.arange(4, dtype=np.int64)
    copies = [PageCopy(key=cache.key(0), page=cache.slot(0), block_ids=ids) for _ in range(3)]
    answers = iter([False, True])
    assert cache.mapped.gather(copies, None, lambda: next(answers)) == 1
    assert bytes(copies[1].page[:4]) != b"KVPG"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"size_bytes": 1 << 40}, "its file has"),
        ({"file_offset": 100}, "file_offset"),
        ({"file_offset": 1 << 20}, "its file has"),
        ({"size_bytes": 0}, "size_bytes"),
    ],
)
def test_memory_that_is_not_there_is_refused_before_it_can_kill_the_agent(change: dict[str, int], named: str) -> None:
    spec = make_spec("gqa")
    layout = layout_presets.contiguous_layout(spec, range(LAYERS), range(HEADS), 8, 4)
    handles, _ = offer(layout.handle_sizes)
    descriptor = handles[0].descriptor
    assert descriptor is not None
    bad = MappedHandle(**{"size_bytes": handles[0].size_bytes, "descriptor": descriptor, **change})
    with pytest.raises(InvalidRequest, match=named):
        CpuDevice().map_cache(spec, ShardGrid.of(spec), layout, [bad])
    with pytest.raises(OSError):
        os.fstat(descriptor)  # closed all the same


def test_close_lets_the_memory_go() -> None:
    cache = make_cache("sglang", 8)
    cache.mapped.close()
    cache.mapped.close()
