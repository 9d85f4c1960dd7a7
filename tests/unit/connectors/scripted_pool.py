"""A pool in this process that does what a test scripts, over the blocks of any engine that registers a buffer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvpool.client.engine_items import (
    EngineMatchRun,
    EngineSource,
    LoadResult,
    MatchResult,
    StoreResult,
    TierTokens,
)
from kvpool.client.hashing import Prompt
from kvpool.client.sync import Handle
from kvpool.core.errors import KvPoolError

ResultT = TypeVar("ResultT")
HASH_KEY = b"hash key of the scripted pool..."


@dataclass(frozen=True)
class Span:
    """Chunks of one request: hashes up to the last of them, and the blocks of those that are asked for."""

    chain: tuple[bytes, ...]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, block_table: Sequence[int], first_chunk: int, end_chunk: int) -> "Span":
        return cls(prompt.hashes[:end_chunk], tuple(block_table[first_chunk:end_chunk]))

    @property
    def first_index(self) -> int:
        return len(self.chain) - len(self.blocks)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return self.chain[self.first_index :]


class ScriptedHandle(Handle[ResultT]):
    """A load or store that has ended when it begins."""

    done = True
    released = True

    def __init__(self, outcome: ResultT | KvPoolError, layers_in: int = 0, *, released: bool = True) -> None:
        self.outcome, self.layers_in, self.released = outcome, layers_in, released

    def wait_layers(self, layers: int, timeout_s: float | None = None) -> bool:
        return layers <= self.layers_in

    def result(self, timeout_s: float | None = None) -> ResultT:
        if isinstance(self.outcome, KvPoolError):
            raise self.outcome
        return self.outcome


@dataclass
class ScriptedPool:
    """Chunks by hash, shared by all engines whose pools have the same `chunks`.

    memory:         the engine's blocks, of block_bytes each.
    match_error, load_error, store_failure: what goes wrong.
    load_limit:     so many chunks of a load arrive, the rest fails (after garbage was written to their blocks).
    layers_before_failure: of a load that fails, so many layers are said to be in before.
    hold:           releases are kept back until `let_go`.
    """

    chunks: dict[bytes, bytes] = field(default_factory=dict)
    memory: memoryview = field(default_factory=lambda: memoryview(bytearray()))
    block_bytes: int = 0
    chunk_tokens: int = 16
    reachable: bool = True
    match_error: KvPoolError | None = None
    load_error: KvPoolError | None = None
    load_limit: int | None = None
    layers_before_failure: int = 0
    store_failure: str = ""
    estimated_load_ms: float = 0.0
    load_duration_s: float = 0.001
    hold: bool = False
    held: list[ScriptedHandle[Any]] = field(default_factory=list)
    matches: list[tuple[int, int]] = field(default_factory=list)  # (chain length, held chunks)
    loads: list[Span] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)  # of loads
    stores: list[Span] = field(default_factory=list)
    closed: bool = False

    def hash_key(self) -> bytes | None:
        return HASH_KEY if self.reachable else None

    def match(self, prompt: Prompt, *, held_chunks: int = 0) -> MatchResult:
        chain = prompt.hashes
        self.matches.append((len(chain), held_chunks))
        if self.match_error is not None:
            return MatchResult(held_chunks, error=self.match_error)
        count = 0
        for chunk_hash in chain[held_chunks:]:
            if chunk_hash not in self.chunks:
                break
            count += 1
        runs = (EngineMatchRun(count, EngineSource.REMOTE, self.estimated_load_ms),) if count else ()
        return MatchResult(held_chunks + count, runs=runs)

    def start_load(
        self,
        prompt: Prompt,
        block_table: Sequence[int],
        *,
        first_chunk: int,
        end_chunk: int,
        timeout_s: float,
        compute_us_per_token: float = 0.0,
    ) -> Handle[LoadResult]:
        span = Span.of(prompt, block_table, first_chunk, end_chunk)
        self.loads.append(span)
        self.timeouts_s.append(timeout_s)
        limit = len(span.blocks) if self.load_limit is None else self.load_limit
        for position, (chunk_hash, block) in enumerate(zip(span.hashes, span.blocks, strict=True)):
            content = self.chunks[chunk_hash] if position < limit else b"\x7f" * self.block_bytes
            self.memory[block * self.block_bytes : (block + 1) * self.block_bytes] = content
        loaded = min(limit, len(span.blocks))
        tokens = TierTokens(remote=loaded * self.chunk_tokens)
        complete = loaded == len(span.blocks)
        outcome = LoadResult(
            span.first_index,
            loaded,
            tuple(range(span.first_index + loaded, len(span.chain))),
            error=None if complete else KvPoolError("a page was damaged"),
            tokens=tokens,
            duration_s=self.load_duration_s,
        )
        layers_in = 1_000_000 if complete and self.load_error is None else self.layers_before_failure
        return self._handle(ScriptedHandle(self.load_error or outcome, layers_in))

    def store(
        self, prompt: Prompt, block_table: Sequence[int], *, first_chunk: int, end_chunk: int
    ) -> Handle[StoreResult]:
        span = Span.of(prompt, block_table, first_chunk, end_chunk)
        self.stores.append(span)
        failed: dict[int, KvPoolError] = {}
        if self.store_failure:
            failed = dict.fromkeys(range(first_chunk, end_chunk), KvPoolError(self.store_failure))
        else:
            for chunk_hash, block in zip(span.hashes, span.blocks, strict=True):
                content = self.memory[block * self.block_bytes : (block + 1) * self.block_bytes]
                self.chunks[chunk_hash] = bytes(content)
        return self._handle(ScriptedHandle(StoreResult(failed_chunks=failed)))

    def close(self) -> None:
        self.closed = True
        self.let_go()

    def let_go(self) -> None:
        """Release what was held."""
        while self.held:
            self.held.pop().released = True

    def _handle(self, handle: ScriptedHandle[ResultT]) -> ScriptedHandle[ResultT]:
        if self.hold:
            handle.released = False
            self.held.append(handle)
        return handle
