"""What a connector needs of the pool, as blocking calls. `AgentPool` serves it through a gpuagent; tests script it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.client.engine_items import EngineMatchRun, TierTokens


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedChunks:
    """Outcome of a load: the leading chunks that are in, and where their tokens came from."""

    chunk_count: int = 0
    tokens: TierTokens = field(default_factory=TierTokens)
    duration_s: float = 0.0  # from its begin until all was in, however long nobody asked; 0 if unknown
    failure: str = ""  # why the next chunk is not in; empty if all are


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunks:
    """Outcome of a store: positions in the span of the chunks that are not in the pool now, and why."""

    failed: tuple[int, ...] = ()
    failure: str = ""


class RunningLoad(Protocol):
    """A load that was begun. Its methods wait, no longer than its time and a little more."""

    def wait_layers(self, layers: int) -> bool:
        """Wait until so many leading layers of all chunks of the span are in, so that GPU work launched now finds them.

        A chunk may still fail in a later layer. False: not all chunks can be had, and the load has ended.
        Raises KvPoolError if no chunk can be used.
        """

    def result(self) -> LoadedChunks:
        """Wait for the end. Raises KvPoolError if no chunk can be used."""


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

    def begin_load(self, span: ChunkSpan, timeout_s: float, on_released: Callable[[], None]) -> RunningLoad:
        """Begin to load chunks into the engine's blocks, as many as come in time, and return.

        It goes on to its end, which is soon, when nobody waits for it. Comes after the work on the blocks that the
        calling thread has given to its GPU. Raises KvPoolError if nothing was begun; then on_released is not called.
        """

    def store(self, span: ChunkSpan, on_released: Callable[[], None], on_done: Callable[[StoredChunks], None]) -> None:
        """Begin to store chunks from the engine's blocks and return. on_done is called once, at the end.

        Comes after the work on the blocks that the calling thread has given to its GPU.
        """

    def close(self) -> None:
        """End what runs and let go of the pool. Idempotent."""
