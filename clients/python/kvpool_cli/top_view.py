"""What `kvpool top` shows, worked out of two looks at a cluster. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.client.pagestore_control import ListedChunk
from kvpool.core.cluster import LiveNode, NodeKind
from kvpool_cli.output import natural
from kvpool_cli.top_metrics import Samples

SOURCES = ("staging", "disk", "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """One node at one moment. samples: its /metrics; None where they cannot be had."""

    node: LiveNode
    samples: Samples | None
    is_silent: bool = False  # it has a lease, and does not answer calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """A cluster at one moment. hot: chunks that are read most, with the host that says so."""

    at_s: float  # of a monotonic clock
    index: str
    store: str
    store_reachable: bool
    nodes: Sequence[NodeSnapshot] = ()
    keyspaces: dict[bytes, str] = field(default_factory=dict)  # names, by id
    hot: Sequence[tuple[str, ListedChunk]] = ()


@dataclass(slots=True, kw_only=True)
class HostStats:
    """Counters and gauges of one host, or of all. Rates are per second; negative ones do not occur."""

    staging_used_bytes: int = 0
    staging_capacity_bytes: int = 0
    disk_used_bytes: int = 0
    disk_capacity_bytes: int = 0
    staging_pages: float = 0
    disk_pages: float = 0
    dirty_bytes: float = 0
    sessions: float = 0
    read_bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))
    write_bytes: float = 0
    tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))
    matched_chunks: float = 0
    unmatched_chunks: float = 0
    evicted: dict[str, float] = field(default_factory=lambda: {"staging": 0.0, "disk": 0.0})
    corrupt_pages: float = 0
    failed_chunks: float = 0

    @property
    def hit_share(self) -> float | None:
        """Of the chunks that engines asked for; None while they ask for none."""
        asked = self.matched_chunks + self.unmatched_chunks
        return self.matched_chunks / asked if asked else None


@dataclass(slots=True, kw_only=True)
class HostRow:
    """One host: its pagestores and agents together. states: what an operator should know."""

    host: str
    stats: HostStats
    pagestores: int = 0
    agents: int = 0
    states: list[str] = field(default_factory=list)
    healthy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HotChain:
    """A group of 16 chunks of one chain that is read much."""

    keyspace: str
    head: str  # the beginning of the hash of the group's first chunk
    first_token_chunk: int
    chunk_count: int
    page_reads_per_minute: float
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown."""

    index: str
    store: str
    store_reachable: bool
    interval_s: float
    total: HostStats
    hosts: list[HostRow]
    hot: list[HotChain]


def view(before: ClusterSnapshot, now: ClusterSnapshot) -> View:
    """What changed between two looks, and what is now; hosts in the order of their names, numbers in them by value."""
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    earlier = {snapshot.node.info.node_id: snapshot for snapshot in before.nodes}
    hosts: dict[str, HostRow] = {}
    with_agent = {
        snapshot.node.info.host_id
        for snapshot in now.nodes
        if snapshot.node.info.kind is NodeKind.AGENT and snapshot.samples is not None
    }
    for snapshot in now.nodes:
        host = snapshot.node.info.host_id
        row = hosts.setdefault(host, HostRow(host=host, stats=HostStats()))
        known = earlier.get(snapshot.node.info.node_id)
        rates = _counter_rates(known, snapshot, elapsed_s)
        if snapshot.node.info.kind is NodeKind.PAGESTORE:
            row.pagestores += 1
            _add_pagestore(row, snapshot, rates, counts_reads=host not in with_agent)
        else:
            row.agents += 1
            _add_agent(row, snapshot, rates)
    total = HostStats()
    for row in hosts.values():
        _sum(total, row.stats)
    return View(
        index=now.index,
        store=now.store,
        store_reachable=now.store_reachable,
        interval_s=elapsed_s,
        total=total,
        hosts=sorted(hosts.values(), key=lambda row: natural(row.host)),
        hot=hot_chains(now.hot, now.keyspaces),
    )


def hot_chains(hot: Iterable[tuple[str, ListedChunk]], keyspaces: dict[bytes, str]) -> list[HotChain]:
    """Chunks gathered by chain group, the most read first."""
    groups: dict[tuple[bytes, bytes], list[tuple[str, ListedChunk]]] = {}
    for host, chunk in hot:
        groups.setdefault((chunk.keyspace, chunk.metadata.group_head_hash), []).append((host, chunk))
    chains = [
        HotChain(
            keyspace=keyspaces.get(keyspace, keyspace.hex()[:8]),
            head=head.hex()[:12],
            first_token_chunk=min(chunk.metadata.chunk_index for _, chunk in members),
            chunk_count=len({chunk.chunk_hash for _, chunk in members}),
            page_reads_per_minute=sum(chunk.page_reads_per_minute for _, chunk in members),
            hosts=tuple(sorted({host for host, _ in members}, key=natural)),
        )
        for (keyspace, head), members in groups.items()
    ]
    return sorted(chains, key=lambda chain: (-chain.page_reads_per_minute, chain.keyspace, chain.head))


