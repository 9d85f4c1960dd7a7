"""One engine's cache in shared memory: pages out of it and into it, with numpy."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
from collections.abc import Sequence
from functools import partial

import numpy as np

from kvpool.client.host_memory import empty_page_tables
from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import HEADER_BYTES
from kvpool.core.payload import ShardPayload
from kvpool.core.payload_codec import decode_payload, encode_payload
from kvpool_gpuagent.adapters.copy_threads import CopyThreads
from kvpool_gpuagent.adapters.cpu_rows import Bytes, ShardRows
from kvpool_gpuagent.core.pages import CopyBatch
from kvpool_gpuagent.ports import StopFlag

_log = logging.getLogger(__name__)


class CpuCache:
    """See ports.EngineCache. With a codec, rows are quantized on their way out and back on the thread that copies."""

    def __init__(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        mappings: Sequence[mmap.mmap],
        threads: CopyThreads,
    ) -> None:
        self._spec, self._grid, self._layout, self._threads = spec, grid, layout, threads
        self._mappings = list(mappings)
        self._memory: list[Bytes] = [np.frombuffer(mapping, dtype=np.uint8) for mapping in mappings]
        self._copies_payload = layout.holds_codec_rows(spec)
        touched = grid.touching(grid.bitmap_for(layout.layer_range, layout.head_range))
        self._payloads = {shard: ShardPayload.of(spec, grid, shard) for shard in shards_in(touched)}
        self._rows = {
            shard: ShardRows(spec, layout, self._memory, payload) for shard, payload in self._payloads.items()
        }

    async def event_passed(self, slot: int) -> bool:
        """See ports.EngineCache. A CPU engine's writes are in place when it asks: it has no events to register."""
        raise InvalidRequest("a CPU cache has no device events; leave the event unset")

    async def gather(self, batch: CopyBatch, stop: StopFlag) -> bool:
        """See ports.EngineCache."""
        done = await self._threads.run_all([partial(self._gather_part, part, stop) for part in self._shares(batch)])
        return all(done)

    async def scatter(self, batch: CopyBatch) -> None:
        """See ports.EngineCache."""
        await self._threads.run_all([partial(self._scatter_part, part) for part in self._shares(batch)])

    async def close(self) -> None:
        """See ports.EngineCache."""
        await self._threads.run(self._unmap)

    def _shares(self, batch: CopyBatch) -> list[CopyBatch]:
        share = max(1, -(-batch.count // self._threads.thread_count))
        return [batch.part(start, share) for start in range(0, batch.count, share)]

    def _gather_part(self, batch: CopyBatch, stop: StopFlag) -> bool:
        for address, shard, block_ids in zip(
            batch.addresses.tolist(), batch.shards.tolist(), batch.block_ids, strict=True
        ):
            if stop():
                return False
            shape, rows = self._payloads[shard], self._rows[shard]
            payload = _payload_at(address, shape.payload_bytes)
            copied = payload if self._copies_payload else np.empty(rows.copied_bytes, dtype=np.uint8)
            rows.gather(block_ids, copied)
            if not self._copies_payload:
                encode_payload(self._spec, shape, copied, payload)
        return True

    def _scatter_part(self, batch: CopyBatch) -> None:
        for address, shard, block_ids, skip_tokens in zip(
            batch.addresses.tolist(), batch.shards.tolist(), batch.block_ids, batch.skip_tokens.tolist(), strict=True
        ):
            shape = self._payloads[shard]
            payload = _payload_at(address, shape.payload_bytes)
            copied = payload if self._copies_payload else decode_payload(self._spec, shape, payload)
            self._rows[shard].scatter(block_ids, copied, skip_tokens)

    def _unmap(self) -> None:
        self._rows = {}
        self._memory = []
        mappings, self._mappings = self._mappings, []
        for mapping in mappings:
            empty_page_tables(mapping)
        if not close_mappings(mappings):
            _log.error("views of an engine's memory outlive its session; it is unmapped when the last of them goes")


def _payload_at(address: int, payload_bytes: int) -> Bytes:
    """The payload of a page that begins at an address of this process."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * payload_bytes).from_address(address + HEADER_BYTES))


def close_mappings(mappings: Sequence[mmap.mmap]) -> bool:
    """Unmap; False if views still live (their memory goes with the last of them)."""
    left = [mapping for mapping in mappings if not _close(mapping)]
    if left:
        gc.collect()  # views that only a reference cycle keeps
        left = [mapping for mapping in left if not _close(mapping)]
    return not left


def _close(mapping: mmap.mmap) -> bool:
    try:
        mapping.close()
    except BufferError:
        return False
    return True
