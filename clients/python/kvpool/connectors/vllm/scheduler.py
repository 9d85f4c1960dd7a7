"""The connector's scheduler side: decides what to load and store for each request.

Runs on the engine's thread and may block it for a moment.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from kvpool.client.engine_items import EngineSource
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.connectors.vllm.announcements import Announcements, ChainAndBlocks
from kvpool.connectors.vllm.connector_counters import ConnectorCounters
from kvpool.connectors.vllm.engine_introspection import WeightsEpoch
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.kv_groups import NULL_BLOCK_ID, KvCache
from kvpool.connectors.vllm.leases import Leases
from kvpool.connectors.vllm.load_plans import LoadPlan, LoadPlans
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.lookups import Lookup, Lookups
from kvpool.connectors.vllm.lora_identities import LoraIdentities
from kvpool.connectors.vllm.request_chain import Request, final_tokens, request_chains, scheduled_among, trace_of
from kvpool.connectors.vllm.request_options import RequestOptions
from kvpool.connectors.vllm.settings import LOAD_NEVER, STORE_NEVER, STORE_PREFILL, VllmSettings
from kvpool.connectors.vllm.step_jobs import (
    LoadJob,
    LoadReport,
    PoolEvent,
    StepJobs,
    StoreJob,
    StoreReport,
    block_id_array,
)
from kvpool.connectors.vllm.step_timer import StepTimer
from kvpool.connectors.vllm.store_plans import StorePlans
from kvpool.connectors.vllm.unconfirmed_loads import UnconfirmedLoads
from kvpool.core.clock import Clock, SystemClock
from kvpool.core.errors import InvalidRequest

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_STORABLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_REPETITION")
_CHANGES_MAX = 4096
_NO_CHECKPOINTS: Mapping[str, Sequence[Checkpoint]] = MappingProxyType({})
_UNREADY_S = 1.0  # what a worker said of its agent holds for so long; it is heard of with steps only


@dataclass(slots=True)
class _State:
    """State of one request."""

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


class ConnectorScheduler:
    """Scheduler side of KvPoolConnector: methods have the names of vLLM's calls where one maps to one.

    update_state_after_alloc calls `allocated` or `allocated_without_load`, build_connector_meta calls `build_jobs`, and
    update_connector_output calls `on_worker_report`, `on_reports` and `finished_recving`.
    """

    def __init__(
        self,
        settings: VllmSettings,
        connection: AgentConnection,
        cache: KvCache,
        *,
        worker_count: int,
        publishes_events: bool = True,
        weights: WeightsEpoch | None = None,
        clock: Clock | None = None,
    ) -> None:
        """worker_count: workers that report each load and store. publishes_events: whether `take_events` is called.
        weights: None while vLLM reports no weight versions."""
        clock = clock or SystemClock()
        groups, now_s = cache.groups, clock.monotonic_s
        self._settings, self._connection, self._cache, self._groups = settings, connection, cache, groups
        self._publishes_events, self._now_s, self._wall_us = publishes_events, now_s, clock.wall_us
        self._states: dict[str, _State] = {}
        self._computing: set[str] = set()  # in the last step
        self._prefilling: set[str] = set()  # some of the prompt's chunks are not ordered to be stored yet
        self._windows = [number for number, group in enumerate(groups) if group.window_tokens]
        self._computed = [number for number, group in enumerate(groups) if not group.recurrent]  # chunk by chunk
        self._watches_blocks = any(group.gives_blocks_back for group in groups)
        self._unconfirmed = UnconfirmedLoads()
        self._generating: set[str] = set()  # chunks of windows are to be stored before vLLM takes their blocks away
        self._new_blocks: list[int] = []  # that requests were given since the last step
        self._knows_new_blocks = True
        self._announcements: Announcements | None = None
        if cache.shared_from_gpu:
            self._announcements = Announcements(
                chunk_tokens=settings.chunk_tokens,
                block_tokens=groups[0].block_tokens,
                volatile_tokens=cache.volatile_tokens,
            )
        full = [number for number, group in enumerate(groups) if not group.gives_blocks_back]
        self._main_group = full[0] if full else 0  # has most chunks: its hashes stand for a prompt's in logs and events
        self._adapters = LoraIdentities(connection.start)
        self._weights = weights or WeightsEpoch(lambda: None)
        self._epoch = self._weights.epoch()
        self._unready_until_s = 0.0
        self.counters = ConnectorCounters()
        self._steps = StepTimer(now_s)
        self._known = KnownChunks()
        self._changed: deque[PoolEvent] = deque(maxlen=_CHANGES_MAX)
        self._lookups = Lookups(settings, connection, groups, self.counters, now_s)
        self._loads = LoadPlans(settings, self.counters, groups, now_s=now_s)
        self.cost = self._loads.cost
        self._leases = Leases(connection, groups, bytes_max=settings.lease_bytes_max, now_s=now_s)
        self._store_plans = StorePlans(
            self._known,
            groups,
            worker_count=worker_count,
            chunk_tokens=settings.chunk_tokens,
            named_group=self._main_group if publishes_events else None,
        )
        self._jobs: list[LoadJob] = []
        self._cancel: list[str] = []
        self._stores: list[StoreJob] = []
        self._release: list[str] = []
        self._log_rate = LogRateLimiter(now_s)

    def on_new_request(self, request: Request) -> None:
        """Start hashing and looking up the prompt of a new request while it waits to be scheduled."""
        # The tokens of a streaming session change after they were hashed.
        shareable = request.prompt_embeds is None and not request.resumable
        options = RequestOptions.of(request.kv_transfer_params, self._wall_us)
        if options.refused and self._log_rate.due("options"):
            more = self._log_rate.suppressed("options")
            _log.warning("kvpool: request %s is only computed: %s%s", request.request_id, options.refused, more)
        state = _State(request, shareable, options, lookup=Lookup(trace_of(request)))
        self._states[request.request_id] = state
        self._prefilling.add(request.request_id)
        if self._announcements is not None:
            self._announcements.add(request)
        self._follow_weights()
        if not self._is_shareable(state) or request.num_tokens < self._settings.chunk_tokens:
            return
        pools = self._pools_for(state, 0)
        asked = pools or (self._connection.pools if self._stores_any(state) else ())
        if asked:
            self._lookups.begin(state.lookup, asked, self._hashing(state, asked), request.num_tokens, match=bool(pools))

    def get_num_new_matched_tokens(self, request: Request, held_tokens: int) -> int | None:
        """Return how many tokens after the first held_tokens (vLLM's num_computed_tokens) will be loaded.

        Returns None if vLLM must ask again in a later step: the lookup is still running, another request is loading the
        same chunk, or too many bytes are in flight.
        """
        state = self._states.get(request.request_id)
        if state is None:
            return 0
        state.held_tokens = held_tokens
        if self._announcements is not None:
            self._announcements.found(request.request_id, held_tokens)
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
        if self._cache.prefix_caching and self._loads.is_loading(chains[0].hashes[held_chunks]):
            return None  # another request loads this very chunk: its blocks will be found then
        if not lookup.counted:
            for group, chain, runs in zip(self._groups, chains, lookup.runs, strict=False):
                if group.gives_blocks_back:  # chunks are evicted one by one: what was not found may be gone
                    self._known.drop(chain.hashes[found.matched_chunks :])
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
        """vLLM has allocated blocks for a planned load.

        block_ids: for each of vLLM's groups, all blocks of the request from token 0 on. The request waits for the load
        from now on, so a load that cannot be started is ordered as one that fails at once.
        """
        state = self._states.get(request.request_id)
        try:
            self._leases.allocated(request.request_id)
            self._unconfirmed.forget(request.request_id)
            self._note_new_blocks(request, state, block_ids)
            if state is None or state.plan is None:
                raise InvalidRequest("a load was begun that was not planned")
            jobs = self._loads.begin(request.request_id, state.plan, block_ids, loaded_tokens)
        except Exception:
            _log.exception("kvpool: request %s computes instead of loading", request.request_id)
            jobs = [self._loads.failed_load_job(request.request_id, block_ids)]
        self._jobs += jobs
        if state is not None:
            state.plan, state.loaded_at_preemption = None, request.num_preemptions
            state.loading = not self._settings.layerwise  # else its step has waited when anything is heard

    def allocated_without_load(self, request: Request, block_ids: BlocksOfGroups = ()) -> None:
        """vLLM has allocated blocks for a request that this connector does not load; another connector may."""
        state = self._states.get(request.request_id)
        self._note_new_blocks(request, state, block_ids)
        self._leases.end(request.request_id)
        if state is not None:
            state.plan = None
            self._unconfirmed.admitted(request, state.held_tokens)

    def _note_new_blocks(self, request: Request, state: _State | None, block_ids: BlocksOfGroups) -> None:
        """Note the blocks of an admitted request that neither vLLM's prefix cache nor a load has filled.

        After an asynchronous load vLLM counts the loaded tokens in num_computed_tokens: their blocks were noted when
        the load started.
        """
        if self.needs_new_blocks:
            first_token = max(state.held_tokens if state is not None else 0, request.num_computed_tokens)
            if self._announcements is not None:
                self._announcements.admitted(request.request_id, first_token)
            for group in self._groups if block_ids else ():
                for blocks in group.blocks_of(block_ids):
                    self._new_blocks += blocks[first_token // group.block_tokens :]

    @property
    def needs_new_blocks(self) -> bool:
        """Whether `build_jobs` must be given the blocks that running requests were allocated."""
        return self._watches_blocks or self._announcements is not None

    def lose_new_blocks(self) -> None:
        """Some newly allocated blocks are not known: any block may be written from the next step on."""
        self._knows_new_blocks = False

    def build_jobs(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        block_ids_of: BlockIdsOf,
        new_blocks: Iterable[int] = (),
        checkpoints: Mapping[str, Sequence[Checkpoint]] = _NO_CHECKPOINTS,
    ) -> StepJobs:
        """Return the workers' jobs for a step.

        scheduled: number of tokens of each request. new_blocks: blocks that running requests were allocated in this
        step, beside those passed to `allocated` and `allocated_without_load`; see `needs_new_blocks`. checkpoints:
        recurrent state of each request, in blocks that hold it at the end of this step.
        """
        self._lookups.new_step()
        self._loads.new_step()
        self._leases.new_step()
        computes = bool(scheduled or self._computing)
        self._computing = set(scheduled)
        self._follow_weights()
        confirmed = self._unconfirmed.step(scheduled)
        waits_for_layers = self._settings.layerwise and bool(self._jobs)
        prefill_tokens = 0 if waits_for_layers else self._prefill_tokens(scheduled)
        written = block_id_array([*self._new_blocks, *new_blocks]) if self._knows_new_blocks else None
        self._knows_new_blocks = True
        jobs = StepJobs(
            step=self._steps.begin(prefill_tokens, sum(scheduled.values())),
            loads=self._jobs,
            cancel=self._cancel,
            stores=self._stores,
            release=self._release,
            preempted=list(preempted),
            overwritten=self._store_plans.overwritten(written),
            computes=computes,
            written=written,
        )
        self._jobs, self._cancel, self._stores, self._release, self._new_blocks = [], [], [], [], []
        if self._announcements is not None:
            jobs.announce = self._announcements.take(confirmed, partial(self._announced_chain, block_ids_of))
        for request_id in jobs.preempted:
            if request_id in self._states:
                self._states[request_id].stored_chunks.clear()
                self._prefilling.add(request_id)
                if self._announcements is not None:
                    self._announcements.preempted(request_id)
        # A window's blocks are gone when the request ends: its chunks are stored as they are computed in any case.
        groups = self._computed if self._settings.store == STORE_PREFILL else self._windows
        if groups and self._settings.store != STORE_NEVER:
            for request_id in scheduled_among(confirmed, self._prefilling):
                state = self._states[request_id]
                request = state.request
                computed = min(request.num_computed_tokens + confirmed[request_id], request.num_prompt_tokens)
                self._store(jobs.stores, state, computed, block_ids_of, groups)
                end_chunk = self._lasting_chunks(request.num_prompt_tokens)
                if all(state.stored_chunks[number] >= end_chunk for number in groups):
                    self._prefilling.discard(request_id)
                    if self._windows and self._settings.store_generated:
                        self._generating.add(request_id)
            for request_id in scheduled_among(confirmed, self._generating):
                state = self._states[request_id]
                self._store(jobs.stores, state, final_tokens(state.request), block_ids_of, self._windows)
        for request_id, kept in checkpoints.items():
            wanted = request_id in self._states and request_id not in self._unconfirmed
            if wanted and self._settings.store != STORE_NEVER:
                self._store_states(jobs.stores, self._states[request_id], kept)
        return jobs

    def request_finished(self, request: Request, block_ids: BlocksOfGroups, status: str) -> bool:
        """Return whether vLLM must keep the request's blocks until the workers report that nothing reads them."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        self._prefilling.discard(request.request_id)
        self._generating.discard(request.request_id)
        state.lookup.cancel()
        self._leases.end(request.request_id)
        unconfirmed = self._unconfirmed.finished(request)
        if state.loading:
            self._cancel.append(request.request_id)
        if state.loading or unconfirmed:
            if self._announcements is not None:
                self._announcements.forget(request.request_id)
            return False  # the engine holds the blocks until the load, of whichever connector, has ended
        if self._announcements is not None:
            self._announcements.finished(
                request.request_id, partial(self._announced_chain, lambda _: block_ids, state=state)
            )
        if status in _STORABLE:
            computed = final_tokens(request)
            if not self._settings.store_generated:
                computed = min(computed, request.num_prompt_tokens)
            self._store(self._stores, state, computed, lambda _: block_ids, self._computed)
        if not self._store_plans.has_pending(request.request_id):
            return False
        self._release.append(request.request_id)
        return True

    def on_worker_report(self, step: int, reports: Sequence[LoadReport | StoreReport], ready: bool = True) -> None:
        """Process what all workers reported after a step. ready: whether all of them are connected to their agents."""
        if not ready:
            self._unready_until_s = self._now_s() + _UNREADY_S
        sample = self._steps.end(step)
        if sample is not None:
            self.cost.note_prefill(*sample)
        self.on_reports(reports)
        if self._settings.layerwise:  # vLLM reports none of the loads that a step has waited for as received
            self.finished_recving({report.request_id for report in reports if isinstance(report, LoadReport)})

    def on_reports(self, reports: Sequence[LoadReport | StoreReport]) -> None:
        """Process ended loads and stores, each of one worker."""
        for report in reports:
            self.counters.count(report)
            if isinstance(report, LoadReport):
                self._load_ended(report)
            else:
                self._store_ended(report)

    def finished_recving(self, request_ids: Iterable[str]) -> None:
        """Process requests whose loads have ended on all workers."""
        for request_id in request_ids:
            if request_id in self._states:
                self._states[request_id].loading = False
            elif request_id in self._cancel:  # too late, and it may be the name of another request soon
                self._cancel.remove(request_id)
            self._loads.finished_recving(request_id)
            self._leases.end(request_id)

    def take_events(self) -> list[PoolEvent]:
        """Return the chunks that were stored in the pool or found missing from it since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def reset_cache(self) -> None:
        """The weights may have changed: stop sharing what the pool has until their version is known."""
        self._weights.reset()
        self._follow_weights()

    def _follow_weights(self) -> None:
        """Switch to the hashes of the current weights. Requests that started with other weights are not shared."""
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
        """Return why a request's parameters could not be read; empty if they could."""
        state = self._states.get(request_id)
        return state.options.refused if state is not None else ""

    def expected_sources(self, request_id: str, token_count: int) -> dict[EngineSource, int]:
        """Return from which sources the first token_count tokens of a request's load are expected."""
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
        token_count, chunk_tokens = request.num_tokens - 1 - held_tokens, self._settings.chunk_tokens
        if token_count < max(1, self._settings.min_load_tokens):
            return ()
        if request.num_tokens // chunk_tokens <= held_tokens // chunk_tokens:
            return ()
        if state.loaded_at_preemption == request.num_preemptions or self._now_s() < self._unready_until_s:
            return ()
        pools = self._lookups.pools
        return pools if pools and self._loads.admit_lookup(state.lookup, token_count) else ()

    def _hashing(self, state: _State, pools: Sequence[AsyncPool]) -> Callable[[], tuple[Prompt, ...]]:
        """Return a function that hashes the request's tokens on any thread, or returns the known chains if they cover
        them."""
        known, request = state.chains, state.request
        if known and known[0].token_count >= request.num_tokens:
            return lambda: known
        chunk_tokens, adapter, epoch = self._settings.chunk_tokens, state.adapter, self._epoch
        keys = [pool.session.hash_key for pool in pools]

        return lambda: request_chains(request, adapter, keys, chunk_tokens, known, epoch)

    def _chains_of(self, state: _State, pools: Sequence[AsyncPool], chunk_count: int) -> tuple[Prompt, ...]:
        """Return chains of at least so many chunks, or of all that the request has."""
        state.chains = state.chains or state.lookup.chains
        if not state.chains or state.chains[0].chunk_count < chunk_count:
            state.chains = self._hashing(state, pools)()
        return state.chains

    def _prefill_tokens(self, scheduled: Mapping[str, int]) -> int:
        """Return how many of the scheduled tokens were known beforehand, so that drafts of speculative decoding do not
        count."""
        known = 0
        for request_id, token_count in scheduled.items():
            state = self._states.get(request_id) if token_count > 1 else None
            if state is not None:
                left = state.request.num_tokens - state.request.num_computed_tokens
                known += min(token_count, left) if left > 1 else 0
        return known

    def _store(
        self,
        jobs: list[StoreJob],
        state: _State,
        computed_tokens: int,
        block_ids_of: BlockIdsOf,
        groups: Sequence[int],
    ) -> None:
        """Order stores of the leading full chunks of these groups that the pool is not known to have."""
        end_chunk = self._lasting_chunks(computed_tokens)
        lacking = [number for number in groups if state.stored_chunks[number] < end_chunk]
        pools = self._connection.pools if lacking and self._stores_any(state) else ()
        if not pools or self._now_s() < self._unready_until_s:
            return
        try:
            block_ids = block_ids_of(state.request.request_id) if self._is_shareable(state) else None
            if block_ids is None:
                return
            begun = state.stored_chunks.copy()
            state.stored_chunks.update({number: end_chunk - begun[number] for number in lacking})
            chains = self._chains_of(state, pools, end_chunk)
            for number in lacking:
                # vLLM may use blocks again that have left the window: a store of its own for what stays.
                split = self._groups[number].first_chunk(computed_tokens, self._settings.chunk_tokens)
                split = min(max(split, begun[number]), end_chunk)
                for chunks in (range(begun[number], split), range(split, end_chunk)):
                    blocks = self._groups[number].blocks_of(block_ids)
                    job = self._store_plans.plan(
                        state.request, number, chains[number], chunks, blocks, state.options.retention
                    )
                    if job is not None:
                        jobs.append(job)
        except Exception:  # of one request: the other jobs of the step have to go out
            if self._log_rate.due("store"):
                _log.exception("kvpool: a store could not be ordered%s", self._log_rate.suppressed("store"))

    def _announced_chain(
        self, block_ids_of: BlockIdsOf, request_id: str, end_chunk: int, state: _State | None = None
    ) -> ChainAndBlocks | None:
        """Return the chain and blocks of a request whose chunks before end_chunk may be announced. state: of one that
        has ended."""
        state = state or self._states[request_id]
        pools = self._connection.pools if state.options.store else ()
        try:
            block_ids = block_ids_of(request_id) if pools and self._is_shareable(state) else None
            return (self._chains_of(state, pools, end_chunk)[0], block_ids[0]) if block_ids is not None else None
        except Exception:  # of one request: the other jobs of the step have to go out
            if self._log_rate.due("announce"):
                _log.exception("kvpool: chunks were not announced%s", self._log_rate.suppressed("announce"))
            return None

    def _store_states(self, jobs: list[StoreJob], state: _State, checkpoints: Sequence[Checkpoint]) -> None:
        """Order stores of the recurrent states that all members of a group have."""
        blocks = {(number, end_tokens): block for number, block, end_tokens in checkpoints if block != NULL_BLOCK_ID}
        for number, group in enumerate(self._groups):
            members = group.members
            for end_tokens in sorted({tokens for one, tokens in blocks if group.recurrent and one == members[0]}):
                of_members = [blocks[one, end_tokens] for one in members if (one, end_tokens) in blocks]
                if len(of_members) == len(members):
                    self._store_state(jobs, state, number, of_members, end_tokens)

    def _store_state(
        self, jobs: list[StoreJob], state: _State, group: int, blocks: Sequence[int], end_tokens: int
    ) -> None:
        """Order a store of the recurrent state after end_tokens tokens, which vLLM keeps in a block of each member."""
        request, chunk_tokens = state.request, self._settings.chunk_tokens
        pools = self._connection.pools if self._stores_any(state) else ()
        generated = end_tokens > request.num_prompt_tokens
        if not pools or end_tokens % chunk_tokens:
            return
        if (generated and not self._settings.store_generated) or self._now_s() < self._unready_until_s:
            return
        try:
            if not self._is_shareable(state):
                return
            chunk = end_tokens // chunk_tokens - 1
            chain = self._chains_of(state, pools, chunk + 1)[group]
            if chunk < chain.chunk_count:
                tables = [[NULL_BLOCK_ID] * chunk + [block] for block in blocks]
                job = self._store_plans.plan(
                    request, group, chain, range(chunk, chunk + 1), tables, state.options.retention
                )
                jobs += [job] if job is not None else []
        except Exception:  # of one request: the other jobs of the step have to go out
            if self._log_rate.due("store"):
                _log.exception("kvpool: a store could not be ordered%s", self._log_rate.suppressed("store"))

    def _lasting_chunks(self, computed_tokens: int) -> int:
        """Return the number of whole chunks that no drafter writes any more."""
        return (computed_tokens - self._cache.volatile_tokens) // self._settings.chunk_tokens

    def _load_ended(self, report: LoadReport) -> None:
        gone = self._loads.on_report(report)
        if report.failed_chunks and not report.cancelled and self._log_rate.due("load"):
            why, more = report.result.error or "damaged or gone", self._log_rate.suppressed("load")
            _log.warning("kvpool: %d chunks were not loaded: %s%s", report.failed_chunks, why, more)
        if gone and report.missing:
            self._known.drop(gone)
            if report.group == self._main_group:
                self._publish(PoolEvent(hashes=gone))

    def _store_ended(self, report: StoreReport) -> None:
        if report.failed_chunks:
            _log.debug("kvpool: %d chunks were not stored: %s", report.failed_chunks, report.failure)
        changed = self._store_plans.on_report(report)
        if changed is not None:
            self._publish(changed)

    def _publish(self, change: PoolEvent) -> None:
        if self._publishes_events:
            self._changed.append(change)


BlocksOfGroups = Sequence[Sequence[int]]
BlockIdsOf = Callable[[str], BlocksOfGroups | None]
Checkpoint = tuple[int, int, int]  # group, block, tokens that the state has seen
