"""What the index's engine needs from its store: chunk locations, nodes, keyspaces, and a log of events.

Every method raises StoreUnavailable, soon, when the store is out of reach; nothing is retried here. Several replicas
use one store at once, so that each method is atomic as far as its comment says.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.core.cluster import UNNUMBERED, ChainQuery, NodeInfo, RegistrationAttempt
from kvpool.core.errors import KvPoolError
from kvpool.core.location_digest import PartSpan, SplitGroup
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.core.entries import ChunkOperation, GroupRead, NamedChunk, NodeEntry
from kvpool_index.core.events import ChunkState, LogEntry
from kvpool_index.core.nodes import NodeRecord, Renewal
from kvpool_index.core.redis_stats import RedisStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFence:
    """The right of one announce stream to change its node's entries; a later stream of the node takes it away."""

    node_id: bytes
    incarnation: int
    ordinal: int
    number: int  # grows with each stream the node opens; 1 to 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGrant:
    """What a registration granted."""

    incarnation: int
    ordinal: int
    announce_epoch: int
    is_repeat: bool = False  # of an attempt that is not above the highest seen: nothing was changed
    took_over: bool = False  # another process held a live lease of this node


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundKeyspace:
    """One name of a tenant and the encoding it stands for."""

    tenant: str
    name: str
    keyspace_id: bytes  # 16 bytes
    encoding: bytes  # canonical


class LocationStore(Protocol):
    """The values of chunks, kept in chain groups.

    A group holds the first 16 chunks of a chain, or 16 further ones: but of all chains that share its head, which may
    be very many. So a large one is split into PART_COUNT parts, and no call handles more than one part at once.
    """

    async def read(self, keyspace: bytes, groups: Sequence[GroupRead]) -> list[bytes | None]:
        """The values of all fields of all groups, in order, in one round; None for absent ones."""
        ...

    async def read_chain(self, query: ChainQuery) -> list[bytes | None]:
        """The same for the chunks of a checked query; None also from the first chunk on that is out of reach just now.

        That is a master of several that is lost. StoreUnavailable if nothing of the store answers.
        """
        ...

    async def read_chains(self, queries: Sequence[ChainQuery]) -> list[list[bytes | None]]:
        """The same for each of several checked queries, in one round."""
        ...

    async def apply(self, fence: StreamFence, operations: Sequence[ChunkOperation]) -> list[ChunkState]:
        """Apply operations of one announce stream and return the states after them, in order, also unchanged ones.

        Each chunk is changed atomically and versions grow with each change. Operations are idempotent. Raises
        StaleIncarnation when a newer process of the node is registered; LeaseLost when its lease has ended or a later
        stream fences this one. Then none of the operations counts, but some chunks may have been changed.
        """
        ...

    async def remove(self, operations: Sequence[ChunkOperation]) -> list[ChunkState | None]:
        """Apply operations that no stream of the owner asked for, such as stale reports; None for an unchanged chunk.

        The operations only remove.
        """
        ...

    def drop(self, keyspace: bytes, ordinal: int | None) -> AsyncIterator[list[ChunkState]]:
        """Remove one node's entries, or all, of a keyspace, step by step; yields the chunks each step changed."""
        ...

    async def digests(self, ordinal: int, ranges: Sequence[int]) -> list[int]:
        """One node's digest of each range; see kvpool.core.location_digest. Whatever changes a chunk changes them.

        A store that loses or rolls back chunks of a range does so with their digests.
        """
        ...

    async def correct_digests(self, ordinal: int, digests: Mapping[int, tuple[int, int]]) -> int:
        """Set digests that do not agree with the entries they stand for: by range, what was found and what is right.

        One that is not as it was found stays. Returns how many were set.
        """
        ...

    def entries(self, ordinal: int, first_bucket: int, last_bucket: int) -> AsyncIterator[list[NodeEntry]]:
        """All entries of one node in a range of buckets, both inclusive, some at a time; one may come twice.

        Looks at nothing but these buckets, and not at groups that are split.
        """
        ...

    async def split_groups(self, ordinal: int, number: int, after: bytes) -> tuple[list[SplitGroup], bytes]:
        """Some of a range's split groups with one node's digests, and what to go on `after`; b"" begins, and ends.

        A group is split once it has more than SPLIT_CHUNKS chunks, until all are gone. One may come twice. Raises
        InvalidRequest for an `after` that it did not return.
        """
        ...

    async def part_digest(self, ordinal: int, span: PartSpan) -> int | None:
        """One node's digest of one part of a group; None if the group is not split."""
        ...

    async def correct_part_digest(self, ordinal: int, span: PartSpan, found: int, wanted: int) -> bool:
        """Set the digest of a part of a split group, and change that of the range by the same difference.

        Returns whether it did: not if the digest is no longer as it was found.
        """
        ...

    def part_entries(self, ordinal: int, span: PartSpan) -> AsyncIterator[list[NodeEntry]]:
        """The same as `entries` for one part of a group, which may be split or not."""
        ...

    def group_heads(self, keyspace: bytes) -> AsyncIterator[list[bytes]]:
        """Yield the heads of all groups of a keyspace that have a chunk, some at a time.

        One may come twice; one that gets its first chunk meanwhile may be missing, but no other.
        """
        ...

    def chunks(self) -> AsyncIterator[list[NamedChunk]]:
        """Yield all chunks, a few at a time. A chunk may come twice; one that is added meanwhile may be missing."""
        ...


