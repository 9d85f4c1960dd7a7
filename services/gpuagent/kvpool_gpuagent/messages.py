"""Domain values of the agent from and to its messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import EngineEvent, IpcEvent
from kvpool.core.retention import NO_RETENTION
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.convert import HASH_BYTES, check_count, hashes_from_bytes, item_error_to_proto, retention_from_proto
from kvpool.wire.convert_engine import (
    block_ids_to_bytes,
    engine_event_from_proto,
    int64s_from_bytes,
    ipc_event_from_proto,
    ipc_memory_from_proto,
    layout_from_proto,
)
from kvpool.wire.convert_keyspace import spec_from_proto
from kvpool.wire.versions import check_peer_version
from kvpool_gpuagent.core.cached_chunks import HeldChunks
from kvpool_gpuagent.core.requests import BlockIds, LoadOutcome, StoreOutcome
from kvpool_gpuagent.core.sources import LoadSource
from kvpool_gpuagent.engine.agent import Registration
from kvpool_gpuagent.engine.session import EngineMatch
from kvpool_gpuagent.ports import MappedHandle

MAX_NAME_LENGTH = 128
MAX_HANDLES = 4096  # a K and a V tensor of 500 layers, with scales, is half of it
MAX_EVENTS = 1024
_MAX_COMPUTE_US_PER_TOKEN = 1e7


def handles_from_proto(messages: Sequence[gpuagent_pb2.MemoryHandle]) -> tuple[MappedHandle, ...]:
    """Engine memory, all of one kind. Raises InvalidRequest naming the handle."""
    check_count(len(messages), "the number of handles", most=MAX_HANDLES)
    handles = tuple(_handle(index, message) for index, message in enumerate(messages))
    for index, handle in enumerate(handles):
        if (handle.ipc is None) != (handles[0].ipc is None):
            raise InvalidRequest(
                f"handles[{index}] is of another kind than handles[0]; an engine's memory is all shared memory or all "
                f"CUDA IPC",
                item_index=index,
            )
    return handles


def _handle(index: int, message: gpuagent_pb2.MemoryHandle) -> MappedHandle:
    name = f"handles[{index}]"
    match message.WhichOneof("kind"):
        case "shared_memory":
            return MappedHandle(size_bytes=message.size_bytes)
        case "cuda_ipc":
            memory = ipc_memory_from_proto(message.cuda_ipc, name, message.size_bytes)
            return MappedHandle(size_bytes=message.size_bytes, ipc=memory)
        case _:
            raise InvalidRequest(f"{name} has no kind", item_index=index)


def _events(messages: Sequence[gpuagent_pb2.CudaIpcEventHandle]) -> tuple[IpcEvent, ...]:
    check_count(len(messages), "the number of events", most=MAX_EVENTS)
    return tuple(ipc_event_from_proto(message, f"events[{index}]") for index, message in enumerate(messages))


def registration_from_proto(register: gpuagent_pb2.EngineRegister) -> Registration:
    """Raises InvalidRequest naming the field, GeometryUnsupported."""
    check_peer_version(register.version, "the engine's client")
    if len(register.engine_name) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"engine_name must have at most {MAX_NAME_LENGTH} characters")
    if len(register.previous_session_id) not in (0, HASH_BYTES):
        raise InvalidRequest(f"previous_session_id must be empty or {HASH_BYTES} bytes")
    handles = handles_from_proto(register.handles)
    if register.match_only and (register.events or register.hold_file):
        raise InvalidRequest("match_only: such a session has no memory; leave events and hold_file empty")
    if register.block_generations and not register.hold_file:
        raise InvalidRequest("block_generations: only GPU memory is copied from, and its engine lends a hold file")
    if len(register.engine_id) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"engine_id must have at most {MAX_NAME_LENGTH} bytes")
    return Registration(
        engine_name=register.engine_name,
        keyspace_name=register.keyspace_name,
        spec=spec_from_proto(register.spec),
        layout=layout_from_proto(register.layout, register.handles),
        handles=handles,
        events=_events(register.events),
        load_only=register.load_only,
        previous_session_id=register.previous_session_id,
        hold_file=register.hold_file,
        match_only=register.match_only,
        block_generations=register.block_generations,
        engine_id=register.engine_id,
    )


def span_from_proto(request: gpuagent_pb2.EngineStoreRequest | gpuagent_pb2.EngineLoadRequest) -> ChunkRange:
    """Raises InvalidRequest naming the argument. Counts are core.checks' to refuse."""
    chain_head, retention, prompt_tokens, skip_tokens = b"", NO_RETENTION, 0, 0
    if isinstance(request, gpuagent_pb2.EngineStoreRequest):
        chain_head = request.chain_head_hash
        retention = retention_from_proto(request.retention)
        prompt_tokens = check_count(request.prompt_tokens, "prompt_tokens")
    else:
        skip_tokens = request.skip_tokens
    return ChunkRange(
        chunk_hashes=request.chunk_hashes,
        block_ids=_block_ids(request.block_ids, request.chunk_hashes),
        first_chunk_index=request.first_chunk_index,
        parent_hash=request.parent_hash,
        group_head_hashes=tuple(hashes_from_bytes(request.group_head_hashes, "group_head_hashes")),
        chain_head_hash=chain_head,
        retention=retention,
        prompt_tokens=prompt_tokens,
        skip_tokens=skip_tokens,
    )


