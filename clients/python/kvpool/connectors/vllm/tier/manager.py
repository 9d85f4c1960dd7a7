"""The class that vLLM's TieringOffloadingManager asks for: it translates, `jobs` and `lookups` do the work."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import fields
from typing import Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpool.client.store_sync import StorePages
from kvpool.client.store_values import KeyspaceShards, StoreCounts
from kvpool.client.streaming_copy import compile_streaming_copy
from kvpool.connectors.vllm.engine_introspection import configs_of_caller
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.model_parts import kv_kinds, model_parts
from kvpool.connectors.vllm.releases import cache_hit_sources, job_result, steps_may_wait, tier_arguments
from kvpool.connectors.vllm.request_options import RequestOptions
from kvpool.connectors.vllm.tier.jobs import ClusterChunks, TierJobs
from kvpool.connectors.vllm.tier.lookups import TierLookups
from kvpool.connectors.vllm.tier.settings import TierSettings
from kvpool.connectors.vllm.tier.step_yield import StepYield
from kvpool.core.clock import SystemClock
from kvpool.core.retention import NO_RETENTION

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_HIT_SOURCES = cache_hit_sources()
_METRIC_PREFIX = "vllm:kvpool_tier_"
_STORE_COUNTERS = {
    "looked_up_chunks": "Chunks looked up in the cluster.",
    "found_chunks": "Chunks that a look-up found in the cluster.",
    "loaded_chunks": "Chunks read from the cluster into vLLM's CPU region, verified.",
    "missed_chunks": "Chunks that were to be read and did not come.",
    "stored_chunks": "Offers of chunks to the cluster after which it had them.",
    "loaded_bytes": "Bytes read from the cluster.",
    "stored_bytes": "Bytes written to the cluster.",
    "corrupt_pages": "Pages that failed their checks and were not used.",
    "failed_calls": "Calls for which the index or the pagestore could not be asked.",
}
_OWN_COUNTERS = {
    "known_store_chunks": "Offers of chunks that the cluster was known to have or to be getting.",
    "refused_store_chunks": "Offers of chunks that were refused because too many bytes were being stored.",
    "late_lookups": "Look-ups that were misses because no answer came in time.",
    "resets": "Resets by vLLM, after which nothing from before is served.",
}

_DROP_TIMEOUT_S = 2.0  # twice, at the end: the engine's operator waits for it


class KvPoolTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where this is checked
    """A secondary tier in the cluster. What fails is a miss, or a chunk that is not stored."""

    medium: ClassVar[Medium | None] = Medium.STORAGE
    # A chunk may come from a pagestore's memory, its disk or another host: vLLM has no name for that.
    cache_hit_source: ClassVar[Any] = getattr(_HIT_SOURCES, "EXTERNAL_UNSPECIFIED", None)

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """settings: see TierSettings. raises: InvalidRequest for one that must be changed."""
        more = tier_arguments(SecondaryTierManager, backpressure_detector)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *more)
        self._settings = TierSettings.of(settings)
        self.locality = Locality(self._settings.locality) if self._settings.locality else None
        assert primary_kv_view.strides is not None
        self._chunk_bytes: int = primary_kv_view.strides[0]
        self._epoch, self._resets = "", 0
        self._facts = _facts(offloading_spec)
        self._space()  # a name that is refused is refused now, not in a step
        region = primary_kv_view.cast("B")
        store = self._settings.store
        store_bytes_max = self._settings.store_bytes_in_flight_max or region.nbytes // 4
        known = KnownChunks(known_s=self._settings.known_s, limit=store.remembered_chunks)
        self._jobs = TierJobs(region, self._chunk_bytes, known, max(store_bytes_max, self._chunk_bytes))
        self._pages = StorePages(store, "vllm tier")
        compile_streaming_copy()  # not in a thread: others may go through the loaded modules meanwhile
        self._lookups = TierLookups(known, self._settings.lookup_timeout_s)
        # Whether chunks were to be stored since a reset: no other process can find them, so they are dropped with the
        # next one and at the end. Those of a killed engine are evicted.
        self._offered = False
        self._chunks: ClusterChunks | None = None
        self._finished: list[JobResult] = []  # of jobs that ended in a drain
        self._may_wait = steps_may_wait(offloading_spec, ScheduleEndContext)
        self._yield = StepYield(self._may_wait)
        self._log_limiter = LogRateLimiter()
        self._shown: dict[str, int] = {}
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events and self._settings.enable_kv_events
        self._events: list[OffloadingEvent] | None = [] if publishes else None

    @property
    def _store(self) -> ClusterChunks:
        """The chunks of this epoch. vLLM decides the seed of its hashes only after it has made the tiers."""
        if self._chunks is None:
            none_hash = getattr(kv_cache_utils, "NONE_HASH", None)
            if none_hash is None:
                _log.error("kvpool: vLLM has not said how it hashes; the tier shares with no other process")
            space = self._space(none_hash.hex() if none_hash is not None else secrets.token_hex(16))
            self._chunks = ClusterChunks(self._pages, space, self._chunk_bytes)
            _log.info("kvpool: the tier %s shares keyspace %s", self.tier_type, space.name)
        return self._chunks

    def _space(self, root_hash: str = "") -> KeyspaceShards:
        """The keyspace of this epoch. root_hash: of vLLM's hash algorithm and its seed, so that it is equal only where
        equal tokens have equal keys."""
        return self._settings.space({**self._facts, "root_hash": root_hash}, self._chunk_bytes, self._epoch)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        options = RequestOptions.of(req_context.kv_transfer_params, SystemClock().wall_us)
        req_context.set_state(options)
        if options.refused and self._log_limiter.due("options"):
            more = self._log_limiter.suppressed("options")
            _log.warning("kvpool: the tier leaves request %s alone: %s%s", req_context.req_id, options.refused, more)
        # vLLM offers what its region has since earlier requests only if it is asked to.
        if options.store and (options.retention is not None or self._jobs.wants_again()):
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not _options(req_context).load:
            return LookupResult.MISS
        verdict = self._lookups.verdict(key, req_context.req_id)
        if verdict is None:
            return LookupResult.RETRY
        return LookupResult.HIT if verdict else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        options, job_id = _options(job_metadata.req_context), job_metadata.job_id
        keys, chunk_ids = list(job_metadata.keys), job_metadata.chunk_ids
        if not options.store:
            self._jobs.lack(keys)
            keys, chunk_ids = [], ()
        self._offered |= bool(self._epoch and keys)
        self._jobs.store(self._store, job_id, keys, chunk_ids, options.retention or NO_RETENTION)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.load(self._store, job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """vLLM asks once a step, before it looks anything up."""
        self._yield.begin_step(self._running())
        finished, self._finished = self._finished, []
        return finished + self._ended_jobs()

    def _ended_jobs(self) -> list[JobResult]:
        results = []
        for job in self._jobs.ended():
            self._lookups.mark_missing(job.lost)
            if job.stored and self._events is not None:
                keys = [OffloadKey(key) for key in job.stored]
                self._events.append(
                    OffloadingEvent(keys=keys, medium=Medium.STORAGE, removed=False, locality=self.locality)
                )
            results.append(
                job_result(
                    JobResult,
                    job_id=job.job_id,
                    success=job.success,
                    successful_keys=[OffloadKey(key) for key in job.loaded] if job.is_load else None,
                    transfer_time=job.seconds,
                    transfer_bytes=job.moved_bytes,
                )
            )
        return results

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._yield.finish(req_context.req_id)
        self._lookups.finish(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush(self._store)
        new_request_ids = context.new_req_ids if self._may_wait else ()
        self._yield.end_step(new_request_ids, self._running())

    def _running(self) -> list[Future[list[bool]]]:
        return [*self._jobs.loads(), *self._lookups.answers()]

    def drain_jobs(self) -> None:
        """Wait for all copies, then forget what is stored: vLLM resets its caches, and its weights may change.

        With a `weight_version` the weights stay, and so does what is stored.
        """
        self._jobs.drain()
        self._finished += self._ended_jobs()
        self._lookups.clear()
        self._resets += 1
        if not self._settings.weight_version:
            if self._events is not None:
                self._events.clear()
            if self._offered:
                self._store.clear()
            self._epoch, self._chunks, self._offered = secrets.token_hex(16), None, False
            self._jobs.forget()
            _log.info("kvpool: after a reset the tier shares nothing from before; weight_version is not set")

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            events, self._events = self._events, []
            yield from events

    def shutdown(self) -> None:
        """Nothing touches vLLM's region any more when this returns."""
        if self._offered:
            self._jobs.drain(_DROP_TIMEOUT_S)
            wait([self._store.clear()], _DROP_TIMEOUT_S)
        self._pages.close()
        self._jobs.close()
        self._yield.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            _METRIC_PREFIX + name: OffloadingCounterMetadata(documentation=text)
            for name, text in {**_STORE_COUNTERS, **_OWN_COUNTERS}.items()
        }

    def get_stats(self) -> OffloadingConnectorStats:
        counts = self._pages.counts
        now = {one.name: getattr(counts, one.name) for one in fields(StoreCounts) if one.name in _STORE_COUNTERS}
        now |= {
            "known_store_chunks": self._jobs.known_chunks,
            "refused_store_chunks": self._jobs.refused_chunks,
            "late_lookups": self._lookups.late_count,
            "resets": self._resets,
        }
        stats = OffloadingConnectorStats()
        for name, value in now.items():
            if value > self._shown.get(name, 0):
                stats.increase_counter(_METRIC_PREFIX + name, value - self._shown.get(name, 0))
        self._shown = now
        return stats


