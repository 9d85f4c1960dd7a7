"""What an engine asks of its agent, refusals of malformed requests before anything is touched, and how requests end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import GROUP_CHUNKS, HASH_BYTES, ROOT_HASH, ChunkRange
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import page_bytes
from kvpool.core.payload import payload_bytes
from kvpool.core.retention import NO_RETENTION
from kvpool.core.spans import Bytes, Int32s, PageSpan
from kvpool_gpuagent.core.sources import LoadSource

BlockIds = npt.NDArray[np.int64]
ValueT = TypeVar("ValueT")
ChunkSource = tuple[tuple[RemoteSource, ...], int]
"""Where beside this host the pages of a chunk may be, best first, and the bitmap of its shards to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The part of the keyspace that one engine rank owns."""

    spec: KeyspaceSpec
    grid: ShardGrid
    layout: EngineLayout
    shards: int  # bitmap
    load_only: bool = False
    keyspace: bytes = b""  # 16-byte id; empty until the index has opened it

    @classmethod
    def of(cls, spec: KeyspaceSpec, layout: EngineLayout, *, load_only: bool = False) -> Rank:
        """Raises InvalidRequest naming the argument; PartitionRefused naming the grid when the rank's layers and heads
        are no union of shards."""
        grid = ShardGrid.of(spec)
        layout.validate(spec)
        shards = grid.bitmap_for(layout.layer_range, layout.head_range)
        return cls(spec=spec, grid=grid, layout=layout, shards=shards, load_only=load_only)

    def opened(self, keyspace: bytes) -> Rank:
        """The same rank once the index has named its keyspace."""
        return replace(self, keyspace=keyspace)

    @property
    def blocks_per_chunk(self) -> int:
        """Block ids that name one chunk."""
        return self.spec.chunk_tokens // self.layout.block_tokens

    @property
    def shard_list(self) -> list[int]:
        """Shards that this rank writes, ascending."""
        return list(_shards_in(self.shards))

    @property
    def page_sizes(self) -> npt.NDArray[np.int64]:
        """[shard_count]: bytes of header and payload of a page of each shard."""
        return _page_sizes(self.spec, self.grid)


@lru_cache(maxsize=1024)
def _shards_in(bitmap: int) -> tuple[int, ...]:
    return tuple(shards_in(bitmap))


@lru_cache(maxsize=64)
def _page_sizes(spec: KeyspaceSpec, grid: ShardGrid) -> npt.NDArray[np.int64]:
    sizes = [page_bytes(payload_bytes(spec, grid, shard)) for shard in range(grid.shard_count)]
    return np.array(sizes, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class StoreOutcome:
    """End of a store; `failed` maps positions in the request to why."""

    stored_chunks: int = 0
    deduplicated_chunks: int = 0
    failed: dict[int, KvPoolError] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadOutcome:
    """End of a load: leading chunks that are in; everything after them is failed, `error` says why the first one is.

    tokens: of loaded chunks, by the slowest source that a chunk needed. copying_s: what copying
    it takes alone: of the time from the first copy's begin to the last one's end, the share of its bytes.
    """

    chunk_count: int
    loaded_chunks: int = 0
    error: KvPoolError | None = None
    copying_s: float = 0.0
    tokens: dict[LoadSource, int] = field(default_factory=lambda: dict.fromkeys(LoadSource, 0))

    @property
    def failed_chunks(self) -> range:
        """Positions in the request that are not usable."""
        return range(self.loaded_chunks, self.chunk_count)


def page_span(
    rank: Rank,
    span: ChunkRange,
    chunks: range,
    positions: Int32s,
    shards: Bytes,
    sources: Sequence[tuple[RemoteSource, ...]] = (),
) -> PageSpan:
    """Pages of the chunks at these positions of a request, as a pool is asked for them.

    positions: [N] int32, counted from chunks.start. shards: [N]. sources: of every chunk of the request; loads only.
    """
    first = span.first_chunk_index + chunks.start
    groups = range(first // GROUP_CHUNKS, (first + len(chunks) - 1) // GROUP_CHUNKS + 1)
    first_group = span.first_chunk_index // GROUP_CHUNKS
    elsewhere = sources[chunks.start : chunks.stop]
    return PageSpan(
        keyspace=rank.keyspace,
        chunk_hashes=span.chunk_hashes[chunks.start * HASH_BYTES : chunks.stop * HASH_BYTES],
        first_chunk_index=first,
        parent_hash=span.chunk_hash(chunks.start - 1) if chunks.start else span.parent_hash,
        group_heads=b"".join(span.group_head_hashes[group - first_group] for group in groups),
        positions=positions,
        shards=shards,
        retention=((len(chunks), span.retention),) if span.retention != NO_RETENTION else (),
        prompt_tokens=span.prompt_tokens,
        sources=_runs(elsewhere) if any(elsewhere) else (),
    )


def _runs(values: Sequence[ValueT]) -> tuple[tuple[int, ValueT], ...]:
    return tuple((len(list(same)), value) for value, same in groupby(values))


def window_of(rank: Rank, most_pages: int, window_bytes: int) -> int:
    """Pages of about window_bytes of this rank's, at least one and at most most_pages.

    Rounded: pages of 8 MiB have headers beside it, and 8 of them are a window of 64 MiB."""
    largest_bytes = int(rank.page_sizes[rank.shard_list].max())
    return max(1, min(most_pages, round(window_bytes / largest_bytes)))


def check_store(span: ChunkRange, rank: Rank, *, max_chunks: int) -> None:
    """Raises InvalidRequest."""
    _check_span(span, rank, max_chunks)
    if len(span.chain_head_hash) != HASH_BYTES:
        raise InvalidRequest(f"chain_head_hash must have {HASH_BYTES} bytes, got {len(span.chain_head_hash)}")
    if span.first_chunk_index == 0 and span.chain_head_hash != span.chunk_hash(0):
        raise InvalidRequest("chain_head_hash must be the hash of chunk 0, which is in this request and differs")
    span.retention.check()


def check_load(span: ChunkRange, rank: Rank, *, max_chunks: int) -> None:
    """Raises InvalidRequest; also when a block that would be written is named twice."""
    _check_span(span, rank, max_chunks)
    _check_skip(span.skip_tokens, rank)
    # Blocks that are skipped whole are not written, so they may repeat.
    used = np.sort(span.block_ids.reshape(-1)[span.skip_tokens // rank.layout.block_tokens :])
    repeated = used[1:][used[1:] == used[:-1]]
    if repeated.size:
        raise InvalidRequest(f"block_ids names block {int(repeated[0])} twice; destinations must be distinct")


def check_bases(rank: Rank, offsets_bytes: Sequence[int]) -> None:
    """Refuse GPU memory whose rows no kernel could read. offsets_bytes: of each handle, in its allocation, which itself
    is aligned to far more than any element. Raises InvalidRequest."""
    data_bytes, scale_bytes = rank.layout.row_alignments(rank.spec)
    for layer in rank.layout.layers:
        for planes, alignment in ((layer.planes, data_bytes), (layer.scales, scale_bytes)):
            for plane in planes:
                if offsets_bytes[plane.handle] % alignment:
                    raise InvalidRequest(
                        f"handles[{plane.handle}].allocation_offset must be a multiple of {alignment}, the bytes of an "
                        f"element, got {offsets_bytes[plane.handle]}",
                        item_index=plane.handle,
                    )


def _check_span(span: ChunkRange, rank: Rank, max_chunks: int) -> None:
    check_chunks(span, max_chunks)
    _check_blocks(span, rank)


def check_chunks(span: ChunkRange, max_chunks: int) -> None:
    """All but their blocks. Raises InvalidRequest."""
    count = span.chunk_count
    if not 0 < count <= max_chunks:
        raise InvalidRequest(f"a request names 1 to {max_chunks} chunks, got {count}; split it")
    if span.first_chunk_index < 0:
        raise InvalidRequest(f"first_chunk_index must be >= 0, got {span.first_chunk_index}")
    _check_hashes(span)
    _check_group_heads(span)


def _check_hashes(span: ChunkRange) -> None:
    if len(span.parent_hash) != HASH_BYTES:
        raise InvalidRequest(f"parent_hash must have {HASH_BYTES} bytes, got {len(span.parent_hash)}")
    if (span.first_chunk_index == 0) != (span.parent_hash == ROOT_HASH):
        raise InvalidRequest("parent_hash must be 16 zero bytes for chunk 0, and for no other chunk")


def _check_group_heads(span: ChunkRange) -> None:
    first_group = span.first_chunk_index // GROUP_CHUNKS
    groups = (span.first_chunk_index + span.chunk_count - 1) // GROUP_CHUNKS - first_group + 1
    if len(span.group_head_hashes) != groups:
        raise InvalidRequest(
            f"chunks fall into {groups} chain groups but group_head_hashes has {len(span.group_head_hashes)}"
        )
    for number, head in enumerate(span.group_head_hashes):
        if len(head) != HASH_BYTES:
            raise InvalidRequest(f"group_head_hashes[{number}] must have {HASH_BYTES} bytes, got {len(head)}")
        position = (first_group + number) * GROUP_CHUNKS - span.first_chunk_index
        # A wrong head would hide the chunk from every later match.
        if position >= 0 and head != span.chunk_hash(position):
            raise InvalidRequest(
                f"group_head_hashes[{number}] must be the hash of chunks[{position}], where its group begins",
                item_index=position,
            )


def _check_blocks(span: ChunkRange, rank: Rank) -> None:
    ids, block_count = span.block_ids, rank.layout.block_count
    if ids.shape != (span.chunk_count, rank.blocks_per_chunk):
        raise InvalidRequest(
            f"block_ids must name {rank.blocks_per_chunk} blocks of {rank.layout.block_tokens} tokens for each of "
            f"{span.chunk_count} chunks, got {ids.size}"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= block_count:
        position = int(np.argmax(((ids < 0) | (ids >= block_count)).any(axis=1)))
        raise InvalidRequest(
            f"chunks[{position}].block_ids must lie in [0, {block_count}), "
            f"got {int(ids[position].min())} to {int(ids[position].max())}",
            item_index=position,
        )


def _check_skip(skip_tokens: int, rank: Rank) -> None:
    if not 0 <= skip_tokens < rank.spec.chunk_tokens:
        raise InvalidRequest(
            f"chunks[0].skip_tokens must lie in [0, {rank.spec.chunk_tokens}), got {skip_tokens}", item_index=0
        )
    # An opaque cell cannot be written in part; a canonical page can start at any token.
    if rank.spec.opaque is not None and skip_tokens % rank.layout.block_tokens:
        raise InvalidRequest(
            f"chunks[0].skip_tokens must be a multiple of the block ({rank.layout.block_tokens}) in an opaque keyspace",
            item_index=0,
        )
