"""A pool in this process that does what a test tells it, over the blocks of any engine that registers a buffer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.client.engine_items import EngineMatchRun, EngineSource, LoadResult, StoreResult, TierTokens
from kvpool.client.sync import Handle
from kvpool.connectors.prefix_pool import ChunkSpan
from kvpool.core.errors import KvPoolError

HASH_KEY = b"hash key of the scripted pool..."


class ScriptedLoad(Handle[LoadResult]):
    """A load that has ended when it begins."""

    def __init__(self, outcome: LoadResult | KvPoolError, layers_in: int) -> None:
        self.outcome, self.layers_in = outcome, layers_in

    def wait_layers(self, layers: int, timeout_s: float | None = None) -> bool:
        return layers <= self.layers_in

    def result(self, timeout_s: float | None = None) -> LoadResult:
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
    held: list[Callable[[], None]] = field(default_factory=list)
    matches: list[tuple[int, int]] = field(default_factory=list)  # (chain length, held chunks)
    loads: list[ChunkSpan] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)  # of loads
    stores: list[ChunkSpan] = field(default_factory=list)
    closed: bool = False

    def hash_key(self) -> bytes | None:
        return HASH_KEY if self.reachable else None

    def match(self, chain: Sequence[bytes], held_chunks: int) -> Sequence[EngineMatchRun]:
        self.matches.append((len(chain), held_chunks))
        if self.match_error is not None:
            raise self.match_error
        count = 0
        for chunk_hash in chain[held_chunks:]:
            if chunk_hash not in self.chunks:
                break
            count += 1
        return [EngineMatchRun(count, EngineSource.REMOTE, self.estimated_load_ms)] if count else []

    def start_load(
        self,
        span: ChunkSpan,
        timeout_s: float,
        on_released: Callable[[], None],
        compute_us_per_token: float = 0.0,
    ) -> "ScriptedLoad":
        self.loads.append(span)
        self.timeouts_s.append(timeout_s)
        limit = len(span.blocks) if self.load_limit is None else self.load_limit
        for position, (chunk_hash, block) in enumerate(zip(span.hashes, span.blocks, strict=True)):
            content = self.chunks[chunk_hash] if position < limit else b"\x7f" * self.block_bytes
            self.memory[block * self.block_bytes : (block + 1) * self.block_bytes] = content
        self._release(on_released)
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
        return ScriptedLoad(self.load_error or outcome, layers_in)

    def store(self, span: ChunkSpan, on_released: Callable[[], None], on_done: Callable[[StoreResult], None]) -> None:
        self.stores.append(span)
        if self.store_failure:
            self._release(on_released)
            error = KvPoolError(self.store_failure)
            on_done(StoreResult(failed_chunks=dict.fromkeys(range(span.first_index, len(span.chain)), error)))
            return
        for chunk_hash, block in zip(span.hashes, span.blocks, strict=True):
            self.chunks[chunk_hash] = bytes(self.memory[block * self.block_bytes : (block + 1) * self.block_bytes])
        self._release(on_released)
        on_done(StoreResult())

    def close(self) -> None:
        self.closed = True
        self.let_go()

    def let_go(self) -> None:
        """Release what was held."""
        while self.held:
            self.held.pop()()

    def _release(self, release: Callable[[], None]) -> None:
        if self.hold:
            self.held.append(release)
        else:
            release()
