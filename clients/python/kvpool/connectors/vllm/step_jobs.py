"""Jobs that the scheduler sends to the workers with each step, and the reports they return. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.client.engine_items import LoadResult
from kvpool.client.hashing import Prompt
from kvpool.core.errors import DeadlineExceeded, PageCorrupt, PageMissing
from kvpool.core.retention import Retention
from kvpool.core.tracing import TraceParent

Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadJob:
    """Load chunks [first_chunk, end_chunk) of a chain into a request's blocks of one KV cache group.

    Where the group has several pages a chunk, the chain is that of its pages, and tokens count once for each page.

    group:       number of the group: a request that is loaded has jobs of each that needs one, all in the same step.
    hashes:      [C * 16] bytes, of all chunks of the chain up to end_chunk. token_count: of the prompt.
    block_ids:   [B] int32, the request's blocks of chunks [0, end_chunk).
    first_token: first token that the engine does not hold; it lies in first_chunk.
    end_token:   the engine takes all tokens before it as loaded, unless the connector reports a failure.
    trace:       trace context of the request.
    """

    request_id: str
    hashes: bytes
    token_count: int
    block_ids: Blocks
    first_chunk: int
    end_chunk: int
    first_token: int
    end_token: int
    timeout_s: float
    group: int = 0
    compute_us_per_token: float = 0.0  # were the engine to compute them; 0 if not known
    from_gpu: bool = False  # the match has named GPU caches of other engines
    trace: TraceParent | None = None

    def failed_blocks(self, end_chunk: int, chunk_tokens: int, block_tokens: int) -> set[int]:
        """Return the blocks that must be computed if only chunks before end_chunk were loaded."""
        first = max(end_chunk * chunk_tokens, self.first_token)
        return set(self.block_ids[first // block_tokens : -(-self.end_token // block_tokens)].tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreJob:
    """Store chunks [first_chunk, end_chunk) of a chain from a request's blocks; other fields as in LoadJob.

    number: unique among stores; a preempted request may store the same chunks twice. retention: None for the keyspace's
    default.
    """

    number: int
    request_id: str
    hashes: bytes
    token_count: int
    block_ids: Blocks
    first_chunk: int
    end_chunk: int
    group: int = 0
    trace: TraceParent | None = None
    retention: Retention | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnnounceJob:
    """Tell other engines of the host which blocks of the GPU cache hold chunks that have been computed or loaded.

    hashes: [C * 16] bytes, consecutive chunks. block_ids: [B] int32, their blocks.
    """

    hashes: bytes
    block_ids: Blocks


def block_id_array(block_ids: Sequence[int]) -> Blocks:
    """Return block ids as jobs carry them: [B] int32."""
    return np.array(block_ids, dtype=np.int32)


def prompt_of_job(job: LoadJob | StoreJob, chunk_tokens: int) -> Prompt:
    """Return the prompt of a job, up to its last chunk."""
    return Prompt(chunk_tokens, job.token_count, job.hashes)


def block_table(block_ids: Blocks | Sequence[int], split: int) -> npt.NDArray[np.int64]:
    """Return the ids of the tensors' blocks, `split` of which make one of vLLM's blocks."""
    blocks = np.asarray(block_ids, dtype=np.int64)
    return blocks if split == 1 else (blocks[:, None] * split + np.arange(split)).reshape(-1)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class StepJobs:
    """Jobs of one engine step.

    step:      number of the step from 1 on, which workers report back; 0: jobs were lost and any block may be in use.
    scheduler: unique name of the scheduler that sends them.
    cancel:    requests whose loads are no longer needed.
    release:   finished requests whose blocks vLLM keeps until their stores have read them.
    preempted: requests whose blocks may be written from this step on.
    overwritten: numbers of stores, some of whose blocks may be written from this step on.
    computes:  whether this step or the one before it, which may still be running, computes anything.
    announce:  chunks in the GPU cache. Their blocks have kept their bytes until this step.
    written:   [B] int32, newly allocated blocks, written from this step on; None: not known.
    arrival:   how many steps of the scheduler have arrived in this process, with this one.
    """

    step: int
    scheduler: str = ""
    loads: list[LoadJob] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    release: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    computes: bool = True
    announce: list[AnnounceJob] = field(default_factory=list)
    written: Blocks | None = None
    arrival: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """For vLLM's KV events: consecutive chunks that were stored or, without tokens, found missing."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes = b""
    token_ids: tuple[int, ...] = ()
    lora_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How one load job ended on one rank. cancelled: on request. duration_s: measured by the worker."""

    request_id: str
    result: LoadResult
    duration_s: float
    size_bytes: int  # of what came in
    group: int = 0
    cancelled: bool = False

    @property
    def failed_chunks(self) -> int:
        """Number of chunks that were not loaded."""
        return len(self.result.failed_chunks)

    @property
    def timed_out(self) -> bool:
        """Whether the load exceeded its deadline."""
        return isinstance(self.result.error, DeadlineExceeded)

    @property
    def missing(self) -> bool:
        """Whether the first failed chunk is missing from the pool or damaged; after other failures it may exist."""
        return isinstance(self.result.error, (PageCorrupt, PageMissing))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """How a store ended on one rank. skipped_chunks: dropped before they were read, as their blocks were needed."""

    number: int
    stored_chunks: int
    deduplicated_chunks: int
    failed_chunks: int
    duration_s: float
    size_bytes: int  # of what was stored
    skipped_chunks: int = 0
    failure: str = ""
