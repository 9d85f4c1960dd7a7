"""A real Prometheus that scrapes a cluster of this test."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpool.testing import eventually_sync
from kvpool_cli.state import ClusterState
from tests.fixtures.redis_server import free_port

_JOBS = {"index": "kvpool-index", "pagestore": "kvpool-pagestore", "agent": "kvpool-gpuagent"}


class PrometheusServer:
    """Scrapes each second; ends with the `with` block."""

    def __init__(self, binary: str, directory: Path, targets: dict[str, list[str]]) -> None:
        """targets: host:port of each job."""
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": addresses}]} for job, addresses in targets.items()
            ],
        }
        path = directory / "prometheus.json"  # JSON is YAML
        path.write_text(json.dumps(config))
        self._address = f"127.0.0.1:{free_port()}"
        with (directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(binary, f"--config.file={path}", f"--storage.tsdb.path={directory / 'tsdb'}"),
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        eventually_sync(self._is_ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises AssertionError with Prometheus's own words for one that it refuses."""
        arguments = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{arguments}", timeout=60) as answer:
                series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return series

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus ended"
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def targets_of(state: ClusterState) -> dict[str, list[str]]:
    """What there is to scrape, by job."""
    targets: dict[str, list[str]] = {job: [] for job in _JOBS.values()}
    for process in state.processes:
        if url := process.endpoints.get("metrics_url"):
            targets[_JOBS[process.role]].append(urllib.parse.urlsplit(url).netloc)
    return targets
