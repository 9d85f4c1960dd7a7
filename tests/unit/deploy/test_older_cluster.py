"""What `make smoke-kubernetes` sends to a cluster before 1.29."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.kubernetes.older_cluster import PROBES, older
from tests.unit.deploy.manifests import KUBECTL, build, pod_of, workloads

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, whose kustomize builds the manifests")
KUSTOMIZATIONS = ("overlays/dev", "overlays/prod", "overlays/prod-local-nvme", "examples/vllm-sidecar", "examples/demo")


@pytest.mark.parametrize("path", KUSTOMIZATIONS)
def test_nothing_is_left_that_it_does_not_know(path: str) -> None:
    notes: list[str] = []
    before = build(path)
    after = list(older(copy.deepcopy(list(before)), notes.append))
    assert [(each["kind"], each["metadata"]["name"]) for each in after] == [
        (each["kind"], each["metadata"]["name"]) for each in before
    ]
    assert not {each["apiVersion"] for each in after} & {"policy/v1", "autoscaling/v2"}
    for was, workload in zip(workloads(before), workloads(tuple(after)), strict=True):
        pod = pod_of(workload)
        kept = in_order(pod)
        assert [container["name"] for container in kept] == [container["name"] for container in in_order(pod_of(was))]
        for container in kept:
            assert "restartPolicy" not in container
            assert not any("grpc" in container.get(kind, {}) for kind in PROBES)
    assert notes


def in_order(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Containers as they start."""
    return [*pod.get("initContainers", []), *pod["containers"]]
