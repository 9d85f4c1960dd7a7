"""One engine's cache in shared memory: pages out of it and into it, with numpy."""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvpool.core import page as page_format
from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.page import PageFault
from kvpool.core.payload import ShardPayload
from kvpool.core.payload_codec import decode_payload, encode_payload
from kvpool_gpuagent.adapters.copy_threads import CopyThreads
from kvpool_gpuagent.adapters.cpu_rows import BlockWalk, Bytes, Items, ItemShape, PlaneItems, PlaneRun, plane_runs
from kvpool_gpuagent.ports import PageCopy, StopFlag

_log = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20  # 2 to 4 ms; in batches of 4 MiB the hand-overs took as long as the copies


@dataclass(frozen=True, slots=True)
class _Part:
    """Planes with rows of one kind: a shard's data, or the scales that the engine keeps itself.

    planes: in payload order, [layer][plane]; items: of all, in as few as possible. begin_bytes, end_bytes: in what is
    copied.
    """

    first_head: int
    head_count: int
    planes: tuple[RowPlane, ...]
    items: tuple[PlaneItems, ...]
    shapes: frozenset[ItemShape]  # nearly always one
    begin_bytes: int
    end_bytes: int

    def rows(self, copied: Bytes, shape: ItemShape) -> Items:
        """[planes, blocks, *axes] view of the part."""
        return shape.payload_items(copied[self.begin_bytes : self.end_bytes], len(self.planes))


@dataclass(frozen=True, slots=True)
class _ShardView:
    """What copies of one shard need. copied_bytes: of all parts; the payload's if no codec stands in between."""

    payload: ShardPayload
    parts: tuple[_Part, ...]
    copied_bytes: int


