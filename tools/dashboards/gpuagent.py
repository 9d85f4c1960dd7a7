"""What agents move, how near that is to what the link can do, and what fails."""

from __future__ import annotations

from tools.dashboards.expressions import or_zero, quantile, rate, series, total
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_AGENT = "kvpool_gpuagent_"

MOVES = Row(
    "Bandwidth",
    (
        Panel(
            title="Loads beside the link",
            unit="Bps",
            minimum=0,
            description="Measured bandwidth of loads by source, and what a plain copy over the same link reached when "
            "the agent started.",
            queries=(
                Query(total(f"{_AGENT}load_bandwidth_bytes_per_second", by="source", aggregate="max"), "{{source}}"),
                Query(
                    total(f"{_AGENT}link_bandwidth_bytes_per_second", by="direction", aggregate="max"),
                    "link, {{direction}}",
                ),
            ),
        ),
        Panel(
            title="Loaded",
            unit="Bps",
            stacked=True,
            description="Page bytes scattered into engines, by source.",
            queries=(Query(rate(f"{_AGENT}loaded_bytes_total", by="source"), "{{source}}"),),
        ),
        Panel(
            title="Stored",
            unit="Bps",
            description="Page bytes gathered from engines and committed.",
            queries=(Query(rate(f"{_AGENT}stored_bytes_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="From other ranks' caches",
            unit="Bps",
            description="GPU to GPU, without staging.",
            queries=(Query(rate(f"{_AGENT}peer_pulled_bytes_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Tokens loaded",
            description="Prompt tokens a second, by source.",
            stacked=True,
            queries=(Query(rate(f"{_AGENT}loaded_tokens_total", by="source"), "{{source}}"),),
        ),
        Panel(
            title="Chunks stored",
            description="A second, by outcome; deduplicated ones were there already.",
            queries=(Query(rate(f"{_AGENT}stored_chunks_total", by="outcome"), "{{outcome}}"),),
        ),
    ),
)

QUEUE = Row(
    "Queue and latency",
    (
        Panel(
            title="Running now",
            description="Loads, stores and pulls.",
            queries=(
                Query(or_zero(total(f"{_AGENT}active_requests", by="operation")), "{{operation}}"),
                Query(total(f"{_AGENT}sessions"), "engine sessions"),
            ),
        ),
        *(
            Panel(
                title=title,
                unit="s",
                description=description,
                queries=tuple(
                    Query(quantile(share, f"{_AGENT}{name}_duration_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.9, 0.99)
                ),
            )
            for title, name, description in (
                ("Match latency", "match", "From an engine's question to its answer."),
                ("Load latency", "load", "From an engine's order to its end, waits included."),
                ("Store latency", "store", "From an engine's order to the commit of the last page."),
                ("Latency of pulls from other ranks", "peer_pull", "Waits for the source included."),
            )
        ),
        Panel(
            title="Who answers matches",
            description="The agent's replica of the index, the index, or both; absent: no more is stored (replica).",
            queries=(Query(rate(f"{_AGENT}replica_matches_total", by="answered_by"), "{{answered_by}}"),),
        ),
        Panel(
            title="Replica of the index",
            unit="bytes",
            description="Memory that it takes.",
            queries=(Query(series(f"{_AGENT}replica_bytes"), "{{instance}}"),),
        ),
        Panel(
            title="Memory",
            unit="bytes",
            description="Resident memory of the process by kind.",
            queries=(Query(total("kvpool_process_resident_bytes", by="kind", where='job=~".*agent.*"'), "{{kind}}"),),
        ),
    ),
)

FAILURES = Row(
    "Failures",
    (
        Panel(
            title="Chunks not loaded",
            description="A second, by reason; the engine recomputes them.",
            queries=(Query(or_zero(rate(f"{_AGENT}failed_chunks_total", by="reason")), "{{reason}}"),),
        ),
        Panel(
            title="Damaged pages",
            description="That failed their check in the agent. None reached an engine.",
            queries=(Query(rate(f"{_AGENT}verification_failures_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Sessions and index",
            description="A second: engine sessions that ended without a close, loads without fresh locations, pulls "
            "that did not count, fresh starts of the replica.",
            queries=(
                Query(rate(f"{_AGENT}abnormal_session_ends_total"), "abnormal session ends"),
                Query(rate(f"{_AGENT}index_failures_total"), "index did not answer"),
                Query(or_zero(rate(f"{_AGENT}failed_peer_pulls_total")), "failed pulls"),
                Query(rate(f"{_AGENT}replica_resyncs_total"), "replica started over"),
            ),
        ),
    ),
)

GPUAGENT = Dashboard(
    uid="kvpool-gpuagent",
    title="kvpool: gpuagent",
    description="Bandwidth beside the link's, queue, failures.",
    instances="kvpool_gpuagent_sessions",
    rows=(MOVES, QUEUE, FAILURES),
)
