"""The scheduler's side: what to load and to store for which request. On the engine's thread; never blocks for long."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.client.hashing import Chain
from kvpool.client.pool import KvPool
from kvpool.client.pool_values import PrefixMatch
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.lookups import Lookup, Lookups
from kvpool.connectors.vllm.orders import ChunksChanged, LoadEnd, LoadOrder, StepOrders, StoreEnd, StoreOrder
from kvpool.connectors.vllm.request_chain import Adapters, Request, is_shareable, request_chain
from kvpool.connectors.vllm.settings import LOAD_NEVER, LOAD_QUICKER, STORE_NEVER, STORE_PREFILL, VllmSettings
from kvpool.connectors.vllm.step_clock import StepClock
from kvpool.connectors.vllm.store_plans import StorePlans
from kvpool.connectors.vllm.tally import Tally
from kvpool.core.load_cost import LoadCost, LoadRun

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_STORABLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED")
_CHANGES_MAX = 4096  # kept for vLLM, which does not ask for them unless it publishes events
_LATE_S = 1.0  # after its deadline a load is not waited for by others


@dataclass(slots=True)
class _Plan:
    """What is to be loaded, if the engine finds blocks for it."""

    first_token: int
    end_chunk: int
    estimated_ms: float


@dataclass(slots=True)
class _State:
    """Of one request."""

    request: Request
    shareable: bool
    chain: Chain | None = None
    lookup: Lookup = field(default_factory=Lookup)
    plan: _Plan | None = None
    loaded_at_preemption: int = -1  # number of preemptions before the last load: one load each time is enough
    loading: bool = False
    stored_chunks: int = 0  # leading chunks whose store has been ordered since the last preemption


class SchedulerSide:
    """See KvPoolConnector for what calls what."""

    def __init__(
        self,
        settings: VllmSettings,
        link: PoolLink,
        *,
        block_tokens: int,
        chunk_bytes: int,
        worker_count: int,
        shares_blocks: bool,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """chunk_bytes: of all ranks. shares_blocks: the engine finds blocks of other requests again."""
        self._settings, self._link = settings, link
        self._block_tokens, self._chunk_bytes = block_tokens, chunk_bytes
        self._shares_blocks, self._now_s = shares_blocks, now_s
        self._states: dict[str, _State] = {}
        self._adapters = Adapters()
        self.cost = LoadCost()
        self.tally = Tally()
        self._steps = StepClock(now_s)
        self._known = KnownChunks()
        self._changed: deque[ChunksChanged] = deque(maxlen=_CHANGES_MAX)
        self._lookups = Lookups(settings, link, self.tally, now_s)
        self._store_plans = StorePlans(
            self._known, worker_count=worker_count, chunk_tokens=settings.chunk_tokens, block_tokens=block_tokens
        )
        self._orders: list[LoadOrder] = []
        self._stores: list[StoreOrder] = []
        self._release: list[str] = []
        self._loading: dict[bytes, float] = {}  # first chunk of each load under way, and how long it may take
        self._loads: dict[str, tuple[LoadOrder, float]] = {}  # under way, with the estimate in milliseconds

    def on_new_request(self, request: Request) -> None:
        """A request has come."""
        self._states[request.request_id] = _State(request, is_shareable(request, self._adapters))

    def matched_tokens(self, request: Request, held_tokens: int) -> int | None:
        """Tokens after the held ones that will be loaded; None while that is not known yet."""
        state = self._states[request.request_id]
        state.plan = None
        pool = self._pool_for(state, held_tokens)
        if pool is None:
            return 0
        chain = self._chain_of(state, pool)
        held_chunks = held_tokens // self._settings.chunk_tokens
        if chain.chunk_count <= held_chunks:
            return 0
        if self._shares_blocks and self._now_s() < self._loading.get(chain.hashes[held_chunks], 0.0):
            return None  # another request loads this very chunk: its blocks will be found then
        found = self._lookups.answer(state.lookup, pool, chain, held_chunks)
        if found is None:
            return None
        self._known.add(chain.hashes[held_chunks : found.matched_chunks])
        return self._plan(state, chain, found, held_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], loaded_tokens: int) -> None:
        """The engine has blocks for a plan: of the whole request, from token 0 on."""
        state = self._states[request.request_id]
        plan, chain = state.plan, state.chain
        state.plan = None
        if not loaded_tokens or plan is None or chain is None:
            return
        chunk_tokens = self._settings.chunk_tokens
        end_token = plan.first_token + loaded_tokens
        end_chunk = min(plan.end_chunk, chain.chunks_of(end_token))
        order = LoadOrder(
            request_id=request.request_id,
            hashes=chain.hashes[:end_chunk],
            token_count=chain.token_count,
            block_ids=tuple(block_ids[: end_chunk * chunk_tokens // self._block_tokens]),
            first_chunk=plan.first_token // chunk_tokens,
            end_chunk=end_chunk,
            first_token=plan.first_token,
            end_token=end_token,
            timeout_s=self.cost.deadline_s(
                loaded_tokens, self._settings.load_timeout_min_s, self._settings.load_timeout_s
            ),
        )
        self._orders.append(order)
        self._loads[request.request_id] = (order, plan.estimated_ms)
        self._loading[chain.hashes[order.first_chunk]] = self._now_s() + order.timeout_s + _LATE_S
        state.loading, state.loaded_at_preemption = True, request.num_preemptions

    def build(self, scheduled: Mapping[str, int], preempted: Iterable[str], block_ids_of: BlockIdsOf) -> StepOrders:
        """The orders of a step that computes so many tokens of each request."""
        orders = StepOrders(
            step=self._steps.begin(sum(filter(_is_prefill, scheduled.values())), sum(scheduled.values())),
            loads=self._orders,
            stores=self._stores,
            release=self._release,
            preempted=list(preempted),
        )
        self._orders, self._stores, self._release = [], [], []
        for request_id in orders.preempted:
            if request_id in self._states:
                self._states[request_id].stored_chunks = 0
        if self._settings.store == STORE_PREFILL:
            for request_id, token_count in scheduled.items():
                state = self._states.get(request_id)
                if state is not None:
                    self._store_prefilled(orders, state, token_count, block_ids_of)
        return orders

    def finished(self, request: Request, block_ids: Sequence[int], status: str) -> bool:
        """Whether the engine shall keep the request's blocks until the workers say that nothing reads them."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        state.lookup.cancel()
        if state.loading:
            return False  # the engine holds the blocks until the load has ended
        if status in _STORABLE:
            computed = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
            if not self._settings.store_generated:
                computed = min(computed, request.num_prompt_tokens)
            order = self._store_order(state, computed, block_ids)
            if order is not None:
                self._stores.append(order)
        if not self._store_plans.any_open(request.request_id):
            return False
        self._release.append(request.request_id)
        return True

    def heard(self, step: int, ends: Iterable[LoadEnd | StoreEnd]) -> None:
        """What the workers say after a step."""
        sample = self._steps.end(step)
        if sample is not None:
            self.cost.note_prefill(*sample)
        for end in ends:
            self.tally.count(end)
            if isinstance(end, LoadEnd):
                self._load_ended(end)
            else:
                self._store_ended(end)

    def received(self, request_ids: Iterable[str]) -> None:
        """Loads that have ended on all workers."""
        for request_id in request_ids:
            if request_id in self._states:
                self._states[request_id].loading = False
            order, _ = self._loads.pop(request_id, (None, 0.0))
            if order is not None:
                self._loading.pop(order.hashes[order.first_chunk], None)

    def take_changes(self) -> list[ChunksChanged]:
        """What came into the pool and what was found gone since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _pool_for(self, state: _State, held_tokens: int) -> KvPool | None:
        request = state.request
        if not state.shareable or request.skip_reading_prefix_cache or self._settings.load == LOAD_NEVER:
            return None
        if request.num_tokens - 1 - held_tokens < max(1, self._settings.min_load_tokens):
            return None
        return None if state.loaded_at_preemption == request.num_preemptions else self._lookups.pool

    def _chain_of(self, state: _State, pool: KvPool) -> Chain:
        if state.chain is None or state.chain.token_count < state.request.num_tokens:
            chunk_tokens, hash_key = self._settings.chunk_tokens, pool.session.hash_key
            state.chain = request_chain(state.request, self._adapters, hash_key, chunk_tokens, state.chain)
        return state.chain

    def _plan(self, state: _State, chain: Chain, found: PrefixMatch, held_tokens: int) -> int:
        chunk_tokens = self._settings.chunk_tokens
        runs, at, held_chunks = [], state.lookup.held_chunks, held_tokens // chunk_tokens
        for run in found.runs:
            first, at = max(at, held_chunks), at + run.chunk_count
            count = at - first
            if count > 0:  # the engine may hold more by now than when it asked
                tokens = chain.usable_tokens(at) - max(first * chunk_tokens, held_tokens)
                share_ms = run.estimated_load_ms * count / run.chunk_count
                runs.append(LoadRun(count, tokens, count * self._chunk_bytes, share_ms))
        queued_bytes = sum(
            (order.end_chunk - order.first_chunk) * self._chunk_bytes for order, _ in self._loads.values()
        )
        offered_chunks = sum(run.chunk_count for run in runs)
        quicker_only = self._settings.load == LOAD_QUICKER
        chunks = self.cost.worthwhile_chunks(runs, queued_bytes) if quicker_only else offered_chunks
        if chunks and queued_bytes + chunks * self._chunk_bytes > self._settings.load_bytes_in_flight_max:
            chunks = 0
        end_chunk = held_chunks + chunks
        tokens = chain.usable_tokens(end_chunk) - held_tokens
        if not state.lookup.counted:  # a request that gets no blocks asks again and again
            self.tally.decided(offered_chunks, chunks)
            state.lookup.counted = True
        if not chunks or tokens < max(1, self._settings.min_load_tokens):
            return 0
        estimated_ms = sum(run.estimated_ms for run in runs)
        state.plan = _Plan(held_tokens, end_chunk, estimated_ms if chunks == offered_chunks else 0.0)
        return tokens

    def _store_prefilled(self, orders: StepOrders, state: _State, token_count: int, block_ids_of: BlockIdsOf) -> None:
        request = state.request
        computed = min(request.num_computed_tokens + token_count, request.num_prompt_tokens)
        if computed // self._settings.chunk_tokens > state.stored_chunks:
            block_ids = block_ids_of(request.request_id)
            order = self._store_order(state, computed, block_ids) if block_ids is not None else None
            if order is not None:
                orders.stores.append(order)

    def _store_order(self, state: _State, computed_tokens: int, block_ids: Sequence[int]) -> StoreOrder | None:
        """A store of the leading full chunks that the pool is not known to have."""
        chunk_tokens, pool = self._settings.chunk_tokens, self._link.pool
        end_chunk = computed_tokens // chunk_tokens
        if (
            self._settings.store == STORE_NEVER
            or not state.shareable
            or pool is None
            or end_chunk <= state.stored_chunks
        ):
            return None
        first_chunk, state.stored_chunks = state.stored_chunks, end_chunk
        chain = self._chain_of(state, pool)
        return self._store_plans.order(state.request, chain, first_chunk, end_chunk, block_ids)

    def _load_ended(self, end: LoadEnd) -> None:
        order, estimated_ms = self._loads.get(end.request_id, (None, 0.0))
        if end.failed_chunks:
            _log.warning("kvpool: %d chunks were not loaded: %s", end.failed_chunks, end.failure or "damaged or gone")
            if order is not None:
                gone = order.hashes[order.end_chunk - end.failed_chunks :]
                self._known.drop(gone)
                self._changed.append(ChunksChanged(hashes=gone))
        elif order is not None:
            self.cost.note_load(end.chunk_count * self._chunk_bytes, end.duration_s, estimated_ms)
        if self._settings.layerwise:
            self.received([end.request_id])  # nobody else says so: the engine's step has waited for it

    def _store_ended(self, end: StoreEnd) -> None:
        if end.failed_chunks:
            _log.info("kvpool: %d chunks were not stored: %s", end.failed_chunks, end.failure)
        changed = self._store_plans.ended(end)
        if changed is not None:
            self._changed.append(changed)


def _is_prefill(token_count: int) -> bool:
    return token_count > 1  # of one request in one step; drafts of speculative decoding are too few to matter


BlockIdsOf = Callable[[str], Sequence[int] | None]
