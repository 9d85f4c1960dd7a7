"""Part of main: the replica of the index's locations, with its metrics."""

from __future__ import annotations

from kvpool.client.index import IndexClient
from kvpool.client.replica import LocationReplica, MatchedBy, ReplicaConfig
from kvpool_gpuagent.metrics import AgentMetrics


def location_replica(client: IndexClient, metrics: AgentMetrics, *, replica_bytes: int) -> LocationReplica | None:
    """A replica that counts itself; None for no bytes."""
    if not replica_bytes:
        return None
    counters = {by: metrics.replica_matches.labels(by.value) for by in MatchedBy}
    counted_resyncs = 0

    def on_event(replica: LocationReplica) -> None:
        nonlocal counted_resyncs
        metrics.replica_bytes.set(replica.used_bytes)
        metrics.replica_groups.set(replica.group_count)
        metrics.replica_resyncs.inc(replica.resync_count - counted_resyncs)
        counted_resyncs = replica.resync_count

    return LocationReplica(
        client,
        ReplicaConfig(capacity_bytes=replica_bytes),
        on_match=lambda matched_by: counters[matched_by].inc(),
        on_event=on_event,
    )
