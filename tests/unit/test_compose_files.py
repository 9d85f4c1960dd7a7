"""Compose files and Dockerfiles as text: what `make smoke-compose` sees running, kept right where no Docker is."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_index.config import IndexConfig
from kvpool_pagestore.config import PageStoreConfig
from kvpool_server.config import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE_FILES = ("docker-compose.yml", "compose.gpu.yml", "compose.gpu2.yml", "compose.tls.yml")
DOCKERFILES = {
    "index": REPOSITORY / "services/index/Dockerfile",
    "pagestore": REPOSITORY / "services/pagestore/Dockerfile",
    "gpuagent": REPOSITORY / "services/gpuagent/Dockerfile",
    "demo": REPOSITORY / "demo/Dockerfile",
}
CONFIGS: dict[str, type[Any]] = {"index": IndexConfig, "pagestore": PageStoreConfig, "gpuagent": GpuAgentConfig}
SHARED_PARTS = (  # of all Dockerfiles
    ("ARG BASE_IMAGE", "FROM"),
    ("ARG PIP_INDEX_URL", "RUN"),
    ("&& python -m venv", "&& pip"),
    ("FROM dependencies AS package", "FROM ${BASE_IMAGE}"),
    ("RUN python -m compileall", "RUN echo"),
    ("RUN echo 'kvpool:x", "/run/kvpool"),
    ("ARG VERSION", "org.opencontainers.image.description"),
)
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+):?-([^}]*)\}")


def composed(name: str) -> dict[str, Any]:
    """A compose file with the default of each variable."""
    text = VARIABLE.sub(lambda match: match[2], (REPOSITORY / name).read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


SERVICES: dict[str, dict[str, Any]] = composed("docker-compose.yml")["services"]
TLS_SERVICES: dict[str, dict[str, Any]] = composed("compose.tls.yml")["services"]
TRACING_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG")
OURS = [name for name in SERVICES if name.partition("-")[0] in CONFIGS]


def image_environment(kind: str) -> dict[str, str]:
    """What the last stages of a Dockerfile set."""
    text = DOCKERFILES[kind].read_text().replace("\\\n", " ")
    lines = [
        line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV KVPOOL") or "KVPOOL_" in line
    ]
    return dict(re.findall(r"(KVPOOL_[A-Z_]+)=(\S+)", " ".join(lines)))


def instructions_of(path: Path) -> list[str]:
    """The lines of a Dockerfile that say something."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def part_of(text: str, start: str, end: str, kind: str) -> str:
    """From the first `start` to the `end` after it, without what names the image."""
    found = text[text.index(start) :]
    return found[: found.index(end)].replace(f"kvpool-{kind}", "kvpool-KIND")


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


@pytest.mark.parametrize("name", OURS)
def test_our_services_have_the_descriptors_that_doctor_wants(name: str) -> None:
    assert SERVICES[name]["ulimits"] == {"nofile": 16_384}
    if name.startswith("gpuagent"):
        overlay = "compose.gpu.yml" if name == "gpuagent-0" else "compose.gpu2.yml"
        assert composed(overlay)["services"][name]["ulimits"] == {"memlock": -1}


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


@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_the_service_understands_its_variables(name: str, with_tls: bool) -> None:
    kind = name.partition("-")[0]
    composed_variables = SERVICES[name].get("environment", {})
    if with_tls:
        composed_variables = composed_variables | TLS_SERVICES[name]["environment"]
    environment = image_environment(kind) | {variable: str(value) for variable, value in composed_variables.items()}
    prefix = f"KVPOOL_{kind.upper()}"
    config = load_config(CONFIGS[kind], prog=kind, env_prefix=prefix, argv=(), env=environment)
    known = {f"{prefix}_{field}".upper() for field in config.__dataclass_fields__}
    assert {variable for variable in environment if variable.startswith(prefix)} <= known
    assert all(variable in environment for variable in TRACING_VARIABLES)
    assert bool(config.tls_ca_file) is bool(config.health_listen) is with_tls


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_image_asks_for_health_where_the_service_listens(kind: str) -> None:
    text = DOCKERFILES[kind].read_text()
    variables = f'"KVPOOL_{kind.upper()}_HEALTH_LISTEN", "KVPOOL_{kind.upper()}_LISTEN"'
    assert f'"kvpool_server.health_probe", {variables}]' in text
    assert f'["python", "-m", "kvpool_server.first_process", "kvpool_{kind}.main"]' in text
    assert f"KVPOOL_{kind.upper()}_LISTEN" in image_environment(kind)


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_an_image_runs_without_root_and_ends_on_sigterm(kind: str) -> None:
    lines = DOCKERFILES[kind].read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001:10001"
    assert "STOPSIGNAL SIGTERM" in lines
    assert "ARG BASE_IMAGE=python:3.11-slim" in lines
    assert not any(line.startswith(("# syntax", "ADD ")) for line in lines)  # no frontend from a registry


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_images_are_built_alike(kind: str) -> None:
    """Each Dockerfile stands alone, so what they have in common is written in each: it has to stay the same."""
    instructions = {name: " ".join(instructions_of(path)) for name, path in DOCKERFILES.items()}
    for start, end in SHARED_PARTS:
        parts = {part_of(text, start, end, name) for name, text in instructions.items()}
        assert len(parts) == 1, f"{start!r} to {end!r} differ: {parts}"
    installed = "transformers" if kind == "demo" else f"{kind} cli tracing"
    assert f"python image_requirements.py {installed} > requirements.txt" in instructions[kind]


