"""Metrics of the gpuagent; the registry is passed in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool.core.errors import (
    ArenaFull,
    DeadlineExceeded,
    LeaseLost,
    PageCorrupt,
    PageMissing,
    ServiceUnavailable,
    StaleIncarnation,
    Stopped,
)
from kvpool_gpuagent.core.sources import LoadSource

_PREFIX = "kvpool_gpuagent_"
_LOADS_END_WITH = (
    *(ArenaFull, DeadlineExceeded, LeaseLost, PageCorrupt, PageMissing),
    *(ServiceUnavailable, StaleIncarnation, Stopped),
)
_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class AgentMetrics:
    """One attribute a metric; help says what one sample is. Labels are closed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._sessions()
        self._matches()
        self._replica()
        self._loads()
        self._leases()
        self._stores()
        self._peer_pulls()

    def _sessions(self) -> None:
        self.sessions = self._gauge("sessions", "Engine sessions now open.")
        self.active_requests = self._gauge("active_requests", "Loads and stores now running.", "operation")
        self.abnormal_session_ends = self._counter(
            "abnormal_session_ends_total", "Engine sessions that ended without a close."
        )

    def _matches(self) -> None:
        self.match_duration = self._seconds("match_duration_seconds", "Wall time of one engine match.")
        self.matched_chunks = self._counter(
            "matched_chunks_total", "Chunks matched, by where they would come from.", "source"
        )
        self.unmatched_chunks = self._counter(
            "unmatched_chunks_total", "Chunks asked for by engines that no live node holds."
        )
        self.index_failures = self._counter(
            "index_failures_total", "Loads that went on without fresh locations because the index did not answer."
        )

    def _replica(self) -> None:
        self.replica_matches = self._counter(
            "replica_matches_total",
            "Matches, by who answered: index or both, and without a call replica or absent (no more is stored).",
            "answered_by",
        )
        self.replica_resyncs = self._counter(
            "replica_resyncs_total", "Fresh starts of the replica of the index, the first one included."
        )
        self.replica_bytes = self._gauge("replica_bytes", "Memory that the replica of the index takes.")
        self.replica_groups = self._gauge("replica_groups", "Chain groups of 16 chunks in the replica of the index.")

    def _loads(self) -> None:
        self.load_duration = self._seconds("load_duration_seconds", "Wall time of one load.")
        self.loaded_bytes = self._counter(
            "loaded_bytes_total", "Page bytes scattered into engines, by source.", "source"
        )
        self.loaded_tokens = self._counter(
            "loaded_tokens_total", "Prompt tokens loaded for engines, by source.", "source"
        )
        for counter in (
            self.matched_chunks,
            self.loaded_bytes,
            self.loaded_tokens,
        ):  # there from the start, as rates need
            for source in LoadSource:
                counter.labels(source.name.lower())
        self.failed_chunks = self._counter("failed_chunks_total", "Chunks that were not loaded, by reason.", "reason")
        for error in _LOADS_END_WITH:  # there from the start: an alert must see the first ones rise
            self.failed_chunks.labels(error.reason)
        self.verification_failures = self._counter(
            "verification_failures_total", "Pages of loads that failed their check, in the agent or its pagestore."
        )
        self.bandwidth = self._gauge("load_bandwidth_bytes_per_second", "Measured load bandwidth by source.", "source")
        self.link_bandwidth = self._gauge(
            "link_bandwidth_bytes_per_second", "What a plain copy reached at the start, by direction.", "direction"
        )
        self.saved_seconds = self._counter(
            "saved_seconds_total", "What computing the loaded tokens would have taken, as engines say, less the loads."
        )
        self.lost_seconds = self._counter(
            "lost_seconds_total", "By how much loads took longer than computing would have, as engines say."
        )

    def _leases(self) -> None:
        self.leased_pages = self._gauge("leased_pages", "Pages that leases of waiting requests may hold in staging.")
        self.leased_chunks = self._counter(
            "leased_chunks_total", "Chunks of leases: held in staging, staged only, or left where they are.", "outcome"
        )

    def _stores(self) -> None:
        self.store_duration = self._seconds("store_duration_seconds", "Wall time of one store.")
        self.stored_bytes = self._counter("stored_bytes_total", "Page bytes gathered from engines and committed.")
        self.stored_chunks = self._counter("stored_chunks_total", "Chunks of stores by outcome.", "outcome")
        self.deduplicated_pages = self._counter(
            "deduplicated_pages_total", "Pages that needed no write, by why.", "admission"
        )

    def _peer_pulls(self) -> None:
        self.peer_pull_duration = self._seconds(
            "peer_pull_duration_seconds", "Wall time of one pull from other ranks' caches, waits included."
        )
        self.peer_pulled_bytes = self._counter(
            "peer_pulled_bytes_total", "Bytes that pulls copied from other ranks' caches."
        )
        self.failed_peer_pulls = self._counter(
            "failed_peer_pulls_total", "Pulls that did not count, by reason.", "reason"
        )

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, documentation, labels, registry=self._registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, documentation, labels, registry=self._registry)

    def _seconds(self, name: str, documentation: str) -> Histogram:
        return Histogram(_PREFIX + name, documentation, buckets=_SECONDS, registry=self._registry)
