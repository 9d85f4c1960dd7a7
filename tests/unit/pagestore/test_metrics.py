"""What the pagestore exports of its work."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvpool_pagestore.metrics import PageStoreMetrics
from tests.fixtures.pagestore import new_world, running_engine
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("verification_failures_total", "place", ("commit", "reader", "disk", "peer")),
        ("acquired_pages_total", "source", ("staging", "disk", "remote")),
        ("acquired_bytes_total", "source", ("staging", "disk", "remote")),
        ("evicted_pages_total", "tier", ("staging", "disk")),
        ("request_duration_seconds_count", "request", ("reserve", "commit", "acquire")),
    ],
)
def test_what_has_not_happened_yet_is_zero_and_not_absent(name: str, label: str, values: tuple[str, ...]) -> None:
    registry = CollectorRegistry()
    PageStoreMetrics(registry)
    for value in values:
        assert registry.get_sample_value(f"kvpool_pagestore_{name}", {label: value}) == 0, value


async def test_requests_of_a_session_are_timed_one_by_one() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2])
            await acquire_one(running, peer, wanted(1))
            await acquire_one(running, peer, wanted(9))
            for request, count in (("reserve", 1), ("commit", 1), ("acquire", 2)):
                assert running.metric("request_duration_seconds_count", request=request) == count
                assert running.metric("request_duration_seconds_sum", request=request) > 0
