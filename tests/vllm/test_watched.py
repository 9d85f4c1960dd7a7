"""vLLM's servers under load as operators watch them: each panel of the engines dashboard, and a request's trace."""

from __future__ import annotations

import itertools
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.e2e.prometheus_server import PrometheusServer
from tests.unit.deploy.promql import filled
from tests.vllm.api_server import completed, servers
from tests.vllm.engine import CHUNK, PATIENT, agent_of, prompt
from tests.vllm.otlp_collector import OtlpCollector, otlp_collector
from tools.dashboards.engines import ENGINES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
PROMETHEUS = shutil.which("prometheus")
# Eight texts that two users ask about: more than an engine's own cache holds, so that the pool is asked again.
LOAD = (
    *("--prefixes", "8", "--prefix-tokens", str(4 * CHUNK), "--suffix-tokens", "16:64", "--output-tokens", "8"),
    *("--token-ids", "1:2048", "--extra-body", '{"ignore_eos": true, "detokenize": false}', "--concurrency", "2"),
)
OWN_BLOCKS, LENGTH_MAX = 64, 1024  # blocks of 32 tokens: three prompts


@dataclass(frozen=True, slots=True)
class Watched:
    """A server and where its spans go."""

    url: str
    collector: OtlpCollector


@pytest.fixture(scope="module")
def watched(model_dir: Path, cluster: Cluster) -> Iterator[Watched]:
    """As a user starts it who looks at metrics and traces. Its own cache is small, so that the pool is asked."""
    extra = PATIENT | {"agent": agent_of(cluster), "model_id": "tiny", "salt": "watched"}
    with otlp_collector() as collector:
        arguments = [
            *("--num-gpu-blocks-override", str(OWN_BLOCKS), "--max-model-len", str(LENGTH_MAX)),
            *("--otlp-traces-endpoint", collector.endpoint),
        ]
        variables = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"}
        with servers(model_dir, [extra], *arguments, variables=variables) as [url]:
            yield Watched(url, collector)


def load(url: str, seed: int) -> None:
    """Some requests; the same ones for the same seed."""
    command = [sys.executable, "-m", "bench", "serve", "--base-url", url, *LOAD]
    done = subprocess.run(
        [*command, "--warmup", "0", "--requests", "12", "--seed", str(seed)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMETHEUS is None, reason="needs a Prometheus on the PATH (Debian: apt install prometheus)")
def test_every_panel_of_the_engines_dashboard_has_data(watched: Watched, tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    expressions = {
        target["expr"]: f"{panel['title']}, {target['legendFormat']}"
        for panel in ENGINES.document()["panels"]
        for target in panel.get("targets", ())
    }
    targets = {"vllm": [urlsplit(watched.url).netloc]}
    moving = {"Prompt tokens, staging", "Offered, declined, loaded, loaded", "Speed of loads, loads", "Stored, stored"}
    with PrometheusServer(PROMETHEUS, tmp_path, targets) as prometheus:
        waiting, still, rounds = set(expressions), set(moving), itertools.count()

        def all_answer() -> bool:
            load(watched.url, seed=next(rounds) // 2)  # what is new is stored, what comes again is loaded
            for expression in list(waiting | {one for one, name in expressions.items() if name in still}):
                values = [float(series["value"][1]) for series in prometheus.query(filled(expression))]
                if values and not any(value != value for value in values):  # NaN: nothing was divided by nothing
                    waiting.discard(expression)
                if any(value > 0 for value in values):
                    still.discard(expressions[expression])
            return not waiting and not still

        try:
            eventually_sync(all_answer, deadline_s=300.0)
        except AssertionError as error:
            lacking = sorted(expressions[one] for one in waiting)
            raise AssertionError(f"no data: {lacking}; never above zero: {sorted(still)}") from error


def test_what_a_request_asks_of_the_pool_is_a_part_of_its_trace(watched: Watched) -> None:
    tokens = prompt(3 * CHUNK + 5, seed=95)
    trace_ids, caller = [secrets.token_bytes(16) for _ in range(2)], secrets.token_bytes(8)
    headers = [{"traceparent": f"00-{one.hex()}-{caller.hex()}-01"} for one in trace_ids]

    def await_spans(number: int, *names: str) -> None:
        def there() -> bool:
            completed(watched.url, [5, 6, 7], "trace")  # an idle engine stores with its next step
            return set(names) <= set(watched.collector.named(trace_ids[number]))

        eventually_sync(there, deadline_s=60.0)

    expected = completed(watched.url, tokens, "trace", headers[0])
    await_spans(0, "llm_request", "kvpool.match", "kvpool.store")
    for seed in range(4):  # what the engine has of it itself goes
        completed(watched.url, prompt(LENGTH_MAX - 20, seed=96 + seed), "trace")
    assert completed(watched.url, tokens, "trace", headers[1]) == expected
    await_spans(1, "llm_request", "kvpool.match", "kvpool.load")
    for trace_id in trace_ids:
        for span in watched.collector.named(trace_id).values():
            assert span.parent_span_id == caller, "vLLM's span of the request has the same parent"
    loaded = watched.collector.named(trace_ids[1])["kvpool.load"]
    assert {one.key: one.value.int_value for one in loaded.attributes}["kvpool.chunks.served"] == 3
