"""A silent peer is distinguished from one that could not be heard."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvpool.core.liveness import LivenessMonitor
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_pagestore.config import PageStoreConfig


def checks(monitor: LivenessMonitor, *seconds: float) -> list[bool]:
    return [monitor.expired(now_s) for now_s in seconds]


def test_a_peer_that_says_nothing_expires_after_four_heartbeats() -> None:
    monitor = LivenessMonitor(heartbeat_s=1.0)
    assert checks(monitor, 10.0, 11.0, 12.0, 13.0, 13.5, 14.0, 15.0) == [False] * 5 + [True] * 2


def test_a_beat_begins_a_new_count() -> None:
    monitor = LivenessMonitor(heartbeat_s=1.0)
    assert not any(checks(monitor, 10.0, 11.0, 12.0, 13.0))
    monitor.beat()
    assert checks(monitor, 14.0, 15.0, 16.0, 17.0) == [False, False, False, True]


def test_a_pause_of_ones_own_is_no_silence_of_the_peer() -> None:
    monitor = LivenessMonitor(heartbeat_s=1.0)
    assert not any(checks(monitor, 10.0, 3600.0, 3601.0, 3602.0)), "what it said meanwhile has not been read yet"
    assert monitor.expired(3603.0), "it does not last for ever"


@pytest.mark.parametrize("service", [GpuAgentConfig, PageStoreConfig])
def test_a_service_that_stops_is_given_up_within_five_seconds(service: type[GpuAgentConfig | PageStoreConfig]) -> None:
    (heartbeat_ms,) = (one.default for one in fields(service) if one.name == "heartbeat_interval_ms")
    assert isinstance(heartbeat_ms, int)
    monitor = LivenessMonitor(heartbeat_ms / 1e3)
    now_s = 0.0
    while not monitor.expired(now_s):
        now_s += monitor.check_s
    assert now_s + monitor.check_s <= 5.0, "it may stop right after a check"
