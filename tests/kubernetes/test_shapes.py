"""The other shapes that k8s/examples has: a pagestore on the engine's node, and engine and agent in one container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.certificates import Authority
from tests.kubernetes.issued import NAMESPACE, secrets
from tests.kubernetes.kube import HERE, Kube
from tests.kubernetes.story import under_load

pytestmark = pytest.mark.timeout(2400)

LABEL = "kvpool.io/pagestore"


@pytest.fixture(scope="module")
def directory(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The prod-local-nvme overlay on one node."""
    directory = tmp_path_factory.mktemp("certificates")
    kube.apply_documents(secrets(Authority("kvpool-ca", days=300), directory))
    kube.apply(HERE / "redis-sentinel")
    kube.wait(NAMESPACE, "statefulset/redis", "statefulset/redis-sentinel")
    node = kube.get("", "nodes")["items"][0]["metadata"]["name"]
    kube.run("label", "--overwrite", "node", node, f"{LABEL}=true")
    try:
        kube.apply(HERE / "local-nvme")
        kube.wait(NAMESPACE, "deployment/kvpool-index", "daemonset/kvpool-pagestore")
        yield directory
    finally:
        kube.run("label", "node", node, f"{LABEL}-")


def test_a_pagestore_on_the_node_is_reached_by_memory_and_restarted_under_load(kube: Kube, directory: Path) -> None:
    kube.apply(HERE / "engine-local")
    kube.wait(NAMESPACE, "deployment/vllm")
    with under_load(kube, NAMESPACE, directory / "local.jsonl") as story:
        assert story.tokens_from("staging")
        assert not story.tokens_from("remote")
        story.go_through(
            "local NVMe: rolling restart of the pagestores",
            lambda: kube.restart(NAMESPACE, "daemonset/kvpool-pagestore"),
        )
        story.go_through(
            "local NVMe: rolling restart of engines and agents", lambda: kube.restart(NAMESPACE, "deployment/vllm")
        )
    kube.run("-n", NAMESPACE, "delete", "deployment/vllm", "--wait")


def test_engine_and_agent_in_one_container(kube: Kube, directory: Path) -> None:
    workload = "deployment/vllm-one-container"
    kube.apply(HERE / "engine-one-container")
    kube.wait(NAMESPACE, workload)
    with under_load(kube, NAMESPACE, directory / "one.jsonl", service="vllm-one-container") as story:
        story.go_through(
            "one container: the agent is killed",
            lambda: kube.kill_process(NAMESPACE, workload, "vllm", "kvpool_gpuagent.main", restarts_container=False),
        )
        story.go_through("one container: rolling restart", lambda: kube.restart(NAMESPACE, workload))
