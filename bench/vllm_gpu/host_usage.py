"""Which processors were busy while a phase ran: a slow result may be the host's."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process_usage import cpu_s
from kvpool.core.errors import StartupFailed
from kvpool_cli.state import read_state

_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")  # columns of /proc/stat
_BUSY = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True, slots=True)
class UsageSample:
    """Seconds since the start of the host and of each process. states: of all processors together, by the states of
    /proc/stat, which counts the whole host. services: of a cluster, by name and pid."""

    at_s: float
    states: Mapping[str, float]
    services: Mapping[tuple[str, int], float]

    @classmethod
    def take(cls, agent: str) -> UsageSample:
        """Return the usage until now. agent: an agent's endpoint, whose cluster's services are counted."""
        with open("/proc/stat") as file:
            states = processor_seconds(file.readline(), os.sysconf("SC_CLK_TCK"))
        return cls(time.monotonic(), states, _service_seconds(state_directory(agent)))


def used(before: UsageSample, after: UsageSample) -> dict[str, Any]:
    """Return how many processors were busy, stolen by other guests of the machine, and idle while a disk was waited
    for; and how many each service used that ran at both samples."""
    took_s = after.at_s - before.at_s
    spent = {name: (seconds - before.states[name]) / took_s for name, seconds in after.states.items()}
    services = {
        f"{name} ({pid})": round((seconds - before.services[name, pid]) / took_s, 2)
        for (name, pid), seconds in after.services.items()
        if (name, pid) in before.services
    }
    return {
        "busy": round(sum(spent[name] for name in _BUSY), 2),
        "stolen": round(spent["steal"], 2),
        "waiting for a disk": round(max(0.0, spent["iowait"]), 2),  # the kernel's count may fall
        "services": services,
    }


def processor_seconds(line: str, ticks_per_s: int) -> dict[str, float]:
    """Return the seconds in each state. line: the first of /proc/stat; time of guests is in its first two columns."""
    return {name: int(ticks) / ticks_per_s for name, ticks in zip(_STATES, line.split()[1:], strict=False)}


def state_directory(agent: str) -> Path | None:
    """Return the state directory of the cluster whose agent this is; None if the endpoint does not say it. agent:
    "unix:DIRECTORY/run/agent-0.sock" or "auto:DIRECTORY/run"."""
    kind, _, path = agent.partition(":")
    if kind not in ("unix", "auto") or not path:
        return None
    return Path(path).parent if kind == "auto" else Path(path).parent.parent


def _service_seconds(directory: Path | None) -> dict[tuple[str, int], float]:
    """Return the processor time of each service that runs now."""
    try:
        state = read_state(directory) if directory is not None else None
    except StartupFailed:  # not a cluster's: the bench does not need it
        state = None
    seconds: dict[tuple[str, int], float] = {}
    for process in state.processes if state is not None else ():
        try:
            if process.alive():
                seconds[process.name, process.pid] = cpu_s(process.pid)
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return seconds
