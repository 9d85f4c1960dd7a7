"""One process of an embedded cluster: started, watched until it serves, restarted on its ports, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from kvpool.core.errors import StartupFailed
from kvpool_cli.cluster import ProcessPlan
from kvpool_cli.logs import last_lines
from kvpool_cli.state import ProcessState, start_ticks

READY_TIMEOUT_S = 60.0
POLL_S = 0.05
_LOG_ROTATE_BYTES = 16 << 20  # at a start; what was there is kept once more under another name
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 1.0, 30.0
_STEADY_S = 60.0  # a process that ran for so long is started again without a pause


class Child:
    """One started process. Start it from a thread that lives as long as the cluster: the kernel ends it with that."""

    def __init__(self, plan: ProcessPlan, log_path: Path) -> None:
        """Starts it. Raises StartupFailed if its log cannot be written."""
        self.plan, self.log_path = plan, log_path
        self.endpoints: dict[str, str] = {}
        self._log_start = 0
        self._backoff_s = _BACKOFF_FIRST_S
        self._rotate_log()
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
                raise StartupFailed(f"{self.plan.name} cannot start: {self.last_log_line()}")
            if time.monotonic() > deadline_s:
                raise StartupFailed(f"{self.plan.name} did not serve within {READY_TIMEOUT_S:g} s; see {self.log_path}")
            if should_stop():
                raise StartupFailed("interrupted")
            time.sleep(POLL_S)

    def restart_due(self) -> bool:
        """Whether a process that has ended may be started again now: one that ends at once waits longer each time."""
        return time.monotonic() - self.started_s > self._backoff_s

    def restart(self) -> None:
        """Start it again on the ports it had."""
        command = list(self.plan.command)
        for flag, key in self.plan.pins.items():
            if key in self.endpoints:
                command[command.index(flag) + 1] = _address(self.endpoints[key])
        if self.plan.ready_file is not None:
            self.plan.ready_file.unlink(missing_ok=True)
        steady = time.monotonic() - self.started_s > _STEADY_S
        self._backoff_s = _BACKOFF_FIRST_S if steady else min(self._backoff_s * 2, _BACKOFF_MAX_S)
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
        """What the current process said last, for error messages."""
        lines = last_lines(self.log_path, 1, start=self._log_start)
        # Services begin their one line with their own name, which the caller says already.
        return lines[-1].removeprefix(f"kvpool-{self.plan.role}: ") if lines else "it said nothing"

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
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we end the children in order.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.plan.environment},
                start_new_session=True,
            )

    def _rotate_log(self) -> None:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            if self.log_path.exists() and self.log_path.stat().st_size > _LOG_ROTATE_BYTES:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
            self.log_path.touch()
        except OSError as error:
            raise StartupFailed(
                f"{self.log_path} cannot be written ({error.strerror}); choose another --state-dir"
            ) from error

    def _is_ready(self) -> bool:
        if self.plan.ready_file is not None:
            try:
                raw = json.loads(self.plan.ready_file.read_text())
            except (FileNotFoundError, ValueError):
                return False
            self.endpoints = {key: str(value) for key, value in raw.items()}
            return True
        assert self.plan.ready_socket is not None, "a plan has a ready file or a socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.plan.ready_socket))
            except OSError:
                return False
        self.endpoints = {"socket": str(self.plan.ready_socket)}
        return True


def _address(endpoint: str) -> str:
    """host:port of an address or of a URL."""
    return urlsplit(endpoint).netloc if "://" in endpoint else endpoint
