"""Counters of servers before and after, and the tiers they tell of."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bench.serve.counters import Scrape, counters_from_text, metrics_url, moved, scrape, tiers
from bench.serve.http import open_session
from kvpool_gpuagent.core.sources import LoadSource
from kvpool_gpuagent.metrics import AgentMetrics
from tests.fixtures.openai_server import OpenAiServer

PAGE = """\
# HELP kvpool_gpuagent_loaded_tokens_total Prompt tokens loaded for engines, by source.
# TYPE kvpool_gpuagent_loaded_tokens_total counter
kvpool_gpuagent_loaded_tokens_total{source="staging"} 100.0
kvpool_gpuagent_loaded_tokens_total{source="disk"} 50.0
# TYPE kvpool_gpuagent_loaded_tokens_created gauge
kvpool_gpuagent_loaded_tokens_created{source="disk"} 1.7e+09
# TYPE kvpool_gpuagent_sessions gauge
kvpool_gpuagent_sessions 1.0
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 7.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="m",engine="0"} 1000.0
"""


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("host:9100", "http://host:9100/metrics"),
        ("http://host:9100", "http://host:9100/metrics"),
        ("https://host/own/path", "https://host/own/path"),
    ],
)
def test_urls(text: str, url: str) -> None:
    assert metrics_url(text) == url


def test_counters_of_ours_and_of_engines_are_read() -> None:
    assert counters_from_text(PAGE) == {
        'kvpool_gpuagent_loaded_tokens_total{source="staging"}': 100.0,
        'kvpool_gpuagent_loaded_tokens_total{source="disk"}': 50.0,
        'vllm:prompt_tokens_total{engine="0",model_name="m"}': 1000.0,
    }


def test_differences_add_up_over_urls() -> None:
    change = moved(Scrape({"a": {"x": 1.0}, "b": {"x": 5.0}}), Scrape({"a": {"x": 4.0, "new": 2.0}, "b": {"x": 6.0}}))
    assert change.counters == {"x": 4.0, "new": 2.0} and change.went_back == []


def test_a_restart_between_is_reported() -> None:
    change = moved(Scrape({"a": {"x": 10.0}}), Scrape({"a": {"x": 3.0}}))
    assert change.counters == {"x": 3.0} and change.went_back == ["x at a"]


def test_a_url_that_answers_only_once_says_nothing() -> None:
    change = moved(Scrape({}, {"a": "connect: down"}), Scrape({"a": {"x": 3.0}}))
    assert change.counters == {} and change.failed == {"a": "connect: down"}


def test_tiers() -> None:
    counters = {
        'vllm:prompt_tokens_total{engine="0"}': 700.0,
        'vllm:prompt_tokens_total{engine="1"}': 300.0,
        "vllm:prefix_cache_hits_total": 200.0,
        "vllm:external_prefix_cache_hits_total": 500.0,
        'kvpool_gpuagent_loaded_tokens_total{source="staging"}': 300.0,
        'kvpool_gpuagent_loaded_tokens_total{source="disk"}': 100.0,
    }
    assert tiers(counters, 5) == {"own": 200.0, "staging": 300.0, "disk": 100.0, "computed": 400.0}
    without_agent = {name: value for name, value in counters.items() if "kvpool" not in name}
    assert tiers(without_agent, 5) == {"own": 200.0, "external": 500.0, "computed": 300.0}


def test_an_engine_without_counters_and_one_that_reported_nothing() -> None:
    assert tiers({}, 100) is None
    assert tiers({'kvpool_gpuagent_loaded_tokens_total{source="disk"}': 30.0}, 100) == {
        "own": 0.0,
        "disk": 30.0,
        "computed": 70.0,
    }
    assert tiers({"vllm:prefix_cache_hits_total": 0.0}, 100) == {"own": 0.0, "computed": 100.0}


async def test_scrapes_of_servers_that_answer_nonsense() -> None:
    server = OpenAiServer()
    async with server.serving() as url, open_session(5.0, "") as session:
        good = await scrape(session, [f"{url}/metrics", f"{url}/absent"])
        server.metrics_text = lambda: "{{{ this is no metric"
        bad = await scrape(session, [f"{url}/metrics"])
    assert good.by_url[f"{url}/metrics"]['vllm:prompt_tokens_total{engine="0"}'] == 0
    assert good.failed[f"{url}/absent"].startswith("http_404")
    assert bad.by_url == {} and "no Prometheus text" in bad.failed[f"{url}/metrics"]


def test_what_a_real_agent_shows_is_understood() -> None:
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    before = Scrape({"a": counters_from_text(generate_latest(registry).decode())})
    shares = {LoadSource.GPU: 20, LoadSource.STAGING: 300, LoadSource.DISK: 100, LoadSource.REMOTE: 50}
    for source, tokens in shares.items():
        metrics.loaded_tokens.labels(source.name.lower()).inc(tokens)
    after = Scrape({"a": counters_from_text(generate_latest(registry).decode())})
    assert tiers(moved(before, after).counters, 500) == {
        "own": 0.0,
        "gpu": 20.0,
        "staging": 300.0,
        "disk": 100.0,
        "remote": 50.0,
        "computed": 30.0,
    }
