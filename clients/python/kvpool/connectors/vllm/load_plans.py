"""What to load for which request, and which loads are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.client.hashing import Chain
from kvpool.client.pool_values import PrefixMatch
from kvpool.client.retry import Backoff
from kvpool.connectors.vllm.lookups import Lookup
from kvpool.connectors.vllm.orders import LoadEnd, LoadOrder, packed, packed_blocks
from kvpool.connectors.vllm.settings import LOAD_QUICKER, VllmSettings
from kvpool.connectors.vllm.tally import Tally
from kvpool.core.load_cost import LoadCost, LoadRun, estimate_ms, leading
from kvpool.core.tracing import TraceParent

_LATE_S = 1.0  # after its deadline a load is not waited for by others
# After a load that was late nothing is loaded for a while, the longer the more have been late since one was not.
_PAUSE_S, _PAUSE_MAX_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is to be loaded, if the engine finds blocks for it. queued_bytes: of the loads before it."""

    chain: Chain
    first_token: int
    end_chunk: int
    token_count: int
    estimated_ms: float  # 0: not known
    queued_bytes: int
    trace: TraceParent | None = None


@dataclass(slots=True)
class _Running:
    order: LoadOrder
    plan: LoadPlan
    size_bytes: int
    begun_at_s: float
    worker_s: float = 0.0  # as the slowest worker measured it
    failed: bool = False
    late: bool = False


