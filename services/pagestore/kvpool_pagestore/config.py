"""Configuration of the pagestore. A default is written once, here; flags and variables follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import StagingMode, WritePolicy, check_combination, option_of
from kvpool.core.sizing import DEFAULT_SEGMENT_BYTES, prepared_segment_bytes
from kvpool_pagestore.core.admission import TenantQuotas
from kvpool_server.service import ServiceSettings

PROMOTION_SHARE = 8  # one part in this many of the arena is never given to writers


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStoreConfig(ServiceSettings):
    """The kvpool pagestore: owns page bytes on one node, in shared memory above a disk tier."""

    data_dir: Annotated[Path, "directory of the node id and the disk tier; one process at a time"]
    index_endpoints: Annotated[tuple[str, ...], "index replicas, host:port, comma separated; empty: none"] = ()
    listen: Annotated[str, "host:port of control calls; port 0 takes a free one"] = "127.0.0.1:7200"
    bulk_listen: Annotated[str, "host:port of page streams; port 0 takes a free one"] = "127.0.0.1:7201"
    socket: Annotated[Path | None, "unix socket of control calls; unset: pagestore.sock in the data directory"] = None
    descriptor_socket: Annotated[Path | None, "unix socket of descriptors; unset: the other one with .fds"] = None
    socket_group_access: Annotated[bool, "who is in the group of the sockets may connect too, not this user alone"] = (
        False
    )
    advertise_host: Annotated[str, "host name or address under which other hosts reach this node"] = "127.0.0.1"
    host_id: Annotated[str, "identity of this machine for placement; empty: the boot id"] = ""

    arena_bytes: Annotated[int, "hard budget of the staging arena"] = 1 << 30
    segment_bytes: Annotated[int, "size of a segment of it that is made when it is needed"] = DEFAULT_SEGMENT_BYTES
    arena_prepare: Annotated[bool, "put all of its memory in place right after the start, in the background"] = True
    prepared_segment_bytes: Annotated[
        int, "size of a segment that is made at the start; 0: 1/16 of the arena, at least segment_bytes, at most 1GiB"
    ] = 0
    session_dir: Annotated[Path, "for session files; in memory, and kept when this process is killed"] = Path(
        "/dev/shm"
    )
    dirty_bytes: Annotated[int, "pages being written or not yet durable, at most; 0: half of the arena"] = 0
    disk_bytes: Annotated[int, "hard budget of the disk tier; 0: no disk tier"] = 16 << 30
    batch_pages: Annotated[int, "pages written to disk together, at most"] = 64
    batch_bytes: Annotated[int, "bytes written to disk together, about; a small disk tier takes less"] = 64 << 20
    write_policy: Annotated[str, "write-back, write-through, selective or staging-only; a keyspace's own counts"] = (
        "write-back"
    )
    staging: Annotated[str, "cache, or transit: memory only passes bytes through; a keyspace's own counts"] = "cache"
    selective_min_uses: Annotated[int, "write policy selective: a page goes to disk at this use"] = 2
    selective_min_tokens: Annotated[int, "write policy selective: pages of a prompt this long go at once"] = 2048
    max_pinned_share: Annotated[float, "part of the disk tier (of the arena without one) that may be pinned"] = 0.25
    tenant_quotas: Annotated[
        tuple[str, ...], "bytes of staging and disk together, tenant=bytes, comma separated; * for all other tenants"
    ] = ()
    write_back_bytes_per_s: Annotated[
        int,
        "rate at which dirty pages go to disk while no caller waits for them and they are at most half of dirty_bytes; "
        "0: as fast as the disk takes them",
    ] = 1 << 30
    linger_ms: Annotated[int, "a dirty page waits this long for others to join its batch"] = 20
    write_retry_ms: Annotated[int, "first wait after a failed write to disk; doubles"] = 500
    write_retry_max_ms: Annotated[int, "longest wait after failed writes"] = 30_000

    write_threads: Annotated[int, "batches written to disk at once"] = 2
    read_threads: Annotated[int, "pages read from disk at once"] = 16
    pull_threads: Annotated[int, "pulls from other nodes at once"] = 4
    verify_threads: Annotated[int, "commits verified at once: of sessions, and of small streamed pages"] = 2
    seal_threads: Annotated[int, "pages sealed at once for disk, peers and plain readers, at low priority"] = 2
    prepare_threads: Annotated[int, "segments of the arena that are made at once at the start, at low priority"] = 8
    bulk_threads: Annotated[int, "page streams served at once"] = 8
    bulk_streams_per_peer: Annotated[
        int, "page streams of one host served at once; 0: three quarters of bulk_threads"
    ] = 0
    queue_limit: Annotated[int, "calls that may wait for each of these"] = 4096

    max_sessions: Annotated[int, "sessions at once"] = 256
    max_keyspaces: Annotated[
        int, "keyspaces of a tenant with pages here at once; pages of a further one are refused"
    ] = 4096
    max_leases: Annotated[int, "leases of each kind that one session holds; also items of one request"] = 256
    max_requests_in_flight: Annotated[int, "requests of one session at once"] = 256
    heartbeat_interval_ms: Annotated[int, "peers are silent for 4 of these before their session is ended"] = 1000
    quarantine_grace_ms: Annotated[int, "wait after a peer's process is gone before its slots are reused"] = 1000
    quarantine_poll_ms: Annotated[int, "how often it is looked whether a peer is gone, while one is missing"] = 200
    pull_timeout_ms: Annotated[int, "deadline of one pull from another node"] = 20_000
    pull_stall_ms: Annotated[int, "a pull that brings no page, or a push without answer, for so long is given up"] = (
        3_000
    )
    push_threads: Annotated[int, "pages sent to other nodes by so many streams at once"] = 2
    push_timeout_ms: Annotated[int, "deadline of 16 pages sent to another node"] = 30_000
    replication_factor: Annotated[int, "nodes that hold each page; a keyspace's own counts"] = 1
    replica_queue_chunks: Annotated[int, "chunks that may wait to be copied; more are left to the next sweep"] = 65_536
    replica_linger_ms: Annotated[int, "a stored page waits this long for others of its chain to go with it"] = 100
    sweep_interval_ms: Annotated[int, "about how often this node searches for lost copies and new nodes"] = 60_000
    hot_uses_per_minute: Annotated[int, "chunks read so often here get copies on more nodes; 0: none does"] = 600
    hot_copies: Annotated[int, "copies of a hot chunk in all, at least"] = 3
    rebalance_bytes_per_s: Annotated[int, "rate at which all others fill a node that joins; 0: not"] = 0
    pull_streams_per_peer: Annotated[int, "pulls from one other node at once"] = 2
    hedge_ms: Annotated[int, "a pull is slow, and another node asked too, after this at the least; 0: never"] = 200
    index_timeout_ms: Annotated[int, "deadline of one call to the index"] = 2_000
    reconcile_interval_ms: Annotated[int, "how often all that is held is compared with what the index knows"] = 60_000
    index_start_wait_ms: Annotated[int, "wait for the index at start before serving without it"] = 3_000
    drain_ms: Annotated[int, "time for dirty pages to become durable after SIGTERM"] = 20_000

    def __post_init__(self) -> None:
        ServiceSettings.__post_init__(self)
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in (
            "disk_bytes",
            "bulk_streams_per_peer",
            "hedge_ms",
            "replica_linger_ms",
            "hot_uses_per_minute",
            "rebalance_bytes_per_s",
            "dirty_bytes",
            "write_back_bytes_per_s",
            "prepared_segment_bytes",
            "linger_ms",
            "quarantine_grace_ms",
            "index_start_wait_ms",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.segment_bytes > self.arena_bytes:
            raise ValueError(f"segment_bytes ({self.segment_bytes}) must be <= arena_bytes ({self.arena_bytes})")
        if self.prepared_segment_bytes > self.arena_bytes:
            raise ValueError(
                f"prepared_segment_bytes ({self.prepared_segment_bytes}) must be <= arena_bytes ({self.arena_bytes})"
            )
        if self.dirty_bytes > self.arena_bytes - self.arena_bytes // PROMOTION_SHARE:
            raise ValueError(f"dirty_bytes ({self.dirty_bytes}) must leave 1/{PROMOTION_SHARE} of the arena to readers")
        self._check_policy()
        try:
            TenantQuotas.parse(self.tenant_quotas)
        except InvalidRequest as error:
            raise ValueError(f"tenant_quotas: {error}") from error
        if not 0.0 <= self.max_pinned_share <= 1.0:
            raise ValueError(f"max_pinned_share must lie in [0, 1], got {self.max_pinned_share}")

    def _check_policy(self) -> None:
        try:
            write_policy, staging = option_of(WritePolicy, self.write_policy), option_of(StagingMode, self.staging)
            check_combination(write_policy, staging)
        except InvalidRequest as error:
            raise ValueError(f"write_policy and staging: {error}") from error
        if not write_policy or not staging:
            raise ValueError("write_policy and staging: a node cannot leave them to a default")
        if not self.disk_bytes and (write_policy is WritePolicy.WRITE_THROUGH or staging is StagingMode.TRANSIT):
            raise ValueError(f"{self.write_policy} with staging {self.staging} needs a disk tier, disk_bytes is 0")

    @property
    def prepared_bytes(self) -> int:
        """Size of a segment that is made at the start."""
        return self.prepared_segment_bytes or prepared_segment_bytes(self.arena_bytes, self.segment_bytes)

    @property
    def peer_bulk_streams(self) -> int:
        """Page streams that one host may have open."""
        return self.bulk_streams_per_peer or max(1, self.bulk_threads * 3 // 4)

    @property
    def writer_bytes(self) -> int:
        """Arena bytes that may be reserved, dirty or left by dead writers."""
        return self.dirty_bytes or self.arena_bytes // 2


_POSITIVE = (
    "arena_bytes",
    "max_keyspaces",
    "segment_bytes",
    "batch_pages",
    "batch_bytes",
    "selective_min_uses",
    "selective_min_tokens",
    "write_retry_ms",
    "write_retry_max_ms",
    "write_threads",
    "read_threads",
    "pull_threads",
    "verify_threads",
    "prepare_threads",
    "seal_threads",
    "bulk_threads",
    "queue_limit",
    "max_sessions",
    "max_leases",
    "max_requests_in_flight",
    "heartbeat_interval_ms",
    "quarantine_poll_ms",
    "pull_timeout_ms",
    "pull_stall_ms",
    "pull_streams_per_peer",
    "push_threads",
    "push_timeout_ms",
    "replication_factor",
    "replica_queue_chunks",
    "sweep_interval_ms",
    "hot_copies",
    "index_timeout_ms",
    "reconcile_interval_ms",
    "drain_ms",
)
