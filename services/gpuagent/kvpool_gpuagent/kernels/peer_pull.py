"""Peer pull: rows of other tokens' slots, mostly of a neighbour GPU, become rows of the own cache, bit for bit.

Few programs that stay, so that few multiprocessors are taken from the engine's own kernels. A program moves a run of
(tile of tokens, plane) items; the slots of a tile are read once for all planes. Each thread has 128 bytes in flight and
warps do not wait for each other within a tile, which hides the microseconds that a read over NVLink takes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool_gpuagent.kernels.copying import ELEMENTS_BY_BYTES
from kvpool_gpuagent.kernels.launching import MOST_ITEMS, Launch, check_table
from kvpool_gpuagent.kernels.tables import PLANE_COLUMNS, PlaneColumn, widest_unit_bytes

PROGRAMS = 24
WARPS = 16
# 16-byte units: 16 elements a thread, 64 KiB in flight a program; narrower ones need more registers for addresses.
TILE_ELEMENTS, NARROW_TILE_ELEMENTS = 8192, 4096
MOST_TILE_TOKENS = 512  # slots that a program holds

_BLOCK_STRIDE = tl.constexpr(PlaneColumn.BLOCK_STRIDE.value)
_TOKEN_STRIDE = tl.constexpr(PlaneColumn.TOKEN_STRIDE.value)
_HEAD_STRIDE = tl.constexpr(PlaneColumn.HEAD_STRIDE.value)
_ADDRESS = tl.constexpr(PlaneColumn.ADDRESS.value)
_PLANE_COLUMNS = tl.constexpr(PLANE_COLUMNS)


@dataclass(frozen=True, slots=True)
class PullShape:
    """What is equal for all planes of a pull.

    heads:                  rows of a token that both sides have; addresses name the first of them.
    row_bytes:              of one head of one token.
    unit_bytes:             1, 2, 4, 8 or 16: divides row_bytes and every address and stride of both sides.
    source_block_rows,
    destination_block_rows: tokens of a block; slot = block * block_rows + token.
    """

    heads: int
    row_bytes: int
    unit_bytes: int
    source_block_rows: int
    destination_block_rows: int

    def __post_init__(self) -> None:
        for name in ("heads", "row_bytes", "unit_bytes", "source_block_rows", "destination_block_rows"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.unit_bytes != widest_unit_bytes(self.unit_bytes) or self.row_bytes % self.unit_bytes:
            raise ValueError(f"unit_bytes must be a power of two up to 16 that divides row_bytes, got {self}")
        if self.heads * self.row_bytes >= 1 << 24:
            raise ValueError(f"a token must have less than 16 MiB in one plane, got {self}")

    def constants(self, prefix: str = "") -> dict[str, Any]:
        """The constexpr arguments of one kind of planes, in the order of the kernel's signature."""
        element_bytes = min(self.unit_bytes, 8)
        token = self.heads * self.row_bytes // element_bytes
        tile = TILE_ELEMENTS if self.unit_bytes == 16 else NARROW_TILE_ELEMENTS
        while tile > 1 and _most_tokens(tile, token) > MOST_TILE_TOKENS:
            tile //= 2
        constants = {
            "SOURCE_ROWS": self.source_block_rows,
            "DESTINATION_ROWS": self.destination_block_rows,
            "HEADS": self.heads,
            "ROW_BYTES": self.row_bytes,
            "UNIT_BYTES": self.unit_bytes,
            "ELEMENT": ELEMENTS_BY_BYTES[element_bytes],
            "TILE": tile,
            "TILE_TOKENS": triton.next_power_of_2(_most_tokens(tile, token)),
        }
        return {prefix + name: value for name, value in constants.items()}


