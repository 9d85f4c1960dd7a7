"""What a host did while a phase ran: whether others took processor time from it, and what a cluster's services used."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bench.process_usage import cpu_s

_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")  # columns of /proc/stat
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class HostUsage:
    """Since it was made."""

    def __init__(self, agent: str) -> None:
        """agent: endpoint of an agent of `kvpool cluster up`, whose services count; empty: none."""
        self._cluster = cluster_file(agent) if agent else None
        self._began_s, self._states, self._services = time.monotonic(), _states(), self._cpu_s()

    def document(self) -> dict[str, Any]:
        """Processors busy, stolen by other guests of the machine, and idle while a disk is waited for, each as a number
        of processors; and of each service that ran all the time."""
        took_s = time.monotonic() - self._began_s
        spent = {name: (ticks - self._states[name]) / _TICKS_PER_S / took_s for name, ticks in _states().items()}
        busy = sum(spent[name] for name in ("user", "nice", "system", "irq", "softirq"))
        now = self._cpu_s()
        services = {name: (now[name] - used_s) / took_s for name, used_s in self._services.items() if name in now}
        return {
            "busy": round(busy, 2),
            "stolen": round(spent["steal"], 2),
            "waiting for a disk": round(spent["iowait"], 2),
            "services": {f"{name} ({pid})": round(share, 2) for (name, pid), share in services.items()},
        }

    def _cpu_s(self) -> dict[tuple[str, int], float]:
        used: dict[tuple[str, int], float] = {}
        if self._cluster is not None and self._cluster.is_file():
            for process in json.loads(self._cluster.read_text())["processes"]:
                try:
                    used[process["name"], process["pid"]] = cpu_s(process["pid"])
                except FileNotFoundError:
                    continue  # it is being started again
        return used


def cluster_file(agent: str) -> Path:
    """The state file of the cluster whose agent this is. agent: unix:DIRECTORY/run/agent-0.sock, or
    auto:DIRECTORY/run."""
    kind, _, path = agent.partition(":")
    run = Path(path) if kind == "auto" else Path(path).parent
    return run.parent / "cluster.json"


def _states() -> dict[str, int]:
    """Ticks that all processors together have spent in each state."""
    with open("/proc/stat") as file:
        return dict(zip(_STATES, map(int, file.readline().split()[1:]), strict=False))