def leased_from_proto(request: gpuagent_pb2.EngineLeaseRequest) -> ChunkRange:
    """Without blocks. Raises InvalidRequest naming the field."""
    return ChunkRange(
        chunk_hashes=request.chunk_hashes,
        block_ids=_block_ids(b"", request.chunk_hashes),
        first_chunk_index=request.first_chunk_index,
        parent_hash=request.parent_hash,
        group_head_hashes=tuple(hashes_from_bytes(request.group_head_hashes, "group_head_hashes")),
    )


def cached_from_proto(request: gpuagent_pb2.EngineCached) -> tuple[bytes, BlockIds, BlockIds]:
    """Hashes, blocks and their generations; counts are CachedChunks' to refuse. Raises InvalidRequest."""
    return (
        request.chunk_hashes,
        int64s_from_bytes(request.block_ids, "block_ids"),
        int64s_from_bytes(request.generations, "generations"),
    )


def held_to_proto(held: HeldChunks) -> gpuagent_pb2.CachedChunks:
    """What a session's cache holds, for another agent."""
    found = held.found
    return gpuagent_pb2.CachedChunks(
        session_id=held.source.session_id,
        first_layer=held.layers.start,
        layer_count=len(held.layers),
        first_head=held.heads.start,
        head_count=len(held.heads),
        scales=held.scales,
        positions=block_ids_to_bytes(found.positions),
        block_ids=block_ids_to_bytes(found.block_ids),
        generations=block_ids_to_bytes(found.generations),
    )


def compute_speed_from_proto(request: gpuagent_pb2.EngineLoadRequest) -> float:
    """Seconds a token; 0.0 for what is unknown or no such figure."""
    us_per_token = request.compute_us_per_token
    return us_per_token / 1e6 if 0.0 < us_per_token <= _MAX_COMPUTE_US_PER_TOKEN else 0.0


def event_of(request: gpuagent_pb2.EngineRequest) -> EngineEvent | None:
    """The event that a store or load comes after, if it names one."""
    if request.HasField("store") and request.store.HasField("after"):
        return engine_event_from_proto(request.store.after)
    if request.HasField("load") and request.load.HasField("after"):
        return engine_event_from_proto(request.load.after)
    return None


def _block_ids(packed: bytes, chunk_hashes: bytes) -> BlockIds:
    chunks, rest = divmod(len(chunk_hashes), HASH_BYTES)
    if rest:
        raise InvalidRequest(f"chunk_hashes must be a multiple of {HASH_BYTES} bytes, got {len(chunk_hashes)}")
    if len(packed) % 8:
        raise InvalidRequest(f"block_ids must be little-endian int64, got {len(packed)} bytes")
    blocks = np.frombuffer(packed, dtype="<i8").astype(np.int64, copy=False)
    if not chunks:
        return np.zeros((0, 0), np.int64)  # core.checks refuses the request
    if blocks.size % chunks:
        raise InvalidRequest(f"block_ids must name equally many blocks for each of {chunks} chunks, got {blocks.size}")
    return blocks.reshape(chunks, blocks.size // chunks)


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
            gpu=outcome.tokens[LoadSource.GPU],
        ),
        copy_ms=outcome.copying_s * 1e3,
    )
