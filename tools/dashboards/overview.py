"""The first dashboard: does the pool pay, is it well, is there room."""

from __future__ import annotations

from tools.dashboards.expressions import increase, or_zero, quantile, rate, series, total
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_MATCHED, _UNMATCHED = "kvpool_gpuagent_matched_chunks_total", "kvpool_gpuagent_unmatched_chunks_total"
_ASKED = f"({or_zero(rate(_MATCHED))}) + {rate(_UNMATCHED)}"
_FOUND_5M = rate(_MATCHED, window="5m")
_TOKENS = "kvpool_gpuagent_loaded_tokens_total"
_GOOD_BAD = ((None, "red"), (1.0, "green"))
_BAD_ABOVE_ZERO = ((None, "green"), (1.0, "red"))


def _used_share(tier: str) -> str:
    return f"{series(f'kvpool_pagestore_{tier}_used_bytes')} / {series(f'kvpool_pagestore_{tier}_capacity_bytes')}"


PAYS = Row(
    "Does it pay",
    (
        Panel(
            title="Hit rate",
            kind="stat",
            unit="percentunit",
            width=4,
            description="Of the chunks that engines asked for and did not hold themselves: the share that was found.",
            queries=(Query(f"{_FOUND_5M} / ({_FOUND_5M} + {rate(_UNMATCHED, window='5m')})"),),
        ),
        Panel(
            title="Prompt tokens not recomputed",
            kind="stat",
            width=4,
            description="Loaded for engines within the time shown.",
            queries=(Query(increase(_TOKENS, "$__range")),),
        ),
        Panel(
            title="Engine time saved",
            kind="stat",
            unit="s",
            width=4,
            description="Within the time shown: prefill that loads made unnecessary, as the engines estimate it, less "
            "what the loads took. Engines that give no estimate are not in it.",
            queries=(
                Query(
                    f"{increase('kvpool_gpuagent_saved_seconds_total', '$__range')}"
                    f" - {increase('kvpool_gpuagent_lost_seconds_total', '$__range')}"
                ),
            ),
        ),
        Panel(
            title="Hit rate by tier",
            unit="percentunit",
            width=12,
            stacked=True,
            minimum=0,
            maximum=1,
            description="Of all chunks asked for: where those that were found would come from.",
            queries=(Query(f"{rate(_MATCHED, by='source')} / scalar({_ASKED})", "{{source}}"),),
        ),
        Panel(
            title="Tokens loaded",
            unit="short",
            stacked=True,
            description="Prompt tokens a second that engines did not recompute, by where they came from.",
            queries=(Query(rate(_TOKENS, by="source"), "{{source}}"),),
        ),
        Panel(
            title="First token: time saved and lost",
            unit="s",
            description="Seconds of waiting for a first token, a second: saved is prefill that loads replaced, less "
            "the load's own time; lost are loads that took longer than computing would have.",
            queries=(
                Query(rate("kvpool_gpuagent_saved_seconds_total"), "saved"),
                Query(rate("kvpool_gpuagent_lost_seconds_total"), "lost"),
            ),
        ),
        Panel(
            title="Load latency",
            unit="s",
            description="How long engines' loads take, waits included.",
            queries=(
                Query(quantile(0.5, "kvpool_gpuagent_load_duration_seconds"), "p50"),
                Query(quantile(0.99, "kvpool_gpuagent_load_duration_seconds"), "p99"),
            ),
        ),
    ),
)

WELL = Row(
    "Is it well",
    (
        Panel(
            title="Processes up",
            kind="stat",
            width=4,
            height=5,
            description="That Prometheus can scrape, by job.",
            queries=(Query(total("up", by="job", where='job=~"kvpool.*"'), "{{job}}"),),
        ),
        Panel(
            title="Nodes with a lease",
            kind="stat",
            width=4,
            height=5,
            description="That the index considers alive, by kind.",
            queries=(Query(total("kvpool_index_live_nodes", by="kind", aggregate="max"), "{{kind}}"),),
        ),
        Panel(
            title="Redis answers",
            kind="stat",
            width=4,
            height=5,
            limits=_GOOD_BAD,
            names=((0, "no", "red"), (1, "yes", "green")),
            description="Whether every index replica reached its store when it last asked.",
            queries=(Query(total("kvpool_index_store_up", aggregate="min")),),
        ),
        Panel(
            title="Disk tiers that cannot be written",
            kind="stat",
            width=4,
            height=5,
            limits=_BAD_ABOVE_ZERO,
            description="Pagestores whose disk is full, failing or off: they serve what they have.",
            queries=(Query(or_zero(f"count({series('kvpool_pagestore_disk_state')} > 0)")),),
        ),
        Panel(
            title="Damaged pages in the last hour",
            kind="stat",
            width=4,
            height=5,
            limits=_BAD_ABOVE_ZERO,
            description="Pages whose identity or checksum was wrong. None of them reached an engine.",
            queries=(
                Query(
                    f"{increase('kvpool_pagestore_verification_failures_total', '1h')}"
                    f" + {increase('kvpool_gpuagent_verification_failures_total', '1h')}"
                ),
            ),
        ),
        Panel(
            title="Bytes not yet durable",
            kind="stat",
            unit="bytes",
            width=4,
            height=5,
            description="In staging only; a host that loses power loses them (and engines recompute).",
            queries=(Query(total("kvpool_pagestore_arena_dirty_bytes")),),
        ),
    ),
)

ROOM = Row(
    "Is there room",
    (
        Panel(
            title="Staging in use",
            unit="percentunit",
            minimum=0,
            maximum=1,
            description="Share of each pagestore's arena. Full is normal for a cache: what counts is what is evicted.",
            queries=(Query(_used_share("arena"), "{{instance}}"),),
        ),
        Panel(
            title="Disk in use",
            unit="percentunit",
            minimum=0,
            maximum=1,
            description="Share of each pagestore's disk budget, which is never exceeded.",
            queries=(Query(_used_share("disk"), "{{instance}}"),),
        ),
        Panel(
            title="Evictions",
            description="Pages thrown out a second, by tier.",
            queries=(Query(rate("kvpool_pagestore_evicted_pages_total", by="tier"), "{{tier}}"),),
        ),
        Panel(
            title="Pagestores",
            kind="table",
            unit="bytes",
            width=24,
            description="Budgets in bytes, and what is used of them.",
            queries=tuple(
                Query(total(f"kvpool_pagestore_{name}_bytes", by="instance"), name.replace("_", " "))
                for name in ("arena_used", "arena_capacity", "disk_used", "disk_capacity")
            ),
        ),
    ),
)

OVERVIEW = Dashboard(
    uid="kvpool-overview",
    title="kvpool: overview",
    description="Does the pool pay, is it well, is there room. The other dashboards go into each service.",
    instances='up{job=~"kvpool.*"}',
    rows=(PAYS, WELL, ROOM),
)
