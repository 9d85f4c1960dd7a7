"""Starts the processes of a cluster, keeps them running, and ends them in an order that loses nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvpool.core.errors import StartupFailed
from kvpool_cli.child import POLL_S, Child
from kvpool_cli.cluster import (
    ClusterOptions,
    ProcessPlan,
    plan_agent,
    plan_index,
    plan_pagestore,
    plan_store,
    remove_socket_dir,
    socket_dir,
)
from kvpool_cli.logs import log_dir
from kvpool_cli.state import ClusterState, ProcessState, start_ticks, write_state

STOP_TIMEOUT_S = 60.0
WATCH_INTERVAL_S = 0.25
LEFTOVER_DRAIN_S = 5.0
STOP_ORDER = ("agent", "pagestore", "index", "redis")


class Supervisor:
    """The running cluster of one `kvpool cluster up`. Use it from the main thread: see Child."""

    def __init__(self, options: ClusterOptions, should_stop: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._options, self._should_stop, self._say = options, should_stop, say
        self._children: list[Child] = []
        self._store = plan_store(options)

    def start(self) -> ClusterState:
        """Start everything in order. Raises StartupFailed; what was started is left for `stop`."""
        self._prepare_directories()
        if self._store.process is not None:
            self._start(self._store.process)
        index = self._start(plan_index(self._options, self._store))
        endpoint = index.endpoints["endpoint"]
        self._start_all([plan_pagestore(self._options, number, endpoint) for number in range(self._options.pagestores)])
        self._start_all([plan_agent(self._options, number, endpoint) for number in range(self._options.agents)])
        return self._publish(ready=True)

    def watch(self) -> None:
        """Restart what dies, until asked to stop."""
        while not self._should_stop():
            for child in self._children:
                code = child.exit_code()
                if code is not None and child.restart_due():
                    self._say(f"{child.plan.name} ended with code {code}: {child.last_log_line()}; starting it again")
                    child.restart()
                    self._publish(ready=True)
            time.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        """Drain: engines' side first, the store last. What does not end in time is killed. Nothing is left in /tmp."""
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
        remove_socket_dir(self._options.state_dir)

    def kill(self) -> None:
        """End everything at once, as a power cut would; `stop` still reaps."""
        for child in self._children:
            child.send(signal.SIGKILL)

    def _start(self, plan: ProcessPlan) -> Child:
        return self._start_all([plan])[0]

    def _start_all(self, plans: Sequence[ProcessPlan]) -> list[Child]:
        started = []
        for plan in plans:
            if plan.ready_file is not None:
                plan.ready_file.unlink(missing_ok=True)
            child = Child(plan, log_dir(self._options.state_dir.resolve()) / f"{plan.name}.log")
            self._children.append(child)
            started.append(child)
        self._publish()  # before they are ready: whatever happens now, the next `up` knows whom to end
        for child in started:
            child.wait_ready(self._should_stop)
        return started

    def _publish(self, *, ready: bool = False) -> ClusterState:
        state = ClusterState(
            supervisor_pid=os.getpid(),
            supervisor_start_ticks=start_ticks(os.getpid()),
            store=self._store.description,
            ready=ready,
            processes=tuple(child.state() for child in self._children),
        )
        write_state(self._options.state_dir, state)
        return state

    def _prepare_directories(self) -> None:
        run_dir = socket_dir(self._options.state_dir)
        try:
            for directory in (self._options.state_dir / "redis", run_dir):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartupFailed(
                f"{error.filename} cannot be made ({error.strerror}); choose another --state-dir"
            ) from error
        if run_dir.stat().st_uid != os.getuid():
            raise StartupFailed(f"{run_dir} belongs to another user; choose a shorter --state-dir")


def end_leftovers(state: ClusterState) -> list[str]:
    """End what a killed `kvpool cluster up` has left behind; returns the names. The pids are checked by start time.

    They have been draining since their parent died, and a second signal would only cut that off. Those that
    are not done soon are killed, which the services are made for.
    """
    left = [process for process in state.processes if process.alive()]
    _wait_ended(left, LEFTOVER_DRAIN_S)
    for process in left:
        if process.alive():
            with suppress(ProcessLookupError):  # it may end in this instant
                os.kill(process.pid, signal.SIGKILL)
    _wait_ended(left, 10.0)
    return [process.name for process in left]


def _wait_ended(processes: Sequence[ProcessState], patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while any(process.alive() for process in processes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
