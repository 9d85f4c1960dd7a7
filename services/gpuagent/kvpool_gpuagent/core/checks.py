"""Refusals of malformed loads and stores, before anything is touched. Each names the argument and the item."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.core.chunks import GROUP_CHUNKS, HASH_BYTES, ROOT_HASH
from kvpool.core.errors import InvalidRequest
from kvpool.core.spans import ChunkRange
from kvpool_gpuagent.core.requests import Rank


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