VERSION_AHEAD_US: Final = 24 * 3600 * 1_000_000
"""How far the clocks of two servers of one store may lie apart: bounds incarnations and versions of policies."""

TOMBSTONE_S: Final = 60
"""How long a group that became empty remembers its fences and its version."""

PROCESSES_REMEMBERED: Final = 4
"""Processes remembered of each node: the one that registered last, and those before it."""


class NodeDirectory(Protocol):
    """Nodes, their leases by the store's clock, and their incarnations."""

    async def register(
        self,
        info: NodeInfo,
        *,
        last_incarnation: int,
        lease_ttl_ms: int,
        attempt: RegistrationAttempt = UNNUMBERED,
    ) -> NodeGrant:
        """Grant a lease, atomically.

        info.incarnation 0 asks for a new incarnation: max(stored, last_incarnation, store time in microseconds) + 1.
        Otherwise the same one is granted again, with the ordinal it had if the store remembers it; raises
        StaleIncarnation when a newer one is stored, or another process has registered it. The announce epoch grows with
        each registration. Logs an event.

        Raises InvalidRequest for an incarnation more than VERSION_AHEAD_US ahead of the store's time: the node's next
        start would find no higher one. A stored one that far ahead does not count.

        An attempt that is not above the highest seen of its process changes nothing and gets what was granted last.
        A process that asks for a new incarnation again, after an answer was lost, gets the one that it has. One that a
        later process has replaced gets StaleIncarnation, if it is one of the last PROCESSES_REMEMBERED.
        """
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> list[KvPoolError | None]:
        """Lengthen leases, in one round. For each None, or why it was refused.

        That is LeaseLost when the lease has ended or is unknown, StaleIncarnation when a newer one is registered.
        """
        ...

    async def end(self, node_id: bytes, incarnation: int, process_id: bytes = b"") -> None:
        """End the lease of this incarnation for good and log that the node went; nothing if it holds none.

        Raises StaleIncarnation if another process than process_id registered it; one that gave no id is not compared.
        """
        ...

    async def open_stream(
        self, node_id: bytes, incarnation: int, announce_epoch: int, process_id: bytes = b""
    ) -> StreamFence:
        """Fence the node's earlier announce streams. Raises LeaseLost (also for an old epoch), StaleIncarnation.

        The latter also for another process than the one that registered; one that gave no id is not compared.
        """
        ...

    async def ordinal(self, node_id: bytes, incarnation: int) -> int:
        """Return the ordinal of the incarnation that has the lease. Raises StaleIncarnation, LeaseLost."""
        ...

    async def snapshot(self) -> list[NodeRecord]:
        """All nodes the store remembers."""
        ...

    async def declare_dead(self, node_id: bytes, incarnation: int, *, forget_after_ms: int) -> bool:
        """Log that a node went whose lease ran out; True for the one caller, of all replicas, who did it.

        A node that has been gone for forget_after_ms is forgotten. Nothing happens to a live one.
        """
        ...


