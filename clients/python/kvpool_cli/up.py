"""`kvpool up`: an embedded cluster on this machine, in the foreground or detached."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvpool.core.errors import StartupFailed
from kvpool_cli.child import READY_TIMEOUT_S
from kvpool_cli.cluster import ClusterOptions, check_gpus, visible_gpus
from kvpool_cli.logs import last_lines, log_dir
from kvpool_cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, fail, say, show, size, size_from_text, table
from kvpool_cli.state import ClusterState, StateLock, read_state, state_file
from kvpool_cli.supervise import Supervisor, end_leftovers


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool up`."""
    parser.description = "Start a cluster on this machine and print where it listens. Ctrl-C drains and ends it."
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ClusterOptions)}

    def add(flag: str, text: str, kind: Callable[[str], object] = str, **more: Any) -> None:
        default = defaults[flag.removeprefix("--").replace("-", "_")]
        shown = size(default).replace(" ", "") if kind is size_from_text else default
        parser.add_argument(
            flag, type=kind, default=default, help=f"{text} (default {shown})" if shown else text, **more
        )

    add("--pagestores", "number of pagestores", int)
    parser.add_argument(
        "--agents",
        type=int,
        default=None,
        help="number of agents (default: one per pagestore); with --device cuda one per GPU at most",
    )
    parser.add_argument("--detach", action="store_true", help="return once it serves; end it with `kvpool down`")
    parser.add_argument("--redis", default="", metavar="URL", help="use this Redis; also env KVPOOL_REDIS_URL")
    parser.add_argument("--memory-index", action="store_true", help="no Redis: the index keeps locations in its memory")
    add("--arena-bytes", "staging memory of a pagestore", size_from_text, metavar="SIZE")
    add("--disk-bytes", "disk tier of a pagestore", size_from_text, metavar="SIZE")
    add("--host", "address to listen on")
    add("--index-port", "port of the index; 0 takes a free one", int)
    add("--lease-ttl-ms", "a dead node leaves matches within this", int)
    add("--device", "where engines of the agents keep their KV", choices=("cpu", "cuda"))
    add("--log-level", "how much the services log", choices=("debug", "info", "warning", "error"))
    for flag, what in (("cert", "certificate chain"), ("key", "private key"), ("ca", "CA bundle")):
        add(f"--tls-{flag}-file", f"{what} of all services, which then speak TLS; all three together", metavar="FILE")
    add("--tls-client-auth", "whether callers need a certificate, with TLS", choices=("require", "none"))
    parser.set_defaults(run=run_up)


def run_up(arguments: argparse.Namespace) -> int:
    """Start a cluster; in the foreground until it is told to end."""
    options = ClusterOptions(
        state_dir=arguments.state_dir,
        pagestores=arguments.pagestores,
        agents=arguments.pagestores if arguments.agents is None else arguments.agents,
        host=arguments.host,
        redis_url=arguments.redis or os.environ.get("KVPOOL_REDIS_URL", ""),
        memory_index=arguments.memory_index,
        arena_bytes=arguments.arena_bytes,
        disk_bytes=arguments.disk_bytes,
        index_port=arguments.index_port,
        lease_ttl_ms=arguments.lease_ttl_ms,
        device=arguments.device,
        log_level=arguments.log_level,
        tls_cert_file=arguments.tls_cert_file,
        tls_key_file=arguments.tls_key_file,
        tls_ca_file=arguments.tls_ca_file,
        tls_client_auth=arguments.tls_client_auth,
    )
    check_gpus(options, visible_gpus)
    if arguments.detach:
        return _detach(arguments.state_dir, [argument for argument in arguments.argv if argument != "--detach"])
    return _Foreground(options).run()


class _Foreground:
    """A cluster that lives as long as this process; the first signal drains it, a second one kills it."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._signal_count = 0
        self._supervisor: Supervisor | None = None

    def run(self) -> int:
        """Serve until a signal comes; EXIT_FAILED if a second one cut the draining off. Raises StartupFailed."""
        lock = StateLock(self._options.state_dir)
        lock.acquire()
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(signal.SIGHUP, self._on_signal)
        try:
            clean_leftovers(self._options.state_dir)
            self._supervisor = Supervisor(self._options, lambda: self._signal_count > 0, say)
            state = self._supervisor.start()
            show(f"{describe(state)}\n\nCtrl-C drains and ends the cluster.")
            self._supervisor.watch()
        except StartupFailed:
            if not self._signal_count:
                raise
            return EXIT_FAILED
        finally:
            if self._supervisor is not None:
                if self._signal_count:
                    say("draining; again to end at once")
                self._supervisor.stop()
            state_file(self._options.state_dir).unlink(missing_ok=True)
            lock.release()
        return EXIT_OK if self._signal_count == 1 else EXIT_FAILED  # not all was drained

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal_count += 1
        if self._signal_count > 1 and self._supervisor is not None:
            self._supervisor.kill()


def clean_leftovers(state_dir: Path) -> None:
    """End what a killed `kvpool up` left; each service cleans its own files when it starts. Raises StartupFailed."""
    state = read_state(state_dir)
    if state is not None:
        ended = end_leftovers(state)
        if ended:
            say(f"ended leftovers of a killed cluster: {', '.join(ended)}")
        state_file(state_dir).unlink(missing_ok=True)


def _detach(state_dir: Path, argv: list[str]) -> int:
    lock = StateLock(state_dir)
    lock.acquire()  # says at once, and in the foreground, that a cluster runs here already
    lock.release()
    log_path = log_dir(state_dir) / "up.log"
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("wb")
    except OSError as error:
        raise StartupFailed(f"{log_path} cannot be written ({error.strerror}); choose another --state-dir") from error
    with log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "kvpool_cli.main", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        return _await_detached(state_dir, supervisor, log_path)
    except KeyboardInterrupt:
        supervisor.terminate()
        raise


def _await_detached(state_dir: Path, supervisor: subprocess.Popen[bytes], log_path: Path) -> int:
    deadline_s = time.monotonic() + READY_TIMEOUT_S * 3
    while time.monotonic() < deadline_s:
        if supervisor.poll() is not None:
            lines = last_lines(log_path, 1) or ["it ended at once"]
            return fail(lines[-1].removeprefix("kvpool: "), code=supervisor.returncode or EXIT_FAILED)
        state = read_state(state_dir)
        if state is not None and state.ready and state.supervisor_pid == supervisor.pid:
            show(f"{describe(state)}\n\nEnd it with `kvpool down`.")
            supervisor.returncode = 0  # it goes on without us: Popen must not warn that nobody waited for it
            return EXIT_OK
        time.sleep(0.05)
    supervisor.terminate()
    raise CommandFailed(f"the cluster did not come up in time; see {log_path}")


def describe(state: ClusterState) -> str:
    """The store and the table of endpoints."""
    keys = ("endpoint", "bulk_endpoint", "socket", "metrics_url")
    rows = [
        [process.name, process.pid, *(process.endpoints.get(key) or "-" for key in keys)] for process in state.processes
    ]
    headers = ["process", "pid", "endpoint", "bulk", "socket", "metrics"]
    return f"store: {state.store}\n\n{table(headers, rows, right=[1])}"
