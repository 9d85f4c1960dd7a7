"""What loads save is what computing would have taken, less what they took."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvpool.core.errors import Stopped
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent.core.requests import LoadOutcome
from kvpool_gpuagent.core.sources import Bandwidths, LoadSource
from kvpool_gpuagent.engine.session import count_load
from kvpool_gpuagent.messages import compute_speed_from_proto
from kvpool_gpuagent.metrics import AgentMetrics

OUTCOME = LoadOutcome(chunk_count=2, loaded_chunks=2, tokens={LoadSource.DISK: 300, LoadSource.STAGING: 100})


@pytest.mark.parametrize(
    ("duration_s", "compute_s_per_token", "saved_s", "lost_s"),
    [(0.1, 1e-3, 0.3, 0.0), (1.0, 1e-3, 0.0, 0.6), (1.0, 0.0, 0.0, 0.0)],
    ids=["quicker", "slower", "of an engine that says nothing"],
)
def test_saved_and_lost(duration_s: float, compute_s_per_token: float, saved_s: float, lost_s: float) -> None:
    registry = CollectorRegistry()
    count_load(AgentMetrics(registry), Bandwidths(), {}, duration_s, OUTCOME, compute_s_per_token)
    assert registry.get_sample_value("kvpool_gpuagent_saved_seconds_total") == pytest.approx(saved_s)
    assert registry.get_sample_value("kvpool_gpuagent_lost_seconds_total") == pytest.approx(lost_s)


def test_a_load_that_was_stopped_says_nothing_of_the_next() -> None:
    registry, bandwidths = CollectorRegistry(), Bandwidths()
    stopped = LoadOutcome(chunk_count=2, loaded_chunks=1, error=Stopped("nobody needs it"))
    count_load(AgentMetrics(registry), bandwidths, {LoadSource.DISK: 1 << 20}, 9.0, stopped, 1e-3)
    assert bandwidths.bytes_per_s(LoadSource.DISK) == 0
    assert registry.get_sample_value("kvpool_gpuagent_lost_seconds_total") == 0
    assert registry.get_sample_value("kvpool_gpuagent_failed_chunks_total", {"reason": "STOPPED"}) == 1


@pytest.mark.parametrize(
    ("us_per_token", "seconds"), [(250.0, 250e-6), (0.0, 0.0), (-1.0, 0.0), (1e9, 0.0), (float("nan"), 0.0)]
)
def test_a_speed_that_cannot_be_is_unknown(us_per_token: float, seconds: float) -> None:
    message = gpuagent_pb2.EngineLoadRequest(compute_us_per_token=us_per_token)
    assert compute_speed_from_proto(message) == pytest.approx(seconds)