class LoadPlans:
    """Of a scheduler."""

    def __init__(
        self,
        settings: VllmSettings,
        tally: Tally,
        *,
        block_tokens: int,
        chunk_bytes: int,
        now_s: Callable[[], float],
    ) -> None:
        """chunk_bytes: of all ranks."""
        self._settings, self._tally, self._now_s = settings, tally, now_s
        self._block_tokens, self._chunk_bytes = block_tokens, chunk_bytes
        self.cost = LoadCost()
        self._pauses = Backoff(_PAUSE_S, _PAUSE_MAX_S)
        self._paused_until_s = 0.0
        self._running: dict[str, _Running] = {}  # by request
        self._queued_bytes = 0
        self._first_chunks: dict[bytes, tuple[str, float]] = {}  # of running loads: which request's, and until when

    def is_awaited(self, chunk_hash: bytes) -> bool:
        """Whether a load that is under way begins with this chunk, and is not late."""
        _, until_s = self._first_chunks.get(chunk_hash, ("", 0.0))
        return self._now_s() < until_s

    def plan(self, chain: Chain, lookup: Lookup, found: PrefixMatch, held_tokens: int) -> LoadPlan | None:
        """What of the found chunks is worth a load."""
        runs = self._runs(chain, lookup.held_chunks, found, held_tokens)
        offered_chunks = chunks = sum(run.chunk_count for run in runs)
        if self._settings.load == LOAD_QUICKER:
            paused = self._now_s() < self._paused_until_s
            chunks = 0 if paused else self.cost.worthwhile_chunks(runs, self._queued_bytes)
        if self._queued_bytes + chunks * self._chunk_bytes > self._settings.load_bytes_in_flight_max:
            chunks = 0
        if not lookup.counted:  # a request that gets no blocks asks again and again
            lookup.counted = True
            self._tally.decided(offered_chunks, chunks)
            if offered_chunks and not chunks:
                self.cost.passed_over(self._now_s())
        end_chunk = held_tokens // self._settings.chunk_tokens + chunks
        token_count = chain.usable_tokens(end_chunk) - held_tokens
        if not chunks or token_count < max(1, self._settings.min_load_tokens):
            return None
        estimated_ms = estimate_ms(leading(runs, chunks))
        return LoadPlan(chain, held_tokens, end_chunk, token_count, estimated_ms, self._queued_bytes, lookup.trace)

    def begin(self, request_id: str, plan: LoadPlan, block_ids: Sequence[int], token_count: int) -> LoadOrder:
        """The engine has blocks for a plan: of the whole request, from token 0 on."""
        chunk_tokens, chain = self._settings.chunk_tokens, plan.chain
        end_token = plan.first_token + token_count
        end_chunk = min(plan.end_chunk, chain.chunks_of(end_token))
        order = LoadOrder(
            request_id=request_id,
            hashes=packed(chain.hashes[:end_chunk]),
            token_count=chain.token_count,
            block_ids=packed_blocks(block_ids[: end_chunk * chunk_tokens // self._block_tokens]),
            first_chunk=plan.first_token // chunk_tokens,
            end_chunk=end_chunk,
            first_token=plan.first_token,
            end_token=end_token,
            timeout_s=self.cost.deadline_s(
                token_count, self._settings.load_timeout_min_s, self._settings.load_timeout_s
            ),
            compute_us_per_token=self.cost.compute_us_per_token(token_count),
            trace=plan.trace,
        )
        size_bytes = (end_chunk - order.first_chunk) * self._chunk_bytes
        self._running[request_id] = _Running(order, plan, size_bytes, self._now_s())
        self._queued_bytes += size_bytes
        self.cost.load_begun()
        until_s = self._now_s() + order.timeout_s + _LATE_S
        self._first_chunks[chain.hashes[order.first_chunk]] = (request_id, until_s)
        return order

    def hopeless(self, request_id: str, block_ids: Sequence[int]) -> LoadOrder:
        """For an engine that waits for a load of which nothing is known: it brings nothing, and ends."""
        return LoadOrder(
            request_id=request_id,
            hashes=b"",
            token_count=0,
            block_ids=packed_blocks(block_ids),
            first_chunk=0,
            end_chunk=0,
            first_token=0,
            end_token=len(block_ids) * self._block_tokens,
            timeout_s=0.0,
        )

    def ended(self, end: LoadEnd) -> tuple[bytes, ...]:
        """One worker's part has ended. The chunks that were not to be had."""
        running = self._running.get(end.request_id)
        if running is None:
            return ()
        running.worker_s = max(running.worker_s, end.duration_s)
        running.failed |= end.failed_chunks > 0
        running.late |= end.late
        return (
            running.plan.chain.hashes[running.order.end_chunk - end.failed_chunks : running.order.end_chunk]
            if end.failed_chunks
            else ()
        )

    def received(self, request_id: str) -> None:
        """All workers' parts have ended."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        self._queued_bytes -= running.size_bytes
        first_chunk = running.plan.chain.hashes[running.order.first_chunk]
        if self._first_chunks.get(first_chunk, ("", 0.0))[0] == request_id:
            del self._first_chunks[first_chunk]
        if running.late:
            if self._now_s() >= self._paused_until_s:  # of loads that are late together the first one counts
                self._paused_until_s = self._now_s() + self._pauses.next_s()
        elif not running.failed:
            self._pauses.reset()
            # A step that waits for the layers of its loads ends with its own work: that is no part of the load.
            duration_s = running.worker_s if self._settings.layerwise else self._now_s() - running.begun_at_s
            self.cost.note_load(running.size_bytes, duration_s, running.plan.estimated_ms, running.plan.queued_bytes)

    def _runs(self, chain: Chain, asked_chunks: int, found: PrefixMatch, held_tokens: int) -> list[LoadRun]:
        chunk_tokens = self._settings.chunk_tokens
        runs, at = [], asked_chunks
        for run in found.runs:
            first, at = max(at, held_tokens // chunk_tokens), at + run.chunk_count
            count = at - first
            if count > 0:  # the engine may hold more by now than when it asked
                tokens = chain.usable_tokens(at) - max(first * chunk_tokens, held_tokens)
                share_ms = run.estimated_load_ms * count / run.chunk_count
                runs.append(LoadRun(count, tokens, count * self._chunk_bytes, share_ms))
        return runs
