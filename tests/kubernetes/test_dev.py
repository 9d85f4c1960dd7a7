"""The dev overlay, as the README has it: it comes up, its command answers, the demo's engines share."""

from __future__ import annotations

import pytest

from tests.kubernetes.kube import HERE, K8S, Kube, with_small_cpu_requests

pytestmark = pytest.mark.timeout(2400)

NAMESPACE = "kvpool-dev"
DEMO_S = 1800.0


def test_it_comes_up(kube: Kube) -> None:
    kube.apply(HERE / "dev")
    kube.wait(NAMESPACE, "statefulset/kvpool-redis", "deployment/kvpool-index", "statefulset/kvpool-pagestore")
    command = ("kvpool", "cluster", "status", "--index", "localhost:7100")
    said = kube.execute(NAMESPACE, "deploy/kvpool-index", "index", *command)
    assert "2 pagestores" in said, said


def test_the_demo_shares_and_its_tokens_are_equal(kube: Kube) -> None:
    kube.apply(K8S / "examples" / "demo", change=with_small_cpu_requests)
    label = "app.kubernetes.io/name=kvpool-demo"
    code = kube.await_exit(NAMESPACE, label, "demo", DEMO_S)  # 0: tokens equal, and the later engine hit
    said = kube.run("-n", NAMESPACE, "logs", "-l", label, "-c", "demo", "--tail", "8")
    print(said)
    assert code == 0, said
