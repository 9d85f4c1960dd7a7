"""`kvpool up`, `kvpool down`, `kvpool logs`: an embedded cluster on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvpool.cli.cluster import ClusterOptions
from kvpool.cli.output import EXIT_FAILED, EXIT_OK, fail, table
from kvpool.cli.state import ClusterState, StateLock, read_state, state_file
from kvpool.cli.supervise import READY_TIMEOUT_S, STOP_TIMEOUT_S, Supervisor, end_leftovers
from kvpool.core.errors import StartupFailed

ENDPOINT_KEYS = ("endpoint", "socket", "bulk_endpoint")


def add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `kvpool up`."""
    parser = commands.add_parser(
        "up",
        help="start a cluster on this machine: Redis, index, pagestores, agents",
        description="Start a cluster on this machine and print where it listens. Ctrl-C drains and ends it.",
    )
    parser.add_argument("--pagestores", type=int, default=1, help="number of pagestores (default 1)")
    parser.add_argument("--agents", type=int, default=None, help="number of agents (default: one per pagestore)")
    parser.add_argument("--detach", action="store_true", help="return once it serves; end it with `kvpool down`")
    parser.add_argument("--redis", default="", metavar="URL", help="use this Redis; also env KVPOOL_REDIS_URL")
    parser.add_argument("--memory-index", action="store_true", help="no Redis: the index keeps locations in its memory")
    parser.add_argument(
        "--arena-bytes", type=_bytes, default=1 << 30, help="staging memory of a pagestore (default 1GiB)"
    )
    parser.add_argument("--disk-bytes", type=_bytes, default=16 << 30, help="disk tier of a pagestore (default 16GiB)")
    parser.add_argument("--shm-dir", default="", help="directory of staging memory (default /dev/shm)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--index-port", type=int, default=0, help="port of the index (default: a free one)")
    parser.add_argument(
        "--lease-ttl-ms", type=int, default=5000, help="a dead node leaves matches within this (default 5000)"
    )
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
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
        shm_dir=arguments.shm_dir,
        index_port=arguments.index_port,
        lease_ttl_ms=arguments.lease_ttl_ms,
        log_level=arguments.log_level,
    )
    return _detach(arguments.state_dir) if arguments.detach else _foreground(options)


def _foreground(options: ClusterOptions) -> int:
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    lock = StateLock(options.state_dir)
    lock.acquire()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    supervisor: Supervisor | None = None
    try:
        _clean(options.state_dir)
        supervisor = Supervisor(
            options, lambda: stopping, lambda text: print(f"kvpool: {text}", file=sys.stderr, flush=True)
        )
        state = supervisor.start()
        print(describe(state), flush=True)
        print("\nCtrl-C drains and ends the cluster.", flush=True)
        supervisor.watch()
        print("kvpool: draining", file=sys.stderr, flush=True)
        return EXIT_OK
    except StartupFailed:
        if stopping:
            return EXIT_FAILED
        raise
    finally:
        if supervisor is not None:
            supervisor.stop()
        state_file(options.state_dir).unlink(missing_ok=True)
        lock.release()


def _clean(state_dir: Path) -> None:
    """End what a killed `kvpool up` left; each service cleans its own files when it starts."""
    state = read_state(state_dir)
    if state is not None:
        ended = end_leftovers(state)
        if ended:
            print(f"kvpool: ended leftovers of a killed cluster: {', '.join(ended)}", file=sys.stderr)
        state_file(state_dir).unlink(missing_ok=True)


