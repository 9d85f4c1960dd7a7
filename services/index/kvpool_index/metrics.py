"""The index's own metrics; request counts and durations are the server's."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool_index.core.redis_stats import PROBLEMS, RedisStats

_SHORT_BUCKETS_S: Final = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2, 0.1, 0.5)


class IndexMetrics:
    """All metrics of one index process, in the registry that is handed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._add_reads(registry)
        self._add_changes(registry)

    def add_redis(self, stats: RedisStats) -> None:
        """Serve what the connections to Redis go through, too."""
        self._registry.register(_RedisCollector(stats))

    def _add_reads(self, registry: CollectorRegistry) -> None:
        self.match_duration = Histogram(
            "kvpool_index_match_duration_seconds",
            "Time to answer one match in the engine, or all of one message, the store's round trip included.",
            buckets=_SHORT_BUCKETS_S,
            registry=registry,
        )
        self.match_questions = Counter(
            "kvpool_index_match_questions",
            "Chains that matches asked about; a message may ask about many.",
            registry=registry,
        )
        self.chunks_asked = Counter("kvpool_index_chunks_asked", "Chunks that matches asked for.", registry=registry)
        self.chunks_matched = Counter(
            "kvpool_index_chunks_matched",
            "Chunks that matches found, by the best tier of each.",
            ["tier"],
            registry=registry,
        )
        self.store_duration = Histogram(
            "kvpool_index_store_duration_seconds",
            "Time of one call of the location store, by kind.",
            ["call"],
            buckets=_SHORT_BUCKETS_S,
            registry=registry,
        )
        self.store_up = Gauge("kvpool_index_store_up", "1 if the store answered when last asked.", registry=registry)
        # Counting is on the path of every match, so that the children are looked up once.
        self.store_duration_read = self.store_duration.labels("read")
        self.matched_by_tier = {tier: self.chunks_matched.labels(tier) for tier in ("staging", "disk", "gpu")}

    def _add_changes(self, registry: CollectorRegistry) -> None:
        self.announce_batches = Counter(
            "kvpool_index_announce_batches", "Announce batches that the store has.", registry=registry
        )
        self.announce_changes = Counter(
            "kvpool_index_announce_changes", "Location changes in these batches.", registry=registry
        )
        self.live_nodes = Gauge(
            "kvpool_index_live_nodes", "Nodes that hold a lease, by kind.", ["kind"], registry=registry
        )
        self.node_events = Counter(
            "kvpool_index_node_events", "Node events that this replica brought about.", ["event"], registry=registry
        )
        self.watchers = Gauge("kvpool_index_watchers", "Open Watch streams.", registry=registry)
        self.watch_resyncs = Counter(
            "kvpool_index_watch_resyncs", "RESYNC events sent to watchers that fell behind.", registry=registry
        )
        self.stale_reports = Counter(
            "kvpool_index_stale_reports",
            "Locations reported as stale, by whether they were there.",
            ["result"],
            registry=registry,
        )
        self.dead_removed = Counter(
            "kvpool_index_dead_locations_removed", "Chunks cleaned of nodes that are gone for good.", registry=registry
        )
        self.replaced_ranges = Counter(
            "kvpool_index_replaced_ranges", "Bucket ranges that nodes sent as a whole.", registry=registry
        )
        self.replaced_parts = Counter(
            "kvpool_index_replaced_parts", "Parts of split chain groups that nodes sent as a whole.", registry=registry
        )
        self.surplus_removed = Counter(
            "kvpool_index_surplus_locations_removed",
            "Chunks that were removed because their node did not name them with their range.",
            registry=registry,
        )
        self.corrected_digests = Counter(
            "kvpool_index_corrected_digests", "Digests that did not agree with their chunks.", registry=registry
        )
        self.left_out = Counter(
            "kvpool_index_left_out_locations",
            "Announced chunks whose node was not recorded, because as many nodes as a chunk can name have it.",
            registry=registry,
        )
        self.staleness_bound = Gauge(
            "kvpool_index_staleness_bound_seconds",
            "What the store lost of any live node longer ago than this has been restored.",
            registry=registry,
        )
        for event in ("registered", "taken_over", "ended", "died"):
            self.node_events.labels(event)
        for result in ("removed", "absent"):
            self.stale_reports.labels(result)


class _RedisCollector(Collector):
    """Reads the counters at each scrape."""

    def __init__(self, stats: RedisStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats, name = self._stats, "kvpool_index_redis"
        yield CounterMetricFamily(f"{name}_connects", "Connections made to Redis, the first ones too.", stats.connects)
        yield CounterMetricFamily(
            f"{name}_reconnects", "Connections to Redis that were lost and asked for again.", stats.reconnects
        )
        yield CounterMetricFamily(
            f"{name}_failed_connects", "Attempts to connect to Redis that failed.", stats.failed_connects
        )
        yield CounterMetricFamily(
            f"{name}_failovers", "Times that another server was found to be a master.", stats.failovers
        )
        redirections = CounterMetricFamily(
            f"{name}_redirections", "Commands that a Cluster sent elsewhere, by kind.", labels=["kind"]
        )
        for kind, count in stats.redirections.items():
            redirections.add_metric([kind], count)
        yield redirections
        malformed = CounterMetricFamily(
            f"{name}_malformed_records",
            "Reads of a record that no index wrote, by kind; it is skipped, as if it were missing.",
            labels=["kind"],
        )
        for kind, count in stats.malformed.items():
            malformed.add_metric([kind], count)
        yield malformed
        yield GaugeMetricFamily(f"{name}_masters", "Masters that share the keys; 0: not known yet.", stats.masters)
        yield GaugeMetricFamily(f"{name}_masters_up", "Masters that answered when last asked.", stats.masters_up)
        problems = GaugeMetricFamily(
            f"{name}_problem", "1 if a master is not set up as the index needs it; see the log.", labels=["kind"]
        )
        for problem in PROBLEMS:
            problems.add_metric([problem], float(problem in stats.problems))
        yield problems