Rates = dict[tuple[str, str], float]


def _counter_rates(before: NodeSnapshot | None, now: NodeSnapshot, elapsed_s: float) -> Rates:
    """By how much counters rose a second. A counter that was reset counts from 0."""
    if before is None or before.samples is None or now.samples is None:
        return {}
    rates: Rates = {}
    for key, value in now.samples.items():
        difference = value - before.samples.get(key, 0.0)
        rates[key] = (difference if difference >= 0 else value) / elapsed_s
    return rates


def _add_pagestore(row: HostRow, snapshot: NodeSnapshot, rates: Rates, *, counts_reads: bool) -> None:
    stats, load, prefix = row.stats, snapshot.node.load, "kvpool_pagestore_"
    samples = snapshot.samples or {}
    gauge = {name: samples.get((f"{prefix}{name}", "")) for name in _GAUGES}
    stats.staging_used_bytes += _first(gauge["arena_used_bytes"], load.arena_used_bytes)
    stats.staging_capacity_bytes += _first(gauge["arena_capacity_bytes"], load.arena_capacity_bytes)
    stats.disk_used_bytes += _first(gauge["disk_used_bytes"], load.disk_used_bytes)
    stats.disk_capacity_bytes += _first(gauge["disk_capacity_bytes"], load.disk_capacity_bytes)
    stats.staging_pages += gauge["staging_pages"] or 0
    stats.disk_pages += gauge["disk_pages"] or 0
    stats.dirty_bytes += gauge["arena_dirty_bytes"] or 0
    stats.write_bytes += rates.get((f"{prefix}committed_bytes_total", ""), 0.0)
    for source in SOURCES if counts_reads else ():  # engines without an agent read from pagestores themselves
        stats.read_bytes[source] += rates.get((f"{prefix}acquired_bytes_total", source), 0.0)
    for tier in stats.evicted:
        stats.evicted[tier] += rates.get((f"{prefix}evicted_pages_total", tier), 0.0)
    stats.corrupt_pages += sum(
        rate for (name, _), rate in rates.items() if name == f"{prefix}verification_failures_total"
    )
    if counts_reads:
        stats.sessions += gauge["sessions"] or 0
    if gauge["disk_faulty"]:
        _trouble(row, "DISK OFF" if gauge["disk_state"] == 2 else "DISK READ-ONLY")
    if snapshot.is_silent:
        _trouble(row, "NO ANSWER")
    if snapshot.node.info.draining:
        row.states.append("draining")
    if gauge["arena_quarantined_bytes"]:
        row.states.append("quarantine")
    _reachable(row, snapshot)


_GAUGES = (
    *("arena_used_bytes", "arena_capacity_bytes", "disk_used_bytes", "disk_capacity_bytes", "staging_pages"),
    *("disk_pages", "arena_dirty_bytes", "sessions", "disk_faulty", "disk_state", "arena_quarantined_bytes"),
)


def _add_agent(row: HostRow, snapshot: NodeSnapshot, rates: Rates) -> None:
    stats, prefix = row.stats, "kvpool_gpuagent_"
    for source in SOURCES:
        stats.read_bytes[source] += rates.get((f"{prefix}loaded_bytes_total", source), 0.0)
        stats.tokens[source] += rates.get((f"{prefix}loaded_tokens_total", source), 0.0)
    stats.sessions += (snapshot.samples or {}).get((f"{prefix}sessions", ""), 0.0)
    stats.unmatched_chunks += rates.get((f"{prefix}unmatched_chunks_total", ""), 0.0)
    for (name, _), rate in rates.items():
        if name == f"{prefix}matched_chunks_total":
            stats.matched_chunks += rate
        elif name == f"{prefix}failed_chunks_total":
            stats.failed_chunks += rate
        elif name == f"{prefix}verification_failures_total":
            stats.corrupt_pages += rate
    _reachable(row, snapshot)


def _reachable(row: HostRow, snapshot: NodeSnapshot) -> None:
    if snapshot.samples is None and "no metrics" not in row.states:
        row.states.append("no metrics")


def _trouble(row: HostRow, state: str) -> None:
    row.states.append(state)
    row.healthy = False


def _first(value: float | None, otherwise: int) -> int:
    return otherwise if value is None else int(value)


def _sum(total: HostStats, part: HostStats) -> None:
    for name in HostStats.__slots__:
        value = getattr(part, name)
        if isinstance(value, dict):
            mine = getattr(total, name)
            for key, each in value.items():
                mine[key] += each
        else:
            setattr(total, name, getattr(total, name) + value)
