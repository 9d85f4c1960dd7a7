"""Starts the processes of a cluster, keeps them running, and ends them in an order that loses nothing."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool.cli.cluster import (
    ClusterOptions,
    ProcessPlan,
    plan_agent,
    plan_index,
    plan_pagestore,
    plan_store,
    socket_dir,
)
from kvpool.cli.state import ClusterState, ProcessState, start_ticks, write_state
from kvpool.core.errors import StartupFailed

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
RESTART_BACKOFF_S = 1.0
STOP_ORDER = ("agent", "pagestore", "index", "redis")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """Runs in the child before exec: a `kvpool up` that is killed takes its children along."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Child:
    """One started process."""

    def __init__(self, plan: ProcessPlan, log_path: Path) -> None:
        self.plan, self.log_path = plan, log_path
        self.endpoints: dict[str, str] = {}
        self._process = self._start(plan.command)
        self.started_s = time.monotonic()

    @property
    def pid(self) -> int:
        """Of the current process."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_ready(self, should_stop: Callable[[], bool]) -> None:
        """Wait until it serves. Raises StartupFailed with the last line of its log if it ends or takes too long."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not self._is_ready():
            if self.exit_code() is not None:
                raise StartupFailed(f"{self.plan.name} ended at once: {self.last_log_line()}")
            if time.monotonic() > deadline_s:
                raise StartupFailed(f"{self.plan.name} did not serve within {READY_TIMEOUT_S:g} s; see {self.log_path}")
            if should_stop():
                raise StartupFailed("interrupted")
            time.sleep(POLL_S)

    def restart(self) -> None:
        """Start it again on the ports it had."""
        command = list(self.plan.command)
        for flag, key in self.plan.pins.items():
            command[command.index(flag) + 1] = self.endpoints[key]
        if self.plan.ready_file is not None:
            self.plan.ready_file.unlink(missing_ok=True)
        self._process = self._start(command)
        self.started_s = time.monotonic()

    def send(self, number: signal.Signals) -> None:
        """Signal it if it runs."""
        if self.exit_code() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """True once it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_log_line(self) -> str:
        """For error messages."""
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "(its log is empty)"

    def state(self) -> ProcessState:
        """For the state file."""
        return ProcessState(
            name=self.plan.name,
            role=self.plan.role,
            pid=self.pid,
            start_ticks=start_ticks(self.pid),
            endpoints=self.endpoints,
            log=str(self.log_path),
        )

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            # A process group of its own: Ctrl-C in the terminal reaches us, and we end the children in order.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.plan.environment},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def _is_ready(self) -> bool:
        if self.plan.ready_file is not None:
            try:
                raw = json.loads(self.plan.ready_file.read_text())
            except (FileNotFoundError, ValueError):
                return False
            self.endpoints = {key: str(value) for key, value in raw.items()}
            return True
        assert self.plan.ready_socket is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.plan.ready_socket))
            except OSError:
                return False
        self.endpoints = {"socket": str(self.plan.ready_socket)}
        return True


class Supervisor:
    """The running cluster of one `kvpool up`."""

    def __init__(self, options: ClusterOptions, should_stop: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._options, self._should_stop, self._say = options, should_stop, say
        self._children: list[Child] = []
        self._store = plan_store(options)

    @property
    def store_description(self) -> str:
        """What the index keeps its locations in."""
        return self._store.description

    def start(self) -> ClusterState:
        """Start everything in order. Raises StartupFailed; what was started is left for `stop`."""
        self._prepare_directories()
        if self._store.process is not None:
            self._start(self._store.process)
        index = self._start(plan_index(self._options, self._store))
        endpoint = index.endpoints["endpoint"]
        self._start_all([plan_pagestore(self._options, number, endpoint) for number in range(self._options.pagestores)])
        self._start_all([plan_agent(self._options, number, endpoint) for number in range(self._options.agents)])
        return self._publish()

    def watch(self) -> None:
        """Restart what dies, until asked to stop."""
        while not self._should_stop():
            for child in self._children:
                code = child.exit_code()
                if code is not None and time.monotonic() - child.started_s > RESTART_BACKOFF_S:
                    self._say(f"{child.plan.name} ended with code {code}: {child.last_log_line()}; starting it again")
                    child.restart()
                    self._publish()
            time.sleep(0.25)

    def stop(self) -> None:
        """Drain: engines' side first, the store last. What does not end in time is killed."""
        for role in STOP_ORDER:
            group = [child for child in self._children if child.plan.role == role]
            for child in group:
                child.send(signal.SIGTERM)
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            for child in group:
                if not child.wait(max(0.1, deadline_s - time.monotonic())):
                    self._say(f"{child.plan.name} did not end within {STOP_TIMEOUT_S:g} s and is killed")
                    child.send(signal.SIGKILL)
                    child.wait(10)

    def _start(self, plan: ProcessPlan) -> Child:
        return self._start_all([plan])[0]

    def _start_all(self, plans: Sequence[ProcessPlan]) -> list[Child]:
        started = []
        for plan in plans:
            if plan.ready_file is not None:
                plan.ready_file.unlink(missing_ok=True)
            child = Child(plan, self._options.state_dir.resolve() / "logs" / f"{plan.name}.log")
            self._children.append(child)
            started.append(child)
        self._publish()  # before they are ready: whatever happens now, the next `up` knows whom to end
        for child in started:
            child.wait_ready(self._should_stop)
        return started

    def _publish(self) -> ClusterState:
        state = ClusterState(
            supervisor_pid=os.getpid(),
            supervisor_start_ticks=start_ticks(os.getpid()),
            store=self._store.description,
            processes=tuple(child.state() for child in self._children),
        )
        write_state(self._options.state_dir, state)
        return state

    def _prepare_directories(self) -> None:
        try:
            for directory in (self._options.state_dir / "redis", socket_dir(self._options.state_dir)):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartupFailed(
                f"{error.filename} cannot be made ({error.strerror}); choose another --state-dir"
            ) from error
        run_dir = socket_dir(self._options.state_dir)
        if run_dir.stat().st_uid != os.getuid():
            raise StartupFailed(f"{run_dir} belongs to another user; choose a shorter --state-dir")


def end_leftovers(state: ClusterState) -> list[str]:
    """Kill what a killed `kvpool up` may have left behind; returns their names. The pids are checked by start time."""
    ended = []
    for process in state.processes:
        if process.alive():
            os.kill(process.pid, signal.SIGKILL)
            ended.append(process.name)
    deadline_s = time.monotonic() + 10
    while any(process.alive() for process in state.processes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return ended
