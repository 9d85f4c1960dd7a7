"""Engine caches and pages of all the shapes that occur, on poisoned memory, and the tables that name them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpool.kernels.tables import CopyShape, PageColumn, copy_shape

POISON = 0xA5
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
    """views: one a plane, [block, token of a block, head, byte] uint8. buffers: all of the memory that they lie in."""

    views: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]

    def planes(self, *, payload_start: int, positions: int) -> Tensor:
        """Rows of the table on the device; planes follow each other in the payload from payload_start on."""
        rows, offset = [], payload_start
        for view in self.views:
            rows.append([view.data_ptr(), *view.stride()[:3], offset, 0, 0, 0])
            offset += positions * view.shape[2] * view.shape[3]
        return torch.tensor(rows, dtype=torch.int64).to(self.views[0].device)

    def shape(self, planes: Tensor, positions: int, most_planes: int | None = None) -> CopyShape:
        _blocks, block_rows, heads, row_bytes = self.views[0].shape
        return copy_shape(
            planes.tolist(),
            positions=positions,
            block_rows=block_rows,
            heads=heads,
            row_bytes=row_bytes,
            most_planes=most_planes or len(self.views),
        )


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
    else:
        raise ValueError(layout)
    return PagedCache(tuple(views), tuple(buffers))


@dataclass(frozen=True, slots=True)
class Pages:
    """slots: [N, bytes] poisoned; payloads begin after a header and end before the sums. table: rows of `pages`."""

    slots: Tensor
    table: Tensor
    payload_bytes: int

    @property
    def payloads(self) -> Tensor:
        return self.slots[:, HEADER_BYTES : HEADER_BYTES + self.payload_bytes]


def make_pages(count: int, payload_bytes: int, plane_count: int, device: str) -> Pages:
    slot_bytes = math.ceil((HEADER_BYTES + payload_bytes + 32) / 16) * 16
    slots = poisoned((count, slot_bytes), device)
    table = torch.zeros((count, 8), dtype=torch.int64)
    for page in range(count):
        table[page, PageColumn.PAYLOAD_ADDRESS] = slots[page].data_ptr() + HEADER_BYTES
    table[:, PageColumn.PLANE_COUNT] = plane_count
    table[:, PageColumn.PAYLOAD_BYTES] = payload_bytes
    table[:, PageColumn.PRESENT] = 1
    return Pages(slots, table, payload_bytes)


def pick_blocks(pages: int, positions: int, block_rows: int, blocks: int, device: str) -> Tensor:
    """[pages, blocks of a page] int64: all different, in no order."""
    columns = math.ceil(positions / block_rows)
    generator = torch.Generator().manual_seed(positions)
    return torch.randperm(blocks, generator=generator)[: pages * columns].reshape(pages, columns).to(device)
