"""The scheduler's side: what to load and to store for which request. On the engine's thread; never blocks for long."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.client.engine_items import EngineSource
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.connectors.vllm.adapters import Adapters
from kvpool.connectors.vllm.connector_counters import ConnectorCounters
from kvpool.connectors.vllm.engine_facts import WeightsEpoch
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.kv_groups import KvCacheGroup
from kvpool.connectors.vllm.leases import Leases
from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.load_plans import LoadPlan, LoadPlans
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.lookups import Lookup, Lookups
from kvpool.connectors.vllm.orders import ChunksChanged, LoadEnd, LoadOrder, StepOrders, StoreEnd, StoreOrder
from kvpool.connectors.vllm.request_chain import Request, request_chain, trace_of
from kvpool.connectors.vllm.request_options import RequestOptions
from kvpool.connectors.vllm.settings import LOAD_NEVER, STORE_NEVER, STORE_PREFILL, VllmSettings
from kvpool.connectors.vllm.step_clock import StepClock
from kvpool.connectors.vllm.store_plans import StorePlans
from kvpool.core.errors import InvalidRequest

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_STORABLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_REPETITION")
_CHANGES_MAX = 4096
_UNREADY_S = 1.0  # what a worker said of its agent holds for so long; it is heard of with steps only


@dataclass(slots=True)
class _State:
    """Of one request."""

    request: Request
    shareable: bool  # whether equal keys mean equal KV
    options: RequestOptions = field(default_factory=RequestOptions)
    adapter: bytes | None = None  # its LoRA adapter's identity, once it is known
    chains: tuple[Prompt, ...] = ()  # of each KV cache group
    lookup: Lookup = field(default_factory=Lookup)
    plan: LoadPlan | None = None
    loaded_at_preemption: int = -1  # number of preemptions before the last load: one load each time is enough
    loading: bool = False
    held_tokens: int = 0  # of the engine's own, when vLLM last asked: blocks from there on are new ones
    # Of each group, leading chunks whose store has been ordered since the last preemption.
    stored_chunks: Counter[int] = field(default_factory=Counter)


class SchedulerSide:
    """Called by KvPoolConnector: get_num_new_matched_tokens calls matched_tokens; update_state_after_alloc: allocated
    or not_chosen; build_connector_meta: build; request_finished: finished; update_connector_output: heard, ended and
    received; take_events: take_changes; reset_cache: forget."""

    def __init__(
        self,
        settings: VllmSettings,
        link: PoolLink,
        groups: Sequence[KvCacheGroup],
        *,
        worker_count: int,
        shares_blocks: bool,
        tells_changes: bool = True,
        volatile_tokens: int = 0,
        now_s: Callable[[], float] = time.monotonic,
        weights: WeightsEpoch | None = None,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """groups: in vLLM's order, as the pools of the link. shares_blocks: the engine finds blocks of other requests
        again. tells_changes: `take_changes` is called. weights: None as long as vLLM names no versions of them.
        volatile_tokens: the last computed ones, whose KV a drafter may write again."""
        self._settings, self._link, self._groups = settings, link, groups
        self._shares_blocks, self._tells_changes, self._now_s = shares_blocks, tells_changes, now_s
        self._volatile_tokens, self._wall_us = volatile_tokens, wall_us
        self._states: dict[str, _State] = {}
        self._computing: set[str] = set()  # in the last step
        self._prefilling: set[str] = set()  # some of the prompt's chunks are not ordered to be stored yet
        self._windows = [number for number, group in enumerate(groups) if group.window_tokens]
        self._generating: set[str] = set()  # chunks of windows are to be stored before vLLM takes their blocks away
        self._new_blocks: list[int] = []  # that requests were given since the last step
        full = [number for number, group in enumerate(groups) if not group.window_tokens]
        self._main_group = full[0] if full else 0  # has most chunks: its hashes stand for a prompt's in logs and events
        self._adapters = Adapters(link.start)
        self._weights = weights or WeightsEpoch(lambda: None)
        self._epoch = self._weights.epoch()
        self._unready_until_s = 0.0
        self.tally = ConnectorCounters()
        self._steps = StepClock(now_s)
        self._known = KnownChunks()
        self._changed: deque[ChunksChanged] = deque(maxlen=_CHANGES_MAX)
        self._lookups = Lookups(settings, link, groups, self.tally, now_s)
        self._loads = LoadPlans(settings, self.tally, groups, now_s=now_s)
        self.cost = self._loads.cost
        self._leases = Leases(link, groups, bytes_max=settings.lease_bytes_max, now_s=now_s)
        self._store_plans = StorePlans(
            self._known,
            groups,
            worker_count=worker_count,
            chunk_tokens=settings.chunk_tokens,
            named_group=self._main_group if tells_changes else None,
        )
        self._orders: list[LoadOrder] = []
        self._cancel: list[str] = []
        self._stores: list[StoreOrder] = []
        self._release: list[str] = []
        self._log_rate = LogRateLimiter(now_s)

    def on_new_request(self, request: Request) -> None:
        """A request has come: its prompt is hashed and looked up while it waits for its turn."""
        # A session's tokens change under its hashes.
        shareable = request.prompt_embeds is None and not request.resumable
        options = RequestOptions.of(request.kv_transfer_params, self._wall_us)
        if options.refused and self._log_rate.due("options"):
            more = self._log_rate.more("options")
            _log.warning("kvpool: request %s is only computed: %s%s", request.request_id, options.refused, more)
        state = _State(request, shareable, options, lookup=Lookup(trace_of(request)))
        self._states[request.request_id] = state
        self._prefilling.add(request.request_id)
        self._follow_weights()
        if not self._is_shareable(state) or request.num_tokens < self._settings.chunk_tokens:
            return
        pools = self._pools_for(state, 0)
        asked = pools or (self._link.pools if self._stores_any(state) else ())
        if asked:
            self._lookups.begin(state.lookup, asked, self._hashing(state, asked), request.num_tokens, match=bool(pools))

    def matched_tokens(self, request: Request, held_tokens: int) -> int | None:
        """Tokens after the held ones (vLLM's num_computed_tokens) that will be loaded. None, to be asked again in a
        later step: the lookup has not ended, another request loads the same chunk, or too many bytes are in flight."""
        state = self._states.get(request.request_id)
        if state is None:
            return 0
        state.held_tokens = held_tokens
        token_count = self._planned_tokens(state, held_tokens)
        if token_count == 0:
            self._leases.end(request.request_id)
        return token_count

    def _planned_tokens(self, state: _State, held_tokens: int) -> int | None:
        request = state.request
        self._follow_weights()
        state.plan, pools = None, self._pools_for(state, held_tokens)
        held_chunks = held_tokens // self._settings.chunk_tokens
        if not pools or request.num_tokens // self._settings.chunk_tokens <= held_chunks:
            return 0
        lookup, hashing = state.lookup, self._hashing(state, pools)
        chains = self._lookups.answer(
            lookup, pools, hashing, request.num_tokens, held_chunks, idle=self._computing.isdisjoint(self._states)
        )
        found = lookup.found
        if not chains or found is None:
            return None
        if found.error is None:
            state.chains = chains
        if chains[0].chunk_count <= held_chunks:
            return 0
        if self._shares_blocks and self._loads.is_awaited(chains[0].hashes[held_chunks]):
            return None  # another request loads this very chunk: its blocks will be found then
        if not lookup.counted:
            for chain, runs in zip(chains, lookup.runs, strict=False):
                for run in runs:
                    self._known.add(chain.hashes[run.start : run.stop])
                    self._known.drop(chain.hashes[run.stop : run.stop + 1])  # what was evicted is to be stored again
        plan = self._loads.plan(chains, lookup, found, held_tokens, pools[0].session.link_bytes_per_s)
        if plan is not None:
            self._leases.want(request.request_id, plan)
        if plan is not None and plan.must_wait:
            return None
        state.plan = plan
        return plan.token_count if plan is not None else 0

    def allocated(self, request: Request, block_ids: BlocksOfGroups, loaded_tokens: int) -> None:
        """The engine has blocks for a plan: of each group, those of the whole request, from token 0 on. It waits for
        the load now, whatever happens here: what cannot be begun is ordered as a load that fails at once."""
        state = self._states.get(request.request_id)
        self._leases.allocated(request.request_id)
        self._note_new_blocks(state, block_ids)
        try:
            if state is None or state.plan is None:
                raise InvalidRequest("a load was begun that was not planned")
            orders = self._loads.begin(request.request_id, state.plan, block_ids, loaded_tokens)
        except Exception:
            _log.exception("kvpool: request %s computes instead of loading", request.request_id)
            orders = [self._loads.failed_load_order(request.request_id, block_ids)]
        self._orders += orders
        if state is not None:
            state.plan, state.loaded_at_preemption = None, request.num_preemptions
            state.loading = not self._settings.layerwise  # else its step has waited when anything is heard

    def not_chosen(self, request: Request, block_ids: BlocksOfGroups = ()) -> None:
        """The engine has blocks for the request and loads nothing of it from here: another connector may."""
        state = self._states.get(request.request_id)
        self._note_new_blocks(state, block_ids)
        self._leases.end(request.request_id)
        if state is not None:
            state.plan = None

    def _note_new_blocks(self, state: _State | None, block_ids: BlocksOfGroups) -> None:
        """Of a request that vLLM admits: those that it did not find in its own cache."""
        if self._windows:
            held_tokens = state.held_tokens if state is not None else 0
            for group, blocks in zip(self._groups, block_ids, strict=False):
                self._new_blocks += blocks[held_tokens // group.block_tokens :]

    @property
    def watches_blocks(self) -> bool:
        """Whether `build` wants to know which blocks running requests were given."""
        return bool(self._windows)

    def build(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        block_ids_of: BlockIdsOf,
        new_blocks: Iterable[int] = (),
    ) -> StepOrders:
        """The orders of a step that computes so many tokens of each request. new_blocks: that requests were given in
        it, beside those of `allocated` and `not_chosen`; see `watches_blocks`."""
        self._lookups.new_step()
        self._loads.new_step()
        self._leases.new_step()
        computes = bool(scheduled or self._computing)
        self._computing = set(scheduled)
        self._follow_weights()
        waits_for_layers = self._settings.layerwise and bool(self._orders)
        prefill_tokens = 0 if waits_for_layers else self._prefill_tokens(scheduled)
        orders = StepOrders(
            step=self._steps.begin(prefill_tokens, sum(scheduled.values())),
            loads=self._orders,
            cancel=self._cancel,
            stores=self._stores,
            release=self._release,
            preempted=list(preempted),
            overwritten=self._store_plans.overwritten([*self._new_blocks, *new_blocks]),
            computes=computes,
        )
        self._orders, self._cancel, self._stores, self._release, self._new_blocks = [], [], [], [], []
        for request_id in orders.preempted:
            if request_id in self._states:
                self._states[request_id].stored_chunks.clear()
                self._prefilling.add(request_id)
        # A window's blocks are gone when the request ends: its chunks are stored as they are computed in any case.
        groups = range(len(self._groups)) if self._settings.store == STORE_PREFILL else self._windows
        if groups and self._settings.store != STORE_NEVER:
            for request_id in [one for one in scheduled if one in self._prefilling]:
                state, token_count = self._states[request_id], scheduled[request_id]
                computed = min(state.request.num_computed_tokens + token_count, state.request.num_prompt_tokens)
                self._store(orders.stores, state, computed, block_ids_of, groups)
                end_chunk = self._lasting_chunks(state.request.num_prompt_tokens)
                if all(state.stored_chunks[number] >= end_chunk for number in groups):
                    self._prefilling.discard(request_id)
                    if self._windows and self._settings.store_generated:
                        self._generating.add(request_id)
            for request_id in [one for one in scheduled if one in self._generating]:
                state = self._states[request_id]
                self._store(orders.stores, state, _final_tokens(state.request), block_ids_of, self._windows)
        return orders

    def finished(self, request: Request, block_ids: BlocksOfGroups, status: str) -> bool:
        """Whether the engine shall keep the request's blocks until the workers say that nothing reads them."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        self._prefilling.discard(request.request_id)
        self._generating.discard(request.request_id)
        state.lookup.cancel()
        self._leases.end(request.request_id)
        if state.loading:
            self._cancel.append(request.request_id)
            return False  # the engine holds the blocks until the load has ended
        if status in _STORABLE:
            computed = _final_tokens(request)
            if not self._settings.store_generated:
                computed = min(computed, request.num_prompt_tokens)
            self._store(self._stores, state, computed, lambda _: block_ids, range(len(self._groups)))
        if not self._store_plans.any_open(request.request_id):
            return False
        self._release.append(request.request_id)
        return True

    def on_worker_report(self, step: int, ends: Sequence[LoadEnd | StoreEnd], ready: bool = True) -> None:
        """What the workers say after a step. ready: all of them reach their agents."""
        if not ready:
            self._unready_until_s = self._now_s() + _UNREADY_S
        sample = self._steps.end(step)
        if sample is not None:
            self.cost.note_prefill(*sample)
        self.ended(ends)
        if self._settings.layerwise:  # vLLM reports none of the loads that a step has waited for as received
            self.received({end.request_id for end in ends if isinstance(end, LoadEnd)})

    def ended(self, ends: Sequence[LoadEnd | StoreEnd]) -> None:
        """How loads and stores ended, each on one worker."""
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
            elif request_id in self._cancel:  # too late, and it may be the name of another request soon
                self._cancel.remove(request_id)
            self._loads.received(request_id)
            self._leases.end(request_id)

    def take_changes(self) -> list[ChunksChanged]:
        """What came into the pool and what was found gone since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def forget(self) -> None:
        """The engine's weights may have changed: what the pool has is not this engine's any more."""
        self._weights.reset()
        self._follow_weights()

    def _follow_weights(self) -> None:
        """KV of other weights has other hashes. What began to be computed with the last ones is not shared at all."""
        epoch = self._weights.epoch()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._leases.end_all()
        self._prefilling = set(self._states)
        for state in self._states.values():
            state.lookup.cancel()
            state.lookup, state.chains, state.plan = Lookup(state.lookup.trace), (), None
            state.stored_chunks.clear()
            state.shareable &= not (state.loading or state.request.num_computed_tokens)
        _log.warning("kvpool: the weights may have changed: this engine shares %s", self._weights.shared_with())

    def refusal(self, request_id: str) -> str:
        """Why a request's parameters could not be read; empty if they could."""
        state = self._states.get(request_id)
        return state.options.refused if state is not None else ""

    def expected_sources(self, request_id: str, token_count: int) -> dict[EngineSource, int]:
        """Where so many tokens of a request's load are expected to come from."""
        return self._loads.expected_sources(request_id, token_count)

    def _stores_any(self, state: _State) -> bool:
        return self._settings.store != STORE_NEVER and state.options.store

    def _is_shareable(self, state: _State) -> bool:
        adapter = state.request.lora_request
        if not state.shareable or adapter is None:
            return state.shareable
        if state.adapter is None:
            state.adapter = self._adapters.identity(adapter)
        return state.adapter is not None

    def _pools_for(self, state: _State, held_tokens: int) -> tuple[AsyncPool, ...]:
        request = state.request
        if request.skip_reading_prefix_cache or self._settings.load == LOAD_NEVER or not state.options.load:
            return ()
        if not self._is_shareable(state):
            return ()
        if request.num_tokens - 1 - held_tokens < max(1, self._settings.min_load_tokens):
            return ()
        if state.loaded_at_preemption == request.num_preemptions or self._now_s() < self._unready_until_s:
            return ()
        return self._lookups.pools

    def _hashing(self, state: _State, pools: Sequence[AsyncPool]) -> Callable[[], tuple[Prompt, ...]]:
        """What hashes the request's tokens, on any thread; the chains that are known if there are no more of them."""
        known, request = state.chains, state.request
        if known and known[0].token_count >= request.num_tokens:
            return lambda: known
        chunk_tokens, adapter, epoch = self._settings.chunk_tokens, state.adapter, self._epoch
        keys = [pool.session.hash_key for pool in pools]

        def hash_tokens() -> tuple[Prompt, ...]:
            begun = known or (None,) * len(keys)
            return tuple(
                request_chain(request, adapter, key, chunk_tokens, chain, epoch)
                for key, chain in zip(keys, begun, strict=True)
            )

        return hash_tokens

    def _chains_of(self, state: _State, pools: Sequence[AsyncPool]) -> tuple[Prompt, ...]:
        state.chains = state.chains or state.lookup.chains
        state.chains = self._hashing(state, pools)()
        return state.chains

    def _prefill_tokens(self, scheduled: Mapping[str, int]) -> int:
        """Of those that are known before they are computed: no drafts of speculative decoding."""
        known = 0
        for request_id, token_count in scheduled.items():
            state = self._states.get(request_id) if token_count > 1 else None
            if state is not None:
                left = state.request.num_tokens - state.request.num_computed_tokens
                known += min(token_count, left) if left > 1 else 0
        return known

    def _store(
        self,
        orders: list[StoreOrder],
        state: _State,
        computed_tokens: int,
        block_ids_of: BlockIdsOf,
        groups: Sequence[int],
    ) -> None:
        """Order stores of the leading full chunks of these groups that the pool is not known to have."""
        end_chunk = self._lasting_chunks(computed_tokens)
        lacking = [number for number in groups if state.stored_chunks[number] < end_chunk]
        pools = self._link.pools if self._stores_any(state) else ()
        if not lacking or not pools or self._now_s() < self._unready_until_s:
            return
        try:
            block_ids = block_ids_of(state.request.request_id) if self._is_shareable(state) else None
            if block_ids is None:
                return
            begun = state.stored_chunks.copy()
            state.stored_chunks.update({number: end_chunk - begun[number] for number in lacking})
            chains = self._chains_of(state, pools)
            for number in lacking:
                # vLLM may use blocks again that have left the window: a store of its own for what stays.
                split = self._groups[number].first_chunk(computed_tokens, self._settings.chunk_tokens)
                split = min(max(split, begun[number]), end_chunk)
                for chunks in (range(begun[number], split), range(split, end_chunk)):
                    order = self._store_plans.order(
                        state.request, number, chains[number], chunks, block_ids[number], state.options.retention
                    )
                    if order is not None:
                        orders.append(order)
        except Exception:  # of one request: the other orders of the step have to go out
            if self._log_rate.due("store"):
                _log.exception("kvpool: a store could not be ordered%s", self._log_rate.more("store"))

    def _lasting_chunks(self, computed_tokens: int) -> int:
        """Whole chunks of which no drafter writes any more."""
        return (computed_tokens - self._volatile_tokens) // self._settings.chunk_tokens

    def _load_ended(self, end: LoadEnd) -> None:
        gone = self._loads.ended(end)
        if end.failed_chunks and not end.cancelled and self._log_rate.due("load"):
            why, more = end.result.error or "damaged or gone", self._log_rate.more("load")
            _log.warning("kvpool: %d chunks were not loaded: %s%s", end.failed_chunks, why, more)
        if gone and end.gone:
            self._known.drop(gone)
            if end.group == self._main_group:
                self._tell(ChunksChanged(hashes=gone))

    def _store_ended(self, end: StoreEnd) -> None:
        if end.failed_chunks:
            _log.debug("kvpool: %d chunks were not stored: %s", end.failed_chunks, end.failure)
        changed = self._store_plans.ended(end)
        if changed is not None:
            self._tell(changed)

    def _tell(self, change: ChunksChanged) -> None:
        if self._tells_changes:
            self._changed.append(change)


def _final_tokens(request: Request) -> int:
    """Leading tokens whose KV has been computed, and with the tokens that they are."""
    return min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)


BlocksOfGroups = Sequence[Sequence[int]]
BlockIdsOf = Callable[[str], BlocksOfGroups | None]
