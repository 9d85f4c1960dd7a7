"""Cuts what an engine asks for into requests that an agent takes."""

from __future__ import annotations

import numpy as np

from kvpool.client.engine_items import ChunkSpan
from kvpool.client.hashing import Chain
from kvpool.core.errors import InvalidRequest
from kvpool.wire.convert_engine import BlockIds


def spans_of(
    chain: Chain, block_table: BlockIds, chunks: range, blocks_per_chunk: int, limit: int, skip_tokens: int
) -> list[ChunkSpan]:
    """Requests of at most `limit` chunks each, in chain order.

    block_table: of the whole prompt from token 0 on. skip_tokens: of the first chunk. raises: InvalidRequest naming
    what does not fit.
    """
    if not 0 <= chunks.start <= chunks.stop <= chain.chunk_count:
        raise InvalidRequest(
            f"chunks [{chunks.start}, {chunks.stop}) are not within the {chain.chunk_count} of the chain"
        )
    if len(block_table) < chunks.stop * blocks_per_chunk:
        raise InvalidRequest(
            f"block_table has {len(block_table)} blocks, {chunks.stop} chunks need {chunks.stop * blocks_per_chunk}"
        )
    if not 0 <= skip_tokens < chain.chunk_tokens:
        raise InvalidRequest(f"skip_tokens must be in [0, {chain.chunk_tokens}), got {skip_tokens}")
    used = block_table[chunks.start * blocks_per_chunk : chunks.stop * blocks_per_chunk]
    block_ids = np.asarray(used, dtype=np.int64).reshape(len(chunks), blocks_per_chunk)
    spans: list[ChunkSpan] = []
    for start in range(chunks.start, chunks.stop, limit):
        end = min(start + limit, chunks.stop)
        spans.append(
            ChunkSpan(
                chunk_hashes=chain.packed_hashes(start, end),
                block_ids=block_ids[start - chunks.start : end - chunks.start],
                first_chunk_index=start,
                parent_hash=chain.parent_hash(start),
                group_head_hashes=chain.group_head_hashes(start, end - start),
                chain_head_hash=chain.head_hash,
                prompt_tokens=chain.token_count,
                skip_tokens=skip_tokens if start == chunks.start else 0,
            )
        )
    return spans
