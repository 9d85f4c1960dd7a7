"""Compose files and Dockerfiles as text: what `make smoke-compose` sees running, kept right where no Docker is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_index.config import IndexConfig
from kvpool_pagestore.config import PageStoreConfig
from kvpool_server.config import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE_FILES = ("docker-compose.yml", "compose.gpu.yml")
DOCKERFILES = {
    "index": REPOSITORY / "services/index/Dockerfile",
    "pagestore": REPOSITORY / "services/pagestore/Dockerfile",
    "gpuagent": REPOSITORY / "services/gpuagent/Dockerfile",
    "demo": REPOSITORY / "demo/Dockerfile",
}
CONFIGS: dict[str, type[Any]] = {"index": IndexConfig, "pagestore": PageStoreConfig, "gpuagent": GpuAgentConfig}
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+):?-([^}]*)\}")


def composed() -> dict[str, Any]:
    """docker-compose.yml with the default of each variable."""
    text = VARIABLE.sub(lambda match: match[2], (REPOSITORY / "docker-compose.yml").read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


SERVICES: dict[str, dict[str, Any]] = composed()["services"]
OURS = [name for name in SERVICES if name.partition("-")[0] in CONFIGS]


def image_environment(kind: str) -> dict[str, str]:
    """What the last stages of a Dockerfile set."""
    text = DOCKERFILES[kind].read_text().replace("\\\n", " ")
    lines = [
        line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV KVPOOL") or "KVPOOL_" in line
    ]
    return dict(re.findall(r"(KVPOOL_[A-Z_]+)=(\S+)", " ".join(lines)))


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["cpus"] and service["pids_limit"]
    assert service["logging"]["options"]["max-size"]
    assert service["restart"] == ("no" if name == "demo" else "unless-stopped")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert not service["image"].endswith(":latest") and ":" in service["image"]
    if name not in OURS:
        assert "healthcheck" in service or name == "demo"
        assert name == "demo" or service["user"].split(":")[0].isdigit()


def test_each_waits_until_what_it_needs_is_healthy() -> None:
    for name, service in SERVICES.items():
        for needed, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}, f"{name} on {needed}"
    assert set(SERVICES["pagestore-0"]["depends_on"]) == {"index-0", "index-1"}
    assert [name for name, service in SERVICES.items() if "store" in service.get("networks", ())] == [
        "redis",
        "index-0",
        "index-1",
    ]


@pytest.mark.parametrize("name", OURS)
def test_the_service_understands_its_variables(name: str) -> None:
    kind = name.partition("-")[0]
    composed_variables = SERVICES[name].get("environment", {})
    environment = image_environment(kind) | {variable: str(value) for variable, value in composed_variables.items()}
    prefix = f"KVPOOL_{kind.upper()}"
    config = load_config(CONFIGS[kind], prog=kind, env_prefix=prefix, argv=(), env=environment)
    known = {f"{prefix}_{field}".upper() for field in config.__dataclass_fields__}
    assert {variable for variable in environment if variable.startswith(prefix)} <= known


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_image_asks_for_health_where_the_service_listens(kind: str) -> None:
    text = DOCKERFILES[kind].read_text()
    variables = f'"KVPOOL_{kind.upper()}_HEALTH_LISTEN", "KVPOOL_{kind.upper()}_LISTEN"'
    assert f'"kvpool_server.health_probe", {variables}]' in text
    assert f'["python", "-m", "kvpool_server.first_process", "kvpool_{kind}.main"]' in text
    assert f"KVPOOL_{kind.upper()}_LISTEN" in image_environment(kind)


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_an_image_runs_as_nobody_and_ends_on_sigterm(kind: str) -> None:
    lines = DOCKERFILES[kind].read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001:10001"
    assert "STOPSIGNAL SIGTERM" in lines
    assert "ARG BASE_IMAGE=python:3.11-slim" in lines
    assert not any(line.startswith(("# syntax", "ADD ")) for line in lines)  # no frontend from a registry


def test_every_variable_is_in_the_example_with_its_default() -> None:
    shown = dict(re.findall(r"(?m)^#([A-Z][A-Z0-9_]*)=(.*)$", (REPOSITORY / ".env.example").read_text()))
    used: dict[str, str] = {}
    for name in COMPOSE_FILES:
        for variable, default in VARIABLE.findall((REPOSITORY / name).read_text()):
            assert used.setdefault(variable, default) == default, f"{variable} has two defaults"
    assert shown == used


def test_prometheus_scrapes_every_service() -> None:
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    targets = {
        target for job in config["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    }
    assert targets == {f"{name}:9100" for name in OURS} | {"localhost:9090"}


def test_the_gpu_overlay_lets_no_process_own_the_namespaces_of_others() -> None:
    text = VARIABLE.sub(lambda match: match[2], (REPOSITORY / "compose.gpu.yml").read_text())
    services = yaml.safe_load(text)["services"]
    for name in ("gpuagent-0", "gpuagent-1"):
        assert services[name]["pid"] == services[name]["ipc"] == "service:gpu-host"
    assert services["gpu-host"]["entrypoint"] == ["sleep", "infinity"] and services["gpu-host"]["init"] is True
