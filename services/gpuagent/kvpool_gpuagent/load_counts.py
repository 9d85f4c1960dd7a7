"""What one load adds to the agent's metrics and to what it knows of its bandwidths."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.core.errors import Stopped
from kvpool_gpuagent.core.bandwidth import Bandwidths, LoadSource
from kvpool_gpuagent.core.requests import LoadOutcome
from kvpool_gpuagent.metrics import AgentMetrics


def count_load(
    metrics: AgentMetrics,
    bandwidths: Bandwidths,
    loaded_bytes: Mapping[LoadSource, int],
    duration_s: float,
    outcome: LoadOutcome,
    compute_s_per_token: float,
) -> None:
    """A load has ended. compute_s_per_token: of the engine, were it to compute them; 0 if unknown.

    One that was stopped, as nobody needed it any more, tells neither what loads bring nor how quick they are: an engine
    whose clients leave early would else take loads for slow.
    """
    stopped = isinstance(outcome.error, Stopped)
    if compute_s_per_token and not stopped:
        saved_s = sum(outcome.tokens.values()) * compute_s_per_token - duration_s
        metrics.saved_seconds.inc(max(0.0, saved_s))
        metrics.lost_seconds.inc(max(0.0, -saved_s))
    used = [source for source, size_bytes in loaded_bytes.items() if size_bytes]
    if len(used) == 1 and not stopped:  # a mixture says nothing about either
        bandwidths.record(used[0], loaded_bytes[used[0]], duration_s)
        metrics.bandwidth.labels(used[0].name.lower()).set(bandwidths.bytes_per_s(used[0]))
    for source, tokens in outcome.tokens.items():
        metrics.loaded_tokens.labels(source.name.lower()).inc(tokens)
    if outcome.error is not None:
        metrics.failed_chunks.labels(outcome.error.reason).inc(len(outcome.failed_chunks))
