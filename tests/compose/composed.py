"""A composed cluster under a project name of its own, on free ports, beside any other."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvpool.client.index import IndexClient
from kvpool.client.tls import TlsCredentials
from kvpool.core.cluster import LiveNode
from tests.fixtures.patience import patient

SMOKE_VARIABLE = "KVPOOL_COMPOSE_SMOKE"
"""Set to run these tests. What else is set as for docker-compose.yml (BASE_IMAGE, PIP_INDEX_URL, ...) goes to it."""

ENGINE_SCRIPT = Path(__file__).with_name("engine.py")
PORT_VARIABLES = ("KVPOOL_INDEX_0_PORT", "KVPOOL_INDEX_1_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
SERVICES = ("redis", "index-0", "index-1", "pagestore-0", "pagestore-1", "gpuagent-0", "gpuagent-1", "prometheus")
KVPOOL_SERVICES = SERVICES[1:-1]
BUILD_TIMEOUT_S = 1800.0
COMMAND_TIMEOUT_S = 240.0


def missing_docker() -> str:
    """Why nothing can be composed here; empty if it can."""
    if shutil.which("docker") is None:
        return "no docker on the PATH: the composed cluster was not tried"
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
        if found.returncode:
            return f"`{' '.join(command)}` says {found.stderr.strip()!r}: the composed cluster was not tried"
    return ""


class ComposedCluster:
    """docker-compose.yml of a checkout. Commands raise AssertionError with what docker said."""

    def __init__(self, repository: Path, directory: Path, files: Sequence[str] = ("docker-compose.yml",)) -> None:
        """files: docker-compose.yml and overlays of the checkout, or of elsewhere."""
        self._repository = repository
        self._files = tuple(word for file in files for word in ("--file", file))
        self.project = f"kvpool-smoke-{os.getpid()}"
        self.ports = dict(zip(PORT_VARIABLES, _free_ports(len(PORT_VARIABLES)), strict=True))
        small = {"KVPOOL_ARENA_BYTES": str(256 << 20), "KVPOOL_DISK_BYTES": str(1 << 30)}
        self._environment = {**os.environ, **small, **{name: str(port) for name, port in self.ports.items()}}
        self._no_variables = directory / "none.env"  # what a .env of the checkout says is not what is tested
        self._no_variables.touch()
        configuration = json.loads(self.compose("--profile", "*", "config", "--format", "json"))
        self.services: dict[str, Any] = configuration["services"]
        self.with_grafana = self._has_image(self.services["grafana"]["image"])

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Output of a docker compose command."""
        options = ("--project-name", self.project, "--env-file", str(self._no_variables), *self._files)
        return self._run("docker", "compose", *options, *arguments, timeout_s=timeout_s)

    def docker(self, *arguments: str, stdin: Path | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Output of a docker command."""
        return self._run("docker", *arguments, stdin=stdin, timeout_s=timeout_s)

    def build(self) -> None:
        """All images."""
        self.compose("--profile", "demo", "build", timeout_s=BUILD_TIMEOUT_S)

    def up(self) -> None:
        """Return when all are healthy."""
        grafana = ("grafana",) if self.with_grafana else ()
        self.compose("up", "--detach", "--wait", "--no-build", *SERVICES, *grafana)

    def remove(self) -> None:
        """Containers, networks and volumes."""
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")

    def container(self, service: str) -> str:
        """Id of its container, running or not."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        """What docker says of its container."""
        described: list[dict[str, Any]] = json.loads(self.docker("inspect", self.container(service)))
        return described[0]

    def crash(self, service: str) -> None:
        """Kill its process behind the back of Docker, for which it ended by itself: its restart policy counts."""
        described = self.inspect(service)
        user = described["Config"]["User"]
        kill = ("sh", self.services["index-0"]["image"], "-c", f"kill -KILL {described['State']['Pid']}")
        self.docker("run", "--rm", "--pid", "host", "--network", "none", "--user", user, "--entrypoint", *kill)

    def is_healthy(self, service: str) -> bool:
        """By its own health check."""
        state = self.inspect(service)["State"]
        return bool(state["Running"]) and state.get("Health", {}).get("Status") == "healthy"

    def engine(self, node: int, operation: str, seed: int, chunk_count: int = 4) -> dict[str, Any]:
        """Store or load in a container of its own, which shares the agent's sockets and nothing else."""
        command = self.engine_command(node, self.services["gpuagent-0"]["image"])
        said = self._run(
            *command, operation, str(seed), str(chunk_count), stdin=ENGINE_SCRIPT, timeout_s=COMMAND_TIMEOUT_S
        )
        answer: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        return answer

    def engine_command(self, node: int, image: str, *options: str) -> tuple[str, ...]:
        """Runs a script, given on stdin, whose first argument is the agent of a node."""
        # Images do not carry bench/, which is not shipped.
        rig = f"{self._repository / 'bench'}:/checkout/bench:ro"
        # Not where the agent has it: engines mount it where they like.
        sockets = f"{self.project}_gpuagent-{node}-sockets:/run/agent-of-node"
        hardened = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none")
        return (
            *("docker", "run", "--rm", "--interactive", *hardened, *options, "--tmpfs", "/tmp:size=256m"),
            *("--volume", rig, "--env", "PYTHONPATH=/checkout"),
            *("--volume", sockets, "--entrypoint", "python", image, "-", "unix:/run/agent-of-node/agent.sock"),
        )

    async def nodes(self, index: int = 0, tls: TlsCredentials | None = None) -> list[LiveNode]:
        """Live nodes, as an index answers on the published port."""
        endpoint = f"127.0.0.1:{self.ports[PORT_VARIABLES[index]]}"
        client = IndexClient(patient(index_endpoints=(endpoint,), tls=tls))
        try:
            return await client.list_nodes()
        finally:
            await client.close()

    def _has_image(self, image: str) -> bool:
        if (
            subprocess.run(
                ["docker", "image", "inspect", image], check=False, capture_output=True, timeout=30
            ).returncode
            == 0
        ):
            return True
        return (
            subprocess.run(
                ["docker", "pull", "--quiet", image], check=False, capture_output=True, timeout=600
            ).returncode
            == 0
        )

    def _run(self, *command: str, timeout_s: float, stdin: Path | None = None) -> str:
        with ExitStack() as stack:
            source = stack.enter_context(stdin.open("rb")) if stdin is not None else subprocess.DEVNULL
            done = subprocess.run(
                command,
                check=False,
                cwd=self._repository,
                env=self._environment,
                stdin=source,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}"
        return done.stdout


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
