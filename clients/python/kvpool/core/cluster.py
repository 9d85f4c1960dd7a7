"""What is known of a cluster: nodes, locations of chunks, matches. Plain values; messages have the same names."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpool.core.outcome import Tier

if TYPE_CHECKING:
    from kvpool.core.page import PageKey

CHAIN_GROUP_CHUNKS = 16  # consecutive chunks of a chain that the index keeps together
ALL_SHARDS = (1 << 64) - 1
SESSION_FILE_NUMBER = 0
"""What the descriptor socket of a pagestore calls the locked session file; every other number is a segment id, > 0."""


class NodeKind(IntEnum):
    """What a node is."""

    PAGESTORE = 1
    AGENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a node registers. `incarnation` 0 means that none was granted yet."""

    node_id: bytes  # 16 bytes
    kind: NodeKind
    host_id: str = ""
    endpoint: str = ""  # "host:port"
    bulk_endpoint: str = ""  # "host:port"; empty if it serves no bulk transfer
    local_socket: str = ""  # path; empty if none
    capacity_bytes: int = 0  # weight of placement
    metrics_url: str = ""
    incarnation: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """Load figures that a node sends with each renewal."""

    arena_capacity_bytes: int = 0
    arena_used_bytes: int = 0
    disk_capacity_bytes: int = 0
    disk_used_bytes: int = 0
    page_count: int = 0
    disk_free_bytes: int = 0  # page bytes that the disk tier takes before it gives up older pages
    reconcile_age_ms: int = 0  # what the store lost longer ago than this has been restored; 0: the node does not


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A registered node whose lease has not ended."""

    info: NodeInfo
    load: NodeLoad
    lease_remaining_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationAttempt:
    """Which registration of which process it is, so that one which arrives late or twice changes nothing.

    process_id: 16 random bytes of the process; empty: registrations are not distinguished. number: from 1, grows with
    each registration of the process.
    """

    process_id: bytes = b""
    number: int = 0


UNNUMBERED: Final = RegistrationAttempt()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLease:
    """What a registration grants."""

    incarnation: int
    lease_ttl_ms: int
    renew_interval_ms: int
    announce_epoch: int
    process_id: bytes = b""  # of the registration: what only the process that has the lease can show


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewal:
    """What a renewal of a lease answers."""

    lease_ttl_ms: int
    policy_version: int = 0  # of all keyspace policies; another one than before: fetch them
    renew_interval_ms: int = 0  # until the next renewal; 0: not said


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """One place that holds some shards of a chunk."""

    node_id: bytes  # 16 bytes
    incarnation: int
    tier: Tier
    shards: int  # bit s set: shard s is there


class LocationChange(NamedTuple):
    """Shards of one chunk that appeared at or left a tier of a node. A bit in both masks is removed.

    A node that starts announces millions: a named tuple is made in a third of the time that a dataclass takes.
    """

    keyspace: bytes  # 16 bytes
    chunk_hash: bytes  # 16 bytes
    group_head_hash: bytes  # 16 bytes
    tier: Tier
    added_shards: int
    removed_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleLocation:
    """A location that did not hold what it promised; only the shards named are removed."""

    keyspace: bytes  # 16 bytes
    chunk_hash: bytes  # 16 bytes
    group_head_hash: bytes  # 16 bytes
    location: Location


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource:
    """Another node that may have a page."""

    node_id: bytes  # 16 bytes
    incarnation: int
    bulk_endpoint: str


def stale_locations(key: PageKey, group_head_hash: bytes, source: RemoteSource) -> list[StaleLocation]:
    """Return what to report when `source` did not hold a page that it was said to hold: its locations in both tiers."""
    return [
        StaleLocation(
            keyspace=key.keyspace,
            chunk_hash=key.chunk_hash,
            group_head_hash=group_head_hash,
            location=Location(node_id=source.node_id, incarnation=source.incarnation, tier=tier, shards=1 << key.shard),
        )
        for tier in (Tier.STAGING, Tier.DISK)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMetadata:
    """What the owner of a page keeps durably beside it."""

    parent_hash: bytes  # 16 bytes; zeros for the first chunk of a chain
    chunk_index: int
    group_head_hash: bytes  # 16 bytes
    ttl_ms: int = 0  # 0: no limit
    priority: int = 0  # -100 (first to go) to 100 (last to go)
    pinned_until_us: int = 0  # wall time, microseconds since the epoch; 0: not pinned
    prompt_tokens: int = 0  # of the prompt it was stored for; 0: unknown
    expires_us: int = 0  # wall time from which it is a miss; 0: never. The first owner sets it from ttl_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainQuery:
    """A question about consecutive chunks of one chain."""

    keyspace: bytes  # 16 bytes
    chunk_hashes: bytes  # 16 bytes each, concatenated, from first_chunk_index on
    first_chunk_index: int = 0
    group_head_hash: bytes = b""  # head of the first chunk's group; may be empty when its index is a multiple of 16
    shards: int = 0  # shards whose layers and heads must be covered; 0: whole chunks
    host_id: str = ""  # nodes of this host are listed first

    @property
    def chunk_count(self) -> int:
        """Chunks asked for."""
        return len(self.chunk_hashes) // 16


TIER_RANK = {Tier.STAGING: 0, Tier.DISK: 1, Tier.GPU: 2}
"""Readers try locations in this order: bytes in memory, bytes on disk, then hints that may need an engine's consent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRun:
    """Consecutive chunks with equal locations."""

    chunk_count: int
    locations: tuple[Location, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainMatch:
    """The longest covered prefix of a chain, run-length encoded."""

    matched_chunks: int
    runs: tuple[MatchRun, ...] = ()
    nodes: dict[bytes, NodeInfo] = field(default_factory=dict)  # by node id: every node named in runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEvent:
    """The new value of one chunk's locations; of two, the one with the higher version counts."""

    keyspace: bytes
    chunk_hash: bytes  # 8 (truncated) or 16 bytes
    group_head_hash: bytes
    locations: tuple[Location, ...]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """A node came or changed (alive), or went: all its locations are gone."""

    node: NodeInfo
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResyncEvent:
    """Events were missed: start from a fresh view."""

    cause: str
    nodes: tuple[NodeInfo, ...] = ()  # those alive now; only where the watch is for a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBatch:
    """Chunk events of a watch for a replica, in the order of the log."""

    events: tuple[ChunkEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatEvent:
    """Everything that was in the log `age_ms` ago has been sent before this.

    watch_age_ms: since the watch was opened, by the sender's clock; 0 if it does not tell. A client has counted the
    time on the way into age_ms by it.
    """

    age_ms: int
    watch_age_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEvent:
    """One event of a watch, with the position to resume from."""

    position: str
    event: ChunkEvent | NodeEvent | ResyncEvent | ChunkBatch | HeartbeatEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteNode:
    """Chunks of a prefix of which one node holds any wanted layer and head, by tier."""

    node: NodeInfo
    gpu_chunks: int = 0
    staging_chunks: int = 0
    disk_chunks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCandidate:
    """A host, by what an engine on it would find of a prefix."""

    host_id: str
    matched_chunks: int  # of the longest prefix that lies whole on this host
    score: float  # higher is better
    arena_fill: float = 0.0  # used part of its pagestores' arenas
    nodes: tuple[RouteNode, ...] = ()  # those that hold something of the prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAnswer:
    """Hosts, best first, and how much of the prefix the whole cluster covers."""

    matched_chunks: int
    candidates: tuple[RouteCandidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """Limits and versions of an index."""

    version: str
    store: str  # "redis" or "memory"
    max_match_chunks: int
    max_batch_items: int
    lease_ttl_ms: int
    store_reachable: bool
    max_match_questions: int = 1  # of one message of a match stream