def _options(req_context: ReqContext) -> RequestOptions:
    """As `on_new_request` has read them; a request that did not come by it has none."""
    return req_context.get_state(RequestOptions) or RequestOptions()


def _facts(spec: OffloadingSpec) -> dict[str, Any]:
    """All that vLLM knows of a chunk's bytes and of its keys, but for how it hashes.

    The fields are those of vLLM's own file tier. It leaves the sizes of TP, PP, PCP and DCP out where a chunk's bytes
    do not depend on them: in a canonical layout, and where all ranks have the same KV. In any other layout a chunk has
    a part for each worker, and they are kept.
    """
    config = spec.config
    one_form = config.canonical_layout or config.replicated_layout
    files = FileMapper.from_offloading_spec("", spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=one_form)
    configs = configs_of_caller()
    if configs is None:
        _log.error("kvpool: vLLM has not said what KV this is; the tier shares with no other process")
        described: dict[str, Any] = {"kinds": secrets.token_hex(16)}
    else:
        any_degree = config.replicated_layout or (config.canonical_layout and config.parallel.is_parallelism_agnostic)
        described = {"kinds": kv_kinds(configs[1], any_degree=any_degree), "model": model_parts(configs[0])}
    return {
        **files.get_run_config(),
        "group_ids": [group.group_id for group in config.groups],
        "worker_kv_bytes_per_block": None if config.canonical_layout else config.worker_kv_bytes_per_block,
        "kv_cache_layout": config.kv_cache_layout,
        "format": f"vllm {vllm.__version__}",
        **described,
    }
