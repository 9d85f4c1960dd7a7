"""Which chunks of a request are worth offering to the pool, and which stores have not ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.orders import ChunksChanged, StoreEnd, StoreOrder, packed_blocks
from kvpool.connectors.vllm.request_chain import Request, trace_of
from kvpool.core.retention import Retention


@dataclass(slots=True)
class _Open:
    request_id: str
    chunks: ChunksChanged
    workers: int
    failed: bool = False


class StorePlans:
    """Of all requests, finished ones too."""

    def __init__(
        self, known: KnownChunks, *, worker_count: int, chunk_tokens: int, block_tokens: int, names_tokens: bool
    ) -> None:
        """names_tokens: somebody wants to know the tokens of what was stored."""
        self._known, self._worker_count, self._names_tokens = known, worker_count, names_tokens
        self._chunk_tokens, self._block_tokens = chunk_tokens, block_tokens
        self._last_number = 0
        self._open: dict[int, _Open] = {}
        self._requests: Counter[str] = Counter()

    def order(
        self,
        request: Request,
        chain: Prompt,
        first_chunk: int,
        end_chunk: int,
        block_ids: Sequence[int],
        retention: Retention | None = None,
    ) -> StoreOrder | None:
        """A store of what the pool is not known to have of chunks [first_chunk, end_chunk), for all workers; with a
        retention of all of them, as it holds for those that are there, too."""
        request_id = request.request_id
        first = first_chunk if retention else self._known.leading(chain.hashes[:end_chunk], first_chunk)
        if first >= end_chunk:
            return None
        self._last_number += 1
        order = StoreOrder(
            number=self._last_number,
            request_id=request_id,
            hashes=chain.packed_hashes(0, end_chunk),
            token_count=chain.token_count,
            block_ids=packed_blocks(block_ids[: end_chunk * self._chunk_tokens // self._block_tokens]),
            first_chunk=first,
            end_chunk=end_chunk,
            trace=trace_of(request),
            retention=retention,
        )
        tokens = range(first * self._chunk_tokens, end_chunk * self._chunk_tokens)
        changed = ChunksChanged(
            hashes=chain.hashes[first:end_chunk],
            parent_hash=chain.parent_hash(first) if first else b"",
            token_ids=tuple(request.all_token_ids[tokens.start : tokens.stop]) if self._names_tokens else (),
            lora_name=request.lora_request.lora_name if request.lora_request is not None else "",
        )
        self._open[order.number] = _Open(request_id, changed, self._worker_count)
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
        self._requests[store.request_id] -= 1
        if not self._requests[store.request_id]:
            del self._requests[store.request_id]
        if store.failed:
            return None
        self._known.add(store.chunks.hashes)
        return store.chunks

    def any_open(self, request_id: str) -> bool:
        """Whether a store of the request has not ended."""
        return request_id in self._requests
