"""How quickly and how rightly the index answers, and how its Redis is."""

from __future__ import annotations

from tools.dashboards.expressions import exporter_series, or_zero, quantile, rate, total
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_COMMANDS = exporter_series("redis_commands_processed_total")
_MATCH = "kvpool_index_match_duration_seconds"

ANSWERS = Row(
    "Answers",
    (
        Panel(
            title="Match latency",
            unit="s",
            description="Time to answer one match, Redis's round trip included.",
            queries=(
                Query(quantile(0.5, _MATCH), "p50"),
                Query(quantile(0.99, _MATCH), "p99"),
            ),
        ),
        Panel(
            title="Matches a second",
            unit="reqps",
            description="By replica. Agents answer most matches from their own replica of the index.",
            queries=(Query(rate(f"{_MATCH}_count", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Chunks found",
            unit="percentunit",
            minimum=0,
            maximum=1,
            stacked=True,
            description="Of those asked for, by the best tier of each.",
            queries=(
                Query(
                    f"{rate('kvpool_index_chunks_matched_total', by='tier')}"
                    f" / scalar({rate('kvpool_index_chunks_asked_total')})",
                    "{{tier}}",
                ),
            ),
        ),
        Panel(
            title="Calls by outcome",
            unit="reqps",
            description="That ended, by status code; streams count when they end.",
            queries=(Query(rate("kvpool_index_grpc_requests_total", by="grpc_code"), "{{grpc_code}}"),),
        ),
        Panel(
            title="Calls and streams open",
            description="Being handled now, by method.",
            queries=(
                Query(
                    f"{total('kvpool_index_grpc_requests_in_flight', by='method')} > 0 or vector(0)",
                    "{{method}}",
                ),
            ),
        ),
        Panel(
            title="Nodes",
            description="That hold a lease, by kind; every replica sees the same.",
            queries=(Query(total("kvpool_index_live_nodes", by="kind", aggregate="max"), "{{kind}}"),),
        ),
    ),
)

TRUTH = Row(
    "Staleness and repair",
    (
        Panel(
            title="Staleness bound",
            unit="s",
            description="What the store lost of any live node longer ago than this has been restored.",
            queries=(Query(total("kvpool_index_staleness_bound_seconds", aggregate="max"), "bound"),),
        ),
        Panel(
            title="Announced",
            description="Changes of locations that Redis has acknowledged, and the batches they came in.",
            queries=(
                Query(rate("kvpool_index_announce_changes_total"), "changes"),
                Query(rate("kvpool_index_announce_batches_total"), "batches"),
            ),
        ),
        Panel(
            title="Repaired",
            description="Ranges that nodes announced as a whole, and what was wrong in them.",
            queries=(
                Query(rate("kvpool_index_replaced_ranges_total"), "ranges replaced"),
                Query(rate("kvpool_index_surplus_locations_removed_total"), "surplus chunks removed"),
                Query(rate("kvpool_index_corrected_digests_total"), "digests corrected"),
                Query(rate("kvpool_index_left_out_locations_total"), "locations left out: 64 nodes have it"),
                Query(rate("kvpool_index_dead_locations_removed_total"), "chunks of dead nodes removed"),
            ),
        ),
        Panel(
            title="Stale locations reported",
            description="By readers that did not find a page where the index said; removed, or gone already.",
            queries=(Query(rate("kvpool_index_stale_reports_total", by="result"), "{{result}}"),),
        ),
        Panel(
            title="Watchers",
            description="Open Watch streams, and those that fell behind and started over.",
            queries=(
                Query(total("kvpool_index_watchers"), "watchers"),
                Query(rate("kvpool_index_watch_resyncs_total"), "resyncs a second"),
            ),
        ),
        Panel(
            title="Nodes that came and went",
            description="Events a second.",
            queries=(Query(rate("kvpool_index_node_events_total", by="event"), "{{event}}"),),
        ),
    ),
)

REDIS = Row(
    "Redis",
    (
        Panel(
            title="Redis, as the index sees it",
            unit="s",
            description="Time of one call of the location store, p99.",
            queries=(Query(quantile(0.99, "kvpool_index_store_duration_seconds", by="call"), "{{call}}"),),
        ),
        Panel(
            title="Masters that answer",
            minimum=0,
            description="Beside those that share the keys.",
            queries=(
                Query(total("kvpool_index_redis_masters_up", aggregate="min"), "up"),
                Query(total("kvpool_index_redis_masters", aggregate="max"), "all"),
            ),
        ),
        Panel(
            title="Problems of its configuration",
            minimum=0,
            description="1: a master is not set up as the index needs it (docs/runbook.md says what to do).",
            queries=(Query(total("kvpool_index_redis_problem", by="kind", aggregate="max"), "{{kind}}"),),
        ),
        Panel(
            title="Connections",
            description="A second: lost and asked for again, refused, moved to another master.",
            queries=(
                Query(rate("kvpool_index_redis_reconnects_total"), "lost"),
                Query(rate("kvpool_index_redis_failed_connects_total"), "refused"),
                Query(rate("kvpool_index_redis_failovers_total"), "failovers"),
                Query(rate("kvpool_index_redis_redirections_total"), "redirections"),
            ),
        ),
        Panel(
            title="Memory",
            unit="bytes",
            description="Of Redis (redis_exporter), and of the index.",
            queries=(
                Query(exporter_series("redis_memory_used_bytes"), "redis {{instance}}"),
                Query(total("kvpool_process_resident_bytes", where='job=~".*index.*"'), "index"),
            ),
        ),
        Panel(
            title="Commands",
            unit="ops",
            description="That Redis processes a second (redis_exporter).",
            queries=(
                Query(
                    or_zero(f"sum(rate({_COMMANDS}[$__rate_interval]))"),
                    "commands",
                ),
            ),
        ),
    ),
)

INDEX = Dashboard(
    uid="kvpool-index",
    title="kvpool: index",
    description="Latency, staleness and repair, Redis.",
    instances="kvpool_index_store_up",
    rows=(ANSWERS, TRUTH, REDIS),
)
