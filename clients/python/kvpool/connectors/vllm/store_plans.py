"""Decides which chunks of a request to store, and tracks stores until they have ended on all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.kv_groups import KvCacheGroup, first_held_chunk, page_blocks, page_chain
from kvpool.connectors.vllm.request_chain import Request, trace_of
from kvpool.connectors.vllm.step_jobs import Blocks, PoolEvent, StoreJob, StoreReport
from kvpool.core.retention import Retention


@dataclass(slots=True)
class _PendingStore:
    request_id: str
    chunks: PoolEvent
    workers: int
    failed: bool = False


class StorePlans:
    """Store plans of all requests, including finished ones."""

    def __init__(
        self,
        known: KnownChunks,
        groups: Sequence[KvCacheGroup],
        *,
        worker_count: int,
        chunk_tokens: int,
        named_group: int | None,
    ) -> None:
        """worker_count: number of reports of each store. named_group: number of the group whose stores yield events
        with token ids; None: none does."""
        self._known, self._groups, self._worker_count = known, groups, worker_count
        self._named_group, self._chunk_tokens = named_group, chunk_tokens
        self._last_number = 0
        self._pending: dict[int, _PendingStore] = {}
        self._requests: Counter[str] = Counter()
        self._watched = _WatchedBlocks()

    def plan(
        self,
        request: Request,
        number: int,
        chain: Prompt,
        chunks: range,
        block_ids: Sequence[Sequence[int]],
        retention: Retention | None = None,
    ) -> StoreJob | None:
        """Return a store, for all workers, of those of these chunks that the pool is not known to have.

        With a retention all of them are stored, as it applies to existing chunks too. Chunks with blocks that have left
        the group's window, or without blocks, are left out. Returns None if nothing remains. number: of the KV cache
        group. block_ids: of each of its members.
        """
        request_id, group = request.request_id, self._groups[number]
        blocks_per_chunk = self._chunk_tokens // group.block_tokens
        end_chunk = min(chunks.stop, *(len(one) // blocks_per_chunk for one in block_ids))
        wanted = chain.hashes[:end_chunk]
        first = chunks.start if retention else self._known.leading(wanted, chunks.start)
        if first >= end_chunk:
            return None
        blocks = page_blocks(block_ids, end_chunk, blocks_per_chunk)
        if group.window_tokens:
            first = first_held_chunk(blocks, first, end_chunk)
            first = first if retention else self._known.leading(wanted, first)
            if first >= end_chunk:
                return None
        chain_of_pages, pages = page_chain(chain, group.pages), group.pages
        self._last_number += 1
        job = StoreJob(
            number=self._last_number,
            request_id=request_id,
            group=number,
            hashes=chain_of_pages.packed_hashes(0, end_chunk * pages),
            token_count=chain.token_count,
            block_ids=blocks,
            first_chunk=first * pages,
            end_chunk=end_chunk * pages,
            trace=trace_of(request),
            retention=retention,
        )
        tokens = range(first * self._chunk_tokens, end_chunk * self._chunk_tokens)
        named = number == self._named_group
        changed = PoolEvent(
            hashes=chain.hashes[first:end_chunk],
            parent_hash=chain.parent_hash(first) if first else b"",
            token_ids=tuple(request.all_token_ids[tokens.start : tokens.stop]) if named else (),
            lora_name=request.lora_request.lora_name if request.lora_request is not None else "",
        )
        # A window goes on while a request runs, and a state is copied: what is left behind is another request's soon.
        if group.gives_blocks_back:
            self._watched.add(job.number, blocks[first * pages * blocks_per_chunk :])
        self._pending[job.number] = _PendingStore(request_id, changed, self._worker_count)
        self._requests[request_id] += 1
        return job

    def on_report(self, report: StoreReport) -> PoolEvent | None:
        """Process one worker's report. Returns the chunks after the last report, if all of them are in the pool now."""
        store = self._pending.get(report.number)
        if store is None:
            return None
        store.workers -= 1
        store.failed |= report.failed_chunks + report.skipped_chunks > 0
        if store.workers:
            return None
        del self._pending[report.number]
        self._watched.remove(report.number)
        self._requests[store.request_id] -= 1
        if not self._requests[store.request_id]:
            del self._requests[store.request_id]
        if store.failed:
            return None
        self._known.add(store.chunks.hashes)
        return store.chunks if store.chunks.token_ids else None

    def overwritten(self, block_ids: Blocks | None) -> list[int]:
        """Return the numbers of open stores that read one of these blocks, which are about to be written. None: any
        block."""
        return self._watched.stores_of(block_ids)

    def has_pending(self, request_id: str) -> bool:
        """Whether a store of the request has not ended."""
        return request_id in self._requests


class _WatchedBlocks:
    """Blocks that open stores read and that the engine may use again meanwhile. A store of a long prompt has thousands,
    so they are counted in arrays."""

    def __init__(self) -> None:
        self._by_store: dict[int, Blocks] = {}
        self._counts = np.zeros(0, np.int32)  # of stores, by block

    def add(self, number: int, blocks: Blocks) -> None:
        """Watch these blocks, which are distinct, for a store."""
        most = int(blocks.max(initial=-1)) + 1
        if most > self._counts.size:
            self._counts = np.concatenate((self._counts, np.zeros(most, np.int32)))  # at least twice as many
        self._by_store[number] = blocks
        self._counts[blocks] += 1

    def remove(self, number: int) -> None:
        """The store has ended. Does nothing for a store without watched blocks."""
        blocks = self._by_store.pop(number, None)
        if blocks is not None:
            self._counts[blocks] -= 1

    def stores_of(self, block_ids: Blocks | None) -> list[int]:
        """Return the numbers of the stores that read one of these blocks, in order. None: any block."""
        if not self._by_store or block_ids is None:
            return sorted(self._by_store)
        known = block_ids[block_ids < self._counts.size]
        read = known[self._counts[known] > 0]
        if not read.size:
            return []
        lost = np.zeros(self._counts.size, np.bool_)
        lost[read] = True
        return sorted(number for number, blocks in self._by_store.items() if lost[blocks].any())
