"""Configuration of the index. A default is written once, here; flags and KVPOOL_INDEX_* variables follow from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvpool_server.config import SECRET
from kvpool_server.service import ServiceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig(ServiceSettings):
    """The kvpool index: which chunks exist, where, and who is alive."""

    listen: Annotated[str, "host:port of the gRPC service; port 0 takes a free one"] = "127.0.0.1:7100"
    drain_s: Annotated[float, "time for running calls to end after SIGTERM"] = 5.0

    redis_url: Annotated[
        str, "redis://, redis+sentinel:// or redis+cluster:// URL of the store; empty: this process's memory", SECRET
    ] = ""
    redis_key_prefix: Annotated[str, "what all keys in Redis begin with"] = "kvpool"
    redis_timeout_ms: Annotated[int, "a store call that takes longer fails as STORE_UNAVAILABLE"] = 500
    redis_max_in_flight: Annotated[int, "calls that wait for Redis at once; further ones are refused"] = 1024
    redis_wait_replicas: Annotated[int, "replicas that must have an announce batch before it is acknowledged"] = 0

    tenant_secret_file: Annotated[Path | None, "file of 32 bytes or more; unset: a published constant"] = None

    lease_ttl_ms: Annotated[int, "a node that does not renew is gone after this"] = 5000
    idle_lease_ttl_ms: Annotated[int, "the same for a node that holds nothing, and so renews less often"] = 60_000
    node_forget_ms: Annotated[int, "a node gone for this long is forgotten"] = 24 * 3600 * 1000
    sweep_interval_s: Annotated[float, "how often all chunks are searched for what nodes long gone left"] = 3600.0
    max_match_chunks: Annotated[int, "hashes of one match, or of all questions of one message together"] = 8192
    max_match_questions: Annotated[int, "questions of one message of a match stream"] = 512
    max_batch_items: Annotated[int, "items of one announce batch or stale report"] = 4096
    max_matches_in_flight: Annotated[int, "matches of one stream at once"] = 64
    route_weight_gpu: Annotated[
        float, "what Route counts a chunk announced in a GPU on the host as; agents announce none"
    ] = 1.0
    route_weight_staging: Annotated[float, "the same for a chunk in staging on the host"] = 0.8
    route_weight_disk: Annotated[float, "the same for a chunk on disk on the host"] = 0.5
    route_weight_remote: Annotated[float, "the same for a chunk that another host would send"] = 0.3
    event_streams: Annotated[int, "partitions of the log of chunk events; the same on all replicas"] = 4
    event_stream_entries: Annotated[int, "entries kept of each partition, 64 chunks or 7 KiB each at most"] = 4096
    watch_buffer_events: Annotated[int, "events that wait for one watcher before it gets RESYNC"] = 16384
    max_watchers: Annotated[int, "Watch streams at once: the cluster's agents over the replicas, twice"] = 16384
    max_peer_watchers: Annotated[int, "the same of one host"] = 1024
    max_open_calls: Annotated[int, "calls and streams open at once: a member has up to four"] = 65536
    max_peer_open_calls: Annotated[int, "the same of one host, over all its connections"] = 8192
    max_nodes: Annotated[int, "nodes that the store remembers; a further one cannot register"] = 65536
    max_keyspaces: Annotated[int, "keyspaces of a tenant; a further one cannot be opened"] = 4096
    keyspace_idle_s: Annotated[
        float, "a keyspace without chunks, policy and use for so long is forgotten; 0: never"
    ] = 30 * 24 * 3600.0

    def __post_init__(self) -> None:
        ServiceSettings.__post_init__(self)
        for name, low, high in (
            ("redis_timeout_ms", 10, 60_000),
            ("redis_max_in_flight", 1, 1 << 20),
            ("redis_wait_replicas", 0, 16),
            ("lease_ttl_ms", 100, 600_000),
            ("idle_lease_ttl_ms", 100, 600_000),
            ("node_forget_ms", 0, 1 << 40),
            ("max_match_chunks", 1, 1 << 15),
            ("max_match_questions", 1, 1 << 12),
            ("max_batch_items", 1, 1 << 15),
            ("max_matches_in_flight", 1, 4096),
            ("event_streams", 1, 64),
            ("event_stream_entries", 1, 1 << 20),
            ("watch_buffer_events", 1, 1 << 22),
            ("max_watchers", 1, 1 << 16),
            ("max_peer_watchers", 1, 1 << 16),
            ("max_open_calls", 1, 1 << 20),
            ("max_peer_open_calls", 1, 1 << 20),
            ("max_nodes", 1, 1 << 20),
            ("max_keyspaces", 1, 1 << 20),
        ):
            value: int = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {value}")
        for name in ("route_weight_gpu", "route_weight_staging", "route_weight_disk", "route_weight_remote"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.sweep_interval_s <= 0:
            raise ValueError(f"sweep_interval_s must be > 0, got {self.sweep_interval_s}")
        if self.keyspace_idle_s and self.keyspace_idle_s < 2 * self.sweep_interval_s:
            # A replica writes down what it saw used with each sweep.
            raise ValueError(
                f"keyspace_idle_s must be 0 or two sweep_interval_s or more, got {self.keyspace_idle_s} with "
                f"{self.sweep_interval_s}"
            )
        if self.drain_s < 0:
            raise ValueError(f"drain_s must be >= 0, got {self.drain_s}")

    @property
    def renew_interval_ms(self) -> int:
        """How often nodes are asked to renew: two renewals may be lost before a lease ends."""
        return self.lease_ttl_ms // 3

    @property
    def refresh_interval_s(self) -> float:
        """How often a replica reads the store's nodes."""
        return min(1.0, self.lease_ttl_ms / 5000)
