"""The connector as vLLM sees it: translates, and lets no trouble of the cache through. Imported only inside vLLM."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvpool.connectors.vllm import compatibility, same_process, wiring
from kvpool.connectors.vllm.agent_choice import AgentChoice
from kvpool.connectors.vllm.engine_facts import WeightVersion, loads_wait_for_work, outer_config, wanted_layout
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.messages import (
    PoolPromMetrics,
    PoolStats,
    StepMetadata,
    WorkerAgent,
    WorkerReport,
    hit_sources,
    pool_event,
)
from kvpool.connectors.vllm.orders import StepOrders
from kvpool.connectors.vllm.request_options import KEY
from kvpool.core.errors import KvPoolError

if TYPE_CHECKING:
    from kvpool.connectors.vllm.scheduler import SchedulerSide
    from kvpool.connectors.vllm.worker import WorkerSide

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_log_rate = LogRateLimiter()
AnyCall = TypeVar("AnyCall", bound=Callable[..., Any])


def _guarded(otherwise: Any = None) -> Callable[[AnyCall], AnyCall]:
    """An exception that reaches vLLM ends the engine: it is logged, and `otherwise` is the answer."""

    def guard(method: AnyCall) -> AnyCall:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except KvPoolError as error:  # its text says what to do: a traceback adds nothing
                if _log_rate.due(method.__name__):
                    more = _log_rate.more(method.__name__)
                    _log.error("kvpool: %s: the engine goes on without it: %s%s", method.__name__, error, more)
                return otherwise() if callable(otherwise) else otherwise
            except Exception:
                if _log_rate.due(method.__name__):
                    more = _log_rate.more(method.__name__)
                    _log.exception("kvpool: %s failed; the engine goes on without it%s", method.__name__, more)
                return otherwise() if callable(otherwise) else otherwise

        return call  # type: ignore[return-value]

    return guard


class KvPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Shared prefixes through a kvpool agent. One instance in the scheduler's process, one in each worker's.

    SupportsHMA: without it vLLM would give up the cache manager that models with several KV cache groups need, also of
    those that are not shared.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """raises: InvalidRequest for an extra config that must be another one; nothing else stops it."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = wiring.settings_of(vllm_config, kv_cache_config)
        self._off = compatibility.switched_off(vllm_config)  # why; then both sides stay None
        self._agents = AgentChoice(self._settings.agent)
        self._outer_config = outer_config(vllm_config)
        # With several workers, or under MultiConnector, vLLM itself combines what all of them have received.
        one_worker = not self._off and vllm_config.parallel_config.world_size == 1
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id) if one_worker else ""
        self._asks_worker = one_worker and self._outer_config is vllm_config
        self._weight_version = WeightVersion()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
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
        self._scheduler, close = wiring.scheduler_side(
            self._settings, self._vllm_config, self._kv_cache_config, self._agents, self._weight_version
        )
        self._close.append(close)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is computed again."""
        return False

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See the base class."""
        if self._off:
            return
        self._register(kv_caches)
        if self._worker is None:  # the scheduler's side may be there all the same: what it orders has to end
            self._worker = wiring.idle_worker(self._settings, self._vllm_config, self._kv_cache_config)

    @_guarded()
    def _register(self, kv_caches: dict[str, Any]) -> None:
        self._layer_numbers = wiring.layer_numbers(self._vllm_config, self._kv_cache_config, kv_caches)
        self._worker, close = wiring.worker_side(
            self._settings,
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self._agents,
            loads_wait=self._settings.layerwise or loads_wait_for_work(self._vllm_config, self._outer_config),
            idle_wait=self._asks_worker and self._vllm_config.parallel_config.data_parallel_size == 1,
        )
        self._close.append(close)
        if self._asks_worker:
            same_process.add_worker(self._engine_id, self._worker)

    def get_handshake_metadata(self) -> WorkerAgent | None:
        """See the base class. MultiConnector hands what its first child says to all of them, and NIXL's connector stops
        the engine for what is not its own: a child says nothing."""
        if self._off or self._outer_config is not self._vllm_config:
            return None
        return WorkerAgent(self._agents.endpoint, self._agents.gpu)

    @_guarded()
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """See the base class."""
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.orders)

    @_guarded()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        orders = self._orders()
        if self._worker is not None and orders is not None:
            self._worker.start_loads(orders)

    @_guarded()
    def wait_for_layer_load(self, layer_name: str) -> None:
        """See the base class. Unless they are layerwise, requests wait for their loads before they are scheduled."""
        if self._worker is not None and self._settings.layerwise:
            self._worker.wait_layers(self._layer_numbers[layer_name] + 1)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See the base class. Chunks are stored when all their layers have been computed."""

    @_guarded()
    def wait_for_save(self) -> None:
        """See the base class. Does not wait: the blocks stay the requests' until their stores have let go of them."""
        orders = self._orders()
        if self._worker is not None and orders is not None:
            self._worker.start_stores(orders)

    @_guarded(otherwise=(None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        if self._worker is None:
            return None, None
        return self._worker.take_released() or None, self._worker.take_received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See the base class."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    @_guarded(otherwise=set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @_guarded()
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """See the base class."""
        orders = self._orders()
        if orders is None or self._worker is None:
            return None
        return WorkerReport(orders.step, self._worker.take_ends(), self._worker.ready)

    def _orders(self) -> StepOrders | None:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, StepMetadata) else None

    # Scheduler.

    @_guarded()
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """See the base class, whose own refuses pipelines. For who looks where a worker's pages go."""
        for (pp_rank, tp_rank), agent in sorted(metadata.items()):
            if not isinstance(agent, WorkerAgent):  # another child's of a MultiConnector
                continue
            endpoint, gpu = agent.endpoint or "no agent yet", agent.gpu or "a CPU"
            _log.info("kvpool: worker pp %d tp %d on %s is served by %s", pp_rank, tp_rank, gpu, endpoint)

    @_guarded()
    def on_new_request(self, request: Any) -> None:
        """See the base class."""
        if self._scheduler is not None:
            self._weight_version.look_for_core()
            self._scheduler.on_new_request(request)

    @_guarded(otherwise=(0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._settings.layerwise

    @_guarded()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        if self._scheduler is None:
            return
        if num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        elif self._scheduler.watches_blocks:
            self._scheduler.not_chosen(request, blocks.get_block_ids())
        else:
            self._scheduler.not_chosen(request)

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
        return self._build(scheduler_output) or StepMetadata(StepOrders(step=0))

    @_guarded()
    def _build(self, output: Any) -> StepMetadata | None:
        if self._scheduler is None:
            return None

        preempted, block_ids_of = output.preempted_req_ids or (), output.kv_connector_block_state.get_block_ids
        new_blocks = _blocks_of_running(output) if self._scheduler.watches_blocks else ()
        return StepMetadata(self._scheduler.build(output.num_scheduled_tokens, preempted, block_ids_of, new_blocks))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class: of an engine with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(otherwise=(False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        if self._scheduler is None:
            return False, None
        refusal = self._scheduler.refusal(request.request_id)
        held = self._scheduler.finished(request, block_ids, request.status.name)
        # MultiConnector stops the engine where two children give the same key.
        named = bool(refusal) and self._outer_config is self._vllm_config
        return held, {KEY: {"refused": refusal}} if named else None

    @_guarded()
    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler.on_worker_report(report.step, report.ends, report.ready)
        worker = same_process.worker_of(self._engine_id) if self._asks_worker else None
        arrived = worker.take_arrived() if worker is not None else ()
        if arrived:  # vLLM goes on with these requests in its next step
            reported = connector_output.finished_recving or ()
            connector_output.finished_recving = {*reported, *(end.request_id for end in arrived)}
            self._scheduler.ended(arrived)
        self._scheduler.received(connector_output.finished_recving or ())

    @_guarded(otherwise=())
    def take_events(self) -> Iterable[Any]:
        """See the base class."""
        if self._scheduler is None:
            return ()
        return [pool_event(change, self._settings.chunk_tokens) for change in self._scheduler.take_changes()]

    @_guarded(otherwise=False)
    def reset_cache(self) -> bool:
        """See the base class. The pool keeps what it has: other engines use it."""
        if self._scheduler is not None:
            self._scheduler.forget()
        return True

    @_guarded()
    def get_kv_connector_stats(self) -> PoolStats | None:
        """See the base class."""
        data = self._scheduler.tally.take() if self._scheduler is not None else {}
        return PoolStats(data=data) if data else None

    @classmethod
    @_guarded()
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """See the base class."""
        return wanted_layout(wiring.settings_of(vllm_config), vllm_config, outer_config(vllm_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See the base class: a captured graph would not wait for layers."""
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
        if self._asks_worker:
            same_process.remove_worker(self._engine_id)
        while self._close:
            self._close.pop()()


def _blocks_of_running(output: Any) -> list[int]:
    """Blocks of all groups that a step gave to running requests. Others are heard of by `update_state_after_alloc`."""
    running = output.scheduled_cached_reqs
    return [
        block
        for request_id, groups in zip(running.req_ids, running.new_block_ids, strict=True)
        if groups is not None and request_id not in running.resumed_req_ids
        for blocks in groups
        for block in blocks
    ]
