"""What vLLM says of its use of the pool, beside its own figures. Other engines: docs/engine-metrics.md."""

from __future__ import annotations

from tools.dashboards.expressions import or_zero, quantile, rate, series, total
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_POOL = "vllm:kvpool_"
_COMPUTED = 'source="local_compute"'


def _pool(name: str, legend: str) -> Query:
    return Query(rate(f"{_POOL}{name}_total"), legend)


USERS = Row(
    "What users see",
    (
        Panel(
            title="Time to first token",
            unit="s",
            description="As vLLM measures it.",
            queries=tuple(
                Query(quantile(share, "vllm:time_to_first_token_seconds"), f"p{share * 100:g}")
                for share in (0.5, 0.9, 0.99)
            ),
        ),
        Panel(
            title="Inter-token latency",
            unit="s",
            description="As vLLM measures it: loads and stores must not be seen here.",
            queries=tuple(
                Query(quantile(share, "vllm:inter_token_latency_seconds"), f"p{share * 100:g}")
                for share in (0.5, 0.9, 0.99)
            ),
        ),
        Panel(
            title="Requests",
            description="Running, and waiting; one whose load is under way waits.",
            queries=(
                Query(total("vllm:num_requests_running"), "running"),
                Query(total("vllm:num_requests_waiting"), "waiting"),
            ),
        ),
    ),
)

TOKENS = Row(
    "Where prompts come from",
    (
        Panel(
            title="Prompt tokens",
            stacked=True,
            description="A second: found in vLLM's own cache, loaded out of the pool by tier, and computed.",
            queries=(
                Query(rate("vllm:prefix_cache_hits_total"), "own cache"),
                _pool("staging_tokens", "staging"),
                _pool("disk_tokens", "disk"),
                _pool("remote_tokens", "remote"),
                _pool("gpu_tokens", "other GPUs"),
                Query(rate("vllm:prompt_tokens_by_source_total", where=_COMPUTED), "computed"),
            ),
        ),
        Panel(
            title="Prompt tokens asked for",
            description="A second.",
            queries=(Query(rate("vllm:prompt_tokens_total"), "prompt tokens"),),
        ),
        Panel(
            title="Offered, declined, loaded",
            description="Chunks a second. Declined: computing was estimated to be quicker than loading.",
            queries=(
                _pool("offered_chunks", "offered"),
                _pool("declined_chunks", "declined"),
                _pool("loaded_chunks", "loaded"),
                _pool("failed_load_chunks", "failed"),
            ),
        ),
        Panel(
            title="Speed of loads",
            unit="Bps",
            description="Bytes over the seconds of each load, as the engine sees them.",
            queries=(
                Query(
                    or_zero(f"{rate(_POOL + 'loaded_bytes_total')} / {rate(_POOL + 'load_seconds_total')}"),
                    "loads",
                ),
            ),
        ),
        Panel(
            title="Stored",
            unit="Bps",
            description="By the engines of this dashboard.",
            queries=(_pool("stored_bytes", "stored"),),
        ),
        Panel(
            title="Look-ups",
            unit="reqps",
            description="And those that got no answer in time: their requests computed.",
            queries=(_pool("lookups", "look-ups"), _pool("failed_lookups", "failed")),
        ),
    ),
)

CACHE = Row(
    "vLLM's own cache",
    (
        Panel(
            title="In use",
            unit="percentunit",
            minimum=0,
            maximum=1,
            description="Of its KV cache.",
            queries=(Query(series("vllm:kv_cache_usage_perc"), "{{instance}}"),),
        ),
        Panel(
            title="Hit rate",
            unit="percentunit",
            minimum=0,
            maximum=1,
            description="Of the tokens that it was asked for.",
            queries=(
                Query(
                    f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
                    "own cache",
                ),
            ),
        ),
        Panel(
            title="Preemptions",
            description="A second: requests that lost their blocks to others.",
            queries=(Query(rate("vllm:num_preemptions_total"), "preemptions"),),
        ),
    ),
)

ENGINES = Dashboard(
    uid="kvpool-engines",
    title="kvpool: engines",
    description="vLLM's users, prompts and own cache, beside what it loads and stores. Of other engines the agents and "
    "pagestores tell.",
    instances="vllm:num_requests_running",
    rows=(USERS, TOKENS, CACHE),
)
