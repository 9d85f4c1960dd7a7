"""Every panel of the dashboards has data when a real Prometheus scrapes a live cluster with some traffic."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import SMALL, TOKENS, Cluster
from tests.e2e.prometheus_server import PrometheusServer, targets_of
from tests.unit.deploy.promql import filled, metrics_of
from tools.dashboards.__main__ import DASHBOARDS
from tools.dashboards.engines import ENGINES

pytestmark = pytest.mark.e2e
PROMETHEUS = shutil.which("prometheus")
_OF_OTHERS = {"redis_memory_used_bytes"}  # redis_exporter's


@pytest.mark.skipif(PROMETHEUS is None, reason="needs a Prometheus on the PATH")
def test_every_panel_has_data(tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    expressions = {
        target["expr"]: f"{dashboard.title}, {panel['title']}"
        for dashboard in DASHBOARDS
        if dashboard is not ENGINES  # what vLLM says is looked at where there is one: tests/vllm
        for panel in dashboard.document()["panels"]
        for target in panel.get("targets", ())
        if not metrics_of(target["expr"]) & _OF_OTHERS
    }
    cluster = Cluster(tmp_path / "cluster")
    cluster.run("cluster", "up", "--detach", *SMALL)
    try:
        with PrometheusServer(PROMETHEUS, tmp_path, targets_of(cluster.state)) as prometheus:
            waiting, rounds = set(expressions), itertools.count(1000, 1000)

            def all_answer() -> bool:
                # A quantile needs two scrapes with events between them, so the load goes on.
                offset = next(rounds)
                tokens = [token + offset for token in TOKENS]
                cluster.store(tokens)
                cluster.match_and_load(tokens)
                waiting.difference_update([one for one in waiting if prometheus.query(filled(one))])
                return not waiting

            try:
                eventually_sync(all_answer)
            except AssertionError as error:
                raise AssertionError(f"no data: {sorted(expressions[one] for one in waiting)}") from error
    finally:
        cluster.run("cluster", "down")
