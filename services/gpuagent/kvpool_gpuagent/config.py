"""Configuration of the gpuagent; flags and environment variables are derived from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvpool_server.service import ServiceSettings

_POSITIVE = (
    "copy_threads",
    "scratch_bytes",
    "peer_programs",
    "bounce_bytes",
    "max_sessions",
    "max_running_requests",
    "max_request_chunks",
    "max_running_leases",
    "lease_ms_max",
    "max_remembered_chunks",
    "heartbeat_interval_ms",
    "index_timeout_ms",
    "kept_timeout_ms",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAgentConfig(ServiceSettings):
    """One gpuagent. It reaches one local pagestore by its unix socket, or none and uses page streams."""

    data_dir: Annotated[Path, "directory of this agent's node id; one process at a time"]
    index_endpoints: Annotated[tuple[str, ...], "index replicas, host:port, comma separated"]
    socket: Annotated[Path, "unix socket that engines of this host connect to"]
    socket_group_access: Annotated[bool, "who is in the group of the sockets may connect too, not this user alone"] = (
        False
    )
    listen: Annotated[str, "TCP address of status and health, host:port; port 0 picks a free one"] = "127.0.0.1:0"
    advertise_host: Annotated[str, "host name or address under which others reach this agent"] = "127.0.0.1"
    pagestore_socket: Annotated[
        str, "unix socket of this host's pagestore; empty means none: page streams are used"
    ] = ""
    host_id: Annotated[str, "identity of this machine for placement; empty means the boot id"] = ""
    device: Annotated[str, "where engines keep their KV: cpu or cuda"] = "cpu"
    device_ordinal: Annotated[int, "which of the GPUs visible to this process works for its engines"] = 0
    scratch_bytes: Annotated[
        int, "GPU memory that pages pass through where an engine's layout needs kernels, both directions together"
    ] = 256 << 20
    peer_programs: Annotated[int, "multiprocessors of a GPU that pulls from other ranks' caches take at most"] = 24
    copy_threads: Annotated[int, "threads that copy (cpu)"] = 2
    prepare_s: Annotated[
        float, "how long an agent with a GPU waits at its start for the local pagestore's memory to be ready"
    ] = 60.0
    bounce_bytes: Annotated[int, "memory for pages in flight when there is no local pagestore"] = 256 << 20
    max_sessions: Annotated[int, "engine sessions at once"] = 64
    max_running_requests: Annotated[int, "loads and stores of one session at once"] = 64
    max_request_chunks: Annotated[int, "chunks of one match, load, store or lease"] = 8192
    max_running_leases: Annotated[int, "leases of one session, on pages of requests that wait, at once"] = 16
    lease_ms_max: Annotated[int, "a lease ends after this at the latest"] = 30_000
    lease_share: Annotated[
        float, "part of the pages that may be read at once, and of the arena, that leases hold at most; 0: none"
    ] = 0.25
    max_remembered_chunks: Annotated[int, "chunks whose locations a session remembers from matches"] = 16384
    replica_bytes: Annotated[
        int, "memory for a replica of the index's locations, which answers matches without a call; 0: none"
    ] = 64 << 20
    heartbeat_interval_ms: Annotated[int, "engines are silent for 4 of these before their session is ended"] = 1000
    index_timeout_ms: Annotated[int, "deadline of one call to the index"] = 1000
    kept_timeout_ms: Annotated[
        int, "how long an engine may take to answer a gathered window before it counts as not kept"
    ] = 30000
    drain_s: Annotated[float, "time for running calls to end after SIGTERM"] = 10.0

    def __post_init__(self) -> None:
        ServiceSettings.__post_init__(self)
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if self.device_ordinal < 0:
            raise ValueError(f"device_ordinal must be >= 0, got {self.device_ordinal}")
        if self.prepare_s < 0:
            raise ValueError(f"prepare_s must be >= 0, got {self.prepare_s}")
        if not 0.0 <= self.lease_share <= 0.9:
            raise ValueError(f"lease_share must lie in [0, 0.9]: loads need the rest; got {self.lease_share}")
        if self.replica_bytes < 0:
            raise ValueError(f"replica_bytes must be >= 0, got {self.replica_bytes}")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if not self.index_endpoints:
            raise ValueError("index_endpoints must name at least one index replica, host:port")