def test_options_of_the_demo_do_not_take_its_agents_away() -> None:
    image = 'ENTRYPOINT ["python", "-m", "kvpool_server.first_process", "demo.composed"]'
    assert image in DOCKERFILES["demo"].read_text().splitlines()
    entrypoint = SERVICES["demo"]["entrypoint"]
    assert entrypoint[:4] == ["python", "-m", "kvpool_server.first_process", "demo.composed"]
    assert entrypoint[4::2] == ["--agent", "--agent"] and "command" not in SERVICES["demo"]


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
    services = composed("compose.gpu.yml")["services"] | composed("compose.gpu2.yml")["services"]
    for name in ("gpuagent-0", "gpuagent-1"):
        assert services[name]["pid"] == services[name]["ipc"] == "service:gpu-host"
    assert services["gpu-host"]["entrypoint"] == ["sleep", "infinity"] and services["gpu-host"]["init"] is True


def test_the_tls_overlay_gives_every_service_a_volume_of_its_own_key() -> None:
    issued = {volume.split(":")[0] for volume in TLS_SERVICES["certificates"]["volumes"][1:]}
    for name in (*OURS, "redis"):
        assert TLS_SERVICES[name]["volumes"] == [f"tls-{name}:/etc/kvpool/tls:ro"]
        assert f"tls-{name}" in issued
    users = [name for name, service in TLS_SERVICES.items() if any("tls-ca:" in one for one in service["volumes"])]
    assert users == ["certificates"]
    assert TLS_SERVICES["redis"]["depends_on"] == {"certificates": {"condition": "service_completed_successfully"}}
    plain = SERVICES["redis"]["command"]
    assert TLS_SERVICES["redis"]["command"][: len(plain)] == plain
    assert TLS_SERVICES["redis"]["command"][len(plain) :][:2] == ["--port", "0"]


@pytest.mark.slow
def test_certificates_are_made_once_and_again_on_request(tmp_path: Path) -> None:
    def make(*options: str) -> dict[str, bytes]:
        command = ["sh", str(REPOSITORY / "deploy/tls/make-certificates.sh"), str(tmp_path / "made"), *options]
        subprocess.run(command, check=True, capture_output=True, timeout=60, env={"PATH": os.environ["PATH"]})
        return {str(file.relative_to(tmp_path / "made")): file.read_bytes() for file in (tmp_path / "made").glob("*/*")}

    first = make()
    assert {path.partition("/")[0] for path in first} == {"ca", "client", "redis", *OURS}
    assert make() == first
    renewed = make("--renew")
    assert {path for path in first if renewed[path] == first[path]} == {
        path for path in first if path.endswith("ca.crt") or path.startswith("ca/")
    }
    authority = x509.load_pem_x509_certificate(renewed["ca/ca.crt"])
    for name in ("client", "redis", *OURS):
        certificate = x509.load_pem_x509_certificate(renewed[f"{name}/tls.crt"])
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert name in names.get_values_for_type(x509.DNSName)
        assert (tmp_path / "made" / name / "tls.key").stat().st_mode & 0o077 == 0
    (tmp_path / "made" / "ca" / "ca.crt").unlink()  # whose certificates are then of another CA than the next one
    kept = make("--renew")
    assert kept["ca/ca.crt"] != renewed["ca/ca.crt"]
    assert {path: kept[path] for path in kept if not path.startswith("ca/")} == {
        path: renewed[path] for path in renewed if not path.startswith("ca/")
    }


def test_an_image_with_the_wheel_is_built_from_the_folder_of_the_wheel() -> None:
    """.dockerignore leaves dist/ out of the checkout's own build context."""
    for name in ("docs/quickstart-docker.md", "k8s/README.md"):
        text = (REPOSITORY / name).read_text()
        assert re.findall(r"docker build -f Dockerfile\.vllm -t \S+ (\S+)", text) == ["dist"], name
    assert "\nCOPY kvpool-*.whl /tmp/\n" in (REPOSITORY / "docs/quickstart-docker.md").read_text()