class CpuCache:
    """See ports.EngineCache. With a codec, rows are quantized on their way out and back on the thread that copies."""

    batch_bytes = _BATCH_BYTES

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
        self._block_rows = layout.rows_of_block(spec)
        shards = range(grid.shard_count)
        owned = grid.bitmap_for(layout.layer_range, layout.head_range)
        self._shards = {shard: self._shard_view(shard) for shard in shards if owned >> shard & 1}

    async def event_passed(self, slot: int) -> bool:
        """See ports.EngineCache. A CPU engine's writes are in place when it asks: it has no events to register."""
        raise InvalidRequest("a CPU cache has no device events; leave the event unset")

    async def gather(self, copies: Sequence[PageCopy], stop: StopFlag) -> bool:
        """See ports.EngineCache."""
        share = max(1, -(-len(copies) // self._threads.thread_count))
        parts = [copies[start : start + share] for start in range(0, len(copies), share)]
        done = await self._threads.run_all([partial(self._gather_part, part, stop) for part in parts])
        return all(done)

    async def scatter(self, copies: Sequence[PageCopy]) -> Sequence[PageFault | None]:
        """See ports.EngineCache. One call is one thread's work; calls run side by side."""
        return await self._threads.run(lambda: [self._verify_and_scatter(copy) for copy in copies])

    async def close(self) -> None:
        """See ports.EngineCache."""
        await self._threads.run(self._unmap)

    def _gather_part(self, copies: Sequence[PageCopy], stop: StopFlag) -> bool:
        for copy in copies:
            if stop():
                return False
            self._gather(copy)
        return True

    def _gather(self, copy: PageCopy) -> None:
        shard = self._shards[copy.key.shard]
        walk = BlockWalk(copy.block_ids)
        payload = self._payload(shard, copy.page)
        copied = payload if self._copies_payload else np.empty(shard.copied_bytes, dtype=np.uint8)
        for part in shard.parts:
            rows = {shape: part.rows(copied, shape) for shape in part.shapes}
            for items in part.items:
                walk.gather(items, items.of_payload(rows[items.shape]))
        if not self._copies_payload:
            encode_payload(self._spec, shard.payload, copied, payload)
        page_format.seal(copy.page, copy.key, self._spec.codec, shard.payload.payload_bytes)

    def _verify_and_scatter(self, copy: PageCopy) -> PageFault | None:
        shard = self._shards[copy.key.shard]
        # All of the page first: a block of it that fails must find the cache untouched.
        fault = page_format.verify(copy.page, copy.key, self._spec.codec, shard.payload.payload_bytes)
        if fault is None:
            self._scatter(shard, copy)
        return fault

    def _scatter(self, shard: _ShardView, copy: PageCopy) -> None:
        payload = self._payload(shard, copy.page)
        copied = payload if self._copies_payload else decode_payload(self._spec, shard.payload, payload)
        for part in shard.parts:
            self._scatter_part(part, copied, copy)

    def _scatter_part(self, part: _Part, copied: Bytes, copy: PageCopy) -> None:
        whole, rest = divmod(copy.skip_tokens, self._layout.block_tokens)
        if rest:  # never in an opaque keyspace: the request was checked
            self._scatter_part_of_block(part, copied, int(copy.block_ids[whole]), whole, rest)
            whole += 1
        if whole == copy.block_ids.size:
            return
        walk = BlockWalk(copy.block_ids[whole:])
        rows = {shape: part.rows(copied, shape)[:, whole:] for shape in part.shapes}
        for items in part.items:
            walk.scatter(items, items.of_payload(rows[items.shape]))

    def _scatter_part_of_block(self, part: _Part, copied: Bytes, block: int, position: int, first_token: int) -> None:
        for number, plane in enumerate(part.planes):
            shape = ItemShape.of(plane, self._block_rows, part.head_count, by_token=True)
            rows = part.rows(copied, shape)[number, position]
            items = self._items(PlaneRun(plane, number), part.first_head, shape)
            items.blocks[0, block, first_token:] = rows[first_token:]

    @staticmethod
    def _payload(shard: _ShardView, page: memoryview) -> Bytes:
        size_bytes = shard.payload.payload_bytes
        return np.frombuffer(page, dtype=np.uint8, count=size_bytes, offset=page_format.HEADER_BYTES)

    def _shard_view(self, shard: int) -> _ShardView:
        payload = ShardPayload.of(self._spec, self._grid, shard)
        layers = [self._layout.layers[layer - self._layout.first_layer] for layer in payload.layers]
        parts: list[_Part] = []
        for of_layers in ([layer.planes for layer in layers], [layer.scales for layer in layers]):
            planes = [plane for of_layer in of_layers for plane in of_layer]
            if planes:
                parts.append(self._part(payload, planes, parts[-1].end_bytes if parts else 0))
        return _ShardView(payload, tuple(parts), parts[-1].end_bytes)

    def _part(self, payload: ShardPayload, planes: Sequence[RowPlane], begin_bytes: int) -> _Part:
        first_head = payload.heads.start - self._layout.first_head
        items = tuple(
            self._items(run, first_head, ItemShape.of(run.first, self._block_rows, len(payload.heads)))
            for run in plane_runs(planes)
        )
        rows_bytes = payload.positions * len(payload.heads) * sum(plane.row_bytes for plane in planes)
        return _Part(
            first_head=first_head,
            head_count=len(payload.heads),
            planes=tuple(planes),
            items=items,
            shapes=frozenset(each.shape for each in items),
            begin_bytes=begin_bytes,
            end_bytes=begin_bytes + rows_bytes,
        )

    def _items(self, run: PlaneRun, first_head: int, shape: ItemShape) -> PlaneItems:
        return PlaneItems(self._memory[run.first.handle], run, first_head, self._layout.block_count, shape)

    def _unmap(self) -> None:
        self._shards = {}
        self._memory = []
        mappings, self._mappings = self._mappings, []
        if not close_mappings(mappings):
            _log.error("views of an engine's memory outlive its session; it is unmapped when the last of them goes")


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
