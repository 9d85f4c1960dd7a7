"""What an engine asks of its agent, checked, and what it is told at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import GROUP_CHUNKS, ROOT_HASH
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

BlockIds = npt.NDArray[np.int64]
HASH_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBlocks:
    """One chunk and where its tokens lie in the engine's cache.

    block_ids: [chunk_tokens / block_tokens] int64.
    skip_tokens: loads only: the first this many tokens are the engine's own and stay untouched.
    """

    chunk_hash: bytes
    block_ids: BlockIds
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpan:
    """Consecutive chunks of one chain.

    group_heads: heads of the 16-chunk groups that the chunks fall into, in order.
    parent_hash: of the chunk before the first.
    """

    chunks: tuple[ChunkBlocks, ...]
    first_index: int
    parent_hash: bytes
    group_heads: tuple[bytes, ...]
    chain_head: bytes

    def group_head(self, position: int) -> bytes:
        """Head of the group that the chunk at `position` (in the request) falls into."""
        return self.group_heads[(self.first_index + position) // GROUP_CHUNKS - self.first_index // GROUP_CHUNKS]

    def parent(self, position: int) -> bytes:
        """Hash of the chunk before the one at `position`."""
        return self.chunks[position - 1].chunk_hash if position else self.parent_hash

    @property
    def hashes(self) -> list[bytes]:
        """Chunk hashes, in order."""
        return [chunk.chunk_hash for chunk in self.chunks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The part of the keyspace that one engine rank owns."""

    keyspace: bytes
    spec: KeyspaceSpec
    grid: ShardGrid
    layout: EngineLayout
    shards: int  # bitmap
    load_only: bool = False

    @classmethod
    def of(cls, keyspace: bytes, spec: KeyspaceSpec, layout: EngineLayout, *, load_only: bool = False) -> Rank:
        """Raises PartitionRefused naming the grid when the rank's layers and heads are no union of shards."""
        grid = ShardGrid.of(spec)
        layout.validate(spec)
        layers = range(layout.first_layer, layout.first_layer + len(layout.layers))
        heads = range(layout.first_head, layout.first_head + layout.head_count)
        shards = grid.bitmap_for(layers, heads)
        return cls(keyspace=keyspace, spec=spec, grid=grid, layout=layout, shards=shards, load_only=load_only)

    @property
    def blocks_per_chunk(self) -> int:
        """Block ids that name one chunk."""
        return self.spec.chunk_tokens // self.layout.block_tokens


@dataclass(slots=True, kw_only=True)
class StoreOutcome:
    """End of a store; `failed` maps positions in the request to why."""

    stored_chunks: int = 0
    deduplicated_chunks: int = 0
    failed: dict[int, KvPoolError] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadOutcome:
    """End of a load: leading chunks that are in; everything after them is failed, `error` says why the first one is."""

    chunk_count: int
    loaded_chunks: int = 0
    error: KvPoolError | None = None
    staging_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0

    @property
    def failed_chunks(self) -> range:
        """Positions in the request that are not usable."""
        return range(self.loaded_chunks, self.chunk_count)


def check_span(span: ChunkSpan, rank: Rank, *, max_chunks: int, unique_blocks: bool) -> None:
    """Refuse a malformed request before anything is touched.

    Raises InvalidRequest naming the argument and the item. unique_blocks: a load must not name a block twice.
    """
    count = len(span.chunks)
    if not 0 < count <= max_chunks:
        raise InvalidRequest(f"a request names 1 to {max_chunks} chunks, got {count}; split it")
    if span.first_index < 0:
        raise InvalidRequest(f"first_chunk_index must be >= 0, got {span.first_index}")
    groups = (span.first_index + count - 1) // GROUP_CHUNKS - span.first_index // GROUP_CHUNKS + 1
    if len(span.group_heads) != groups:
        raise InvalidRequest(
            f"chunks fall into {groups} chain groups but group_head_hashes has {len(span.group_heads)}"
        )
    if span.first_index == 0 and span.parent_hash != ROOT_HASH:
        raise InvalidRequest("parent_hash of chunk 0 must be 16 zero bytes")
    _check_hash_lengths(span)
    for position, chunk in enumerate(span.chunks):
        _check_blocks(position, chunk, rank)
    if unique_blocks:
        _check_unique(span, rank)


def _check_hash_lengths(span: ChunkSpan) -> None:
    for name, value in (("parent_hash", span.parent_hash), *(("group_head_hashes", head) for head in span.group_heads)):
        if len(value) != HASH_BYTES:
            raise InvalidRequest(f"{name} must have {HASH_BYTES} bytes, got {len(value)}")
    for position, chunk in enumerate(span.chunks):
        if len(chunk.chunk_hash) != HASH_BYTES:
            raise InvalidRequest(
                f"chunks[{position}].chunk_hash must have {HASH_BYTES} bytes, got {len(chunk.chunk_hash)}",
                item_index=position,
            )


def _check_blocks(position: int, chunk: ChunkBlocks, rank: Rank) -> None:
    ids = chunk.block_ids
    if ids.shape != (rank.blocks_per_chunk,):
        raise InvalidRequest(
            f"chunks[{position}].block_ids must name {rank.blocks_per_chunk} blocks "
            f"of {rank.layout.block_tokens} tokens, "
            f"got {ids.shape[0]}",
            item_index=position,
        )
    if int(ids.min()) < 0 or int(ids.max()) >= rank.layout.block_count:
        raise InvalidRequest(
            f"chunks[{position}].block_ids must lie in [0, {rank.layout.block_count}), "
            f"got {int(ids.min())} to {int(ids.max())}",
            item_index=position,
        )
    if not 0 <= chunk.skip_tokens < rank.spec.chunk_tokens:
        raise InvalidRequest(
            f"chunks[{position}].skip_tokens must lie in [0, {rank.spec.chunk_tokens}), got {chunk.skip_tokens}",
            item_index=position,
        )
    # An opaque cell cannot be written in part; a canonical page can start at any token.
    if rank.spec.opaque is not None and chunk.skip_tokens % rank.layout.block_tokens:
        raise InvalidRequest(
            f"chunks[{position}].skip_tokens must be a multiple of the block ({rank.layout.block_tokens}) "
            f"in an opaque keyspace",
            item_index=position,
        )


def _check_unique(span: ChunkSpan, rank: Rank) -> None:
    # Blocks that are skipped whole are not written, so they may repeat.
    used = np.concatenate([chunk.block_ids[chunk.skip_tokens // rank.layout.block_tokens :] for chunk in span.chunks])
    values, counts = np.unique(used, return_counts=True)
    if values.size != used.size:
        raise InvalidRequest(f"block_ids names block {int(values[counts > 1][0])} twice; destinations must be distinct")


def windows(page_counts: Sequence[int], window_pages: int) -> list[range]:
    """Cut items (of page_counts pages each) into consecutive runs of at most window_pages pages (but one item)."""
    cuts: list[range] = []
    start, pages = 0, 0
    for position, count in enumerate(page_counts):
        if pages and pages + count > window_pages:
            cuts.append(range(start, position))
            start, pages = position, 0
        pages += count
    if start < len(page_counts):
        cuts.append(range(start, len(page_counts)))
    return cuts
