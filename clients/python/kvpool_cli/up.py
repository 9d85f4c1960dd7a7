"""`kvpool cluster up`: an embedded cluster on this machine, in the foreground or detached."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from kvpool.core.errors import KvPoolError, StartupFailed
from kvpool_cli.child import READY_TIMEOUT_S
from kvpool_cli.cluster import ClusterOptions, check_gpus, visible_gpus
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, CommandFailed
from kvpool_cli.logs import last_lines, log_dir
from kvpool_cli.options import duration_option, size_option
from kvpool_cli.output import fail, print_json, say, show, stack, table
from kvpool_cli.state import ClusterState, StateLock, read_state, state_file
from kvpool_cli.supervise import Supervisor, end_leftovers


class Device(StrEnum):
    """Where engines keep their KV."""

    CPU = "cpu"
    CUDA = "cuda"


class LogLevel(StrEnum):
    """How much services log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ClientAuth(StrEnum):
    """Whether callers need a certificate."""

    REQUIRE = "require"
    NONE = "none"


def up(
    common: Common,
    pagestores: Annotated[int, typer.Option(min=1, metavar="N", help="Number of pagestores, at most 64.")] = 1,
    agents: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of agents (default: one per pagestore); with --device cuda one per GPU at most."
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it serves; end it with `kvpool cluster down`.")
    ] = False,
    redis: Annotated[
        str, typer.Option(metavar="URL", envvar="KVPOOL_REDIS_URL", help="Use this Redis instead of one of its own.")
    ] = "",
    memory_index: Annotated[
        bool, typer.Option("--memory-index", help="No Redis: the index keeps locations in its memory.")
    ] = False,
    arena_bytes: Annotated[int, size_option("--arena-bytes", "Staging memory of a pagestore (default 1GiB).")] = 1
    << 30,
    disk_bytes: Annotated[int, size_option("--disk-bytes", "Disk tier of a pagestore (default 16GiB).")] = 16 << 30,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    index_port: Annotated[int, typer.Option(metavar="PORT", help="Port of the index; 0 takes a free one.")] = 0,
    lease_ttl: Annotated[
        float, duration_option("--lease-ttl", "A dead node leaves matches within this (default 5s).")
    ] = 5.0,
    device: Annotated[Device, typer.Option(help="Where engines of the agents keep their KV.")] = Device.CPU,
    log_level: Annotated[LogLevel, typer.Option(help="How much the services log.")] = LogLevel.INFO,
    service_cert_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="Certificate chain of all services, which then use TLS; all three together."),
    ] = "",
    service_key_file: Annotated[str, typer.Option(metavar="FILE", help="Private key of all services.")] = "",
    service_ca_file: Annotated[str, typer.Option(metavar="FILE", help="CA bundle of all services.")] = "",
    service_client_auth: Annotated[
        ClientAuth, typer.Option(help="Whether callers need a certificate, with TLS.")
    ] = ClientAuth.REQUIRE,
) -> int:
    """Start a cluster on this machine and print where it listens. Ctrl-C drains and ends it."""
    options = ClusterOptions(
        state_dir=common.state_dir,
        pagestores=pagestores,
        agents=pagestores if agents is None else agents,
        host=host,
        redis_url=redis,
        memory_index=memory_index,
        arena_bytes=arena_bytes,
        disk_bytes=disk_bytes,
        index_port=index_port,
        lease_ttl_ms=round(lease_ttl * 1e3),
        device=str(device),
        log_level=str(log_level),
        tls_cert_file=service_cert_file,
        tls_key_file=service_key_file,
        tls_ca_file=service_ca_file,
        tls_client_auth=str(service_client_auth),
    )
    check_gpus(options, visible_gpus)
    if detach:
        return _detach(common, options)
    return _Foreground(options, common).run()


class _Foreground:
    """A cluster that lives as long as this process; the first signal drains it, a second one kills it."""

    def __init__(self, options: ClusterOptions, common: Common) -> None:
        self._options, self._common = options, common
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
            _print(self._common, state, "Ctrl-C drains and ends the cluster.")
            _warn_of_redis(self._common, state, self._options)
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
    """End what a killed `kvpool cluster up` left; services clean their own files. Raises StartupFailed."""
    state = read_state(state_dir)
    if state is not None:
        ended = end_leftovers(state)
        if ended:
            say(f"ended leftovers of a killed cluster: {', '.join(ended)}")
        state_file(state_dir).unlink(missing_ok=True)


def _detach(common: Common, options: ClusterOptions) -> int:
    state_dir = common.state_dir
    argv = [word for word in common.argv if word not in ("--detach", "--json")]
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
            [sys.executable, "-m", "kvpool_cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        return _await_detached(common, options, supervisor, log_path)
    except KeyboardInterrupt:
        supervisor.terminate()
        raise


def _await_detached(
    common: Common, options: ClusterOptions, supervisor: subprocess.Popen[bytes], log_path: Path
) -> int:
    deadline_s = time.monotonic() + READY_TIMEOUT_S * 3
    while time.monotonic() < deadline_s:
        if supervisor.poll() is not None:
            lines = last_lines(log_path, 1) or ["it ended at once"]
            message = lines[-1].removeprefix("kvpool: ")
            return fail(message, code=supervisor.returncode or EXIT_FAILED, as_json=common.json)
        state = read_state(common.state_dir)
        if state is not None and state.ready and state.supervisor_pid == supervisor.pid:
            _print(common, state, "End it with `kvpool cluster down`.")
            _warn_of_redis(common, state, options)
            supervisor.returncode = 0  # it goes on without us: Popen must not warn that it was not waited for
            return EXIT_OK
        time.sleep(0.05)
    supervisor.terminate()
    raise CommandFailed(f"the cluster did not come up in time; see {log_path}")


def _print(common: Common, state: ClusterState, advice: str) -> None:
    if common.json:
        print_json({"version": 1, **asdict(state)})
        sys.stdout.flush()
    else:
        show(stack(describe(state), "", advice))


def _warn_of_redis(common: Common, state: ClusterState, options: ClusterOptions) -> None:
    """Say so if the Redis that was named does not answer: services start without it, so a wrong URL looks right."""
    if not options.redis_url:
        return
    from kvpool_cli.targets import Target, find_tls, open_index, run

    async def is_reachable() -> bool:
        async with open_index(target) as index:
            return (await index.get_info()).store_reachable

    endpoint = state.of_role("index")[0].endpoints["endpoint"]
    try:
        target = Target(index_endpoint=endpoint, state=state, tls=find_tls(common))
        if not run(is_reachable()):
            say(
                "the Redis that --redis names does not answer: no prefix is found until it does; "
                "if the URL is wrong, `kvpool cluster down` and start again"
            )
    except (CommandFailed, KvPoolError):
        pass  # services with TLS, and no files for commands: what was asked for is done


def describe(state: ClusterState) -> RenderableType:
    """The store and the table of endpoints."""
    keys = ("endpoint", "bulk_endpoint", "socket", "metrics_url")
    rows = [
        [process.name, process.pid, *(process.endpoints.get(key) or "-" for key in keys)] for process in state.processes
    ]
    headers = ["process", "pid", "endpoint", "bulk", "socket", "metrics"]
    return stack(f"store: {state.store}", "", table(headers, rows, right=[1]))
