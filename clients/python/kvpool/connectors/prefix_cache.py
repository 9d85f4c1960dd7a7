"""An engine's own chunks and the pool behind them: find a prefix, load what is missing, keep and store what is new.

Whatever the pool does, an engine only loses time that is bounded by the pool's deadlines: every failure means that
tokens are computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.client.engine_items import EngineMatchRun, LoadResult, MatchResult, StoreResult
from kvpool.client.hashing import Prompt
from kvpool.client.sync import Handle
from kvpool.connectors.chunk_ledger import ChunkLedger, HeldChunk
from kvpool.connectors.prefix import Prefix
from kvpool.core.chunks import Tokens, chunk_hashes
from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.core.load_cost import LoadCost, LoadRun, leading

_log = logging.getLogger(__name__)
# The engine's own chunks are found without the pool, also before it was ever reached.
_OWN_KEY = b"chunks in the engine's own cache"


class PrefixPool(Protocol):
    """A pool of chunks that other engines fill too, over an engine's blocks of one chunk each: calls of `kvpool.Pool`.

    A block is the engine's again once the handle of each request that names it is released.
    """

    def hash_key(self) -> bytes | None:
        """The 32-byte key of chunk hashes; None while the pool has never been reached."""

    def match(self, prompt: Prompt, *, held_chunks: int = 0) -> MatchResult:
        """See AsyncPool."""

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
        """See AsyncPool. raises: KvPoolError if nothing was begun."""

    def store(
        self, prompt: Prompt, block_table: Sequence[int], *, first_chunk: int, end_chunk: int
    ) -> Handle[StoreResult]:
        """See AsyncPool. raises: KvPoolError if nothing was begun."""

    def close(self) -> None:
        """End what runs and let go of the pool. Idempotent."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A load or store whose blocks are pinned until it is released. stored: chunks that count as pooled until it ends,
    and then unless it failed; the first of them has index first_chunk in its prompt."""

    handle: Handle[LoadResult] | Handle[StoreResult]
    blocks: Sequence[int]
    stored: Sequence[HeldChunk] = ()
    first_chunk: int = 0
    pinned: bool = True


class PrefixCache:
    """Blocks of one chunk each, of which the ledger here decides. Requests come from one thread at a time."""

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
        self._transfers: list[_Transfer] = []  # begun, and not known to be over
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
        self._note_ends()
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
            prompt = Prompt.of(hash_key, usable, self.chunk_tokens)
            return self._begin_load(self._pool, prompt, own_hashes, blocks)
        except BaseException:
            self._unpin(blocks)
            raise

    def forget(self) -> None:
        """Drop all own chunks that nothing needs just now: the pool is asked for them again."""
        self._note_ends()
        with self._lock:
            self._ledger.give_back(self._ledger.take(self._ledger.block_count))

    def available_chunks(self, tokens: Tokens) -> int:
        """Leading full chunks that the engine or the pool has now. Raises KvPoolError if the pool cannot be asked."""
        with self._lock:
            held = len(self._ledger.find(chunk_hashes(_OWN_KEY, tokens, self.chunk_tokens)))
        hash_key = self._pool.hash_key() if self._pool is not None else None
        if self._pool is None or hash_key is None:
            return held
        found = self._pool.match(Prompt.of(hash_key, tokens, self.chunk_tokens), held_chunks=held)
        if found.error is not None:
            raise found.error
        return held + sum(run.chunk_count for run in found.runs)

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
        self._note_ends()
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
        ends_at_s = time.monotonic() + timeout_s
        with self._lock:
            stores = [transfer.handle for transfer in self._transfers if transfer.stored]
        for handle in stores:
            try:
                handle.result(max(0.0, ends_at_s - time.monotonic()))
            except DeadlineExceeded:
                return False
            except KvPoolError:
                continue  # `_note_ends` says so
        self._note_ends()
        return True

    def _begin_load(
        self,
        pool: PrefixPool,
        prompt: Prompt,
        own_hashes: Sequence[bytes],
        own_blocks: Sequence[int],
    ) -> Prefix:
        started_s = time.perf_counter()
        load: Handle[LoadResult] | None = None
        blocks: list[int] = []
        runs: list[LoadRun] = []
        failure, match_ms, own_chunks = "", 0.0, len(own_blocks)
        try:
            found = pool.match(prompt, held_chunks=own_chunks)
            if found.error is not None:
                raise found.error
            runs = self._load_runs(found.runs)
            match_ms = (time.perf_counter() - started_s) * 1e3
            blocks = self._take(self._chunks_to_load(runs))
            runs = leading(runs, len(blocks))
            if blocks:
                compute_ms = self._cost.compute_ms(len(blocks) * self.chunk_tokens)
                timeout_s = self._cost.timeout_s(self._cost.load_ms(runs), compute_ms, self._load_timeout_s)
                compute_us = (compute_ms or 0.0) * 1e3 / (len(blocks) * self.chunk_tokens)
                timeout_s = min(timeout_s, self._load_timeout_s)
                load = pool.start_load(
                    prompt,
                    _block_table(own_chunks, blocks),
                    first_chunk=own_chunks,
                    end_chunk=own_chunks + len(blocks),
                    timeout_s=timeout_s,
                    compute_us_per_token=compute_us,
                )
                self._cost.load_begun()
        except KvPoolError as error:
            failure = str(error)
            _log.warning("kvpool: computing instead of loading: %s", failure)
            match_ms = match_ms or (time.perf_counter() - started_s) * 1e3
        except Exception:
            raise
        except BaseException:
            blocks = []  # an interrupt says nothing for certain of these: they stay pinned
            raise
        finally:
            if load is None and blocks:
                self._unpin(blocks)
                self._bind((), blocks, 0)
        if load is None:
            return Prefix(own_blocks, match_ms=match_ms, failure=failure)
        hashes = own_hashes[own_chunks : own_chunks + len(blocks)]
        with self._lock:
            self._loading.update(hashes)
            self._transfers.append(_Transfer(load, blocks))

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
        first, end = unknown[0], unknown[-1] + 1
        chunks = held[first:end]
        blocks = [chunk.block for chunk in chunks]
        with self._lock:
            self._ledger.pin(blocks)
        try:
            prompt = Prompt.of(hash_key, tokens, self.chunk_tokens)
            handle = self._pool.store(prompt, _block_table(first, blocks), first_chunk=first, end_chunk=end)
        except KvPoolError as error:
            _log.warning("kvpool: %d chunks were not stored: %s", len(chunks), error)
            self._unpin(blocks)
            return
        except Exception:  # after an interrupt they stay pinned
            self._unpin(blocks)
            raise
        with self._lock:
            for chunk in chunks:
                chunk.pooled = True  # taken back if the store fails: until then it is not stored again
            self._transfers.append(_Transfer(handle, blocks, chunks, first))

    def _note_ends(self) -> None:
        """Take in what transfers have come to: whose blocks may be reused, and what was not stored."""
        ended: list[tuple[_Transfer, Sequence[HeldChunk]]] = []
        with self._lock:
            for transfer in self._transfers:
                if transfer.pinned and transfer.handle.released:
                    self._ledger.unpin(transfer.blocks)
                    transfer.pinned = False
                if transfer.stored and transfer.handle.done:
                    ended.append((transfer, transfer.stored))
                    transfer.stored = ()
            self._transfers = [transfer for transfer in self._transfers if transfer.pinned or transfer.stored]
        for transfer, chunks in ended:
            failed = _failed_chunks(transfer, len(chunks))
            with self._lock:
                for index in failed:
                    chunks[index - transfer.first_chunk].pooled = False
            if failed:
                why = "; ".join(sorted({str(error) for error in failed.values()}))
                _log.warning("kvpool: %d chunks were not stored: %s", len(failed), why)

    def _unpin(self, blocks: Sequence[int]) -> None:
        with self._lock:
            self._ledger.unpin(blocks)


def _failed_chunks(store: _Transfer, chunk_count: int) -> Mapping[int, KvPoolError]:
    try:
        result = store.handle.result()
    except KvPoolError as error:
        return dict.fromkeys(range(store.first_chunk, store.first_chunk + chunk_count), error)
    return result.failed_chunks if isinstance(result, StoreResult) else {}


def _block_table(first_chunk: int, blocks: Sequence[int]) -> list[int]:
    """Blocks of a whole prompt; those before first_chunk are not looked at."""
    return [0] * first_chunk + list(blocks)
