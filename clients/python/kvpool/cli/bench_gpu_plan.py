"""What the GPU bench measures, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kvpool.core import layout_presets
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "link": "the link, the peer link and the engine's work alone",
        "shapes": "store, load and both at once, beside memcpy of the same size and as many in flight",
        "beside": "each way beside a process that keeps the GPU busy, and what that costs it",
        "codecs": "logical bytes with pages quantized on the way, beside memcpy of bf16",
        "peer": "rows pulled from another GPU by at most 24 SMs, beside peer memcpy",
        "ways": "each way forced",
    }
)
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One rank's cache. geometry: layers, KV heads of the model, head dim, latent dim.

    small_chunk_tokens: of a keyspace whose pages have about 1 MiB: a transfer is at least a page.
    """

    label: str
    geometry: tuple[int, int, int, int]
    layout: str
    heads: tuple[int, int]
    block_tokens: int
    block_count: int
    small_chunk_tokens: int

    def command(self, codec: str = "RAW", chunk_tokens: int = CHUNK_TOKENS) -> dict[str, Any]:
        """What names the cache to the measured agent."""
        return {
            "geometry": self.geometry,
            "codec": codec,
            "layout": self.layout,
            "heads": self.heads,
            "block_tokens": self.block_tokens,
            "block_count": self.block_count,
            "chunk_tokens": chunk_tokens,
        }

    def handle_sizes(self) -> list[int]:
        """Bytes of the engine's tensors."""
        return list(described(self.command())[1].handle_sizes)


def described(command: Mapping[str, Any]) -> tuple[KeyspaceSpec, EngineLayout]:
    """What a Shape's command stands for, as the measured agent reads it."""
    layers, kv_heads, head_dim, latent_dim = command["geometry"]
    spec = KeyspaceSpec(
        model_id="bench",
        model_revision="1",
        groups=(KvGroup(layers, kv_heads, head_dim, latent_dim=latent_dim),),
        dtype=Dtype.BF16,
        codec=Codec[command["codec"]],
        chunk_tokens=command["chunk_tokens"],
    )
    preset = getattr(layout_presets, f"{command['layout']}_layout")
    heads = range(*command["heads"])
    layout: EngineLayout = preset(spec, range(layers), heads, command["block_tokens"], command["block_count"])
    return spec, layout


def _llama_8b(layout: str) -> Shape:
    return Shape(
        label=f"8B {layout.removeprefix('vllm_').upper()}",
        geometry=(32, 8, 128, 0),
        layout=layout,
        heads=(0, 8),
        block_tokens=16,
        block_count=2048,
        small_chunk_tokens=64,
    )


LLAMA_8B = _llama_8b("vllm_nhd")
LLAMA_8B_HND = _llama_8b("vllm_hnd")
LLAMA_8B_HND_LONG = replace(LLAMA_8B_HND, label="8B HND 256", block_tokens=256, block_count=128)
LLAMA_70B = Shape(
    label="70B TP 2",
    geometry=(80, 8, 128, 0),
    layout="vllm_nhd",
    heads=(0, 4),
    block_tokens=16,
    block_count=1664,
    small_chunk_tokens=CHUNK_TOKENS,
)
DEEPSEEK = Shape(
    label="MLA",
    geometry=(61, 1, 0, 576),
    layout="mla",
    heads=(0, 1),
    block_tokens=64,
    block_count=512,
    small_chunk_tokens=CHUNK_TOKENS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """in_flight: by MiB of a transfer, how many when they are pipelined. deadline_s: nothing new begins after it."""

    shapes: tuple[Shape, ...]
    in_flight: Mapping[int, int]
    rounds: int
    sample_s: float
    beside_shapes: tuple[Shape, ...]
    beside_rounds: int
    beside_s: float
    alone_s: float
    run_in_s: float = 0.1  # of transfers, before the engine's batches beside them are looked at
    codec_mib: tuple[int, ...]
    peer_shapes: tuple[Shape, ...]
    peer_mib: tuple[int, ...]
    way_shapes: tuple[Shape, ...]
    way_rounds: int
    deadline_s: float


FULL = GpuPlan(
    shapes=(LLAMA_8B, LLAMA_8B_HND, LLAMA_70B, DEEPSEEK),
    in_flight={1: 32, 8: 8, 64: 4, 512: 2},
    rounds=2,
    sample_s=0.05,
    beside_shapes=(LLAMA_8B, DEEPSEEK, LLAMA_8B_HND_LONG),
    beside_rounds=2,
    beside_s=0.25,
    alone_s=0.15,
    codec_mib=(64, 512),
    peer_shapes=(LLAMA_8B, DEEPSEEK),
    peer_mib=(8, 64, 512),
    way_shapes=(LLAMA_8B, LLAMA_8B_HND, DEEPSEEK),
    way_rounds=1,
    deadline_s=215.0,
)
QUICK = GpuPlan(
    shapes=(LLAMA_8B, DEEPSEEK),
    in_flight={1: 32, 64: 4},
    rounds=1,
    sample_s=0.05,
    beside_shapes=(LLAMA_8B,),
    beside_rounds=1,
    beside_s=0.2,
    alone_s=0.12,
    codec_mib=(64,),
    peer_shapes=(LLAMA_8B,),
    peer_mib=(64,),
    way_shapes=(DEEPSEEK,),
    way_rounds=1,
    deadline_s=45.0,
)
