"""Engine caches and pages of all the shapes that occur, on poisoned memory, and the tables that name them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpool_gpuagent.kernels.launching import Launch
from kvpool_gpuagent.kernels.tables import CopyShape, PageColumn, copy_shape

POISON = 0xA5
UNIT_ROWS = 16  # of a payload
HEADER_BYTES = 64  # before a payload, as in an arena slot


def random_bytes(shape: tuple[int, ...], device: str, seed: int = 1) -> Tensor:
    """Bytes that no test expects by accident, the same in each run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


def poisoned(shape: tuple[int, ...], device: str) -> Tensor:
    """Fresh memory in which every byte that is written by mistake shows."""
    return torch.full(shape, POISON, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """views: one a plane, [block, token of a block, head, byte] uint8. buffers: all of the memory that they lie in.
    row_planes: planes of a layer."""

    views: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    row_planes: int = 2

    def payload(self, positions: int, *, start: int = 0, first_head: int = 0, more_heads: int = 0) -> "PayloadPlaces":
        """Where pages have the rows; first_head, more_heads: of the payload, before and behind those of the views."""
        _blocks, _block_rows, heads, row_bytes = self.views[0].shape
        return PayloadPlaces(
            start=start,
            positions=positions,
            planes=len(self.views),
            row_planes=self.row_planes,
            heads=heads,
            row_bytes=row_bytes,
            first_head=first_head,
            more_heads=more_heads,
        )

    def planes(self, places: "PayloadPlaces") -> Tensor:
        """Rows of the table on the device."""
        rows = [
            [view.data_ptr(), *view.stride()[:3], places.offset(plane), 0, places.unit_bytes, 0]
            for plane, view in enumerate(self.views)
        ]
        return torch.tensor(rows, dtype=torch.int64).to(self.views[0].device)

    def shape(self, planes: Tensor, positions: int, most_planes: int | None = None, most_heads: int = 0) -> CopyShape:
        _blocks, block_rows, heads, row_bytes = self.views[0].shape
        return copy_shape(
            planes.tolist(),
            positions=positions,
            block_rows=block_rows,
            most_heads=most_heads or heads,
            row_bytes=row_bytes,
            most_planes=most_planes or len(self.views),
            row_planes=self.row_planes,
            unit_rows=UNIT_ROWS,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadPlaces:
    """Where the rows of planes lie in a payload: [unit][layer][head][token of the unit][k, v][byte], from start on."""

    start: int
    positions: int
    planes: int
    row_planes: int
    heads: int
    row_bytes: int
    first_head: int
    more_heads: int

    @property
    def axes(self) -> tuple[int, int, int, int, int, int]:
        units = -(-self.positions // UNIT_ROWS)
        heads = self.first_head + self.heads + self.more_heads
        return units, self.planes // self.row_planes, heads, UNIT_ROWS, self.row_planes, self.row_bytes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.axes)

    @property
    def unit_bytes(self) -> int:
        return math.prod(self.axes[1:])

    def offset(self, plane: int) -> int:
        """Of a plane's first row."""
        layer, nth = divmod(plane, self.row_planes)
        _units, _layers, heads, *inner = self.axes
        head_bytes = math.prod(inner)
        return self.start + (layer * heads + self.first_head) * head_bytes + nth * self.row_bytes

    def rows_of(self, payloads: Tensor) -> Tensor:
        """[N, plane, position, head, byte], a copy, of [N, bytes]."""
        whole = payloads[:, self.start : self.start + self.size_bytes].reshape(-1, *self.axes)
        here = whole[:, :, :, self.first_head : self.first_head + self.heads]
        rows = here.permute(0, 2, 5, 1, 4, 3, 6).flatten(3, 4).flatten(1, 2)
        return rows[:, :, : self.positions].clone()

    def put(self, payloads: Tensor, rows: Tensor) -> None:
        """The same the other way; whatever else is in the payloads stays."""
        units, layers, _heads, unit_rows, row_planes, row_bytes = self.axes
        whole = payloads[:, self.start : self.start + self.size_bytes].reshape(-1, *self.axes).clone()
        padded = rows.new_zeros((len(rows), self.planes, units * unit_rows, self.heads, row_bytes))
        padded[:, :, : self.positions] = rows
        by_layer = padded.view(-1, layers, row_planes, units, unit_rows, self.heads, row_bytes)
        exists = (torch.arange(units * unit_rows, device=rows.device) < self.positions).view(
            units, 1, 1, unit_rows, 1, 1
        )
        here = whole[:, :, :, self.first_head : self.first_head + self.heads]
        here[:] = torch.where(exists, by_layer.permute(0, 3, 1, 5, 4, 2, 6), here)
        payloads[:, self.start : self.start + self.size_bytes] = whole.flatten(1)


def paged_cache(
    layout: str,
    *,
    layers: int,
    blocks: int,
    block_rows: int,
    heads: int,
    row_bytes: int,
    device: str,
    first_head: int = 0,
) -> PagedCache:
    """A cache filled with random bytes.

    layout: where rows lie; first_head leaves heads of other shards before and, as many, behind those of the views.
    """
    total, sizes = heads + 2 * first_head, (blocks, block_rows)
    own = slice(first_head, first_head + heads)
    if layout == "nhd":  # vLLM: [2, blocks, block, H, D] a layer
        buffers = [random_bytes((2, *sizes, total, row_bytes), device, seed) for seed in range(layers)]
        views = [buffer[k_or_v][:, :, own] for buffer in buffers for k_or_v in range(2)]
    elif layout == "hnd":  # vLLM: [blocks, 2, H, block, D] a layer
        buffers = [random_bytes((blocks, 2, total, block_rows, row_bytes), device, seed) for seed in range(layers)]
        views = [buffer[:, k_or_v].transpose(1, 2)[:, :, own] for buffer in buffers for k_or_v in range(2)]
    elif layout == "interleaved":  # lightllm: one tensor [L, slots, 2H, D], K heads then V heads
        buffers = [random_bytes((layers, *sizes, 2, total, row_bytes), device)]
        views = [buffers[0][layer, :, :, k_or_v, own] for layer in range(layers) for k_or_v in range(2)]
    elif layout == "separate":  # SGLang: K and V buffers [slots, H, D] of their own a layer
        buffers = [random_bytes((*sizes, total, row_bytes), device, seed) for seed in range(2 * layers)]
        views = [buffer[:, :, own] for buffer in buffers]
    elif layout == "padded":  # MLA: [slots, 1, row] a layer, with bytes of something else after each row
        buffers = [random_bytes((*sizes, total, row_bytes + 48), device, seed) for seed in range(layers)]
        views = [buffer[:, :, own, :row_bytes] for buffer in buffers]
    elif layout == "block-major":  # vLLM: [blocks, L, H, block, K|V]
        buffers = [random_bytes((blocks, layers, total, block_rows, 2 * row_bytes), device)]
        cells = buffers[0].transpose(2, 3)[:, :, :, own]
        views = [cells[:, layer, ..., k * row_bytes : (k + 1) * row_bytes] for layer in range(layers) for k in range(2)]
    else:
        raise ValueError(layout)
    return PagedCache(tuple(views), tuple(buffers), 1 if layout == "padded" else 2)


@dataclass(frozen=True, slots=True)
class Pages:
    """slots: [N, bytes] poisoned; payloads begin after a header and end before the sums. table: rows of `pages`."""

    slots: Tensor
    table: Tensor
    payload_bytes: int

    @property
    def payloads(self) -> Tensor:
        return self.slots[:, HEADER_BYTES : HEADER_BYTES + self.payload_bytes]


def make_pages(count: int, payload_bytes: int, plane_count: int, heads: int, device: str) -> Pages:
    slot_bytes = math.ceil((HEADER_BYTES + payload_bytes + 32) / 16) * 16
    slots = poisoned((count, slot_bytes), device)
    table = torch.zeros((count, 8), dtype=torch.int64)
    for page in range(count):
        table[page, PageColumn.PAYLOAD_ADDRESS] = slots[page].data_ptr() + HEADER_BYTES
    table[:, PageColumn.PLANE_COUNT] = plane_count
    table[:, PageColumn.HEADS] = heads
    return Pages(slots, table, payload_bytes)


def pick_blocks(pages: int, positions: int, block_rows: int, blocks: int, device: str) -> Tensor:
    """[pages, blocks of a page] int64: all different, in no order."""
    columns = math.ceil(positions / block_rows)
    generator = torch.Generator().manual_seed(positions)
    return torch.randperm(blocks, generator=generator)[: pages * columns].reshape(pages, columns).to(device)


def start(launch: Launch, pages: Tensor, blocks: Tensor, planes: Tensor, *, programs: int | None = None) -> None:
    """Run a launch over these tables, which lie on the device or in pinned memory."""
    launch.start(len(pages), *(table.data_ptr() for table in (pages, blocks, planes)), programs=programs)
