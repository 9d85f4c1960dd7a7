"""The demo's cluster: two pagestores with an agent each, started and ended with the kvpool command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvpool.core.errors import StartupFailed
from kvpool_cli.logs import last_lines, log_dir
from kvpool_cli.state import ClusterState, StateLock, read_state, start_ticks

KEYSPACE_NAME = "demo"
ARENA_BYTES = 384 << 20
DISK_BYTES = 8 << 30
MARKER = "made-by-kvpool-demo"
COMMAND_TIMEOUT_S = 240.0
DEATH_TIMEOUT_S = 20.0
POLL_S = 0.1
LOG_LINE_MAX = 500


class CommandFailed(Exception):
    """A kvpool command did not succeed; the message is what it said."""


class DemoCluster:
    """A cluster in a directory of its own. Raises StartupFailed for a directory that is not the demo's."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        """device: of the engines, cpu or cuda."""
        self.directory, self._device = directory, device
        if directory.exists() and any(directory.iterdir()) and not (directory / MARKER).exists():
            raise StartupFailed(f"{directory} is not empty and not of the demo; choose another --state-dir")

    def wipe(self) -> None:
        """Begin with nothing: an earlier run that was killed may have left a cluster and its pages."""
        self.down()
        try:
            if self.directory.exists():
                shutil.rmtree(self.directory)
            self.directory.mkdir(parents=True)
            (self.directory / MARKER).touch()
        except OSError as error:
            raise StartupFailed(
                f"{error.filename} cannot be written ({error.strerror}); choose another --state-dir"
            ) from error

    def up(self) -> None:
        """Start it, on what it had before if it ran before. Raises CommandFailed."""
        sizes = ("--arena-bytes", str(ARENA_BYTES), "--disk-bytes", str(DISK_BYTES))
        self._kvpool(
            "cluster", "up", "--pagestores", "2", "--agents", "2", "--device", self._device, "--detach", *sizes
        )

    def agent(self, number: int) -> str:
        """Endpoint of an agent."""
        return f"unix:{self._state().of_role('agent')[number].endpoints['socket']}"

    def flush(self) -> None:
        """Wait until every page is on disk. Raises CommandFailed."""
        self._kvpool("cache", "flush")

    def matched_tokens(self, keyspace: str, tokens: Sequence[int]) -> int:
        """Leading tokens of a prompt that the cluster can give. Raises CommandFailed."""
        answer = json.loads(
            self._kvpool("cache", "match", "-", "--json", "--keyspace", keyspace, text=json.dumps(list(tokens)))
        )
        return int(answer["matched_chunks"]) * int(answer["chunk_tokens"])

    def kill(self) -> None:
        """SIGKILL for every process, the supervisor, the index and its Redis included, and wait until they are gone."""
        state = self._state()
        pids = [(process.pid, process.start_ticks) for process in state.processes]
        supervisor = (state.supervisor_pid, state.supervisor_start_ticks)
        # Stopped first: it would start again what dies, and its own death would tell the others to drain.
        for number, targets in ((signal.SIGSTOP, [supervisor]), (signal.SIGKILL, [*pids, supervisor])):
            for pid, ticks in targets:
                if start_ticks(pid) == ticks:
                    os.kill(pid, number)
        deadline_s = time.monotonic() + DEATH_TIMEOUT_S
        while any(start_ticks(pid) == ticks for pid, ticks in [*pids, supervisor]):
            if time.monotonic() > deadline_s:
                raise CommandFailed("processes of the cluster did not die")
            time.sleep(POLL_S)

    def down(self) -> None:
        """End it if it runs, by force if it does not end otherwise."""
        deadline_s = time.monotonic() + COMMAND_TIMEOUT_S
        while self.directory.exists() and (read_state(self.directory) is not None or self._is_locked()):
            if read_state(self.directory) is not None:
                self._end()
            elif time.monotonic() > deadline_s:
                print(f"demo: a process holds {self.directory} and does not end", file=sys.stderr)
                break
            else:
                time.sleep(POLL_S)  # it is starting or ending just now

    def _end(self) -> None:
        try:
            self._kvpool("cluster", "down")
        except (CommandFailed, subprocess.TimeoutExpired) as error:
            print(f"demo: the cluster is killed, because it did not end by itself: {error}", file=sys.stderr)
            self.kill()
            self._kvpool("cluster", "down")  # forgets it

    def _is_locked(self) -> bool:
        lock = StateLock(self.directory)
        try:
            lock.acquire()
        except StartupFailed:
            return True
        lock.release()
        return False

    def remove_data(self) -> None:
        """Free the disk; logs and sockets' directory stay."""
        for path in self.directory.iterdir():
            if path.is_dir() and path != log_dir(self.directory):
                shutil.rmtree(path, ignore_errors=True)

    def log_tails(self, line_count: int = 8) -> str:
        """The last lines of every log, services and engines."""
        paths = sorted(log_dir(self.directory).glob("*.log"))
        lines = (f"{path.stem}: {line}" for path in paths for line in last_lines(path, line_count))
        return "\n".join(line if len(line) <= LOG_LINE_MAX else f"{line[:LOG_LINE_MAX]} ..." for line in lines)

    def _state(self) -> ClusterState:
        state = read_state(self.directory)
        if state is None:
            raise CommandFailed(f"no cluster runs in {self.directory}")
        return state

    def _kvpool(self, *arguments: str, text: str | None = None) -> str:
        command = [sys.executable, "-m", "kvpool_cli", "--state-dir", str(self.directory), *arguments]
        # A session of its own: Ctrl-C reaches the demo alone, which then ends the command in its own order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(text, timeout=COMMAND_TIMEOUT_S)
        except BaseException:
            process.send_signal(signal.SIGINT)  # an `up` that is not done takes its cluster along
            process.communicate()
            raise
        if process.returncode:
            said = (errors or output).strip() or f"exit code {process.returncode}"
            raise CommandFailed(f"kvpool {arguments[0]}: {said.removeprefix('kvpool: ')}")
        return output
