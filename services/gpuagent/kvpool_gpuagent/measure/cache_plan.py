"""An engine's cache as a command names it, and pages of it laid out in an arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.core import layout_presets
from kvpool.core.copy_runs import RunTable
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.ipc import IpcMemory
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import PageKey
from kvpool.core.payload import ShardPayload
from kvpool.core.plane_table import Int64s, PlaneTable
from kvpool_gpuagent.ports import MappedHandle, PageCopy

_KEYSPACE = b"bench" + bytes(11)
_CHUNK_TOKENS = 256
_ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """A rank's cache. handles: none where the command brought none."""

    spec: KeyspaceSpec
    grid: ShardGrid
    layout: EngineLayout
    handles: tuple[MappedHandle, ...]

    @classmethod
    def of(cls, command: Mapping[str, Any]) -> CachePlan:
        """Raises KeyError, AttributeError, InvalidRequest and the like for a command that names no cache."""
        layers, kv_heads, head_dim, latent_dim = command["geometry"]
        spec = KeyspaceSpec(
            model_id="bench",
            model_revision="1",
            groups=(KvGroup(layers, kv_heads, head_dim, latent_dim=latent_dim),),
            dtype=Dtype.BF16,
            codec=Codec[command["codec"]],
            chunk_tokens=command.get("chunk_tokens", _CHUNK_TOKENS),
        )
        preset = getattr(layout_presets, f"{command['layout']}_layout")
        heads = range(*command["heads"])
        layout: EngineLayout = preset(spec, range(layers), heads, command["block_tokens"], command["block_count"])
        layout.validate(spec)
        handles = tuple(
            MappedHandle(size_bytes=size, ipc=IpcMemory(uuid, bytes.fromhex(handle), offset, allocation))
            for uuid, handle, offset, allocation, size in command.get("handles", ())
        )
        return cls(spec=spec, grid=ShardGrid.of(spec), layout=layout, handles=handles)

    @property
    def payloads(self) -> dict[int, ShardPayload]:
        """Of the rank's shards."""
        bitmap = self.grid.bitmap_for(self.layout.layer_range, self.layout.head_range)
        return {shard: ShardPayload.of(self.spec, self.grid, shard) for shard in shards_in(bitmap)}

    @property
    def run_bytes(self) -> int:
        """The shortest run that the cache and a page have in common."""
        addresses = [
            (number + 1) << 40 for number in range(len(self.layout.handle_sizes))
        ]  # only their distance counts
        runs = RunTable.of(PlaneTable.of(self.spec, self.grid, self.layout, addresses))
        return min(runs.run_bytes(shard) for shard in self.payloads)

    def logical_bytes(self, shard: int) -> int:
        """What a page of the shard has in the engine's cache."""
        payload = ShardPayload.of(self.spec, self.grid, shard)
        row_elements = self.spec.group.latent_dim or self.spec.group.head_dim
        return payload.row_count * row_elements * _ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one transfer."""

    copies: Sequence[PageCopy]
    logical_bytes: int


class BenchPages:
    """Pages of scattered blocks: half of a cache's blocks are stored, the others are loaded."""

    def __init__(self, plan: CachePlan, store_slots: memoryview, load_slots: memoryview) -> None:
        """As many pages as the slots have room for; those of loads are not filled yet."""
        self._plan = plan
        chunk_blocks = plan.spec.chunk_tokens // plan.layout.block_tokens
        chunk_count = plan.layout.block_count // chunk_blocks
        blocks = np.random.default_rng(5).permutation(plan.layout.block_count).astype(np.int64)
        chunks = blocks[: chunk_count * chunk_blocks].reshape(chunk_count, chunk_blocks)
        self.stores = self._copies(chunks[: chunk_count // 2], store_slots)
        self.loads = self._copies(chunks[chunk_count // 2 :], load_slots)
        if not self.stores or not self.loads:
            raise ValueError("the cache is too small: it needs room for two chunks")

    def parts(self, copies: Sequence[PageCopy], size_bytes: int) -> list[Part]:
        """Cut into transfers of about so many logical bytes, at least a page each."""
        logical = [self._plan.logical_bytes(copy.key.shard) for copy in copies]
        count = min(len(copies), max(1, round(size_bytes * len(copies) / sum(logical))))
        starts = range(0, len(copies) - count + 1, count)
        return [Part(copies[start : start + count], sum(logical[start : start + count])) for start in starts]

    def transfer_bytes(self, size_bytes: int) -> int:
        """Logical bytes of such a transfer, on average."""
        parts = self.parts(self.stores, size_bytes)
        return sum(part.logical_bytes for part in parts) // len(parts)

    def _copies(self, chunks: Int64s, slots: memoryview) -> list[PageCopy]:
        copies: list[PageCopy] = []
        offset = 0
        for number, blocks in enumerate(chunks):
            for shard, payload in self._plan.payloads.items():
                end = offset + payload.slot_bytes
                if end > len(slots):
                    return copies
                key = PageKey(_KEYSPACE, number.to_bytes(16, "big"), shard)
                copies.append(PageCopy(key=key, page=slots[offset:end], block_ids=blocks))
                offset = end
        return copies
