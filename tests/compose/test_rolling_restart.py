"""Every service of the composed cluster is replaced, one at a time, while the demo's engines serve on both nodes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.compose.composed import SERVICES, ComposedCluster
from tests.compose.serving_engine import Request, ServingEngine

pytestmark = pytest.mark.timeout(1800)  # images are built first


def reported(service: str, requests: list[Request]) -> str:
    """One row of what the engines saw meanwhile."""
    known = [request for request in requests if not request.is_new]
    hits = sum(request.loaded_tokens > 0 for request in known)
    slowest_ms = max((request.ttft_ms for request in requests), default=0)
    failures = sorted({request.failure for request in requests if request.failure})
    counted = f"{len(requests):>4} requests, {hits:>3} of {len(known):>3} hit"
    return f"{service:<12} {counted}, TTFT <= {slowest_ms} ms {failures}"


def test_no_request_fails_while_every_service_is_replaced(cluster: ComposedCluster) -> None:
    cluster.up()
    with ExitStack() as stack:
        engines = [stack.enter_context(ServingEngine(cluster, node)) for node in (0, 1)]
        for engine in engines:
            engine.await_serving()
            engine.await_hit(0)
        print(f"\n{reported('before', [request for engine in engines for request in engine.requests])}")
        for service in SERVICES:
            before = [len(engine.requests) for engine in engines]
            cluster.compose("stop", service)
            if service != "prometheus":
                assert cluster.inspect(service)["State"]["ExitCode"] == 0, f"{service} did not end by itself"
            cluster.compose("up", "--detach", "--wait", "--no-deps", "--no-build", "--force-recreate", service)
            healthy = [len(engine.requests) for engine in engines]
            for engine, since in zip(engines, healthy, strict=True):
                engine.await_hit(since)
            meanwhile = [
                request for engine, since in zip(engines, before, strict=True) for request in engine.requests[since:]
            ]
            print(reported(service, meanwhile))
        for engine in engines:
            engine.end()
    requests = [request for engine in engines for request in engine.requests]
    assert not [request for request in requests if request.error]
    assert all(request.equal for request in requests)
