"""Metrics of the pagestore. Requests are counted by the server's interceptors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_REQUEST_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0)
_LAG_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGauges:
    """What is true of the store at one moment."""

    arena_capacity_bytes: int
    arena_segment_bytes: int
    arena_used_bytes: int
    arena_quarantined_bytes: int
    arena_dirty_bytes: int
    arena_prepared_bytes: int
    arena_prepare_seconds: float
    staging_pages: int
    arriving_pages: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    disk_pages: int
    disk_writing_bytes: int
    disk_faulty: int  # 1: pages are not made durable
    disk_state: int  # 0: it can be written, 1: only read, 2: neither
    sessions: int
    quarantined_sessions: int
    leases: int
    write_back_oldest_seconds: float
    write_back_waiting_bytes: int
    pinned_bytes: int
    replica_queue_chunks: int
    draining: int  # 1: from the first Drain until it is cancelled


_GAUGE_HELP = {
    "arena_capacity_bytes": "Hard budget of the arena.",
    "arena_segment_bytes": "Arena segments that exist, those of an earlier process included.",
    "arena_used_bytes": "Slots that hold a page or a lease.",
    "arena_quarantined_bytes": "Slots and old segments that a vanished peer may still touch.",
    "arena_dirty_bytes": "Slots of pages that are not yet durable.",
    "arena_prepared_bytes": "Arena memory that was put in place before it was needed, since the start.",
    "arena_prepare_seconds": "How long that took, or has taken so far.",
    "staging_pages": "Pages ready in staging.",
    "arriving_pages": "Pages on their way to readers: from disk, from a peer, or to be sealed.",
    "disk_capacity_bytes": "Hard budget of the disk tier.",
    "disk_used_bytes": "The disk tier as its file system counts it.",
    "disk_pages": "Pages on disk.",
    "disk_writing_bytes": "Bytes of batches that are being written to the disk tier.",
    "disk_faulty": "1 while pages are not made durable.",
    "disk_state": "0: the disk tier can be written and read, 1: only read, 2: neither.",
    "sessions": "Open sessions.",
    "quarantined_sessions": "Sessions that ended abnormally and whose peers may still touch slots.",
    "leases": "Leases held by open sessions.",
    "replica_queue_chunks": "Chunks that wait to be copied to other nodes.",
    "draining": "1 from the first Drain on, until it is cancelled.",
    "pinned_bytes": "Page bytes that are pinned and here.",
    "write_back_oldest_seconds": "Age of the page that has waited longest to become durable.",
    "write_back_waiting_bytes": "Bytes of pages that are to become durable, those being written included.",
}


class _GaugeCollector(Collector):
    """Asks for the gauges when they are scraped; nothing is kept up to date in between."""

    def __init__(self, read: Callable[[], StoreGauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges = self._read()
        for name, text in _GAUGE_HELP.items():
            yield GaugeMetricFamily(f"kvpool_pagestore_{name}", text, value=getattr(gauges, name))

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Names only, so that registering does not ask."""
        for name, text in _GAUGE_HELP.items():
            yield GaugeMetricFamily(f"kvpool_pagestore_{name}", text)


class ReconcileFigures(Protocol):
    """How the comparison of this node with the index goes."""

    last_round_s: float
    round_count: int
    replaced_count: int

    @property
    def age_s(self) -> float: ...


