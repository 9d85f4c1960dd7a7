"""Who is alive, as one replica knows it."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from kvpool.core.addresses import check_node_addresses
from kvpool.core.cluster import UNNUMBERED, LiveNode, NodeInfo, NodeKind, NodeLoad, RegistrationAttempt
from kvpool.core.errors import InvalidRequest

REFRESH_STEP_NODES: Final = 256  # read from the store between two turns of the event loop
MAX_INCARNATION: Final = (1 << 53) - 1  # the store's scripts count in doubles; microseconds reach this in the year 2255

INCARNATION_AHEAD: Final = (
    "the incarnation lies more than 24 hours ahead of the store's clock, so that no index granted it; "
    "set the clocks of Redis and of the node's host right"
)
OF_ANOTHER_PROCESS: Final = "another process of this node registered this incarnation"


class NodeRecord(NamedTuple):
    """A node as the store knows it. A named tuple, because a replica makes one of every node each second.

    ordinal:  short name of (node, incarnation) in chunk values; another incarnation has another one.
    alive:    a lease was granted and neither ended nor declared dead; it may have run out all the same.
    ended:    the node gave its lease back, so that this incarnation will not come back and its ordinal is dead.
    """

    info: NodeInfo  # with the current incarnation
    load: NodeLoad
    ordinal: int
    alive: bool
    ended: bool
    lease_remaining_ms: int  # <= 0: ran out


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """One lease to renew. load: None keeps the last one reported; the node holds nothing."""

    node_id: bytes
    incarnation: int
    load: NodeLoad | None
    lease_ttl_ms: int = 0  # 0: not decided yet


class NodeTable:
    """The nodes one replica knows, refreshed from the store. A lease that runs out in between has ended at once."""

    def __init__(self) -> None:
        self._records: dict[bytes, NodeRecord] = {}
        self._expires_at_s: dict[bytes, float] = {}  # local monotonic time
        self._ids: dict[int, bytes] = {}  # by ordinal, of those that have not ended
        self._renewed: dict[bytes, NodeRecord] | None = None  # since `replacing` began

    def replacing(self, records: Sequence[NodeRecord], asked_at_s: float) -> Iterator[None]:
        """Take the store's whole answer in steps of REFRESH_STEP_NODES, between which others may have their turn; all
        counts at the end. asked_at_s: when it was asked, so that no lease is overestimated.

        Renewals that are noted meanwhile count. What else changes meanwhile is lost: make those changes again.
        """
        self._renewed = {}
        by_id: dict[bytes, NodeRecord] = {}
        expires_at_s: dict[bytes, float] = {}
        ids: dict[int, bytes] = {}
        for start in range(0, len(records), REFRESH_STEP_NODES):
            for record in records[start : start + REFRESH_STEP_NODES]:
                node_id = record.info.node_id
                by_id[node_id] = record
                expires_at_s[node_id] = asked_at_s + record.lease_remaining_ms / 1000
                if not record.ended:
                    ids[record.ordinal] = node_id
            yield
        for node_id, renewed in self._renewed.items():
            fresh = by_id.get(node_id)
            if fresh is not None and fresh.alive and fresh.info.incarnation == renewed.info.incarnation:
                by_id[node_id] = fresh._replace(load=renewed.load)
                expires_at_s[node_id] = max(expires_at_s[node_id], self._expires_at_s[node_id])
        self._renewed = None
        self._records, self._expires_at_s, self._ids = by_id, expires_at_s, ids

    def put(self, record: NodeRecord, asked_at_s: float) -> None:
        """Take one record that is newer than the table's, such as a registration served here."""
        node_id = record.info.node_id
        self.forget(node_id)
        self._records[node_id] = record
        self._expires_at_s[node_id] = asked_at_s + record.lease_remaining_ms / 1000
        self._ids[record.ordinal] = node_id

    def renewed(self, node_id: bytes, incarnation: int, load: NodeLoad | None, expires_at_s: float) -> bool:
        """Note a renewal served here. False if the table does not know this incarnation as alive."""
        record = self._records.get(node_id)
        if record is None or record.info.incarnation != incarnation or not record.alive:
            return False
        if load is not None:
            record = self._records[node_id] = record._replace(load=load)
        self._expires_at_s[node_id] = expires_at_s
        if self._renewed is not None:
            self._renewed[node_id] = record
        return True

    def __len__(self) -> int:
        return len(self._records)

    def forget(self, node_id: bytes) -> None:
        """Drop what is known of a node."""
        record = self._records.pop(node_id, None)
        if record is not None:
            del self._expires_at_s[node_id]
            self._ids.pop(record.ordinal, None)
        if self._renewed is not None:
            self._renewed.pop(node_id, None)

    def live_by_ordinal(self, ordinal: int, now_s: float) -> NodeInfo | None:
        """The node of an ordinal if its lease has not ended."""
        node_id = self._ids.get(ordinal)
        record = self.live_record(node_id, now_s) if node_id is not None else None
        return record.info if record is not None else None

    def registered_by_ordinal(self, ordinal: int) -> NodeInfo | None:
        """The node of an ordinal unless it has ended its lease or was declared dead; the lease may have run out.

        For what receivers keep: the event log says when a node ends or is declared dead, but nothing corrects an event
        that leaves out a node whose lease only seemed over here, because the store answered late.
        """
        node_id = self._ids.get(ordinal)
        record = self._records[node_id] if node_id is not None else None
        return record.info if record is not None and record.alive else None

    def registered_infos(self) -> list[NodeInfo]:
        """All such nodes, by node id."""
        return [record.info for _, record in sorted(self._records.items()) if record.alive]

    def knows_ordinal(self, ordinal: int) -> bool:
        """False if no node has this ordinal, or ever will again: what it named is gone."""
        return ordinal in self._ids

    def live_record(self, node_id: bytes, now_s: float) -> NodeRecord | None:
        """The record of a live node."""
        record = self._records.get(node_id)
        return record if record is not None and record.alive and self._expires_at_s[node_id] > now_s else None

    def record(self, node_id: bytes) -> NodeRecord | None:
        """The record of a node, live or not."""
        return self._records.get(node_id)

    def live_nodes(self, now_s: float) -> list[LiveNode]:
        """All live nodes, by node id."""
        return [
            LiveNode(
                info=record.info,
                load=record.load,
                lease_remaining_ms=max(1, int((self._expires_at_s[record.info.node_id] - now_s) * 1000)),
            )
            for record in sorted(self._live_records(now_s), key=lambda record: record.info.node_id)
        ]

    def live_infos(self, now_s: float, kind: NodeKind) -> Iterator[NodeInfo]:
        """Live nodes of a kind, in no order."""
        return (record.info for record in self._live_records(now_s) if record.info.kind == kind)

    def counts(self, now_s: float) -> tuple[dict[int, int], int]:
        """Live nodes by kind, and the highest reconcile_age_ms among them."""
        counts: dict[int, int] = {}
        oldest_ms = 0
        for record in self._live_records(now_s):
            counts[record.info.kind] = counts.get(record.info.kind, 0) + 1
            oldest_ms = max(oldest_ms, record.load.reconcile_age_ms)
        return counts, oldest_ms

    def departed(self, forget_after_ms: int) -> list[NodeInfo]:
        """Return nodes to report to the store: overdue and not yet declared dead, or gone for forget_after_ms."""
        return [
            record.info
            for record in self._records.values()
            if record.lease_remaining_ms <= (0 if record.alive else -forget_after_ms)
        ]

    def _live_records(self, now_s: float) -> Iterator[NodeRecord]:
        expires_at_s = self._expires_at_s
        return (record for node_id, record in self._records.items() if record.alive and expires_at_s[node_id] > now_s)


