"""Which chunks of a request are worth offering to the pool, and which stores have not ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.kv_groups import KvCacheGroup, first_held_chunk
from kvpool.connectors.vllm.orders import ChunksChanged, StoreEnd, StoreOrder, packed_blocks
from kvpool.connectors.vllm.request_chain import Request, trace_of
from kvpool.core.retention import Retention


@dataclass(slots=True)
class _Open:
    request_id: str
    chunks: ChunksChanged
    workers: int
    watched: frozenset[int] = frozenset()  # blocks that the engine may use again while they are read
    failed: bool = False


class StorePlans:
    """Of all requests, finished ones too."""

    def __init__(
        self,
        known: KnownChunks,
        groups: Sequence[KvCacheGroup],
        *,
        worker_count: int,
        chunk_tokens: int,
        named_group: int | None,
    ) -> None:
        """named_group: the one of whose stores the tokens are wanted, too."""
        self._known, self._groups, self._worker_count = known, groups, worker_count
        self._named_group, self._chunk_tokens = named_group, chunk_tokens
        self._last_number = 0
        self._open: dict[int, _Open] = {}
        self._requests: Counter[str] = Counter()
        self._watched: dict[int, set[int]] = {}  # numbers of open stores by block

    def order(
        self,
        request: Request,
        number: int,
        chain: Prompt,
        chunks: range,
        block_ids: Sequence[int],
        retention: Retention | None = None,
    ) -> StoreOrder | None:
        """A store of what the pool is not known to have of these chunks, for all workers; with a retention of all of
        them, as it holds for those that are there, too. None if that is nothing.

        number: of the KV cache group. Chunks of which blocks have left the group's window are left out.
        """
        request_id, group = request.request_id, self._groups[number]
        first_chunk, end_chunk, blocks_per_chunk = chunks.start, chunks.stop, self._chunk_tokens // group.block_tokens
        if group.window_tokens:
            first_chunk = first_held_chunk(block_ids, first_chunk, end_chunk, blocks_per_chunk)
        first = first_chunk if retention else self._known.leading(chain.hashes[:end_chunk], first_chunk)
        if first >= end_chunk:
            return None
        self._last_number += 1
        order = StoreOrder(
            number=self._last_number,
            request_id=request_id,
            group=number,
            hashes=chain.packed_hashes(0, end_chunk),
            token_count=chain.token_count,
            block_ids=packed_blocks(block_ids[: end_chunk * blocks_per_chunk]),
            first_chunk=first,
            end_chunk=end_chunk,
            trace=trace_of(request),
            retention=retention,
        )
        tokens = range(first * self._chunk_tokens, end_chunk * self._chunk_tokens)
        named = number == self._named_group
        changed = ChunksChanged(
            hashes=chain.hashes[first:end_chunk],
            parent_hash=chain.parent_hash(first) if first else b"",
            token_ids=tuple(request.all_token_ids[tokens.start : tokens.stop]) if named else (),
            lora_name=request.lora_request.lora_name if request.lora_request is not None else "",
        )
        # A window goes on while a request runs: what has left it is another request's soon.
        watched = block_ids[first * blocks_per_chunk : end_chunk * blocks_per_chunk] if group.window_tokens else ()
        self._open[order.number] = _Open(request_id, changed, self._worker_count, frozenset(watched))
        for block in watched:
            self._watched.setdefault(block, set()).add(order.number)
        self._requests[request_id] += 1
        return order

    def ended(self, end: StoreEnd) -> ChunksChanged | None:
        """One worker's part has ended. The chunks, if it was the last part and all of them are in the pool now."""
        store = self._open.get(end.number)
        if store is None:
            return None
        store.workers -= 1
        store.failed |= end.failed_chunks + end.skipped_chunks > 0
        if store.workers:
            return None
        del self._open[end.number]
        for block in store.watched:
            self._watched[block].discard(end.number)
            if not self._watched[block]:
                del self._watched[block]
        self._requests[store.request_id] -= 1
        if not self._requests[store.request_id]:
            del self._requests[store.request_id]
        if store.failed:
            return None
        self._known.add(store.chunks.hashes)
        return store.chunks if store.chunks.token_ids else None

    def overwritten(self, block_ids: Collection[int]) -> list[int]:
        """Numbers of the open stores that read one of these blocks, which the engine uses for something else now."""
        if not self._watched:
            return []
        return sorted({number for block in block_ids for number in self._watched.get(block, ())})

    def any_open(self, request_id: str) -> bool:
        """Whether a store of the request has not ended."""
        return request_id in self._requests
