"""Domain values of the agent from and to its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.convert import HASH_BYTES, check_count, hashes_from_bytes, item_error_to_proto
from kvpool.wire.convert_engine import layout_from_proto
from kvpool.wire.convert_keyspace import spec_from_proto
from kvpool_gpuagent.core.bandwidth import LoadSource
from kvpool_gpuagent.core.requests import ChunkBlocks, ChunkSpan, LoadOutcome, Retention, StoreOutcome
from kvpool_gpuagent.engine import Registration
from kvpool_gpuagent.ports import MappedHandle
from kvpool_gpuagent.session import EngineMatch

MAX_NAME_LENGTH = 128


@dataclass(frozen=True, slots=True)
class AwaitedHandles:
    """Shared-memory handles whose descriptors come over the raw socket."""

    sizes_bytes: tuple[int, ...]
    file_offsets: tuple[int, ...]

    def with_descriptors(self, descriptors: Sequence[int]) -> list[MappedHandle]:
        """Pair the handles with their descriptors, in handle order."""
        return [
            MappedHandle(size_bytes=size, descriptor=descriptor, file_offset=offset)
            for size, offset, descriptor in zip(self.sizes_bytes, self.file_offsets, descriptors, strict=True)
        ]


def handles_from_proto(register: gpuagent_pb2.EngineRegister) -> AwaitedHandles:
    """Raises NotServed for CUDA handles and events, InvalidRequest naming the handle for anything else."""
    if register.events:
        raise NotServed("interprocess CUDA events are not served by this version; leave `events` empty")
    for index, handle in enumerate(register.handles):
        kind = handle.WhichOneof("kind")
        if kind == "cuda_ipc":
            raise NotServed(
                f"handles[{index}] is a CUDA IPC handle, which this version does not serve; register shared memory"
            )
        if kind != "shared_memory":
            raise InvalidRequest(f"handles[{index}] has no kind", item_index=index)
    return AwaitedHandles(
        tuple(handle.size_bytes for handle in register.handles),
        tuple(handle.shared_memory.file_offset for handle in register.handles),
    )


def registration_from_proto(register: gpuagent_pb2.EngineRegister) -> Registration:
    """Raises InvalidRequest naming the field, GeometryUnsupported."""
    if len(register.engine_name) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"engine_name must have at most {MAX_NAME_LENGTH} characters")
    if len(register.previous_session_id) not in (0, HASH_BYTES):
        raise InvalidRequest(f"previous_session_id must be empty or {HASH_BYTES} bytes")
    return Registration(
        engine_name=register.engine_name,
        keyspace_name=register.keyspace_name,
        spec=spec_from_proto(register.spec),
        layout=layout_from_proto(register.layout, register.handles),
        load_only=register.load_only,
        layers_per_progress=check_count(register.layers_per_progress, "layers_per_progress"),
        previous_session_id=register.previous_session_id,
    )


def span_from_proto(request: gpuagent_pb2.EngineStoreRequest | gpuagent_pb2.EngineLoadRequest) -> ChunkSpan:
    """Raises InvalidRequest naming the item. Lengths and ranges are core.checks' to refuse."""
    chunks: Sequence[gpuagent_pb2.StoreChunk | gpuagent_pb2.LoadChunk] = request.chunks
    chain_head, retention = b"", Retention()
    if isinstance(request, gpuagent_pb2.EngineStoreRequest):
        chain_head = request.chain_head_hash
        retention = Retention(
            ttl_ms=request.retention.ttl_ms,
            priority=request.retention.priority,
            pinned_until_us=request.retention.pinned_until_us,
        )
    return ChunkSpan(
        chunks=tuple(_chunk(position, chunk) for position, chunk in enumerate(chunks)),
        first_index=request.first_chunk_index,
        parent_hash=request.parent_hash,
        group_heads=tuple(hashes_from_bytes(request.group_head_hashes, "group_head_hashes")),
        chain_head=chain_head,
        retention=retention,
    )


def _chunk(position: int, chunk: gpuagent_pb2.StoreChunk | gpuagent_pb2.LoadChunk) -> ChunkBlocks:
    if len(chunk.block_ids) % 8:
        raise InvalidRequest(f"chunks[{position}].block_ids must be little-endian int64", item_index=position)
    skip_tokens = chunk.skip_tokens if isinstance(chunk, gpuagent_pb2.LoadChunk) else 0
    block_ids = np.frombuffer(chunk.block_ids, dtype="<i8").astype(np.int64, copy=False)
    return ChunkBlocks(chunk_hash=chunk.chunk_hash, block_ids=block_ids, skip_tokens=skip_tokens)


def match_to_proto(found: EngineMatch) -> gpuagent_pb2.EngineMatchResponse:
    """Runs in chain order."""
    return gpuagent_pb2.EngineMatchResponse(
        matched_chunks=found.matched_chunks,
        runs=[
            gpuagent_pb2.EngineMatchRun(
                chunk_count=count, source=gpuagent_pb2.EngineSource.ValueType(source), estimated_load_ms=estimate_ms
            )
            for count, source, estimate_ms in found.runs
        ],
    )


def store_done_to_proto(outcome: StoreOutcome) -> gpuagent_pb2.EngineStoreDone:
    """Failed positions ascend."""
    failed = sorted(outcome.failed)
    return gpuagent_pb2.EngineStoreDone(
        stored_chunks=outcome.stored_chunks,
        deduplicated_chunks=outcome.deduplicated_chunks,
        failed_chunks=failed,
        errors=[item_error_to_proto(outcome.failed[position]) for position in failed],
    )


def load_done_to_proto(outcome: LoadOutcome) -> gpuagent_pb2.EngineLoadDone:
    """`error` is unset when every chunk is in."""
    return gpuagent_pb2.EngineLoadDone(
        loaded_chunks=outcome.loaded_chunks,
        failed_chunks=outcome.failed_chunks,
        error=item_error_to_proto(outcome.error) if outcome.error is not None else None,
        tokens=common_pb2.TierTokens(
            staging=outcome.tokens[LoadSource.STAGING],
            disk=outcome.tokens[LoadSource.DISK],
            remote=outcome.tokens[LoadSource.REMOTE],
        ),
    )
