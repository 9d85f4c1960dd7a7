"""What a client packs wrongly is refused by name."""

import numpy as np
import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent.messages import span_from_proto

HASHES = bytes(range(32))


def test_a_load_names_chunks_and_their_blocks() -> None:
    blocks = np.array([[7, 1, 2], [4, 9, 0]], dtype="<i8")
    request = gpuagent_pb2.EngineLoadRequest(chunk_hashes=HASHES, block_ids=blocks.tobytes(), skip_tokens=5)
    span = span_from_proto(request)
    assert (span.chunk_count, span.hashes, span.chunk_hash(1)) == (2, [HASHES[:16], HASHES[16:]], HASHES[16:])
    assert span.block_ids.dtype == np.int64
    assert span.block_ids.tolist() == blocks.tolist()
    assert span.skip_tokens == 5


@pytest.mark.parametrize("message", [gpuagent_pb2.EngineLoadRequest, gpuagent_pb2.EngineStoreRequest])
@pytest.mark.parametrize(
    ("chunk_hashes", "block_ids", "named"),
    [
        (HASHES[:-1], bytes(64), "chunk_hashes must be a multiple of 16 bytes, got 31"),
        (b"x", b"", "chunk_hashes must be a multiple of 16 bytes, got 1"),
        (HASHES, bytes(63), "block_ids must be little-endian int64, got 63 bytes"),
        (HASHES, bytes(56), "block_ids must name equally many blocks for each of 2 chunks, got 7"),
    ],
)
def test_arrays_that_are_cut_off_are_refused(
    message: type[gpuagent_pb2.EngineLoadRequest | gpuagent_pb2.EngineStoreRequest],
    chunk_hashes: bytes,
    block_ids: bytes,
    named: str,
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        span_from_proto(message(chunk_hashes=chunk_hashes, block_ids=block_ids))


def test_blocks_of_no_chunk_are_left_to_the_check_of_counts() -> None:
    span = span_from_proto(gpuagent_pb2.EngineLoadRequest(block_ids=bytes(24)))
    assert (span.chunk_count, span.block_ids.size) == (0, 0)
