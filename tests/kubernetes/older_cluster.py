"""Manifests for a cluster older than they ask for (1.29): what its API server does not know is said in older words.

    kubectl kustomize k8s/overlays/dev | python tests/kubernetes/older_cluster.py | kubectl apply -f -

Says on stderr what it changed; that part of the manifests is then not what runs. For trying and testing: an old cluster
ends sidecars together with the engine, not after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import yaml

Manifest = dict[str, Any]

API_VERSIONS = {
    ("policy/v1", "PodDisruptionBudget"): "policy/v1beta1",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "autoscaling/v2beta2",
}
OPERATORS = ("cert-manager.io/", "monitoring.coreos.com/")  # their resources go where they are installed
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# What the images' own HEALTHCHECK runs; without site packages it starts in some 40 ms.
HEALTH_PROBE = ["python", "-I", "-m", "kvpool_server.health_probe"]
# Containers of a pod start in their order, each after the hook of the one before.
WAIT_SCRIPT = "for _ in $(seq {attempts}); do {probe} && exit 0; sleep 1; done; exit 1"
SIDECAR_STAYS_S = 20  # longer than the engines' own preStop, so that an agent does not go before its engine


def older(manifests: list[Manifest], note: Callable[[str], None]) -> Iterator[Manifest]:
    """The same cluster in words of Kubernetes 1.20. note: called with each change."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["apiVersion"].startswith(OPERATORS):
            note(f"{name}: left out")
            continue
        api_version = API_VERSIONS.get((manifest["apiVersion"], manifest["kind"]))
        if api_version is not None:
            note(f"{name}: {manifest['apiVersion']} -> {api_version}")
            manifest["apiVersion"] = api_version
        _drop_rollout_fields(manifest, name, note)
        pod = manifest.get("spec", {}).get("template", {}).get("spec")
        if pod is not None:
            _make_containers_of_sidecars(pod, name, note)
            for container in (*pod.get("initContainers", []), *pod["containers"]):
                _probe_by_tcp(container, f"{name}/{container['name']}", note)
        yield manifest


def _drop_rollout_fields(manifest: Manifest, name: str, note: Callable[[str], None]) -> None:
    if manifest["kind"] == "StatefulSet" and manifest["spec"].pop("minReadySeconds", None) is not None:
        note(f"{name}: no minReadySeconds")
    rolling = manifest.get("spec", {}).get("updateStrategy", {}).get("rollingUpdate", {})
    if rolling.pop("maxSurge", None) is not None:
        note(f"{name}: no maxSurge")


def _make_containers_of_sidecars(pod: dict[str, Any], name: str, note: Callable[[str], None]) -> None:
    first = pod.get("initContainers", [])
    sidecars = [container for container in first if container.pop("restartPolicy", None) == "Always"]
    if not sidecars:
        return
    note(f"{name}: sidecars as containers that start first, and stay {SIDECAR_STAYS_S} s when the pod goes")
    for sidecar in sidecars:
        startup = sidecar["startupProbe"]
        command = " ".join([*HEALTH_PROBE, f"127.0.0.1:{startup['grpc']['port']}"])
        script = WAIT_SCRIPT.format(attempts=startup.get("failureThreshold", 60), probe=command)
        sidecar["lifecycle"] = {
            "postStart": {"exec": {"command": ["sh", "-c", script]}},
            "preStop": {"exec": {"command": ["sleep", str(SIDECAR_STAYS_S)]}},
        }
    pod["initContainers"] = [container for container in first if container not in sidecars]
    pod["containers"] = [*sidecars, *pod["containers"]]


def _probe_by_tcp(container: dict[str, Any], name: str, note: Callable[[str], None]) -> None:
    for kind in PROBES:
        probe = container.get(kind, {})
        if "grpc" in probe:
            note(f"{name}: {kind} by TCP, which a service that does not serve answers too")
            probe["tcpSocket"] = {"port": probe.pop("grpc")["port"]}


def main() -> int:
    """Filter from stdin to stdout."""
    manifests = [manifest for manifest in yaml.safe_load_all(sys.stdin) if manifest]
    changed = list(older(manifests, lambda change: print(change, file=sys.stderr)))
    yaml.safe_dump_all(changed, sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
