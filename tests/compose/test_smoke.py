"""One story, in order: the tests go on from what those before left."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from typing import Any

import pytest

from kvpool.core.cluster import NodeKind
from kvpool.testing.waiting import eventually, eventually_sync
from tests.compose.composed import KVPOOL_SERVICES, SERVICES, ComposedCluster

pytestmark = pytest.mark.timeout(1800)  # images are built in the first one

DEADLINE_S = 120.0  # of what comes by itself: restarts, health, scrapes
DEMO_TIMEOUT_S = 900.0  # it computes on the CPU
TOKENS = 1024  # of an engine's prompt
FIRST, SECOND, DRAINED = 7, 8, 9  # seeds of prompts


def loaded(cluster: ComposedCluster, node: int, seed: int) -> dict[str, int]:
    """Where a prompt comes from, once it comes whole; its bytes have to be those that were stored."""

    def load() -> dict[str, Any]:
        return cluster.engine(node, "load", seed)

    answer = eventually_sync(load, DEADLINE_S, f"node {node} does not get the prompt back")
    assert answer["equal"], answer
    tokens: dict[str, int] = answer["tokens"]
    assert sum(tokens.values()) == TOKENS, answer
    return tokens


def test_an_engine_gets_from_another_node_what_one_stored_within_a_minute_of_up(cluster: ComposedCluster) -> None:
    started_s = time.monotonic()
    cluster.up()
    up_s = time.monotonic() - started_s
    cluster.engine(0, "store", FIRST)
    tokens = loaded(cluster, 1, FIRST)
    print(f"\nup and healthy after {up_s:.1f} s, first shared hit after {time.monotonic() - started_s:.1f} s")
    assert tokens["remote"] == TOKENS


def test_the_demo_takes_options_and_gets_the_right_tokens(cluster: ComposedCluster) -> None:
    said = cluster.compose(
        "run", "--rm", "-T", "demo", "--conversations", "1", "--turns", "2", timeout_s=DEMO_TIMEOUT_S
    )
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
    for phase in ("cold", "shared", "reference"):
        assert rows[phase][-1] == "yes", said


def test_containers_are_confined(cluster: ComposedCluster) -> None:
    for service in SERVICES:
        described = cluster.inspect(service)
        host = described["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"] and not host["CapAdd"] and not host["Privileged"], service
        assert any(option.startswith("no-new-privileges") for option in host["SecurityOpt"]), service
        assert host["Memory"] and host["NanoCpus"] and host["PidsLimit"], service
        assert not host["PidMode"] and host["IpcMode"] == "private", service
        assert host["RestartPolicy"]["Name"] == "unless-stopped", service
        bindings = [binding for ports in (host["PortBindings"] or {}).values() for binding in ports]
        assert {binding["HostIp"] for binding in bindings} <= {"127.0.0.1"}, service
        assert described["State"]["Health"]["Status"] == "healthy", service
    for service in KVPOOL_SERVICES:
        status = cluster.compose("exec", "-T", service, "cat", "/proc/1/status")
        found = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
        assert found["Uid"] == ["10001"] * 4 and found["Gid"] == ["10001"] * 4, service
        assert int(found["CapEff"][0], 16) == int(found["CapBnd"][0], 16) == 0, service
        assert found["NoNewPrivs"] == ["1"], service
        refused = cluster.compose("exec", "-T", service, "sh", "-c", "touch /root-file 2>&1 || true")
        assert "Read-only file system" in refused, service


def test_prometheus_scrapes_every_service(cluster: ComposedCluster) -> None:
    base = f"http://127.0.0.1:{cluster.ports['PROMETHEUS_PORT']}/api/v1/"

    def get(path: str) -> Any:
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            return json.load(answer)["data"]

    def states() -> list[str]:
        return [target["health"] for target in get("targets")["activeTargets"]]

    eventually_sync(lambda: states() == ["up"] * 7, DEADLINE_S, "not every target is up")
    stored = urllib.parse.quote("sum(kvpool_gpuagent_stored_bytes_total)")
    eventually_sync(lambda: float(get(f"query?query={stored}")["result"][0]["value"][1]) > 0, DEADLINE_S)

    def rule_states() -> set[str]:
        return {rule["health"] for group in get("rules")["groups"] for rule in group["rules"]}

    eventually_sync(lambda: rule_states() == {"ok"}, DEADLINE_S, "not every alert rule is evaluated")


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_container_comes_back_and_costs_nothing_that_is_stored(cluster: ComposedCluster, service: str) -> None:
    cluster.compose("kill", "--signal", "SIGKILL", service)
    if service not in ("redis", "pagestore-0", "gpuagent-0"):  # without these the engines of node 0 recompute
        loaded(cluster, 0, FIRST)
    cluster.compose("start", service)
    eventually_sync(lambda: cluster.is_healthy(service), DEADLINE_S, f"{service} does not get healthy")
    for node in (0, 1):
        loaded(cluster, node, FIRST)


async def test_stop_drains_a_pagestore_and_ends_its_lease(cluster: ComposedCluster) -> None:
    cluster.engine(0, "store", DRAINED)
    cluster.compose("stop", "pagestore-0")
    state = cluster.inspect("pagestore-0")["State"]
    assert state["ExitCode"] == 0, state  # killed after the grace period it would be 137
    left = {node.info.endpoint for node in await cluster.nodes() if node.info.kind is NodeKind.PAGESTORE}
    assert left == {"pagestore-1:7200"}
    logs = cluster.compose("logs", "--no-log-prefix", "--tail", "30", "pagestore-0")
    assert "stopping on SIGTERM" in logs
    cluster.compose("start", "pagestore-0")
    eventually_sync(lambda: cluster.is_healthy("pagestore-0"), DEADLINE_S)
    tokens = loaded(cluster, 0, DRAINED)
    assert tokens["disk"] == TOKENS  # not one page was only in memory

    async def all_registered() -> bool:
        return len(await cluster.nodes(1)) == 4

    await eventually(all_registered, DEADLINE_S, "a node is missing")


@pytest.mark.parametrize("service", SERVICES)
def test_what_crashes_is_started_again_and_the_nodes_share(cluster: ComposedCluster, service: str) -> None:
    restarts = cluster.inspect(service)["RestartCount"]
    cluster.crash(service)

    def is_back() -> bool:
        return cluster.inspect(service)["RestartCount"] > restarts and cluster.is_healthy(service)

    eventually_sync(is_back, DEADLINE_S, f"{service} does not come back")
    for node in (0, 1):
        loaded(cluster, node, FIRST)


def test_nodes_tell_an_empty_redis_what_they_have(cluster: ComposedCluster) -> None:
    cluster.compose("rm", "--stop", "--force", "redis")
    cluster.docker("volume", "rm", f"{cluster.project}_redis-data")
    cluster.up()
    for node in (0, 1):
        loaded(cluster, node, FIRST)


def test_what_was_stored_survives_down_and_up(cluster: ComposedCluster) -> None:
    cluster.engine(1, "store", SECOND)
    cluster.compose("down")
    cluster.up()
    for node in (0, 1):
        for seed in (FIRST, SECOND):
            loaded(cluster, node, seed)