class _ReconcileCollector(Collector):
    """Asks when it is scraped; nothing before the node has an index."""

    def __init__(self, read: Callable[[], ReconcileFigures | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        figures = self._read()
        if figures is None:
            return
        prefix = "kvpool_pagestore_reconcile"
        text = "What the index lost of this node longer ago than this has been restored."
        yield GaugeMetricFamily(f"{prefix}_age_seconds", text, value=figures.age_s)
        text = "Duration of the last complete comparison with the index, repairs included."
        yield GaugeMetricFamily(f"{prefix}_round_seconds", text, value=figures.last_round_s)
        text = "Complete comparisons with the index."
        yield CounterMetricFamily(f"{prefix}_rounds", text, value=figures.round_count)
        text = "Bucket ranges that were announced as a whole because they differed."
        yield CounterMetricFamily(f"{prefix}_ranges", text, value=figures.replaced_count)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing, so that registering does not ask."""
        return iter(())


class PageStoreMetrics:
    """Counters of the pagestore, on a registry that is passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        prefix = "kvpool_pagestore"
        # Sessions and bulk streams live long, so that what gRPC measures of them says nothing about a request.
        self.request_duration = Histogram(
            f"{prefix}_request_duration_seconds",
            "Wall time of one request of a session or bulk stream, waiting for room, disk and peers included.",
            ["request"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.acquired_pages = Counter(
            f"{prefix}_acquired_pages", "Pages leased to readers, by where they were.", ["source"], registry=registry
        )
        self.acquired_bytes = Counter(
            f"{prefix}_acquired_bytes", "Bytes leased to readers, by where they were.", ["source"], registry=registry
        )
        self.missed_pages = Counter(
            f"{prefix}_missed_pages", "Pages not served to readers, by reason.", ["reason"], registry=registry
        )
        self.reserved_pages = Counter(
            f"{prefix}_reserved_pages", "Pages asked to be written, by admission.", ["admission"], registry=registry
        )
        self.committed_pages = Counter(
            f"{prefix}_committed_pages", "Pages that became visible by a commit.", registry=registry
        )
        self.committed_bytes = Counter(
            f"{prefix}_committed_bytes", "Bytes that became visible by a commit.", registry=registry
        )
        self.verification_failures = Counter(
            f"{prefix}_verification_failures", "Pages that failed verification, by place.", ["place"], registry=registry
        )
        self.sealed_pages = Counter(
            f"{prefix}_sealed_pages", "Pages of trusting writers that got header and sums here.", registry=registry
        )
        self.sealed_bytes = Counter(f"{prefix}_sealed_bytes", "Bytes of those pages.", registry=registry)
        self.seal_seconds = Counter(f"{prefix}_seal_seconds", "Time of threads that this took.", registry=registry)
        self.evicted_pages = Counter(
            f"{prefix}_evicted_pages", "Pages thrown out to make room, by tier.", ["tier"], registry=registry
        )
        self.written_pages = Counter(
            f"{prefix}_written_pages", "Pages written back to disk, by outcome.", ["outcome"], registry=registry
        )
        self.postponed_pages = Counter(
            f"{prefix}_postponed_pages",
            "Pages that may be evicted before they are written, as they were committed while the disk was behind.",
            registry=registry,
        )
        self.write_back_lag = Histogram(
            f"{prefix}_write_back_lag_seconds",
            "Time from a page's commit until it was durable.",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )
        self._count_ends(prefix)
        self._count_movement(prefix, registry)
        self._show_zeros()

    def _count_ends(self, prefix: str) -> None:
        self.expired_pages = Counter(
            f"{prefix}_expired_pages", "Pages forgotten because their time to live was over.", registry=self._registry
        )
        self.ended_sessions = Counter(
            f"{prefix}_ended_sessions", "Sessions that ended, by manner.", ["manner"], registry=self._registry
        )

    def _count_movement(self, prefix: str, registry: CollectorRegistry) -> None:
        """What goes to other nodes, comes slowly from them, or comes up from disk unasked."""
        self.moved_pages = Counter(
            f"{prefix}_moved_pages", "Pages copied to other nodes, by purpose.", ["purpose"], registry=registry
        )
        self.moved_bytes = Counter(
            f"{prefix}_moved_bytes", "Bytes of pages copied to other nodes, by purpose.", ["purpose"], registry=registry
        )
        self.move_failures = Counter(
            f"{prefix}_move_failures",
            "Pages that another node did not take, tried again or not, by purpose and reason.",
            ["purpose", "reason"],
            registry=registry,
        )
        self.prefetched_pages = Counter(
            f"{prefix}_prefetched_pages", "Pages that a Prefetch brought from disk to staging.", registry=registry
        )
        self.prefetched_bytes = Counter(
            f"{prefix}_prefetched_bytes", "Bytes that a Prefetch brought from disk to staging.", registry=registry
        )
        self.hedged_pages = Counter(
            f"{prefix}_hedged_pages", "Pages asked of a second node because the first was slow.", registry=registry
        )

    def _show_zeros(self) -> None:
        """What has not happened yet is exported as 0: the first failure is a change that an alert can see."""
        for metric, labels in (
            (self.request_duration, ("reserve", "commit", "acquire")),
            (self.acquired_pages, ("staging", "disk", "remote")),
            (self.acquired_bytes, ("staging", "disk", "remote")),
            (self.reserved_pages, ("RESERVED", "EXISTS", "PENDING", "REJECTED")),
            (self.verification_failures, ("commit", "reader", "disk", "peer")),
            (self.evicted_pages, ("staging", "disk")),
            (self.written_pages, ("written", "failed")),
            (self.ended_sessions, ("closed", "abnormal")),
            (self.moved_pages, ("replica", "hot", "drain", "rebalance")),
            (self.moved_bytes, ("replica", "hot", "drain", "rebalance")),
        ):
            for label in labels:
                metric.labels(label)

    def watch(self, read: Callable[[], StoreGauges]) -> None:
        """Have the gauges read at each scrape; `read` is called from the scraping thread."""
        self._registry.register(_GaugeCollector(read))

    def watch_reconciliation(self, read: Callable[[], ReconcileFigures | None]) -> None:
        """Have these read at each scrape, too; None while there is nothing to report."""
        self._registry.register(_ReconcileCollector(read))
