"""Small engine caches of every layout, mapped by the CPU device."""

import asyncio
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpool.core import layout_presets
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import AttentionKind, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import PageFault, PageKey, page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.adapters.cpu_cache import CpuCache
from kvpool_gpuagent.adapters.cpu_device import CpuDevice
from kvpool_gpuagent.ports import MappedHandle, PageCopy, StopFlag

LAYERS, HEADS, DIM, CHUNK = 4, 4, 8, 32
KEYSPACE, CHUNK_HASH = b"k" * 16, b"c" * 16


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


@dataclass
class Cache:
    """A mapped cache and the same memory as the test sees it."""

    spec: KeyspaceSpec
    grid: ShardGrid
    layout: EngineLayout
    memory: list[npt.NDArray[np.uint8]]
    mapped: CpuCache
    device: CpuDevice

    def gather(self, copies: Sequence[PageCopy], stop: StopFlag = lambda: False) -> bool:
        return asyncio.run(self.mapped.gather(copies, stop))

    def scatter(self, *copies: PageCopy) -> Sequence[PageFault | None]:
        return asyncio.run(self.mapped.scatter(copies))

    async def close(self) -> None:
        await self.mapped.close()
        await self.device.close()

    def key(self, shard: int) -> PageKey:
        return PageKey(KEYSPACE, CHUNK_HASH, shard)

    def slot(self, shard: int) -> memoryview:
        return memoryview(bytearray(b"\xa5" * page_bytes(payload_bytes(self.spec, self.grid, shard))))


def offer(sizes_bytes: Sequence[int]) -> tuple[list[MappedHandle], list[npt.NDArray[np.uint8]]]:
    handles, memory = [], []
    for size_bytes in sizes_bytes:
        descriptor = os.memfd_create("cache")
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory.append(np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8))
        handles.append(MappedHandle(size_bytes=size_bytes, descriptor=descriptor))
    return handles, memory


def make_cache(preset: str, block_tokens: int, block_count: int = 23, cuts: tuple[int, int] = (1, 1)) -> Cache:
    """cuts: layer groups and head groups (this small a geometry would have one shard)."""
    return asyncio.run(make_cache_async(preset, block_tokens, block_count, cuts))


async def make_cache_async(
    preset: str, block_tokens: int, block_count: int = 23, cuts: tuple[int, int] = (1, 1)
) -> Cache:
    kind, make_layout = PRESETS[preset]
    spec = make_spec(kind)
    kv_heads = spec.group.kv_heads
    grid = ShardGrid(layers=LAYERS, kv_heads=kv_heads, layer_groups=cuts[0], head_groups=min(kv_heads, cuts[1]))
    layout = make_layout(spec, range(LAYERS), range(kv_heads), block_tokens, block_count)
    layout.validate(spec)
    handles, memory = offer(layout.handle_sizes)
    device = CpuDevice()
    mapped = await device.map_cache(spec, grid, layout, handles, [])
    assert isinstance(mapped, CpuCache)
    return Cache(spec, grid, layout, memory, mapped, device)
