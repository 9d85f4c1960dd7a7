"""What `kvpool cluster up` leaves for other commands: one JSON file in the state directory, and its lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpool.core.errors import StartupFailed

STATE_VERSION = 1
DEFAULT_STATE_DIR = Path(".kvpool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process of the cluster. start_ticks (from /proc) distinguishes it from a later process with the same pid."""

    name: str  # "index-0"
    role: str  # redis, index, pagestore or agent
    pid: int
    start_ticks: int
    endpoints: dict[str, str] = field(default_factory=dict)  # of its ready file
    log: str = ""

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return start_ticks(self.pid) == self.start_ticks != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """A running (or killed) cluster."""

    supervisor_pid: int
    supervisor_start_ticks: int
    store: str  # "redis (own, unix:...)", "redis (given)", "memory"
    ready: bool = False  # everything serves
    processes: tuple[ProcessState, ...] = ()

    def of_role(self, role: str) -> list[ProcessState]:
        """Processes of one role, in order."""
        return [process for process in self.processes if process.role == role]

    def supervised(self) -> bool:
        """Whether the `kvpool cluster up` that wrote this still runs."""
        return start_ticks(self.supervisor_pid) == self.supervisor_start_ticks != 0


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def state_file(state_dir: Path) -> Path:
    """Where the state lies."""
    return state_dir / "cluster.json"


def write_state(state_dir: Path, state: ClusterState) -> None:
    """Replace the state in one step: readers see the old or the new one. Raises StartupFailed."""
    path = state_file(state_dir)
    scratch = path.with_suffix(".tmp")
    try:
        scratch.write_text(json.dumps({"version": STATE_VERSION, **asdict(state)}, indent=2) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise StartupFailed(f"{path} cannot be written ({error.strerror}); choose another --state-dir") from error


def read_state(state_dir: Path) -> ClusterState | None:
    """The state, or None if there is none. Raises StartupFailed for a file that is none of ours."""
    path = state_file(state_dir)
    try:
        raw = json.loads(path.read_text())
        if raw.pop("version") != STATE_VERSION:
            raise ValueError("another version")
        processes = tuple(_process(entry) for entry in raw.pop("processes"))
        return ClusterState(processes=processes, **raw)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupFailed(
            f"{path} is not a kvpool cluster state ({error}); remove it or use another --state-dir"
        ) from error


def _process(entry: Mapping[str, Any]) -> ProcessState:
    return ProcessState(**entry)


class StateLock:
    """Held by the one `kvpool cluster up` of a state directory while it runs; the kernel drops it when that dies."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises StartupFailed if another `kvpool cluster up` runs here, or the directory cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(
                f"state directory {self._path.parent} cannot be used ({error.strerror}); choose another --state-dir"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StartupFailed(
                f"a cluster runs in {self._path.parent} already; "
                "end it with `kvpool cluster down` or choose another --state-dir"
            ) from None
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
