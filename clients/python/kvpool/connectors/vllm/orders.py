"""What the scheduler's side tells the workers' side in a step, and what it hears back. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.core.tracing import TraceParent


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Load chunks [first_chunk, end_chunk) of a chain into the blocks of a request.

    hashes:      of all chunks of the chain up to end_chunk. token_count: of the prompt.
    block_ids:   of the request, from token 0 on, those of all of end_chunk included.
    first_token: the first one that the engine does not hold; it lies in first_chunk.
    end_token:   the engine takes all tokens up to it for loaded, until it is told otherwise.
    trace:       that the request came with.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    token_count: int
    block_ids: tuple[int, ...]
    first_chunk: int
    end_chunk: int
    first_token: int
    end_token: int
    timeout_s: float
    compute_us_per_token: float = 0.0  # were the engine to compute them; 0 if not known
    trace: TraceParent | None = None

    def failed_blocks(self, end_chunk: int, chunk_tokens: int, block_tokens: int) -> set[int]:
        """Blocks to be computed, when only chunks before end_chunk have come in."""
        first = max(end_chunk * chunk_tokens, self.first_token)
        return set(self.block_ids[first // block_tokens : -(-self.end_token // block_tokens)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOrder:
    """Store chunks [first_chunk, end_chunk) of a chain from the blocks of a request; as LoadOrder otherwise.

    number: of no other store; a request that was preempted may store the same chunks twice.
    """

    number: int
    request_id: str
    hashes: tuple[bytes, ...]
    token_count: int
    block_ids: tuple[int, ...]
    first_chunk: int
    end_chunk: int
    trace: TraceParent | None = None


@dataclass(slots=True, kw_only=True)
class StepOrders:
    """Of one engine step.

    step:      its number, which the workers say back.
    cancel:    requests whose loads nobody needs any more.
    release:   finished requests whose blocks the engine holds until their stores have let go of them.
    preempted: requests whose blocks the engine uses again from this step on.
    """

    step: int
    loads: list[LoadOrder] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    release: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksChanged:
    """For vLLM's KV events: consecutive chunks that came into the pool, or are not there after all (no tokens)."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes = b""
    token_ids: tuple[int, ...] = ()
    lora_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnd:
    """How a load ended on one rank. late: it was given up at its deadline. cancelled: by order. gone: the pool does not
    have its first failed chunk, or a damaged one; after other failures it may have it still."""

    request_id: str
    chunk_count: int  # that came in
    failed_chunks: int
    duration_s: float
    size_bytes: int  # of what came in
    staging_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    late: bool = False
    cancelled: bool = False
    gone: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnd:
    """How the store of that number ended on one rank."""

    number: int
    stored_chunks: int
    deduplicated_chunks: int
    failed_chunks: int
    duration_s: float
    size_bytes: int  # of what was stored
    failure: str = ""
