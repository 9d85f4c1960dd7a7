"""What `kubectl kustomize` makes of k8s/, and the parts of it that tests ask for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_index.config import IndexConfig
from kvpool_pagestore.config import PageStoreConfig
from kvpool_server.config import load_config

REPOSITORY = Path(__file__).resolve().parents[3]
K8S = REPOSITORY / "k8s"
KUBECTL = shutil.which("kubectl")
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job")
SERVICES: dict[str, type] = {
    "KVPOOL_INDEX": IndexConfig,
    "KVPOOL_PAGESTORE": PageStoreConfig,
    "KVPOOL_GPUAGENT": GpuAgentConfig,
}
# What images set already.
IMAGE_ENVIRONMENT = dict(
    re.findall(
        r"\b(KVPOOL_[A-Z_]+)=(\S+)",
        "\n".join((REPOSITORY / "services" / name / "Dockerfile").read_text() for name in ("gpuagent", "pagestore")),
    )
)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the dashboards are long
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

Manifest = dict[str, Any]


@cache
def build(path: str) -> tuple[Manifest, ...]:
    """The resources of a kustomization below k8s/."""
    return _kustomize(K8S / path)


@cache
def build_with(base: str, component: str) -> tuple[Manifest, ...]:
    """The same with one more component on top, as an operator's own overlay would take it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        overlay = {
            "resources": [os.path.relpath(K8S / base, directory)],
            "components": [os.path.relpath(K8S / "components" / component, directory)],
        }
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        return _kustomize(directory)


def _kustomize(directory: Path) -> tuple[Manifest, ...]:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # deprecated fields
    return tuple(yaml.load_all(done.stdout, Loader=_LOADER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a workload, with what it gets from its pod and from ConfigMaps."""

    workload: Manifest
    spec: dict[str, Any]
    environment: dict[str, str]  # what comes from fields and Secrets stands as a word

    @property
    def name(self) -> str:
        return f"{self.workload['kind']}/{self.workload['metadata']['name']}/{self.spec['name']}"

    @property
    def pod(self) -> dict[str, Any]:
        return pod_of(self.workload)

    @property
    def prefix(self) -> str | None:
        """Of its service's variables; None for what is none of ours."""
        return next((prefix for prefix in SERVICES if any(prefix in name for name in self.environment)), None)

    @property
    def is_sidecar(self) -> bool:
        return self.spec.get("restartPolicy") == "Always"

    def port(self, *names: str) -> int | None:
        ports = {port["name"]: int(port["containerPort"]) for port in self.spec.get("ports", [])}
        return next((ports[name] for name in names if name in ports), None)

    def config(self) -> Any:
        """What the service makes of its variables. Raises StartupFailed as it would."""
        assert self.prefix is not None
        return load_config(
            SERVICES[self.prefix],
            prog="test",
            env_prefix=self.prefix,
            argv=[],
            env={**IMAGE_ENVIRONMENT, **self.environment},
        )


def workloads(manifests: tuple[Manifest, ...]) -> Iterator[Manifest]:
    yield from (manifest for manifest in manifests if manifest["kind"] in WORKLOADS)


def pod_of(workload: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def containers(manifests: tuple[Manifest, ...]) -> list[Container]:
    maps = {each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"}
    found = []
    for workload in workloads(manifests):
        pod = pod_of(workload)
        for spec in (*pod.get("initContainers", []), *pod["containers"]):
            environment: dict[str, str] = {}
            for source in spec.get("envFrom", []):
                environment |= maps[source["configMapRef"]["name"]]
            for variable in spec.get("env", []):
                environment[variable["name"]] = variable.get("value", "from-elsewhere")
            found.append(Container(workload=workload, spec=spec, environment=environment))
    return found


def size_bytes(quantity: str) -> int:
    """Of a Kubernetes quantity such as 16Mi."""
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]
