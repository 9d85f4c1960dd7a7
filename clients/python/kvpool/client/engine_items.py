"""What an engine asks of its agent and what it is answered, as plain values, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from kvpool.client.hashing import Prompt
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import KvPoolError
from kvpool.core.ipc import EngineEvent
from kvpool.core.retention import NO_RETENTION, Retention
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import enum_from_proto, hashes_to_bytes, is_newer, item_error_from_proto, retention_to_proto
from kvpool.wire.convert_engine import block_ids_to_bytes, engine_event_to_proto


class EngineSource(IntEnum):
    """Where a chunk would be loaded from. The numbers are those of the wire."""

    STAGING = 1
    DISK = 2
    REMOTE = 3
    GPU = 4  # of other engine ranks of the host


@dataclass(frozen=True, slots=True)
class EngineMatchRun:
    """Consecutive chunks with equal best source. estimated_load_ms: 0 if nothing was measured yet."""

    chunk_count: int
    source: EngineSource
    estimated_load_ms: float


@dataclass(frozen=True, slots=True)
class MatchResult:
    """How much of a prompt the pool has.

    matched_chunks: those that the engine holds included.
    num_tokens:     the tokens of these chunks, never the prompt's last one; 0 where only hashes were given.
    runs:           of the chunks after the held ones.
    error:          why nothing was looked up.
    """

    matched_chunks: int
    num_tokens: int = 0
    runs: tuple[EngineMatchRun, ...] = ()
    error: KvPoolError | None = None

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
    gpu: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.staging + self.disk + self.remote + self.gpu

    def __add__(self, other: TierTokens) -> TierTokens:
        return TierTokens(
            self.staging + other.staging, self.disk + other.disk, self.remote + other.remote, self.gpu + other.gpu
        )


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought. Chunks are named by their index in the prompt.

    loaded_chunks: from first_chunk on. What is not loaded must be computed.
    failed_chunks: of those asked for, the first that failed and all after it.
    num_tokens:    leading tokens of the prompt that need no computing, if the chunks before first_chunk are there:
                   never the prompt's last one. 0 where only hashes were given.
    error:         why the first failed chunk is not in.
    tokens:        where the loaded tokens came from.
    copy_s:        from the beginning of the agent's first copy to the end of its last; 0 if not known.
    duration_s:    from the call until all was in; 0 if not known.
    """

    first_chunk: int = 0
    loaded_chunks: int = 0
    failed_chunks: tuple[int, ...] = ()
    num_tokens: int = 0
    error: KvPoolError | None = None
    tokens: TierTokens = TierTokens()
    copy_s: float = 0.0
    duration_s: float = 0.0

    @property
    def end_chunk(self) -> int:
        """All chunks from first_chunk up to this index are in."""
        return self.first_chunk + self.loaded_chunks


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store. failed_chunks: index in the prompt, and why."""

    stored_chunks: int = 0
    deduplicated_chunks: int = 0  # were there already
    failed_chunks: dict[int, KvPoolError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Prompt tokens by where their KV came from; they add up to the prompt."""

    own: int = 0  # the engine held them already
    staging: int = 0
    disk: int = 0
    remote: int = 0
    gpu: int = 0
    recomputed: int = 0

    @classmethod
    def of(cls, chain: Prompt, *, own_tokens: int, loaded: TierTokens) -> RequestStats:
        """Of one prompt. The last token always counts as recomputed, also when its chunk was loaded."""
        own = max(0, min(own_tokens, chain.token_count - 1))
        excess = max(0, own + loaded.total - max(0, chain.token_count - 1))
        counts = {"staging": loaded.staging, "disk": loaded.disk, "remote": loaded.remote, "gpu": loaded.gpu}
        for source in (
            "remote",
            "disk",
            "staging",
            "gpu",
        ):  # the excess is at the end: most likely the slowest source's
            cut = min(excess, counts[source])
            counts[source] -= cut
            excess -= cut
        return cls(own=own, recomputed=chain.token_count - own - sum(counts.values()), **counts)

    @property
    def prompt(self) -> int:
        """All tokens of the prompt."""
        return self.own + self.staging + self.disk + self.remote + self.gpu + self.recomputed

    def __add__(self, other: RequestStats) -> RequestStats:
        return RequestStats(
            own=self.own + other.own,
            staging=self.staging + other.staging,
            disk=self.disk + other.disk,
            remote=self.remote + other.remote,
            gpu=self.gpu + other.gpu,
            recomputed=self.recomputed + other.recomputed,
        )


def match_from_proto(message: gpuagent_pb2.EngineMatchResponse) -> MatchResult:
    """raises: InvalidRequest for a source that is not set."""
    return MatchResult(
        message.matched_chunks,
        runs=tuple(
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


def store_result_from_proto(message: gpuagent_pb2.EngineStoreDone, first_chunk: int) -> StoreResult:
    """End of a store that begins with chunk first_chunk of its prompt."""
    errors: Sequence[KvPoolError] = [item_error_from_proto(error) for error in message.errors]
    missing = len(message.failed_chunks) - len(errors)
    errors = [*errors, *[KvPoolError("the agent did not say why")] * missing]
    failed = {first_chunk + at: error for at, error in zip(message.failed_chunks, errors, strict=False)}
    return StoreResult(message.stored_chunks, message.deduplicated_chunks, failed)


def load_to_proto(
    span: ChunkRange,
    wait_ms: int,
    after: EngineEvent | None = None,
    compute_us_per_token: float = 0.0,
    *,
    no_progress: bool = False,
    from_gpu: bool = False,
) -> gpuagent_pb2.EngineLoadRequest:
    """A load of consecutive chunks. no_progress: its end alone matters. from_gpu: see EngineSession.load."""
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
        from_gpu=from_gpu,
    )


def lease_to_proto(
    chain: Prompt, chunks: range, hold_ms: int, *, hold_only: bool = False
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


def load_result_from_proto(message: gpuagent_pb2.EngineLoadDone, first_chunk: int) -> LoadResult:
    """End of a load that begins with chunk first_chunk of its prompt."""
    return LoadResult(
        first_chunk=first_chunk,
        loaded_chunks=message.loaded_chunks,
        failed_chunks=tuple(first_chunk + at for at in message.failed_chunks),
        error=item_error_from_proto(message.error) if message.HasField("error") else None,
        tokens=TierTokens(message.tokens.staging, message.tokens.disk, message.tokens.remote, message.tokens.gpu),
        copy_s=message.copy_ms / 1e3 if 0 < message.copy_ms < inf else 0.0,
    )
