"""An engine's own chunks and the pool behind them: find a prefix, load what is missing, keep and store what is new.

Whatever the pool does, an engine only loses time that is bounded by the pool's deadlines: every failure means that
tokens are computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvpool.client.engine_items import EngineMatchRun, LoadResult, StoreResult
from kvpool.client.sync import Handle
from kvpool.connectors.chunk_ledger import ChunkLedger, HeldChunk
from kvpool.connectors.prefix import Prefix
from kvpool.connectors.prefix_pool import ChunkSpan, PrefixPool
from kvpool.core.chunks import Tokens, chunk_hashes
from kvpool.core.errors import KvPoolError
from kvpool.core.load_cost import LoadCost, LoadRun, leading

_log = logging.getLogger(__name__)
# The engine's own chunks are found without the pool, also before it was ever reached.
_OWN_KEY = b"chunks in the engine's own cache"


class PrefixCache:
    """Blocks of one chunk each, of which the ledger here decides. On one thread; callbacks on any."""

    def __init__(
        self,
        pool: PrefixPool | None,
        *,
        block_count: int,
        chunk_tokens: int,
        chunk_bytes: int,
        load_timeout_s: float = 30.0,
        always_load: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """load_timeout_s: of one load at most. always_load: also what would be computed quicker."""
        self.chunk_tokens, self._chunk_bytes = chunk_tokens, chunk_bytes
        self._load_timeout_s, self._always_load, self._now_s = load_timeout_s, always_load, now_s
        self._pool = pool
        self._ledger = ChunkLedger(block_count)
        self._lock = threading.Lock()
        self._stores_changed = threading.Condition(self._lock)
        self._stores_running = 0
        self._cost = LoadCost()
        self._loading: set[bytes] = set()  # chunks under way, by their own hashes

    def find(self, tokens: Tokens) -> Prefix:
        """The longest prefix of whole chunks that can be had, own or loaded, that leaves at least one token."""
        return self.begin(tokens).finish()

    def begin(self, tokens: Tokens, *, ask_pool: bool = True) -> Prefix:
        """The same, without waiting for what has to be loaded. The caller sees to it that it is finished.

        ask_pool: False leaves it at the engine's own chunks.
        """
        running = self._begin(tokens, ask_pool=ask_pool, beside=False)
        assert running is not None
        return running

    def begin_beside(self, tokens: Tokens, *, ask_pool: bool = True) -> Prefix | None:
        """The same beside others that were begun. None: one of them loads the very chunk that is needed next; begin
        again when it is finished, and it will be found."""
        return self._begin(tokens, ask_pool=ask_pool, beside=True)

    def _begin(self, tokens: Tokens, *, ask_pool: bool, beside: bool) -> Prefix | None:
        usable = tokens[: max(0, len(tokens) - 1)]
        own_hashes = chunk_hashes(_OWN_KEY, usable, self.chunk_tokens)
        with self._lock:
            held = self._ledger.find(own_hashes)
            if beside and len(held) < len(own_hashes) and own_hashes[len(held)] in self._loading:
                return None
            blocks = [chunk.block for chunk in held]
            self._ledger.pin(blocks)
        if len(held) == len(own_hashes) or self._pool is None or not ask_pool:
            return Prefix(blocks)
        hash_key = self._pool.hash_key()
        if hash_key is None:
            return Prefix(blocks, failure="the pool cannot be reached")
        try:
            chain = chunk_hashes(hash_key, usable, self.chunk_tokens)
            return self._begin_load(self._pool, chain, own_hashes, blocks)
        except BaseException:
            self._unpin(blocks)
            raise

    def forget(self) -> None:
        """Drop all own chunks that nothing needs just now: the pool is asked for them again."""
        with self._lock:
            self._ledger.give_back(self._ledger.take(self._ledger.block_count))

    def available_chunks(self, tokens: Tokens) -> int:
        """Leading full chunks that the engine or the pool has now. Raises KvPoolError if the pool cannot be asked."""
        with self._lock:
            held = len(self._ledger.find(chunk_hashes(_OWN_KEY, tokens, self.chunk_tokens)))
        hash_key = self._pool.hash_key() if self._pool is not None else None
        if self._pool is None or hash_key is None:
            return held
        runs = self._pool.match(chunk_hashes(hash_key, tokens, self.chunk_tokens), held)
        return held + sum(run.chunk_count for run in runs)

    def release(self, found: Prefix) -> None:
        """The blocks of a found prefix have been read."""
        with self._lock:
            self._ledger.unpin(found.blocks)

    def keep(self, tokens: Tokens, copy_in: Callable[[int, Sequence[int]], None]) -> None:
        """Keep all full chunks of `tokens`, whose KV the engine has now, and begin to store those the pool may lack.

        copy_in(first chunk index, blocks) fills blocks, one for each chunk from that one on. Chunks for which no block
        is free are not kept.
        """
        own_hashes = chunk_hashes(_OWN_KEY, tokens, self.chunk_tokens)
        with self._lock:
            held = self._ledger.find(own_hashes)
            kept_blocks = [chunk.block for chunk in held]
            self._ledger.pin(kept_blocks)  # making room must not take the chunks that the new ones continue
            taken = self._ledger.take(len(own_hashes) - len(held))
        try:
            if taken:
                copy_in(len(held), taken)
        except BaseException:
            with self._lock:
                self._ledger.give_back(taken)
                self._ledger.unpin(kept_blocks)
            raise
        with self._lock:
            for own_hash, block in zip(own_hashes[len(held) :], taken, strict=False):
                self._ledger.bind(own_hash, block, pooled=False)
            self._ledger.unpin(kept_blocks)
            held = self._ledger.find(own_hashes)
        self._store(tokens, held)

    def note_prefill(self, token_count: int, duration_ms: float) -> None:
        """Tell how long computing tokens took, however few, so that loads slower than that are left alone."""
        self._cost.note_prefill(token_count, duration_ms / 1e3)

    def flush_stores(self, timeout_s: float) -> bool:
        """Wait until all stores that were begun have ended; False if they have not in time."""
        with self._stores_changed:
            return self._stores_changed.wait_for(lambda: not self._stores_running, timeout_s)

    def _begin_load(
        self,
        pool: PrefixPool,
        chain: Sequence[bytes],
        own_hashes: Sequence[bytes],
        own_blocks: Sequence[int],
    ) -> Prefix:
        started_s = time.perf_counter()
        load: Handle[LoadResult] | None = None
        blocks: list[int] = []
        runs: list[LoadRun] = []
        failure, match_ms, own_chunks = "", 0.0, len(own_blocks)
        try:
            runs = self._load_runs(pool.match(chain, own_chunks))
            match_ms = (time.perf_counter() - started_s) * 1e3
            blocks = self._take(self._chunks_to_load(runs))
            runs = leading(runs, len(blocks))
            if blocks:
                span = ChunkSpan(tuple(chain[: own_chunks + len(blocks)]), tuple(blocks))
                compute_ms = self._cost.compute_ms(len(blocks) * self.chunk_tokens)
                timeout_s = self._cost.timeout_s(self._cost.load_ms(runs), compute_ms, self._load_timeout_s)
                compute_us = (compute_ms or 0.0) * 1e3 / (len(blocks) * self.chunk_tokens)
                timeout_s = min(timeout_s, self._load_timeout_s)
                load = pool.start_load(span, timeout_s, lambda: self._unpin(blocks), compute_us)
                self._cost.load_begun()
        except KvPoolError as error:
            failure = str(error)
            _log.warning("kvpool: computing instead of loading: %s", failure)
            match_ms = match_ms or (time.perf_counter() - started_s) * 1e3
        finally:
            if load is None and blocks:
                self._unpin(blocks)
                self._bind((), blocks, 0)
        if load is None:
            return Prefix(own_blocks, match_ms=match_ms, failure=failure)
        hashes = own_hashes[own_chunks : own_chunks + len(blocks)]
        with self._lock:
            self._loading.update(hashes)

        def loaded(result: LoadResult) -> Sequence[int]:
            if result.loaded_chunks == len(blocks) and len({run.source for run in runs}) == 1:
                size_bytes = result.loaded_chunks * self._chunk_bytes
                self._cost.note_load(runs[0].source, size_bytes, result.duration_s)
            return self._bind(hashes, blocks, result.loaded_chunks)

        return Prefix(own_blocks, load=load, blocks=blocks, bind=loaded, match_ms=match_ms)

    def _load_runs(self, runs: Sequence[EngineMatchRun]) -> list[LoadRun]:
        return [
            LoadRun(
                chunk_count=run.chunk_count,
                token_count=run.chunk_count * self.chunk_tokens,
                size_bytes=run.chunk_count * self._chunk_bytes,
                source=run.source,
            )
            for run in runs
        ]

    def _chunks_to_load(self, runs: Sequence[LoadRun]) -> int:
        """How many leading chunks to load so that the time gained over computing them is greatest; all as long as
        nothing is known of one of both, and now and then to learn of loads."""
        every = sum(run.chunk_count for run in runs)
        if self._always_load or not every:
            return every
        return self._cost.chunks_to_load(runs) or (every if self._cost.tries_declined(self._now_s()) else 0)

    def _take(self, count: int) -> list[int]:
        """Up to `count` blocks to load into, pinned until the pool lets go of them."""
        with self._lock:
            blocks = self._ledger.take(count)
            self._ledger.pin(blocks)
        return blocks

    def _bind(self, own_hashes: Sequence[bytes], blocks: Sequence[int], loaded_count: int) -> list[int]:
        """Take in the loaded ones of `blocks` and give back the others; returns where the chunks are, pinned."""
        with self._lock:
            self._loading.difference_update(own_hashes)
            self._ledger.give_back(blocks[loaded_count:])
            usable = [
                self._ledger.bind(own_hash, block, pooled=True).block
                for own_hash, block in zip(own_hashes, blocks[:loaded_count], strict=False)
            ]
            self._ledger.pin(usable)
        return usable

    def _store(self, tokens: Tokens, held: Sequence[HeldChunk]) -> None:
        """Store from the first to the last chunk of the chain that is not known to be pooled."""
        hash_key = self._pool.hash_key() if self._pool is not None else None
        unknown = [index for index, chunk in enumerate(held) if not chunk.pooled]
        if self._pool is None or hash_key is None or not unknown:
            return
        chain = chunk_hashes(hash_key, tokens, self.chunk_tokens)[: unknown[-1] + 1]
        chunks = held[unknown[0] : unknown[-1] + 1]
        span = ChunkSpan(tuple(chain), tuple(chunk.block for chunk in chunks))
        with self._lock:
            self._ledger.pin(span.blocks)
            self._stores_running += 1
            for chunk in chunks:
                chunk.pooled = True  # taken back if the store fails: until then it is not stored again
        store = _Store(self, span, chunks)
        self._pool.store(span, store.on_released, store.on_done)

    def _unpin(self, blocks: Sequence[int]) -> None:
        with self._lock:
            self._ledger.unpin(blocks)

    def _end_store(self, failed: Sequence[HeldChunk]) -> None:
        with self._stores_changed:
            for chunk in failed:
                chunk.pooled = False
            self._stores_running -= 1
            self._stores_changed.notify_all()


class _Store:
    """Callbacks of one running store."""

    def __init__(self, cache: PrefixCache, span: ChunkSpan, chunks: Sequence[HeldChunk]) -> None:
        self._cache, self._span, self._chunks = cache, span, chunks

    def on_released(self) -> None:
        self._cache._unpin(self._span.blocks)

    def on_done(self, stored: StoreResult) -> None:
        failed = stored.failed_chunks
        if failed:
            why = "; ".join(sorted({str(error) for error in failed.values()}))
            _log.warning("kvpool: %d chunks were not stored: %s", len(failed), why)
        self._cache._end_store([self._chunks[index - self._span.first_index] for index in failed])
