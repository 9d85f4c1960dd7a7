"""Jobs of a worker, over chunks of 32 tokens that are hashed as HASHES."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.connectors.vllm.step_jobs import LoadJob, StoreJob, block_id_array

CHUNK, BLOCK, CHUNK_BYTES = 32, 16, 1000
HASHES = tuple(bytes([number]) * 16 for number in range(16))


def a_load(request_id: str, blocks: Sequence[int], *, end_chunk: int = 4, **changes: Any) -> LoadJob:
    """Of all chunks up to end_chunk."""
    values: dict[str, Any] = {
        "first_chunk": 0,
        "first_token": 0,
        "end_token": end_chunk * CHUNK,
        "timeout_s": 1.0,
        **changes,
    }
    return LoadJob(**_chunks(request_id, blocks, end_chunk), **values)


def a_store(number: int, request_id: str, blocks: Sequence[int], *, end_chunk: int = 4, **changes: Any) -> StoreJob:
    """Of all chunks up to end_chunk."""
    return StoreJob(number=number, **_chunks(request_id, blocks, end_chunk), **{"first_chunk": 0, **changes})


def _chunks(request_id: str, blocks: Sequence[int], end_chunk: int) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "hashes": b"".join(HASHES[:end_chunk]),
        "token_count": end_chunk * CHUNK + 2,
        "block_ids": block_id_array(blocks),
        "end_chunk": end_chunk,
    }
