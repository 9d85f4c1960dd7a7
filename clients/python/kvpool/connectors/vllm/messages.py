"""Messages that vLLM carries between scheduler and workers and to its loggers. Imported only inside vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool.client.engine_items import EngineSource
from kvpool.connectors.vllm.engine_introspection import step_arrives
from kvpool.connectors.vllm.releases import cache_hit_sources
from kvpool.connectors.vllm.step_jobs import LoadReport, PoolEvent, StepJobs, StoreReport


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """From the scheduler to all workers: unpickled in theirs, or the same object in a process that has both."""

    jobs: StepJobs

    def __post_init__(self) -> None:
        step_arrives(self.jobs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        step_arrives(self.jobs)


@dataclass
class WorkerAgent(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, once. endpoint: of its agent; empty until one is found. gpu: UUID of its GPU.
    keyspaces: that it stores in, one for each KV cache group; none until an agent is found."""

    endpoint: str
    gpu: str
    keyspaces: tuple[str, ...] = ()


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, each step; reports of all workers are merged. ready: connected to its agent."""

    step: int
    reports: tuple[LoadReport | StoreReport, ...] = ()
    ready: bool = True

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """See the base class."""
        return WorkerReport(max(self.step, other.step), (*self.reports, *other.reports), self.ready and other.ready)


@dataclass
class PoolStats(KVConnectorStats):  # type: ignore[misc]
    """Counters since the last report, by name; see ConnectorCounters."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """See the base class."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """See the base class."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """See the base class: for vLLM's log line."""
        reduced = {name: round(value, 3) for name, value in self.data.items()}
        if reduced.get("load_seconds"):
            reduced["load_gb_per_s"] = round(self.data.get("loaded_bytes", 0) / self.data["load_seconds"] / 1e9, 2)
        return reduced

    def is_empty(self) -> bool:
        """See the base class."""
        return not self.data


def hit_sources(tokens: Mapping[EngineSource, int]) -> dict[Any, int]:
    """Return token counts by vLLM's cache hit sources."""
    vllms = cache_hit_sources()
    assert vllms is not None  # only a vLLM that has them asks
    named = {
        EngineSource.STAGING: vllms.HOST,
        EngineSource.DISK: vllms.DISK,
        EngineSource.REMOTE: vllms.P2P,
        EngineSource.GPU: vllms.P2P,
    }
    counts: dict[Any, int] = {}
    for source, count in tokens.items():
        counts[named[source]] = counts.get(named[source], 0) + count
    return counts


def kv_cache_event(change: PoolEvent, chunk_tokens: int) -> KVCacheEvent:
    """Return vLLM's KV event for a change: a chunk is a block of chunk_tokens tokens, identified by its chunk hash."""
    hashes = list(change.hashes)
    if not change.token_ids:
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE, ownership="kvpool")
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=change.parent_hash or None,
        token_ids=list(change.token_ids),
        block_size=chunk_tokens,
        lora_id=None,
        lora_name=change.lora_name or None,
        medium=MEDIUM_STORAGE,
        ownership="kvpool",
    )


_COUNTERS = {  # by name in ConnectorCounters; metric names follow vLLM's and ours
    "lookups": "Matches asked of the pool.",
    "failed_lookups": "Matches that failed or took too long.",
    "offered_chunks": "Chunks that the pool had and the engine did not.",
    "declined_chunks": "Offered chunks that were computed, because that was taken to be quicker.",
    "loads": "Loads that ended, on any worker.",
    "failed_loads": "Loads that did not bring all their chunks.",
    "loaded_chunks": "Chunks loaded.",
    "failed_load_chunks": "Chunks that were to be loaded and had to be computed.",
    "load_seconds": "Wall time of loads, summed.",
    "loaded_bytes": "KV bytes loaded.",
    "staging_tokens": "Tokens loaded from this host's memory.",
    "disk_tokens": "Tokens loaded from this host's disk.",
    "remote_tokens": "Tokens loaded from other hosts.",
    "gpu_tokens": "Tokens copied from GPU caches of other engines of this host.",
    "stores": "Stores that ended, on any worker.",
    "stored_chunks": "Chunks stored.",
    "deduplicated_chunks": "Chunks that the pool had already.",
    "failed_store_chunks": "Chunks that were not stored.",
    "skipped_store_chunks": "Chunks whose store was given up before it began, as the engine needed their blocks.",
    "store_seconds": "Wall time of stores, summed.",
    "stored_bytes": "KV bytes stored.",
}


class PoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters `vllm:kvpool_<name>` with vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """See the base class."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in _COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvpool_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See the base class."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