def _detach(state_dir: Path) -> int:
    lock = StateLock(state_dir)
    lock.acquire()  # says at once, and in the foreground, that a cluster runs here already
    lock.release()
    log_path = state_dir / "logs" / "up.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "kvpool.cli.main",
        *(argument for argument in sys.argv[1:] if argument != "--detach"),
    ]
    with log_path.open("wb") as log:
        supervisor = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    deadline_s = time.monotonic() + READY_TIMEOUT_S * 3
    while time.monotonic() < deadline_s:
        if supervisor.poll() is not None:
            lines = log_path.read_text(errors="replace").strip().splitlines()
            text = lines[-1] if lines else "it ended at once"
            return fail(text.removeprefix("kvpool: "), code=supervisor.returncode or EXIT_FAILED)
        if "Ctrl-C drains" in log_path.read_text(errors="replace"):
            state = read_state(state_dir)
            assert state is not None
            print(describe(state))
            print("\nEnd it with `kvpool down`.")
            return EXIT_OK
        time.sleep(0.1)
    supervisor.terminate()
    return fail(f"the cluster did not come up in time; see {log_path}")


def describe(state: ClusterState) -> str:
    """The table of endpoints."""
    rows = [
        [
            process.name,
            process.pid,
            next((process.endpoints[key] for key in ENDPOINT_KEYS if process.endpoints.get(key)), "-"),
            process.endpoints.get("socket", "-"),
            process.endpoints.get("metrics_url", "-"),
        ]
        for process in state.processes
    ]
    return f"store: {state.store}\n\n{table(['process', 'pid', 'endpoint', 'socket', 'metrics'], rows, right=[1])}"


def add_down(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `kvpool down`."""
    parser = commands.add_parser("down", help="drain and end the cluster that `kvpool up` started")
    parser.set_defaults(run=run_down)


def run_down(arguments: argparse.Namespace) -> int:
    """Tell the supervisor to drain; clean up after one that was killed."""
    state = read_state(arguments.state_dir)
    if state is None:
        print("no cluster runs here")
        return EXIT_OK
    if not state.supervised():
        ended = end_leftovers(state)
        state_file(arguments.state_dir).unlink(missing_ok=True)
        print(f"ended leftovers: {', '.join(ended)}" if ended else "the cluster was dead already")
        return EXIT_OK
    os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S * 4 + 30
    while state.supervised():
        if time.monotonic() > deadline_s:
            return fail(f"`kvpool up` (pid {state.supervisor_pid}) did not end; see {arguments.state_dir / 'logs'}")
        time.sleep(0.05)
    print("cluster ended")
    return EXIT_OK


def add_logs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `kvpool logs`."""
    parser = commands.add_parser("logs", help="show logs of the cluster's processes")
    parser.add_argument("process", nargs="*", help="names such as index-0 (default: all)")
    parser.add_argument("-n", "--lines", type=int, default=20, help="last lines of each (default 20)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing what is added")
    parser.set_defaults(run=run_logs)


def run_logs(arguments: argparse.Namespace) -> int:
    """Print the ends of log files, and follow them."""
    log_dir = arguments.state_dir / "logs"
    paths = sorted(path for path in log_dir.glob("*.log") if not arguments.process or path.stem in arguments.process)
    if not paths:
        return fail(f"no logs of {', '.join(arguments.process) or 'any process'} in {log_dir}")
    positions: dict[Path, int] = {}
    for path in paths:
        text = path.read_text(errors="replace")
        positions[path] = path.stat().st_size
        for line in text.splitlines()[-arguments.lines :] if arguments.lines > 0 else []:
            print(f"{path.stem}: {line}")
    while arguments.follow:
        for path in paths:
            positions[path] = _print_new(path, positions[path])
        sys.stdout.flush()
        time.sleep(0.3)
    return EXIT_OK


def _print_new(path: Path, position: int) -> int:
    with path.open("rb") as log:
        log.seek(position)
        added = log.read()
    whole = added[: added.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        print(f"{path.stem}: {line}")
    return position + len(whole)


def _bytes(text: str) -> int:
    """12345, 64MiB, 2GiB."""
    for suffix, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)):
        if text.endswith(suffix):
            return int(float(text.removesuffix(suffix)) * factor)
    return int(text)
