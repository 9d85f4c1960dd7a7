"""Small engine caches of every layout, mapped by the CPU device."""

import asyncio
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.cancel import CancelToken
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import AttentionKind, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import HEADER_BYTES, page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.adapters.cpu.device import CpuCache, CpuDevice
from kvpool_gpuagent.core.pages import CopyBatch
from kvpool_gpuagent.ports import MappedHandle
from tests.fixtures import layout_presets

Bytes = npt.NDArray[np.uint8]
LAYERS, HEADS, DIM, CHUNK = 4, 4, 8, 32
POISON = 0xA5


CODECS = {"int8": Codec.INT8_GROUP8, "fp8": Codec.FP8_E4M3, "int4": Codec.INT4_GROUP8}


def make_spec(kind: str) -> KeyspaceSpec:
    """canonical GQA, MLA, or opaque cells; "mla fp8" and the like for a codec."""
    kind, _, codec = kind.partition(" ")
    if codec:
        return replace(make_spec(kind), codec=CODECS[codec])
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
    dtype = {"fp32": Dtype.FP32, "fp16": Dtype.FP16}.get(kind, Dtype.BF16)
    return KeyspaceSpec(model_id="m", model_revision="r", groups=(group,), dtype=dtype, chunk_tokens=CHUNK)


PRESETS = {
    "contiguous": ("gqa", layout_presets.contiguous_layout),
    "contiguous-fp32": ("fp32", layout_presets.contiguous_layout),
    "vllm-nhd": ("gqa", layout_presets.vllm_nhd_layout),
    "vllm-hnd": ("gqa", layout_presets.vllm_hnd_layout),
    "vllm-blhnc": ("gqa", layout_presets.vllm_blhnc_layout),
    "sglang": ("gqa", layout_presets.sglang_layout),
    "lightllm": ("gqa", layout_presets.lightllm_layout),
    "mla": ("mla", layout_presets.mla_layout),
    "contiguous-int4": ("fp32 int4", layout_presets.contiguous_layout),
    "vllm-nhd-int8": ("gqa int8", layout_presets.vllm_nhd_layout),
    "vllm-hnd-fp8": ("fp16 fp8", layout_presets.vllm_hnd_layout),
    "mla-fp8": ("mla fp8", layout_presets.mla_layout),
    "lightllm-int8": ("gqa int8", layout_presets.lightllm_quantized_layout),
    "inline-scales-fp8": ("gqa fp8", layout_presets.inline_scales_layout),
    "block-scales-int4": ("gqa int4", layout_presets.block_scales_layout),
    "vllm-cpu": ("opaque", layout_presets.vllm_cpu_opaque_layout),
}


@dataclass(eq=False)
class Page:
    """A page's slot, poisoned at first."""

    shard: int
    slot: Bytes
    payload_bytes: int

    @property
    def payload(self) -> Bytes:
        """A view."""
        return self.slot[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]

    @property
    def others(self) -> Bytes:
        """Header and sums, which no device fills."""
        return np.delete(self.slot, np.s_[HEADER_BYTES : HEADER_BYTES + self.payload_bytes])


@dataclass
class Cache:
    """A mapped cache and the same memory as the test sees it."""

    spec: KeyspaceSpec
    grid: ShardGrid
    layout: EngineLayout
    memory: list[Bytes]
    mapped: CpuCache
    device: CpuDevice

    def gather(self, pages: Sequence[Page], block_ids: npt.NDArray[np.int64], stop: CancelToken | None = None) -> bool:
        """All of one chunk."""
        return asyncio.run(self.mapped.gather(batch_of(pages, block_ids), stop or CancelToken()))

    def scatter(self, pages: Sequence[Page], block_ids: npt.NDArray[np.int64], skip_tokens: int = 0) -> None:
        asyncio.run(self.mapped.scatter(batch_of(pages, block_ids, skip_tokens)))

    async def close(self) -> None:
        await self.mapped.close()
        await self.device.close()

    def page(self, shard: int) -> Page:
        payload = payload_bytes(self.spec, self.grid, shard)
        return Page(shard, np.full(page_bytes(payload), POISON, dtype=np.uint8), payload)


def batch_of(pages: Sequence[Page], block_ids: npt.NDArray[np.int64], skip_tokens: int = 0) -> CopyBatch:
    return CopyBatch(
        np.array([page.slot.ctypes.data for page in pages], dtype=np.int64),
        np.array([page.shard for page in pages], dtype=np.uint8),
        np.tile(block_ids.astype(np.int64), (len(pages), 1)),
        np.full(len(pages), skip_tokens, dtype=np.int64),
    )


def offer(sizes_bytes: Sequence[int]) -> tuple[list[MappedHandle], list[Bytes]]:
    handles, memory = [], []
    for size_bytes in sizes_bytes:
        descriptor = os.memfd_create("cache")
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory.append(np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8))
        handles.append(MappedHandle(size_bytes=size_bytes, descriptor=descriptor))
    return handles, memory


def make_cache(preset: str, block_tokens: int, block_count: int = 23, **changes: Any) -> Cache:
    return asyncio.run(make_cache_async(preset, block_tokens, block_count, **changes))


async def make_cache_async(
    preset: str,
    block_tokens: int,
    block_count: int = 23,
    *,
    layer_groups: int = 1,
    splits: Sequence[int] = (1,),
    heads: range | None = None,
) -> Cache:
    """layer_groups, splits: of the grid (this small a geometry would have one shard). heads: of the rank; else all."""
    kind, make_layout = PRESETS[preset]
    spec = make_spec(kind)
    kv_heads = spec.group.kv_heads
    fitting = tuple(split for split in splits if kv_heads % split == 0)
    grid = ShardGrid(layers=LAYERS, kv_heads=kv_heads, layer_groups=layer_groups, splits=fitting or (1,))
    layout = make_layout(spec, range(LAYERS), heads or range(kv_heads), block_tokens, block_count)
    layout.validate(spec)
    handles, memory = offer(layout.handle_sizes)
    device = CpuDevice()
    mapped = await device.map_cache(spec, grid, layout, handles, [])
    assert isinstance(mapped, CpuCache)
    return Cache(spec, grid, layout, memory, mapped, device)
