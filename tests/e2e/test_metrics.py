"""What each service of a live cluster exports, before and after a small load."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import CHUNK_TOKENS, KEYSPACE_NAME, SMALL, TOKENS, Cluster
from tests.unit.deploy.promql import metrics_of

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = 4  # four chunks of one shard
RPC = "/kvpool.v1."
Samples = dict[tuple[str, str], float]

# By process, what the load moves: sample and one label value, "" for a sample without labels or with any.
MOVED = {
    "index-0": [
        ("kvpool_index_grpc_requests_total", f"{RPC}IndexService/OpenKeyspace"),
        ("kvpool_index_grpc_request_duration_seconds_count", f"{RPC}IndexService/OpenKeyspace"),
        ("kvpool_index_match_duration_seconds_count", ""),
        ("kvpool_index_match_questions_total", ""),
        ("kvpool_index_chunks_asked_total", ""),
        ("kvpool_index_chunks_matched_total", "staging"),
        ("kvpool_index_announce_changes_total", ""),
    ],
    "pagestore-0": [
        # The agent's: it opens one for all its engines when it needs it first, and keeps it.
        ("kvpool_pagestore_grpc_requests_in_flight", f"{RPC}PageStoreService/Session"),
        ("kvpool_pagestore_grpc_requests_total", f"{RPC}PageStoreService/Flush"),
        ("kvpool_pagestore_grpc_request_duration_seconds_count", f"{RPC}PageStoreService/Flush"),
        ("kvpool_pagestore_request_duration_seconds_count", "reserve"),
        ("kvpool_pagestore_request_duration_seconds_count", "commit"),
        ("kvpool_pagestore_request_duration_seconds_count", "acquire"),
        ("kvpool_pagestore_committed_bytes_total", ""),
        ("kvpool_pagestore_acquired_pages_total", "staging"),
        ("kvpool_pagestore_acquired_bytes_total", "staging"),
        ("kvpool_pagestore_written_pages_total", "written"),
        ("kvpool_pagestore_arena_used_bytes", ""),
        ("kvpool_pagestore_disk_used_bytes", ""),
        ("kvpool_pagestore_staging_pages", ""),
        ("kvpool_pagestore_disk_pages", ""),
    ],
    "agent-0": [
        ("kvpool_gpuagent_grpc_requests_total", f"{RPC}GpuAgentService/EngineSession"),
        ("kvpool_gpuagent_store_duration_seconds_count", ""),
        ("kvpool_gpuagent_load_duration_seconds_count", ""),
        ("kvpool_gpuagent_stored_bytes_total", ""),
        ("kvpool_gpuagent_loaded_bytes_total", "staging"),
        ("kvpool_gpuagent_loaded_tokens_total", "staging"),
    ],
}
# What is there from the start, and what it says of a healthy cluster without sessions.
STEADY = {
    "index-0": {
        ("kvpool_index_live_nodes", "pagestore"): 1,  # leases of nodes
        ("kvpool_index_live_nodes", "agent"): 1,
        ("kvpool_index_store_up", ""): 1,
        ("kvpool_index_stale_reports_total", "removed"): 0,
    },
    "pagestore-0": {
        ("kvpool_pagestore_arena_capacity_bytes", ""): 64 << 20,
        ("kvpool_pagestore_disk_capacity_bytes", ""): 256 << 20,
        ("kvpool_pagestore_leases", ""): 0,
        ("kvpool_pagestore_arena_quarantined_bytes", ""): 0,
        **{("kvpool_pagestore_verification_failures_total", at): 0 for at in ("commit", "reader", "disk", "peer")},
    },
    "agent-0": {("kvpool_gpuagent_verification_failures_total", ""): 0, ("kvpool_gpuagent_sessions", ""): 0},
}


def scrape(cluster: Cluster) -> dict[str, Samples]:
    """By process, all samples; of several label values each names its sample, alone."""
    found: dict[str, Samples] = {}
    for process in cluster.state.processes:
        if url := process.endpoints.get("metrics_url"):
            with urllib.request.urlopen(url, timeout=60) as answer:
                families = text_string_to_metric_families(answer.read().decode())
            samples = found[process.name] = {}
            for sample in (sample for family in families for sample in family.samples):
                for label in sample.labels.values() or ("",):
                    samples[sample.name, label] = samples.get((sample.name, label), 0.0) + sample.value
    return found


def at_rest(cluster: Cluster) -> dict[str, Samples]:
    """The samples once they say what they have to of a cluster with nobody in a session. Raises AssertionError."""
    found = scrape(cluster)
    for process, expected in STEADY.items():
        assert {one: found[process].get(one) for one in expected} == expected, process
    return found


def asked_by_alerts() -> set[str]:
    """Names of our series that alerts read."""
    groups = yaml.safe_load((REPOSITORY / "k8s" / "alerts" / "kvpool.rules.yml").read_text())["groups"]
    return {name for group in groups for rule in group["rules"] for name in metrics_of(rule["expr"])} - {"up"}


def test_every_service_exports_its_work(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.run("cluster", "up", "--detach", *SMALL)
    try:
        before = eventually_sync(lambda: at_rest(cluster))
        cluster.store(TOKENS)
        cluster.run("cache", "flush")
        report, equal = cluster.load(TOKENS)
        assert equal and report.tokens.staging == PAGES * CHUNK_TOKENS
        # The agent's replica of the index may have answered the load's match by itself.
        assert f"{PAGES}" in cluster.run(
            "cache", "match", "-", "--keyspace", KEYSPACE_NAME, text=" ".join(map(str, TOKENS))
        )
        after = eventually_sync(lambda: at_rest(cluster))
    finally:
        cluster.run("cluster", "down")
    exported = {name for samples in before.values() for name, _ in samples}
    assert asked_by_alerts() <= exported, "alerts that would never fire, or miss the first rise of a counter"
    for process, samples in MOVED.items():
        still = [one for one in samples if after[process].get(one, 0.0) <= before[process].get(one, 0.0)]
        assert not still, f"{process}: {still}"
    answered = [after["agent-0"]["kvpool_gpuagent_replica_matches_total", by] for by in ("replica", "index", "both")]
    assert sum(answered) >= 1
    moved_bytes = after["pagestore-0"]["kvpool_pagestore_committed_bytes_total", ""]
    assert moved_bytes == after["agent-0"]["kvpool_gpuagent_stored_bytes_total", ""]
    assert moved_bytes == after["agent-0"]["kvpool_gpuagent_loaded_bytes_total", "staging"]
