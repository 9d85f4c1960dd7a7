"""What the scheduler's side orders of the workers' side in a step, and what those report. Plain values."""

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
class LoadOrder:
    """Load chunks [first_chunk, end_chunk) of a chain into the blocks that a request has of one KV cache group.

    group:       number of the group: a request that is loaded has an order for each, all in one step.
    hashes:      [C * 16] bytes, of all chunks of the chain up to end_chunk. token_count: of the prompt.
    block_ids:   [B] int32, of the request, from token 0 on, those of all of end_chunk included.
    first_token: the first one that the engine does not hold; it lies in first_chunk.
    end_token:   the engine takes all tokens up to it for loaded, until the connector says otherwise.
    trace:       that the request came with.
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
    trace: TraceParent | None = None

    def failed_blocks(self, end_chunk: int, chunk_tokens: int, block_tokens: int) -> set[int]:
        """Blocks to be computed, when only chunks before end_chunk have come in."""
        first = max(end_chunk * chunk_tokens, self.first_token)
        return set(self.block_ids[first // block_tokens : -(-self.end_token // block_tokens)].tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreOrder:
    """Store chunks [first_chunk, end_chunk) of a chain from the blocks of a request; as LoadOrder otherwise.

    number: of no other store; a request that was preempted may store the same chunks twice. retention: None: as the
    keyspace says.
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


def packed_blocks(block_ids: Sequence[int]) -> Blocks:
    """As orders name them."""
    return np.array(block_ids, dtype=np.int32)


def prompt_of(order: LoadOrder | StoreOrder, chunk_tokens: int) -> Prompt:
    """As the pool takes it, as far as the order goes."""
    return Prompt(chunk_tokens, order.token_count, order.hashes)


def block_table(order: LoadOrder | StoreOrder, split: int) -> npt.NDArray[np.int64]:
    """Blocks of the tensors, of which each of vLLM's blocks is `split`."""
    blocks = order.block_ids.astype(np.int64)
    return blocks if split == 1 else (blocks[:, None] * split + np.arange(split)).reshape(-1)


@dataclass(slots=True, kw_only=True)
class StepOrders:
    """Of one engine step.

    step:      its number from 1 on, which the workers say back; 0: its orders are not known, any block may be in use.
    cancel:    requests whose loads are no longer needed.
    release:   finished requests whose blocks the engine holds until their stores have let go of them.
    preempted: requests whose blocks the engine uses again from this step on.
    overwritten: numbers of stores of whose blocks the engine uses some again from this step on.
    computes:  whether this step computes anything, or the one before did: it may still run.
    """

    step: int
    loads: list[LoadOrder] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    release: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    computes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksChanged:
    """For vLLM's KV events: consecutive chunks that came into the pool, or are not there after all (no tokens)."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes = b""
    token_ids: tuple[int, ...] = ()
    lora_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnd:
    """A load of one group has ended on one rank: what it brought. cancelled: by order. duration_s: the engine's."""

    request_id: str
    result: LoadResult
    duration_s: float
    size_bytes: int  # of what came in
    group: int = 0
    cancelled: bool = False

    @property
    def failed_chunks(self) -> int:
        """Chunks that did not come in."""
        return len(self.result.failed_chunks)

    @property
    def late(self) -> bool:
        """Whether it was given up at its deadline."""
        return isinstance(self.result.error, DeadlineExceeded)

    @property
    def gone(self) -> bool:
        """Whether the pool does not have its first failed chunk, or a damaged one; after other failures it may."""
        return isinstance(self.result.error, (PageCorrupt, PageMissing))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnd:
    """How the store of that number ended on one rank. skipped_chunks: given up before they were begun, as the engine
    could not keep their blocks for so long."""

    number: int
    stored_chunks: int
    deduplicated_chunks: int
    failed_chunks: int
    duration_s: float
    size_bytes: int  # of what was stored
    skipped_chunks: int = 0
    failure: str = ""
