"""Metrics of the gpuagent; the registry is passed in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class AgentMetrics:
    """One attribute a metric; help says what one sample is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sessions = Gauge("kvpool_gpuagent_sessions", "Engine sessions now open.", registry=registry)
        self.active_requests = Gauge(
            "kvpool_gpuagent_active_requests", "Loads and stores now running.", ["operation"], registry=registry
        )
        self.match_duration = Histogram(
            "kvpool_gpuagent_match_duration_seconds",
            "Wall time of one engine match.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.matched_chunks = Counter(
            "kvpool_gpuagent_matched_chunks_total",
            "Chunks matched, by where they would come from.",
            ["source"],
            registry=registry,
        )
        self.unmatched_chunks = Counter(
            "kvpool_gpuagent_unmatched_chunks_total",
            "Chunks asked for by engines that no live node holds.",
            registry=registry,
        )
        self.load_duration = Histogram(
            "kvpool_gpuagent_load_duration_seconds", "Wall time of one load.", buckets=_SECONDS, registry=registry
        )
        self.store_duration = Histogram(
            "kvpool_gpuagent_store_duration_seconds", "Wall time of one store.", buckets=_SECONDS, registry=registry
        )
        self.loaded_bytes = Counter(
            "kvpool_gpuagent_loaded_bytes_total",
            "Page bytes scattered into engines, by source.",
            ["source"],
            registry=registry,
        )
        self.loaded_tokens = Counter(
            "kvpool_gpuagent_loaded_tokens_total",
            "Prompt tokens loaded for engines, by source.",
            ["source"],
            registry=registry,
        )
        self.stored_bytes = Counter(
            "kvpool_gpuagent_stored_bytes_total", "Page bytes gathered from engines and committed.", registry=registry
        )
        self.stored_chunks = Counter(
            "kvpool_gpuagent_stored_chunks_total", "Chunks of stores by outcome.", ["outcome"], registry=registry
        )
        self.deduplicated_pages = Counter(
            "kvpool_gpuagent_deduplicated_pages_total",
            "Pages that needed no write, by why.",
            ["admission"],
            registry=registry,
        )
        self.failed_chunks = Counter(
            "kvpool_gpuagent_failed_chunks_total",
            "Chunks that were not loaded, by reason.",
            ["reason"],
            registry=registry,
        )
        self.verification_failures = Counter(
            "kvpool_gpuagent_verification_failures_total",
            "Pages that failed their check in the agent.",
            registry=registry,
        )
        self.index_failures = Counter(
            "kvpool_gpuagent_index_failures_total",
            "Loads that went on without fresh locations because the index did not answer.",
            registry=registry,
        )
        self.broken_releases = Counter(
            "kvpool_gpuagent_broken_releases_total",
            "Read leases whose release could not be told because the pagestore session broke.",
            registry=registry,
        )
        self.abnormal_session_ends = Counter(
            "kvpool_gpuagent_abnormal_session_ends_total",
            "Engine sessions that ended without a close.",
            registry=registry,
        )
        self.bandwidth = Gauge(
            "kvpool_gpuagent_load_bandwidth_bytes_per_second",
            "Measured load bandwidth by source.",
            ["source"],
            registry=registry,
        )
