"""What a connector needs of the pool, as blocking calls. `AgentPool` serves it through a gpuagent; tests script it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.client.engine_items import EngineMatchRun, LoadResult, StoreResult
from kvpool.client.sync import Handle


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Consecutive chunks of one chain, and the engine blocks they lie in or go to.

    chain:  hashes of all chunks of the chain up to the last one of the span.
    blocks: one block of the engine for each chunk of the span, which are the last of the chain.
    """

    chain: tuple[bytes, ...]
    blocks: tuple[int, ...]

    @property
    def first_index(self) -> int:
        """Index of the first chunk in its chain."""
        return len(self.chain) - len(self.blocks)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Hashes of the span's chunks."""
        return self.chain[self.first_index :]


class PrefixPool(Protocol):
    """A pool of chunks that other engines fill too.

    Callbacks run on any thread, and must neither block nor raise. on_released is called at most once, as soon as
    nothing touches the blocks of the request any more. That may be long after the request has ended; until then they
    must not be reused.
    """

    def hash_key(self) -> bytes | None:
        """The 32-byte key of chunk hashes; None while the pool has never been reached."""

    def match(self, chain: Sequence[bytes], held_chunks: int) -> Sequence[EngineMatchRun]:
        """What the pool has of a chain after its first `held_chunks`. Raises KvPoolError."""

    def start_load(
        self,
        span: ChunkSpan,
        timeout_s: float,
        on_released: Callable[[], None],
        compute_us_per_token: float = 0.0,
    ) -> Handle[LoadResult]:
        """Begin to load chunks into the engine's blocks, as many as come in time, layer by layer, and return.

        It goes on to its end, which is soon, when nothing waits for it. Comes after the work on the blocks that the
        calling thread has given to its GPU. Raises KvPoolError if nothing was begun; then on_released is not called.
        compute_us_per_token: of this engine, for what is shown of the time that loads save; 0 if unknown.
        """

    def store(self, span: ChunkSpan, on_released: Callable[[], None], on_done: Callable[[StoreResult], None]) -> None:
        """Begin to store chunks from the engine's blocks and return. on_done is called once, at the end.

        Comes after the work on the blocks that the calling thread has given to its GPU.
        """

    def close(self) -> None:
        """End what runs and let go of the pool. Idempotent."""