def _most_tokens(tile: int, token: int) -> int:
    """The most tokens that a run of tile elements touches, if runs start at multiples of tile and tokens of token."""
    if tile % token == 0 or token % tile == 0:
        return max(1, tile // token)
    return (token + tile - 2) // token + 1


def pull_shape(
    source: Sequence[Sequence[int]],
    destination: Sequence[Sequence[int]],
    *,
    heads: int,
    row_bytes: int,
    source_block_rows: int,
    destination_block_rows: int,
) -> PullShape:
    """The cheapest shape for a pull between these planes (rows of the tables, as plain integers).

    Where heads lie side by side on both sides, one row holds them all.
    """
    rows = [[int(value) for value in row] for row in (*source, *destination)]
    if all(row[PlaneColumn.HEAD_STRIDE] == row_bytes for row in rows):
        heads, row_bytes = 1, heads * row_bytes
    last = PlaneColumn.HEAD_STRIDE + (heads > 1)
    unit_bytes = widest_unit_bytes(row_bytes, *(value for row in rows for value in row[:last]))
    return PullShape(heads, row_bytes, unit_bytes, source_block_rows, destination_block_rows)


@dataclass(frozen=True, slots=True)
class PullPlanes:
    """Planes that are pulled with one shape: source and destination [P, 8] int64, row by row; best on the device."""

    source: Tensor
    destination: Tensor
    shape: PullShape


def pull_rows_reference(slots: Tensor, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """The same by torch.

    slots:                 [T, 2] int64, as pull_rows takes them.
    sources, destinations: one view a plane, [block, token of a block, head, byte] uint8, any strides.
    """
    for source, destination in zip(sources, destinations, strict=True):
        from_slot, to_slot = slots[:, 0], slots[:, 1]
        rows = source[from_slot // source.shape[1], from_slot % source.shape[1]]
        destination[to_slot // destination.shape[1], to_slot % destination.shape[1]] = rows


@triton.jit
def rows_of(
    planes: tl.tensor,
    plane: tl.tensor,
    block: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    column: tl.tensor,
    HEADS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Pointers to the elements of a tile in one plane."""
    BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    PAIR: tl.constexpr = UNIT_BYTES // BYTES
    row = planes.to(tl.int64).to(tl.pointer_type(tl.int64)) + plane * _PLANE_COLUMNS
    offset = block * tl.multiple_of(tl.load(row + _BLOCK_STRIDE) // BYTES, PAIR)
    offset += token * tl.multiple_of(tl.load(row + _TOKEN_STRIDE) // BYTES, PAIR)
    if HEADS > 1:
        offset += head * tl.multiple_of(tl.load(row + _HEAD_STRIDE) // BYTES, PAIR)
    return tl.multiple_of(tl.load(row + _ADDRESS).to(tl.pointer_type(ELEMENT)), UNIT_BYTES) + (offset + column)


@triton.jit
def pull_planes(
    slots: tl.tensor,
    tokens: tl.tensor,
    sources: tl.tensor,
    destinations: tl.tensor,
    planes: tl.tensor,
    SOURCE_ROWS: tl.constexpr,
    DESTINATION_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    """This program's share of all (tile, plane) items of one kind of planes."""
    PAIR: tl.constexpr = UNIT_BYTES * 8 // ELEMENT.primitive_bitwidth
    ROW: tl.constexpr = ROW_BYTES * 8 // ELEMENT.primitive_bitwidth
    TOKEN: tl.constexpr = HEADS * ROW
    items = (tokens.to(tl.int64) * TOKEN + TILE - 1) // TILE * planes
    first = items * tl.program_id(0) // tl.num_programs(0)
    last = items * (tl.program_id(0) + 1) // tl.num_programs(0)
    for tile in range(first // planes, (last + planes - 1) // planes):
        start = tl.cast(tile, tl.int64) * TILE
        first_token = start // TOKEN
        element = tl.multiple_of((start - first_token * TOKEN).to(tl.int32), PAIR) + tl.arange(0, TILE)
        nth = element // TOKEN
        mask = nth < tokens - first_token
        # One coalesced read of the slots (they may lie across the host link), then an exchange within the program.
        ahead = tl.arange(0, TILE_TOKENS)
        entries = slots.to(tl.int64).to(tl.pointer_type(tl.int64)) + (first_token + ahead) * 2
        is_there = ahead < tokens - first_token
        source_slots = tl.load(entries, mask=is_there, other=0)
        destination_slots = tl.load(entries + 1, mask=is_there, other=0)
        source_block = tl.max_constancy(tl.gather(source_slots // SOURCE_ROWS, nth, 0), [PAIR])
        source_token = tl.max_constancy(tl.gather(source_slots % SOURCE_ROWS, nth, 0), [PAIR])
        block = tl.max_constancy(tl.gather(destination_slots // DESTINATION_ROWS, nth, 0), [PAIR])
        token = tl.max_constancy(tl.gather(destination_slots % DESTINATION_ROWS, nth, 0), [PAIR])
        head = tl.max_constancy(element % TOKEN // ROW, [PAIR]).to(tl.int64)
        column = element % ROW
        for plane in range(tl.maximum(first - tile * planes, 0), tl.minimum(last - tile * planes, planes)):
            source = rows_of(sources, plane, source_block, source_token, head, column, HEADS, UNIT_BYTES, ELEMENT)
            destination = rows_of(destinations, plane, block, token, head, column, HEADS, UNIT_BYTES, ELEMENT)
            tl.store(destination, tl.load(source, mask=mask, eviction_policy="evict_first"), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=[
    "slots", "tokens", "sources", "destinations", "planes", "scale_sources", "scale_destinations", "scale_planes",
])
def pull_kernel(
    slots: tl.int64, tokens: tl.int32,
    sources: tl.int64, destinations: tl.int64, planes: tl.int32,
    scale_sources: tl.int64, scale_destinations: tl.int64, scale_planes: tl.int32,
    SOURCE_ROWS: tl.constexpr, DESTINATION_ROWS: tl.constexpr, HEADS: tl.constexpr, ROW_BYTES: tl.constexpr,
    UNIT_BYTES: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr, TILE_TOKENS: tl.constexpr,
    SCALE_SOURCE_ROWS: tl.constexpr, SCALE_DESTINATION_ROWS: tl.constexpr, SCALE_HEADS: tl.constexpr,
    SCALE_ROW_BYTES: tl.constexpr, SCALE_UNIT_BYTES: tl.constexpr, SCALE_ELEMENT: tl.constexpr,
    SCALE_TILE: tl.constexpr, SCALE_TILE_TOKENS: tl.constexpr, HAS_SCALES: tl.constexpr,
) -> None:
    pull_planes(
        slots, tokens, sources, destinations, planes,
        SOURCE_ROWS, DESTINATION_ROWS, HEADS, ROW_BYTES, UNIT_BYTES, ELEMENT, TILE, TILE_TOKENS,
    )
    if HAS_SCALES:
        pull_planes(
            slots, tokens, scale_sources, scale_destinations, scale_planes,
            SCALE_SOURCE_ROWS, SCALE_DESTINATION_ROWS, SCALE_HEADS, SCALE_ROW_BYTES, SCALE_UNIT_BYTES, SCALE_ELEMENT,
            SCALE_TILE, SCALE_TILE_TOKENS,
        )
# fmt: on


def pull_rows(slots: Tensor, data: PullPlanes, scales: PullPlanes | None = None, *, programs: int = PROGRAMS) -> None:
    """Copy the rows of all layers of a load's tokens into the own cache, in one launch.

    slots:    [T, 2] int64: (source slot, destination slot) of each token; on the device or in pinned memory, unchanged
              until the launch has run. No destination slot twice; sources may repeat.
    data:     planes in any number of allocations, of any strides, of one or several source GPUs that this device may
              access. Heads: only those that both sides have (TP). What the tables name is not checked on the device.
    scales:   planes of another row size that travel along.
    programs: at most so many, hence as many multiprocessors.
    raises:   ValueError naming the argument, before any launch.

    Moves T * planes * heads * row_bytes bytes over the link and as many into the own memory; equal, bit for bit, to the
    reference. Runs on the current stream. The source's engine may write to its slots meanwhile: what generations of
    blocks say after the copy decides whether it counts.
    """
    tokens = slots.shape[0]
    arguments = [check_table("slots", slots, torch.int64, 2), tokens]
    for name, planes in (("data", data), ("scales", scales or data)):
        count = planes.source.shape[0]
        source = check_table(f"{name}.source", planes.source, torch.int64, PLANE_COLUMNS)
        destination = check_table(f"{name}.destination", planes.destination, torch.int64, PLANE_COLUMNS, count)
        arguments += [source, destination, count]
    if tokens > MOST_ITEMS or programs <= 0:
        raise ValueError(f"slots must be at most {MOST_ITEMS} and programs > 0, got {tokens} and {programs}")
    counts = [planes.source.shape[0] for planes in (data, scales or data)]
    if tokens and all(counts):  # an empty grid cannot be launched, and no division by no planes
        pull_launch(data.shape, scales.shape if scales else None).run(programs, *arguments)


@functools.lru_cache(maxsize=256)
def pull_launch(data: PullShape, scales: PullShape | None) -> Launch:
    """What `pull_rows` launches."""
    constants = data.constants() | (scales or data).constants("SCALE_")
    constants["HAS_SCALES"] = scales is not None
    return Launch(pull_kernel, constants, WARPS)