class KeyspaceRegistry(Protocol):
    """Names of keyspaces."""

    async def bind(self, keyspace: BoundKeyspace) -> tuple[BoundKeyspace, bool]:
        """Bind a name unless it is bound. Returns what it is bound to now, and whether this call did it. Atomic.

        A keyspace that it is bound to is noted as used.
        """
        ...

    async def restore(self, tenant: str, keyspaces: Sequence[BoundKeyspace], *, limit: int) -> int:
        """Note that keyspaces of one tenant are in use, and have `by_id` know those that were lost.

        They are known under no name if theirs is empty. Returns how many were not stored because the tenant has
        `limit` keyspaces.
        """
        ...

    async def touch(self, tenant: str, keyspace_ids: Sequence[bytes]) -> None:
        """Note that keyspaces of a tenant are in use, as far as they are known. `bind` and `restore` do so too."""
        ...

    async def idle(self, tenant: str, idle_s: float) -> list[bytes]:
        """The ids of a tenant's keyspaces that were not used for so long."""
        ...

    async def forget(self, tenant: str, keyspaces: Sequence[BoundKeyspace], *, idle_s: float) -> list[bytes]:
        """Forget keyspaces with their names, unless they were used less than idle_s ago. Returns the ids forgotten.

        One that has several names is given once for each of them. A keyspace is checked and forgotten atomically.
        """
        ...

    async def by_id(self, keyspace_id: bytes) -> BoundKeyspace | None:
        """A keyspace by its id, under the name that it first got."""
        ...

    async def by_ids(self, keyspace_ids: Sequence[bytes]) -> list[BoundKeyspace | None]:
        """The same for several, in one round; None for those that are not known."""
        ...

    async def count(self, tenant: str) -> int:
        """Keyspaces of a tenant, with or without a name; or names, if there are more of them."""
        ...

    async def of_tenant(self, tenant: str) -> list[BoundKeyspace]:
        """All of a tenant's, ordered by name."""
        ...


class PolicyRegistry(Protocol):
    """Policies by keyspace id. Each has a version; the version of all is the highest that any ever got."""

    async def set(self, keyspace: bytes, policy: KeyspacePolicy) -> int:
        """Replace a policy; its version is max(version of all, store time in microseconds) + 1. Atomic."""
        ...

    async def restore(self, policies: Sequence[VersionedPolicy]) -> None:
        """Put policies back that the store has lost; one that it has in this version or a newer one stays.

        A version more than VERSION_AHEAD_US ahead of the store's time was given out by no index and is skipped:
        operators could not get above it.
        """
        ...

    async def get(self, keyspaces: Sequence[bytes]) -> list[VersionedPolicy]:
        """Return the policies of those keyspaces that have one, in order."""
        ...

    async def version(self) -> int:
        """Return the version of all policies; 0 if there are none, or the store has lost them."""
        ...


class EventLog(Protocol):
    """Bounded logs of events: `stream_count - 1` streams of chunk states, and last the stream of node states."""

    @property
    def stream_count(self) -> int:
        """Number of streams, >= 2."""
        ...

    async def append(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Append payloads to their streams, in order. The oldest entries of a full stream go."""
        ...

    async def tails(self) -> tuple[str, ...]:
        """The id of the last entry of each stream, kept or not; ORIGIN for an empty one."""
        ...

    async def read(self, stream: int, after: str, *, limit: int, wait_s: float) -> list[LogEntry]:
        """Entries after an id, at most `limit`; waits at most wait_s for the first one (0: not at all)."""
        ...

    async def is_kept(self, stream: int, entry_id: str) -> bool:
        """Whether every entry after this one is still there."""
        ...

    def count_malformed(self) -> None:
        """Count one more read of an entry that no index wrote."""
        ...


class IndexStore(Protocol):
    """The whole store of an index."""

    @property
    def kind(self) -> str:
        """One of "redis" and "memory"."""
        ...

    @property
    def locations(self) -> LocationStore: ...

    @property
    def nodes(self) -> NodeDirectory: ...

    @property
    def keyspaces(self) -> KeyspaceRegistry: ...

    @property
    def policies(self) -> PolicyRegistry: ...

    @property
    def events(self) -> EventLog: ...

    @property
    def redis(self) -> RedisStats | None:
        """What its connections to Redis go through; None where there is no Redis."""
        ...

    async def check_layout(self) -> None:
        """Raise StartupFailed if the store holds what this release would misread; one out of reach passes."""
        ...

    async def ping(self) -> float:
        """Seconds that one round trip took."""
        ...

    async def run(self) -> None:
        """Look after the store as long as it is used; returns if there is nothing to look after."""
        ...

    async def close(self) -> None:
        """Give connections back; idempotent."""
        ...
