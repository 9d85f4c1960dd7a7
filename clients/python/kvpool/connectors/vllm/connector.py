"""The connector class that vLLM loads: translates its calls and contains cache errors. Imported only inside vLLM."""

from __future__ import annotations

import functools
import logging
import secrets
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvpool.connectors.vllm import compatibility, wiring
from kvpool.connectors.vllm.agent_selector import AgentSelector
from kvpool.connectors.vllm.engine_introspection import (
    WeightVersion,
    loads_wait_for_work,
    outer_config,
    required_kv_cache_layout,
    zeroes_loaded_blocks,
)
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.messages import (
    PoolPromMetrics,
    PoolStats,
    StepMetadata,
    WorkerAgent,
    WorkerReport,
    hit_sources,
    kv_cache_event,
)
from kvpool.connectors.vllm.request_options import KEY
from kvpool.connectors.vllm.step_jobs import StepJobs
from kvpool.core.errors import KvPoolError

if TYPE_CHECKING:
    from kvpool.connectors.vllm.scheduler import ConnectorScheduler
    from kvpool.connectors.vllm.worker import ConnectorWorker

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_log_rate = LogRateLimiter()
# By the engine's id, where its only worker runs in the engine core's process (vLLM's UniProcExecutor). vLLM delivers
# `finished_recving` with the output of a step, up to two steps late with asynchronous scheduling: about 15 ms with
# steps of 7 ms. `update_connector_output` therefore asks the worker itself, by `take_arrived`.
_workers: weakref.WeakValueDictionary[str, ConnectorWorker] = weakref.WeakValueDictionary()
AnyCall = TypeVar("AnyCall", bound=Callable[..., Any])


def _guarded(fallback: Any = None) -> Callable[[AnyCall], AnyCall]:
    """Log exceptions and return `fallback` instead: an exception that reaches vLLM ends the engine."""

    def guard(method: AnyCall) -> AnyCall:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except KvPoolError as error:  # its text says what to do: a traceback adds nothing
                if _log_rate.due(method.__name__):
                    more = _log_rate.suppressed(method.__name__)
                    _log.error("kvpool: the engine runs without it: %s%s (%s)", error, more, method.__name__.strip("_"))
                return fallback() if callable(fallback) else fallback
            except Exception:
                if _log_rate.due(method.__name__):
                    more = _log_rate.suppressed(method.__name__)
                    _log.exception("kvpool: %s failed; the engine runs without it%s", method.__name__.strip("_"), more)
                return fallback() if callable(fallback) else fallback

        return call  # type: ignore[return-value]

    return guard


class KvPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """KV connector that shares prefixes through a kvpool agent. One instance in the scheduler, one in each worker.

    SupportsHMA: without it vLLM would disable its hybrid KV cache manager, which models with several KV cache groups
    need, also where their KV is not shared.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """raises: InvalidRequest for an invalid extra config; no other problem stops the engine."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = wiring.settings_from_config(vllm_config, kv_cache_config)
        self._off = compatibility.disabled_reason(vllm_config)  # why; then both sides stay None
        self._agents = AgentSelector(self._settings.agent)
        self._outer_config = outer_config(vllm_config)
        # With several workers, or under MultiConnector, vLLM itself combines what all of them have received.
        one_worker = not self._off and vllm_config.parallel_config.world_size == 1
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id) if one_worker else ""
        self._polls_worker = one_worker and self._outer_config is vllm_config
        self._scheduler_name = secrets.token_hex(16)  # engine ids are equal in children of one MultiConnector
        self._weight_version = WeightVersion()
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._close: list[Callable[[], object]] = []
        self._layer_numbers: dict[str, int] = {}  # among this rank's layers
        if role is KVConnectorRole.SCHEDULER and self._off:
            _log.error("kvpool: switched off, the engine runs without it: %s", self._off)
        elif role is KVConnectorRole.SCHEDULER:
            # With vLLM's own default a request fails when a load does; vLLM reads it after this, of the outer config.
            for config in (self._vllm_config, self._outer_config):
                config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._start_scheduler()

    @_guarded()
    def _start_scheduler(self) -> None:
        self._scheduler, close = wiring.connector_scheduler(
            self._settings, self._vllm_config, self._kv_cache_config, self._agents, self._weight_version
        )
        self._close.append(close)

    @property
    def requires_kv_delivery(self) -> bool:
        """False, as for every cache: what is not stored is computed again."""
        return False

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See the base class."""
        if self._off:
            return
        self._register(kv_caches)
        if self._worker is None:  # the scheduler may still send jobs: they have to end
            self._worker = wiring.failing_worker(self._settings, self._vllm_config, self._kv_cache_config)

    @_guarded()
    def _register(self, kv_caches: dict[str, Any]) -> None:
        self._layer_numbers = wiring.layer_numbers(self._vllm_config, self._kv_cache_config, kv_caches)
        self._worker, close = wiring.connector_worker(
            self._settings,
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self._agents,
            loads_wait_for_gpu=self._settings.layerwise
            or loads_wait_for_work(
                self._vllm_config, self._outer_config, is_fenced=compatibility.defers_freeing_blocks()
            )
            or zeroes_loaded_blocks(self._kv_cache_config, type(self)),
            wait_when_idle=self._polls_worker and self._vllm_config.parallel_config.data_parallel_size == 1,
        )
        self._close.append(close)
        if self._polls_worker:
            _workers[self._engine_id] = self._worker

    def get_handshake_metadata(self) -> WorkerAgent | None:
        """See the base class. Returns None under MultiConnector, which passes its first child's metadata to all
        children: NIXL's connector stops the engine if it gets metadata of another kind."""
        if self._off or self._outer_config is not self._vllm_config:
            return None
        return WorkerAgent(self._agents.endpoint, self._agents.gpu, self._agents.keyspaces)

    @_guarded()
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """See the base class."""
        if self._worker is not None:
            self._worker.handle_preemptions(kv_connector_metadata.jobs)

    @_guarded()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        jobs = self._jobs()
        if self._worker is not None and jobs is not None:
            self._worker.start_loads(jobs)

    @_guarded()
    def wait_for_layer_load(self, layer_name: str) -> None:
        """See the base class. Unless they are layerwise, requests wait for their loads before they are scheduled."""
        if self._worker is not None and self._settings.layerwise:
            self._worker.wait_layers(self._layer_numbers[layer_name] + 1)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See the base class. Chunks are stored when all their layers have been computed."""

    @_guarded()
    def wait_for_save(self) -> None:
        """See the base class. Does not wait: blocks stay allocated until their stores have read them."""
        jobs = self._jobs()
        if self._worker is not None and jobs is not None:
            self._worker.start_stores(jobs)

    @_guarded(fallback=(None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        if self._worker is None:
            return None, None
        return self._worker.take_finished_sending() or None, self._worker.take_finished_recving() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See the base class."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    @_guarded(fallback=set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @_guarded()
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """See the base class."""
        jobs = self._jobs()
        if jobs is None or self._worker is None:
            return None
        return WorkerReport(jobs.step, self._worker.take_reports(), self._worker.ready)

    def _jobs(self) -> StepJobs | None:
        metadata = self._connector_metadata
        return metadata.jobs if isinstance(metadata, StepMetadata) else None

    # Scheduler.

    @_guarded()
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """See the base class, which refuses pipelines. Logs which agent serves each worker, and which stores where the
        scheduler does not look: vLLM changes its config while it builds the model, which only workers do."""
        for (pp_rank, tp_rank), agent in sorted(metadata.items()):
            if not isinstance(agent, WorkerAgent):  # another child's of a MultiConnector
                continue
            endpoint, gpu = agent.endpoint or "no agent yet", agent.gpu or "a CPU"
            _log.info("kvpool: worker pp %d tp %d on %s is served by %s", pp_rank, tp_rank, gpu, endpoint)
            own, its = self._agents.keyspaces, agent.keyspaces
            if own and its and own != its:
                _log.error(
                    "kvpool: nothing will be loaded: worker pp %d tp %d stores in keyspaces %s, the scheduler looks in "
                    "%s. Please report this with the model's config.json",
                    *(pp_rank, tp_rank, ", ".join(its), ", ".join(own)),
                )

    @_guarded()
    def on_new_request(self, request: Any) -> None:
        """See the base class."""
        if self._scheduler is not None:
            self._weight_version.find_engine_core()
            self._scheduler.on_new_request(request)

    @_guarded(fallback=(0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._settings.layerwise

    @_guarded()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        if self._scheduler is None:
            return
        try:
            if num_external_tokens:
                self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
            elif self._scheduler.needs_new_blocks:
                self._scheduler.allocated_without_load(request, blocks.get_block_ids())
            else:
                self._scheduler.allocated_without_load(request)
        except Exception:
            self._scheduler.lose_new_blocks()
            raise

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """See the base class. Another host's pagestore counts as P2P."""
        return self._hit_sources(request, num_external_tokens) or super().get_external_cache_hit_sources(
            request, num_external_tokens
        )

    @_guarded()
    def _hit_sources(self, request: Any, token_count: int) -> dict[Any, int] | None:
        if self._scheduler is None:
            return None
        return hit_sources(self._scheduler.expected_sources(request.request_id, token_count))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See the base class."""
        jobs = self._build(scheduler_output) or StepJobs(step=0)
        jobs.scheduler = self._scheduler_name
        return StepMetadata(jobs)

    @_guarded()
    def _build(self, output: Any) -> StepJobs | None:
        if self._scheduler is None:
            return None

        try:
            preempted, blocks = output.preempted_req_ids or (), output.kv_connector_block_state
            new_blocks = _written_blocks(output) if self._scheduler.needs_new_blocks else ()
            checkpoints = getattr(blocks, "boundary_state_offloads", {})  # of recurrent state, which is refused without
            return self._scheduler.build_jobs(
                output.num_scheduled_tokens, preempted, blocks.get_block_ids, new_blocks, checkpoints
            )
        except Exception:  # what is to be announced may lie in blocks that this step gave away
            self._scheduler.lose_new_blocks()
            raise

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class: called for engines with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(fallback=(False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        if self._scheduler is None:
            return False, None
        refusal = self._scheduler.refusal(request.request_id)
        held = self._scheduler.request_finished(request, block_ids, request.status.name)
        # MultiConnector stops the engine where two children give the same key.
        named = bool(refusal) and self._outer_config is self._vllm_config
        return held, {KEY: {"refused": refusal}} if named else None

    @_guarded()
    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        if self._scheduler is None:
            return
        worker_report = connector_output.kv_connector_worker_meta
        if isinstance(worker_report, WorkerReport):
            self._scheduler.on_worker_report(worker_report.step, worker_report.reports, worker_report.ready)
        worker = _workers.get(self._engine_id) if self._polls_worker else None
        arrived = worker.take_arrived() if worker is not None else ()
        if arrived:  # vLLM goes on with these requests in its next step
            reported = connector_output.finished_recving or ()
            connector_output.finished_recving = {*reported, *(report.request_id for report in arrived)}
            self._scheduler.on_reports(arrived)
        self._scheduler.finished_recving(connector_output.finished_recving or ())

    @_guarded(fallback=())
    def take_events(self) -> Iterable[Any]:
        """See the base class."""
        if self._scheduler is None:
            return ()
        return [kv_cache_event(change, self._settings.chunk_tokens) for change in self._scheduler.take_events()]

    @_guarded(fallback=False)
    def reset_cache(self) -> bool:
        """See the base class. The pool keeps what it has: other engines use it."""
        if self._scheduler is not None:
            self._scheduler.reset_cache()
        return True

    @_guarded()
    def get_kv_connector_stats(self) -> PoolStats | None:
        """See the base class."""
        data = self._scheduler.counters.take() if self._scheduler is not None else {}
        return PoolStats(data=data) if data else None

    @classmethod
    @_guarded()
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """See the base class."""
        if compatibility.disabled_reason(vllm_config):
            return None
        return required_kv_cache_layout(
            wiring.settings_from_config(vllm_config), vllm_config, outer_config(vllm_config)
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See the base class: a full CUDA graph would not wait for layers."""
        return bool(extra_config.get("layerwise", False))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        """See the base class."""
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolPromMetrics:
        """See the base class."""
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_guarded()
    def shutdown(self) -> None:
        """See the base class."""
        if self._polls_worker:
            _workers.pop(self._engine_id, None)
        while self._close:
            self._close.pop()()


def _written_blocks(output: Any) -> list[int]:
    """Return the blocks of all groups that a step allocated to running requests, and those that it zeroes.

    Blocks of other requests are passed to `update_state_after_alloc`. vLLM zeroes also blocks of a request that was
    preempted in the step that allocated them, and is in no list.
    """
    running = output.scheduled_cached_reqs
    allocated = [
        block
        for request_id, groups in zip(running.req_ids, running.new_block_ids, strict=True)
        if groups is not None and request_id not in running.resumed_req_ids
        for blocks in groups
        for block in blocks
    ]
    return [*allocated, *(getattr(output, "new_block_ids_to_zero", None) or ())]