def check_registration(info: NodeInfo, last_incarnation: int, attempt: RegistrationAttempt = UNNUMBERED) -> None:
    """Raise InvalidRequest for a registration that the wire's own checks let through and the store could not keep."""
    for name, value in (("node.incarnation", info.incarnation), ("last_incarnation", last_incarnation)):
        if not 0 <= value < MAX_INCARNATION:
            raise InvalidRequest(f"{name} must be below {MAX_INCARNATION}, got {value}")
    if attempt.process_id and (len(attempt.process_id) != 16 or not 0 < attempt.number < MAX_INCARNATION):
        raise InvalidRequest("process_id must be 16 bytes or empty, and attempt be numbered from 1 with it")
    if info.kind == NodeKind.PAGESTORE and not info.endpoint:
        raise InvalidRequest("node.endpoint must not be empty; give the host:port at which peers reach the pagestore")


def pack_info(info: NodeInfo) -> bytes:
    """What the store keeps of a registration; the incarnation is kept apart, because the store grants it."""
    fields = asdict(info)
    fields["node_id"] = info.node_id.hex()
    fields["kind"] = int(info.kind)
    del fields["incarnation"]
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def unpack_info(data: bytes, incarnation: int) -> NodeInfo:
    """The inverse of pack_info. Fields that a newer version wrote are left out.

    A kind that only a newer version has a name for stays the number that it is: the node lives, its locations must not
    be swept, and clients that know the kind see it. Raises ValueError and InvalidRequest for what no index wrote.
    """
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError("the record of a node is not an object")
    known = {name: fields[name] for name in _INFO_FIELDS if name in fields}
    for name, value in known.items():
        if type(value) is not _INFO_FIELDS[name]:
            raise ValueError(f"{name} of a node is a {type(value).__name__}")
    node_id, kind = bytes.fromhex(str(fields.get("node_id"))), fields.get("kind")
    if len(node_id) != 16 or type(kind) is not int or not 0 < kind < 1 << 31:
        raise ValueError("the record of a node names no id or no kind")
    if not 0 <= known.get("capacity_bytes", 0) < 1 << 63:
        raise ValueError("the capacity of a node does not fit into 63 bits")
    known["kind"] = NodeKind(kind) if kind <= max(NodeKind) else kind
    return check_node_addresses(NodeInfo(node_id=node_id, incarnation=incarnation, **known))


_INFO_FIELDS: Final[Mapping[str, type]] = {
    "host_id": str,
    "endpoint": str,
    "bulk_endpoint": str,
    "local_socket": str,
    "capacity_bytes": int,
    "metrics_url": str,
    "draining": bool,
}


def pack_load(load: NodeLoad) -> bytes:
    """What the store keeps of a load report: its figures in order, eight bytes each."""
    return struct.pack(f"<{len(_LOAD_FIELDS)}q", *(getattr(load, name) for name in _LOAD_FIELDS))


def unpack_load(data: bytes | None) -> NodeLoad:
    """The inverse of pack_load; zeros for what was not reported, or not yet known to the version that wrote it."""
    if not data:
        return _NO_LOAD  # the same for all agents, which a replica reads once a second
    figures = struct.unpack_from(f"<{len(data) // 8}q", data)
    return NodeLoad(**dict(zip(_LOAD_FIELDS, figures, strict=False)))


_NO_LOAD: Final = NodeLoad()


# Only ever added to, at the end: older versions read what they know.
_LOAD_FIELDS: Final = (
    "arena_capacity_bytes",
    "arena_used_bytes",
    "disk_capacity_bytes",
    "disk_used_bytes",
    "page_count",
    "disk_free_bytes",
    "reconcile_age_ms",
)
