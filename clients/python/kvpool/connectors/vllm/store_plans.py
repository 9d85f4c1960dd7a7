"""Decides which chunks of a request to store, and tracks stores until they have ended on all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.kv_groups import KvCacheGroup, first_held_chunk, page_blocks, page_chain
from kvpool.connectors.vllm.request_chain import Request, trace_of
from kvpool.connectors.vllm.step_jobs import PoolEvent, StoreJob, StoreReport
from kvpool.core.retention import Retention


@dataclass(slots=True)
class _PendingStore:
    request_id: str
    chunks: PoolEvent
    workers: int
    watched: frozenset[int] = frozenset()  # blocks that the engine may use again while they are read
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
        self._watched: dict[int, set[int]] = {}  # numbers of open stores by block

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
        first_chunk, end_chunk, blocks_per_chunk = chunks.start, chunks.stop, self._chunk_tokens // group.block_tokens
        end_chunk = min(end_chunk, *(len(one) // blocks_per_chunk for one in block_ids))
        if group.window_tokens:
            first_chunk = max(first_held_chunk(one, first_chunk, end_chunk, blocks_per_chunk) for one in block_ids)
        first = first_chunk if retention else self._known.leading(chain.hashes[:end_chunk], first_chunk)
        if first >= end_chunk:
            return None
        chain_of_pages, pages = page_chain(chain, group.pages), group.pages
        blocks = page_blocks(block_ids, end_chunk, blocks_per_chunk)
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
        watched = blocks[first * pages * blocks_per_chunk :].tolist() if group.gives_blocks_back else ()
        self._pending[job.number] = _PendingStore(request_id, changed, self._worker_count, frozenset(watched))
        for block in watched:
            self._watched.setdefault(block, set()).add(job.number)
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
        for block in store.watched:
            self._watched[block].discard(report.number)
            if not self._watched[block]:
                del self._watched[block]
        self._requests[store.request_id] -= 1
        if not self._requests[store.request_id]:
            del self._requests[store.request_id]
        if store.failed:
            return None
        self._known.add(store.chunks.hashes)
        return store.chunks if store.chunks.token_ids else None

    def overwritten(self, block_ids: Collection[int] | None) -> list[int]:
        """Return the numbers of open stores that read one of these blocks, which are about to be written. None: any
        block."""
        if not self._watched:
            return []
        if block_ids is None:
            block_ids = self._watched
        return sorted({number for block in block_ids for number in self._watched.get(block, ())})

    def has_pending(self, request_id: str) -> bool:
        """Whether a store of the request has not ended."""
        return request_id in self._requests
