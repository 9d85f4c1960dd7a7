"""Pulls of chunks from other ranks' caches: which rows they mean, and refusals before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.plane_table import PLANE_COLUMNS
from kvpool_gpuagent.core.cached_chunks import HeldChunks, Share, common_range

Int64s = npt.NDArray[np.int64]

MANY_BLOCKS = 32  # what so many copies cost beside their bytes is worth a look for neighbours


@dataclass(frozen=True, slots=True, eq=False)
class PullCells:
    """Rows that a pull copies: of model layers x heads that both ranks have, for tokens.

    slots: [T, 2] int64, row slots of the source and of the destination: block * rows of a block + row.
    """

    layers: range
    heads: range
    slots: Int64s


def cells_of(share: Share, span: ChunkRange, spec: KeyspaceSpec, source: EngineLayout, own: EngineLayout) -> PullCells:
    """Return the rows that bring a share of a cache into a load's blocks; the tokens that the load skips are left out.

    source: the cache's layout, as its engine registered it. own: of the load's cache, whose blocks are distinct. Shares
    of one load (see `covering`) write no cell twice. Raises InvalidRequest naming what of the share does not fit.
    """
    _check_held(share.held, spec, source)
    sides = ((share.held.found.block_ids[share.rows], source), (span.block_ids[share.positions], own))
    slots = np.stack([_row_slots(block_ids, layout.rows_of_block(spec)) for block_ids, layout in sides], axis=1)
    if share.positions[0] == 0:
        slots = slots[span.skip_tokens * spec.positions // spec.chunk_tokens :]
    layers = common_range(source.layer_range, own.layer_range)
    return PullCells(layers, common_range(source.head_range, own.head_range), slots)


def _row_slots(block_ids: Int64s, block_rows: int) -> Int64s:
    """[chunks * rows of a chunk]."""
    rows: Int64s = block_ids[..., np.newaxis] * block_rows + np.arange(block_rows)
    return rows.reshape(-1)


def _check_held(held: HeldChunks, spec: KeyspaceSpec, source: EngineLayout) -> None:
    """Another agent may have said what it liked: nothing outside of the cache is read, and nothing left out."""
    ranges = (("layers", held.layers, source.layer_range), ("heads", held.heads, source.head_range))
    for name, said, there in ranges:
        if said != there:
            raise InvalidRequest(
                f"cached chunks of {name} [{said.start}, {said.stop}): its layout has [{there.start}, {there.stop})"
            )
    if held.scales != bool(source.layers[0].scales):
        raise InvalidRequest(f"cached chunks {'with' if held.scales else 'without'} scales: its layout is not so")
    block_ids, width = held.found.block_ids, spec.chunk_tokens // source.block_tokens
    if block_ids.shape[1] != width:
        raise InvalidRequest(f"cached chunks have {block_ids.shape[1]} blocks for each chunk, its layout needs {width}")
    wrong = block_ids[(block_ids < 0) | (block_ids >= source.block_count)]
    if wrong.size:
        raise InvalidRequest(f"blocks of cached chunks must lie in [0, {source.block_count}), got {int(wrong[0])}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerPlanes:
    """Planes of one row size, layer by layer.

    source, destination: [P, 8] int64: address of (block 0, row 0, first common head); block, row and head stride; 0.
    handles: [P, 2] int64, of source and destination.
    """

    source: Int64s
    destination: Int64s
    handles: Int64s
    heads: int
    row_bytes: int
    source_block_rows: int
    destination_block_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class CacheSide:
    """One rank's cache: addresses of its handles' first bytes, as one GPU sees them."""

    layout: EngineLayout
    addresses: Sequence[int]


def peer_planes(
    spec: KeyspaceSpec, layers: range, heads: range, source: CacheSide, destination: CacheSide
) -> tuple[PeerPlanes, PeerPlanes | None]:
    """Data planes, and scale planes if both caches have some. layers, heads: of the model, that both sides have."""
    data = _planes_of(spec, layers, heads, source, destination, "planes")
    if not source.layout.layers[0].scales:
        return data, None
    return data, _planes_of(spec, layers, heads, source, destination, "scales")


def _planes_of(
    spec: KeyspaceSpec, layers: range, heads: range, source: CacheSide, destination: CacheSide, kind: str
) -> PeerPlanes:
    tables, handles = zip(*(_rows(spec, layers, heads, side, kind) for side in (source, destination)), strict=True)
    plane: RowPlane = getattr(source.layout.layers[0], kind)[0]
    return PeerPlanes(
        source=tables[0],
        destination=tables[1],
        handles=np.stack(handles, axis=1),
        heads=len(heads),
        row_bytes=plane.row_bytes,
        source_block_rows=source.layout.rows_of_block(spec),
        destination_block_rows=destination.layout.rows_of_block(spec),
    )


def _rows(spec: KeyspaceSpec, layers: range, heads: range, side: CacheSide, kind: str) -> tuple[Int64s, Int64s]:
    """The table of a side, and its handles."""
    layout = side.layout
    first_head = heads.start - layout.first_head
    rows: list[tuple[int, ...]] = []
    handles: list[int] = []
    for layer in layers:
        planes: tuple[RowPlane, ...] = getattr(layout.layers[layer - layout.first_layer], kind)
        for plane in planes:
            handles.append(plane.handle)
            # A stride along which there is one item counts for nothing, also not for how wide a copy may be.
            rows.append(
                (
                    side.addresses[plane.handle] + plane.offset_bytes + first_head * plane.head_stride_bytes,
                    plane.block_stride_bytes if layout.block_count > 1 else 0,
                    plane.token_stride_bytes if layout.rows_of_block(spec) > 1 else 0,
                    plane.head_stride_bytes if len(heads) > 1 else 0,
                )
            )
    table = np.zeros((len(rows), PLANE_COLUMNS), dtype=np.int64)
    table[:, :4] = rows
    return table, np.array(handles, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BlockRuns:
    """Byte ranges that are contiguous in both caches and make up one block, each field [R] int64.

    sources, destinations: addresses in block 0. *_strides: to the same range of the next block.
    """

    sources: Int64s
    source_strides: Int64s
    destinations: Int64s
    destination_strides: Int64s
    sizes_bytes: Int64s

    @classmethod
    def of(cls, parts: Sequence[PeerPlanes]) -> BlockRuns | None:
        """The longest runs of all these planes; None where blocks of source and destination have different rows."""
        if any(planes.source_block_rows != planes.destination_block_rows for planes in parts):
            return None
        rows = np.concatenate([_rows_of_block(planes) for planes in parts])
        rows = rows[np.argsort(rows[:, 2], kind="stable")]
        # Neighbours in the destination become one run if they are neighbours in the source, with equal strides, too.
        breaks = np.ones(len(rows), dtype=np.bool_)
        breaks[1:] = (np.diff(rows[:, [0, 2]], axis=0) != rows[:-1, 4:5]).any(axis=1)
        breaks[1:] |= (np.diff(rows[:, [1, 3, 5, 6]], axis=0) != 0).any(axis=1)
        first = np.flatnonzero(breaks)
        return cls(
            sources=rows[first, 0],
            source_strides=rows[first, 1],
            destinations=rows[first, 2],
            destination_strides=rows[first, 3],
            sizes_bytes=np.add.reduceat(rows[:, 4], first),
        )

    def copies(self, blocks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return destinations, sources and sizes of the copies of blocks. blocks: [B, 2], of source and destination.

        Of many blocks, those that follow each other on both sides are one copy of each run that fills its blocks: an
        engine mostly gives out blocks in order.
        """
        follows = np.zeros(len(blocks), dtype=np.bool_)
        if len(blocks) >= MANY_BLOCKS:
            blocks = blocks[np.argsort(blocks[:, 1])]
            follows[1:] = (np.diff(blocks, axis=0) == 1).all(axis=1)
        dense = (self.source_strides == self.sizes_bytes) & (self.destination_strides == self.sizes_bytes)
        first = np.flatnonzero(~(dense[:, np.newaxis] & follows))  # of [R, B]; block 0 follows none
        sources = self.sources[:, np.newaxis] + blocks[:, 0] * self.source_strides[:, np.newaxis]
        destinations = self.destinations[:, np.newaxis] + blocks[:, 1] * self.destination_strides[:, np.newaxis]
        sizes = np.broadcast_to(self.sizes_bytes[:, np.newaxis], sources.shape)
        return (
            destinations.reshape(-1)[first],
            sources.reshape(-1)[first],
            np.add.reduceat(sizes.reshape(-1), first) if first.size else sizes.reshape(-1),
        )


def _rows_of_block(planes: PeerPlanes) -> Int64s:
    """Every row of block 0, [rows, 7]: address and block stride of source and destination, size, both handles."""
    shape = len(planes.source), planes.heads, planes.source_block_rows
    head, token = np.arange(planes.heads)[:, np.newaxis], np.arange(planes.source_block_rows)
    columns: list[npt.ArrayLike] = []
    for table in (planes.source, planes.destination):
        address, block_stride, token_stride, head_stride = table[:, :4].T[..., np.newaxis, np.newaxis]
        columns += [address + head * head_stride + token * token_stride, block_stride]
    columns += [planes.row_bytes, *planes.handles.T[..., np.newaxis, np.newaxis]]
    return np.stack([np.broadcast_to(column, shape).reshape(-1) for column in columns], axis=1)
