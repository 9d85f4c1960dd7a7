"""Selects the agent of a worker: the configured one, or the one that announces itself for the worker's GPU.

A running agent keeps a JSON file beside its socket, `NAME.sock.json`, with `socket`, `device` (cpu or cuda),
`device_uuid` (of the GPU; empty for cpu), `host_id` and `boot_id` (the kernel's, equal for all processes of a machine).
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.core.errors import InvalidRequest, ServiceUnavailable

AUTO = "auto"
RUN_DIRECTORY_VARIABLE = "KVPOOL_RUN_DIR"
_DIRECTORIES = (
    "/run/kvpool",
    ".kvpool/run",
)  # of a machine's service, and of `kvpool cluster up` where the engine was started
_PLACEHOLDERS = ("rank", "dp", "gpu")
_UNIX = "unix:"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlacement:
    """Where a worker runs. number: on its host. replica: data parallel index. gpu: UUID of its GPU.

    For a scheduler, number and replica are those of its first worker, whose GPU it does not know; it only makes
    lookups, and any agent of its machine can answer those.
    """

    number: int = 0
    replica: int = 0
    on_gpu: bool = False
    gpu: str = ""

    @classmethod
    def of(cls, parallel: Any, rank: int, *, on_gpu: bool, gpu: str = "") -> WorkerPlacement:
        """Count as vLLM counts GPUs. Its data_parallel_rank cannot be used: 0 in every replica of a dense model."""
        replica = int(getattr(parallel, "data_parallel_index", 0))
        local = getattr(parallel, "data_parallel_rank_local", None)
        workers_here = int(getattr(parallel, "local_world_size", parallel.world_size))
        number = (replica if local is None else int(local)) * workers_here + rank % workers_here
        return cls(number=number, replica=replica, on_gpu=on_gpu, gpu=gpu)


class AgentSelector:
    """Selects the agent of one worker or scheduler. `endpoint`: of the agent selected last; empty before."""

    def __init__(self, agent: str, environment: Mapping[str, str] = os.environ, boot_id: str = "") -> None:
        """agent: see VllmSettings. boot_id: of this machine, if it differs from the kernel's."""
        self._agent, self._environment = agent, environment
        self._boot_id = boot_id or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.endpoint = ""
        self.gpu = ""
        self.keyspaces: tuple[str, ...] = ()  # that the process uses there, one for each KV cache group

    def select(self, place: WorkerPlacement) -> str:
        """Return the agent's endpoint. raises: ServiceUnavailable if none is running; InvalidRequest."""
        directories = self._directories()
        if directories:
            self.endpoint = self._announced(place, directories)
        else:
            self.endpoint = self._named(place)
        self.gpu = place.gpu
        return self.endpoint

    def _directories(self) -> Sequence[Path]:
        """Return the directories in which agents announce themselves; none if the agent is configured."""
        if self._agent == AUTO:
            given = self._environment.get(RUN_DIRECTORY_VARIABLE)
            return [Path(given)] if given else [Path(path) for path in _DIRECTORIES]
        path = self._agent.removeprefix(f"{AUTO}:").removeprefix(_UNIX)
        return [Path(path)] if self._agent.startswith(f"{AUTO}:") or os.path.isdir(path) else []

    def _named(self, place: WorkerPlacement) -> str:
        named = self._agent.replace("{rank}", str(place.number)).replace("{dp}", str(place.replica))
        if "{gpu}" not in named:
            return named
        if place.gpu:
            return named.replace("{gpu}", place.gpu)
        if place.on_gpu:  # a scheduler
            pattern = "*".join(glob.escape(part) for part in named.removeprefix(_UNIX).split("{gpu}"))
            found = sorted(glob.glob(pattern))
            if not found:
                raise ServiceUnavailable(f"there is no agent's socket {pattern}")
            return _UNIX + found[0]
        raise InvalidRequest(f"the engine has no GPU to put into {self._agent}; name its agent, or {AUTO}")

    def _announced(self, place: WorkerPlacement, directories: Sequence[Path]) -> str:
        device = "cuda" if place.on_gpu else "cpu"
        here = [one for directory in directories for one in _announcements(directory)]
        usable = [one for one in here if one.get("device") == device and one.get("boot_id") == self._boot_id]
        if place.gpu:
            usable = [one for one in usable if one.get("device_uuid") == place.gpu]
        if not usable:
            others = ", ".join(sorted({str(one.get("device_uuid") or one.get("device")) for one in here})) or "none"
            raise ServiceUnavailable(
                f"no agent of {place.gpu or f'a {device} device'} of this machine announces itself in "
                f"{', '.join(map(str, directories))} (agents there are of: {others}); start one, or name it with "
                f"agent in kv_connector_extra_config"
            )
        return _UNIX + str(usable[place.number % len(usable)]["socket"])


def check_agent(agent: str) -> None:
    """raises: InvalidRequest for a name that no agent can have."""
    if not agent:
        raise InvalidRequest(
            f'kv_connector_extra_config must name the agent: {{"agent": "unix:/path/of/agent.sock"}}, or "{AUTO}"'
        )
    unknown = sorted(set(re.findall(r"{(.*?)}", agent)) - set(_PLACEHOLDERS))
    if unknown:
        raise InvalidRequest(
            f"agent {agent!r} has {', '.join(f'{{{name}}}' for name in unknown)}; "
            f"{', '.join(f'{{{name}}}' for name in _PLACEHOLDERS)} can be filled in"
        )
    if "{gpu}" in agent and not agent.startswith(_UNIX):
        raise InvalidRequest(f"agent {agent!r}: {{gpu}} can be part of a unix socket's path only")


def _announcements(directory: Path) -> list[dict[str, Any]]:
    """Return the announcements of agents whose sockets exist, by socket name."""
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob("*.sock.json")):
        try:
            one = json.loads(path.read_text())
        except (OSError, ValueError):  # it ends, or another one writes it
            continue
        if isinstance(one, dict) and one.get("socket") and Path(str(one["socket"])).exists():
            found.append(one)
    return found
