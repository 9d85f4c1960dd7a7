"""What a pagestore does with its memory, its disk and its neighbours."""

from __future__ import annotations

from tools.dashboards.expressions import or_zero, quantile, rate, series, total
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_ARENA = "kvpool_pagestore_arena_{}_bytes"
_REQUEST = "kvpool_pagestore_request_duration_seconds"

ARENA = Row(
    "Arena (staging)",
    (
        Panel(
            title="Arena bytes by use",
            unit="bytes",
            minimum=0,
            description="Dirty: not yet durable. Quarantined: a peer that vanished may still touch them; they count "
            "against the budget until the kernel says that it is gone.",
            queries=tuple(
                Query(total(_ARENA.format(what)), what) for what in ("used", "dirty", "quarantined", "capacity")
            ),
        ),
        Panel(
            title="Pages leased to readers",
            unit="Bps",
            stacked=True,
            description="By where they were when they were asked for.",
            queries=(Query(rate("kvpool_pagestore_acquired_bytes_total", by="source"), "{{source}}"),),
        ),
        Panel(
            title="Pages committed",
            unit="Bps",
            description="Bytes that became visible to everybody.",
            queries=(Query(rate("kvpool_pagestore_committed_bytes_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Answers to writers",
            description="Pages a second. EXISTS and PENDING: somebody else has it or writes it. REJECTED: no room now.",
            queries=(Query(rate("kvpool_pagestore_reserved_pages_total", by="admission"), "{{admission}}"),),
        ),
        Panel(
            title="Pages not served",
            description="By reason; each is recomputed by the engine that wanted it.",
            queries=(Query(or_zero(rate("kvpool_pagestore_missed_pages_total", by="reason")), "{{reason}}"),),
        ),
        Panel(
            title="Sessions and leases",
            description="A quarantined session ended abnormally; its slots wait for the peer's end.",
            queries=(
                Query(total("kvpool_pagestore_sessions"), "sessions"),
                Query(total("kvpool_pagestore_leases"), "leases"),
                Query(total("kvpool_pagestore_quarantined_sessions"), "quarantined"),
            ),
        ),
        Panel(
            title="Requests, p99",
            unit="s",
            description="Of session and bulk streams, waiting for room, disk and peers included.",
            queries=(Query(quantile(0.99, _REQUEST, by="request"), "{{request}}"),),
        ),
        Panel(
            title="Requests, median",
            unit="s",
            description="Of session and bulk streams, waiting for room, disk and peers included.",
            queries=(Query(quantile(0.5, _REQUEST, by="request"), "{{request}}"),),
        ),
        Panel(
            title="Evictions",
            description="Pages thrown out a second, and those whose time to live was over.",
            queries=(
                Query(rate("kvpool_pagestore_evicted_pages_total", by="tier"), "{{tier}}"),
                Query(rate("kvpool_pagestore_expired_pages_total"), "expired"),
            ),
        ),
    ),
)

DISK = Row(
    "Disk",
    (
        Panel(
            title="Disk tier",
            unit="bytes",
            minimum=0,
            description="As its file system counts it, beside the hard budget.",
            queries=(
                Query(series("kvpool_pagestore_disk_used_bytes"), "{{instance}} used"),
                Query(series("kvpool_pagestore_disk_capacity_bytes"), "{{instance}} budget"),
            ),
        ),
        Panel(
            title="State",
            minimum=0,
            maximum=2,
            names=((0, "read and write", "green"), (1, "read only", "orange"), (2, "off", "red")),
            description="A full or failing disk makes the tier read-only or off until a probe finds it well again.",
            queries=(Query(series("kvpool_pagestore_disk_state"), "{{instance}}"),),
        ),
        Panel(
            title="Write-back lag",
            unit="s",
            description="From a page's commit until it was durable, and the age of the oldest page that still waits.",
            queries=(
                Query(quantile(0.5, "kvpool_pagestore_write_back_lag_seconds"), "p50"),
                Query(quantile(0.99, "kvpool_pagestore_write_back_lag_seconds"), "p99"),
                Query(total("kvpool_pagestore_write_back_oldest_seconds", aggregate="max"), "oldest"),
            ),
        ),
        Panel(
            title="Pages written back",
            description="Failed ones stay dirty and are tried again.",
            queries=(Query(rate("kvpool_pagestore_written_pages_total", by="outcome"), "{{outcome}}"),),
        ),
        Panel(
            title="Prefetched pages",
            unit="Bps",
            description="By a Prefetch.",
            queries=(Query(rate("kvpool_pagestore_prefetched_bytes_total"), "prefetched"),),
        ),
        Panel(
            title="Verification failures",
            description="Pages whose identity or checksum was wrong, by where it was noticed. Each was dropped.",
            queries=(Query(rate("kvpool_pagestore_verification_failures_total", by="place"), "{{place}}"),),
        ),
    ),
)

NEIGHBOURS = Row(
    "Other nodes and the index",
    (
        Panel(
            title="Copied to other nodes",
            unit="Bps",
            description="By purpose: replicas, hot chunks, drains, rebalancing.",
            queries=(Query(rate("kvpool_pagestore_moved_bytes_total", by="purpose"), "{{purpose}}"),),
        ),
        Panel(
            title="Not taken by other nodes",
            description="Pages a second, by purpose and reason.",
            queries=(
                Query(
                    or_zero(rate("kvpool_pagestore_move_failures_total", by="purpose, reason")),
                    "{{purpose}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Waiting to be copied",
            description="Chunks in the queue, and pages asked of a second node because the first was slow.",
            queries=(
                Query(total("kvpool_pagestore_replica_queue_chunks"), "queued chunks"),
                Query(rate("kvpool_pagestore_hedged_pages_total"), "hedged pages a second"),
            ),
        ),
        Panel(
            title="Age of the last complete comparison with the index",
            unit="s",
            description="What the index lost longer ago than this has been restored.",
            queries=(Query(series("kvpool_pagestore_reconcile_age_seconds"), "{{instance}}"),),
        ),
        Panel(
            title="Ranges announced again",
            description="Bucket ranges in which the index differed from this node.",
            queries=(Query(rate("kvpool_pagestore_reconcile_ranges_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Memory",
            unit="bytes",
            description="Resident memory of the process by kind; shared memory is the arena.",
            queries=(
                Query(
                    total("kvpool_process_resident_bytes", by="kind", where='job=~".*pagestore.*"'),
                    "{{kind}}",
                ),
            ),
        ),
    ),
)

PAGESTORE = Dashboard(
    uid="kvpool-pagestore",
    title="kvpool: pagestore",
    description="Arena, disk, write-back, eviction, verification, movement.",
    instances="kvpool_pagestore_sessions",
    rows=(ARENA, DISK, NEIGHBOURS),
)
