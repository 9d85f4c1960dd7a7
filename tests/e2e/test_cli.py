"""Commands against one running cluster: what they print and what they do."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.testing import eventually_sync
from kvpool_cli.cluster import socket_dir
from kvpool_cli.state import state_file
from tests.e2e.cli_cluster import CHUNK_TOKENS, KEYSPACE_NAME, SMALL, TOKENS, Cluster

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One pagestore, one agent, detached; ended and found gone."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    output = cluster.run("cluster", "up", "--detach", *SMALL)
    assert "End it with `kvpool cluster down`" in output
    state = cluster.state
    yield cluster
    assert "cluster ended" in cluster.run("cluster", "down")
    assert not any(process.alive() for process in state.processes)
    assert not state_file(cluster.state_dir).exists()
    assert not socket_dir(cluster.state_dir).exists()
    assert "no cluster runs" in cluster.run("cluster", "down")


def test_every_service_has_metrics_where_the_table_says(cluster: Cluster) -> None:
    urls = {process.name: process.endpoints.get("metrics_url", "") for process in cluster.state.processes}
    assert {name for name, url in urls.items() if url} == {"index-0", "pagestore-0", "agent-0"}
    for name, url in urls.items():
        if url:
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert b"kvpool_" in answer.read(), name


def test_a_second_up_is_refused(cluster: Cluster) -> None:
    lines = cluster.run("cluster", "up", code=2).splitlines()
    assert len(lines) == 1
    assert "runs in" in lines[0] and "kvpool cluster down" in lines[0]


def test_status_names_nodes_store_and_processes(cluster: Cluster) -> None:
    document = cluster.json("cluster", "status")
    assert document["version"] == 1
    assert document["store"]["reachable"] is True
    kinds = {node["kind"]: node for node in document["nodes"]}
    assert set(kinds) == {"pagestore", "agent"}
    pagestore = kinds["pagestore"]
    assert pagestore["arena"]["capacity_bytes"] == 64 << 20
    assert pagestore["disk"]["capacity_bytes"] == 256 << 20
    assert pagestore["incarnation"] > 0
    assert 0 < pagestore["lease_remaining_ms"] <= document["index"]["lease_ttl_ms"]
    assert all(process["alive"] for process in document["processes"])
    text = cluster.run("cluster", "status")
    assert "pagestore" in text and "of 64.0 MiB" in text and "reachable" in text


def test_status_of_an_index_that_is_named(cluster: Cluster, tmp_path: Path) -> None:
    elsewhere = Cluster(tmp_path)
    endpoint = cluster.state.of_role("index")[0].endpoints["endpoint"]
    document = elsewhere.json("cluster", "status", "--index", endpoint)
    assert len(document["nodes"]) == 2
    assert document["processes"] == []
    assert "no cluster runs" in elsewhere.run("cluster", "status", code=1)
    assert "does not answer" in elsewhere.run("cluster", "status", "--index", "127.0.0.1:1", code=1, is_patient=False)


def test_pages_are_matched_flushed_and_cleared(cluster: Cluster, tmp_path: Path) -> None:
    cluster.store(TOKENS)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    found = cluster.json("cache", "match", str(file), "--keyspace", KEYSPACE_NAME)
    assert (found["chunks"], found["matched_chunks"]) == (4, 4)
    assert found["matched_tokens"] == 4 * CHUNK_TOKENS
    assert found["tokens_by_tier"]["staging"] == 4 * CHUNK_TOKENS
    assert [
        node["node_id"] for node in cluster.json("cluster", "status")["nodes"] if node["kind"] == "pagestore"
    ] == found["runs"][0]["nodes"]

    # Two chunks that are held, one that is not; blanks instead of JSON, from stdin, in the only keyspace.
    other = [*TOKENS[: 2 * CHUNK_TOKENS], *[7] * CHUNK_TOKENS]
    text = cluster.run("cache", "match", "-", text=" ".join(map(str, other)))
    assert "2 of 3 chunks" in text

    assert "pages" in cluster.run("cache", "flush")
    endpoint = next(
        node["endpoint"] for node in cluster.json("cluster", "status")["nodes"] if node["kind"] == "pagestore"
    )
    assert [node["failed_pages"] for node in cluster.json("cache", "flush", "--node", endpoint)["nodes"]] == [0]
    socket = f"unix:{cluster.state.of_role('pagestore')[0].endpoints['socket']}"
    assert "0 failed" in cluster.run("cache", "flush", "--node", socket)
    cluster.run("cache", "flush", "--node", socket, "--keyspace", KEYSPACE_NAME, code=2)
    node = next(node for node in cluster.json("cluster", "status")["nodes"] if node["kind"] == "pagestore")
    assert node["pages"]["dirty"] == 0
    assert node["pages"]["disk"] == node["pages"]["staging"] > 0

    assert "--yes" in cluster.run("cache", "clear", "--keyspace", KEYSPACE_NAME, text="y\n", code=2)
    (would,) = cluster.json("cache", "clear", "--dry-run")["nodes"]
    assert (would["would_evict_chunks"], would["error"]) == (4, "")
    assert cluster.json("cache", "match", str(file))["matched_chunks"] == 4, "nothing was changed"
    cluster.run("cache", "clear", "--keyspace", KEYSPACE_NAME, "--yes", text="")
    eventually_sync(lambda: cluster.json("cache", "match", str(file))["matched_chunks"] == 0)
    node = next(node for node in cluster.json("cluster", "status")["nodes"] if node["kind"] == "pagestore")
    assert node["pages"] == {"staging": 0, "dirty": 0, "disk": 0}
    assert "no keyspace 'nope'" in cluster.run("cache", "clear", "--keyspace", "nope", "--yes", code=1)


def test_logs_of_one_process(cluster: Cluster) -> None:
    lines = cluster.run("cluster", "logs", "index-0", "-n", "3").splitlines()
    assert 1 <= len(lines) <= 3
    assert all(line.startswith("index-0: ") for line in lines)
    assert "no logs" in cluster.run("cluster", "logs", "nothing-0", code=1)
