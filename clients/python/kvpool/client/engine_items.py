"""What an engine asks of its agent and what it is answered, as plain values, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from kvpool.client.hashing import Chain
from kvpool.core.errors import KvPoolError
from kvpool.core.ipc import EngineEvent
from kvpool.core.retention import NO_RETENTION, Retention
from kvpool.core.spans import ChunkRange
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import enum_from_proto, hashes_to_bytes, is_newer, item_error_from_proto
from kvpool.wire.convert_engine import block_ids_to_bytes
from kvpool.wire.convert_ipc import engine_event_to_proto
from kvpool.wire.convert_policy import retention_to_proto


class EngineSource(IntEnum):
    """Where a chunk would be loaded from. The numbers are those of the wire."""

    STAGING = 1
    DISK = 2
    REMOTE = 3


@dataclass(frozen=True, slots=True)
class EngineMatchRun:
    """Consecutive chunks with equal best source. estimated_load_ms: 0 if nothing was measured yet."""

    chunk_count: int
    source: EngineSource
    estimated_load_ms: float


@dataclass(frozen=True, slots=True)
class EngineMatch:
    """The longest prefix. matched_chunks: those the engine held included; runs: of the chunks after them."""

    matched_chunks: int
    runs: tuple[EngineMatchRun, ...] = ()

    @property
    def estimated_load_ms(self) -> float:
        """Of all runs; 0 if nothing was measured yet."""
        return sum(run.estimated_load_ms for run in self.runs)


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Where tokens came from."""

    staging: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.staging + self.disk + self.remote

    def __add__(self, other: TierTokens) -> TierTokens:
        return TierTokens(self.staging + other.staging, self.disk + other.disk, self.remote + other.remote)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """End of a load. failed: positions of chunks that are not usable; error: why the first of them is not."""

    loaded_chunks: int
    failed: tuple[int, ...] = ()
    error: KvPoolError | None = None
    tokens: TierTokens = TierTokens()
    copy_s: float = 0.0  # from the beginning of the first copy to the end of the last; 0 if nothing was copied


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """End of a store. failed: error by position."""

    stored_chunks: int
    deduplicated_chunks: int
    failed: dict[int, KvPoolError] = field(default_factory=dict)


def match_from_proto(message: gpuagent_pb2.EngineMatchResponse) -> EngineMatch:
    """raises: InvalidRequest for a source that is not set."""
    return EngineMatch(
        message.matched_chunks,
        tuple(
            EngineMatchRun(run.chunk_count, _source(run.source), _estimate_ms(run.estimated_load_ms))
            for run in message.runs
        ),
    )


def _estimate_ms(told_ms: float) -> float:
    # Engines reckon with it: what is no time at all says no more than that nothing was measured.
    return told_ms if 0 <= told_ms < inf else 0.0


def _source(value: int) -> EngineSource:
    # Somewhere that only a newer agent has a name for: as far away as anything that we know.
    return EngineSource.REMOTE if is_newer(value, EngineSource) else enum_from_proto(value, EngineSource, "source")


def store_to_proto(
    span: ChunkRange, retention: Retention | None, after: EngineEvent | None = None, *, keeps_blocks: bool = False
) -> gpuagent_pb2.EngineStoreRequest:
    """A store of consecutive chunks. keeps_blocks: the engine holds them, and is not to be asked.

    raises: InvalidRequest naming what is wrong with the retention."""
    wanted = retention or NO_RETENTION
    wanted.check()
    return gpuagent_pb2.EngineStoreRequest(
        chunk_hashes=span.chunk_hashes,
        block_ids=block_ids_to_bytes(span.block_ids),
        first_chunk_index=span.first_chunk_index,
        parent_hash=span.parent_hash,
        group_head_hashes=hashes_to_bytes(span.group_head_hashes),
        retention=retention_to_proto(wanted) if wanted != NO_RETENTION else None,
        prompt_tokens=span.prompt_tokens,
        chain_head_hash=span.chain_head_hash,
        after=engine_event_to_proto(after) if after is not None else None,
        keeps_blocks=keeps_blocks,
    )


def store_outcome_from_proto(message: gpuagent_pb2.EngineStoreDone) -> StoreOutcome:
    """End of a store."""
    errors: Sequence[KvPoolError] = [item_error_from_proto(error) for error in message.errors]
    missing = len(message.failed_chunks) - len(errors)
    errors = [*errors, *[KvPoolError("the agent did not say why")] * missing]
    return StoreOutcome(
        message.stored_chunks, message.deduplicated_chunks, dict(zip(message.failed_chunks, errors, strict=False))
    )


def load_to_proto(
    span: ChunkRange,
    wait_ms: int,
    after: EngineEvent | None = None,
    compute_us_per_token: float = 0.0,
    *,
    no_progress: bool = False,
) -> gpuagent_pb2.EngineLoadRequest:
    """A load of consecutive chunks. no_progress: its end alone matters."""
    return gpuagent_pb2.EngineLoadRequest(
        chunk_hashes=span.chunk_hashes,
        block_ids=block_ids_to_bytes(span.block_ids),
        skip_tokens=span.skip_tokens,
        first_chunk_index=span.first_chunk_index,
        parent_hash=span.parent_hash,
        group_head_hashes=hashes_to_bytes(span.group_head_hashes),
        wait_ms=wait_ms,
        after=engine_event_to_proto(after) if after is not None else None,
        compute_us_per_token=compute_us_per_token,
        no_progress=no_progress,
    )


@dataclass(frozen=True, slots=True)
class EngineLease:
    """What a lease could have. held_chunks: leading ones that stay in staging memory until it ends. staged_chunks:
    leading ones that are there now, the held ones included."""

    held_chunks: int
    staged_chunks: int


def lease_to_proto(
    chain: Chain, chunks: range, hold_ms: int, *, hold_only: bool = False
) -> gpuagent_pb2.EngineLeaseRequest:
    """A lease on consecutive chunks of a prompt."""
    return gpuagent_pb2.EngineLeaseRequest(
        chunk_hashes=chain.packed_hashes(chunks.start, chunks.stop),
        first_chunk_index=chunks.start,
        parent_hash=chain.parent_hash(chunks.start),
        group_head_hashes=hashes_to_bytes(chain.group_head_hashes(chunks.start, len(chunks))),
        hold_ms=hold_ms,
        hold_only=hold_only,
    )


def load_outcome_from_proto(message: gpuagent_pb2.EngineLoadDone) -> LoadOutcome:
    """End of a load."""
    return LoadOutcome(
        loaded_chunks=message.loaded_chunks,
        failed=tuple(message.failed_chunks),
        error=item_error_from_proto(message.error) if message.HasField("error") else None,
        tokens=TierTokens(message.tokens.staging, message.tokens.disk, message.tokens.remote),
        copy_s=message.copy_ms / 1e3 if 0 < message.copy_ms < inf else 0.0,
    )
