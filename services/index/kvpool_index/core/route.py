"""Which hosts would serve a prompt best, by what an engine there would find of its prefix."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.cluster import ChainMatch, LiveNode, NodeInfo, RouteCandidate, RouteNode
from kvpool.core.coverage import Coverage
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.outcome import Tier

_SCORE_DIGITS: Final = 9  # so that hosts with equal holdings have equal scores, in any order of summing up


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWeights:
    """What a chunk is worth to an engine by where its KV heads are, >= 0; a head counts once, as the first of these."""

    gpu: float
    staging: float
    disk: float
    remote: float  # on another host, in staging or on disk


class _Heads(dict[int, int]):
    """By a bitmap of shards, the KV heads that they have: bit g * kv_heads + h is head h of layer group g."""

    def __init__(self, grid: ShardGrid) -> None:
        self._grid = grid

    def __missing__(self, shards: int) -> int:
        grid, heads = self._grid, 0
        for shard in shards_in(shards):
            of_shard = grid.heads_of(shard)
            first = grid.layer_group_of(shard) * grid.kv_heads + of_shard.start
            heads |= ((1 << len(of_shard)) - 1) << first
        self[shards] = heads
        return heads


@dataclass(slots=True)
class _Host:
    """What is summed up of one host."""

    nearer: float = 0.0  # how much more it has, for what it holds itself, than a host that holds nothing
    matched: int = 0
    nodes: dict[bytes, list[int]] = field(default_factory=dict)  # chunks by tier, by node id


def route(
    match: ChainMatch, alive: Sequence[LiveNode], *, coverage: Coverage, weights: RouteWeights, with_unmatched: bool
) -> list[RouteCandidate]:
    """Hosts, best first: by score, then the emptier arenas, then the name.

    match: for the shards that `coverage` wants. Each chunk of it gives a host the mean weight of the KV heads that are
    wanted of each layer group: of the best tier in which the host itself has them, in shards of any split, else
    of `remote` where another host could send them. A cache of another host's engine can send nothing, so that it counts
    as nothing. Hosts on which all nodes drain are left out.
    """
    heads = _Heads(coverage.grid)
    wanted = heads[coverage.wanted]
    hosts = {name: _Host() for name in _open_hosts(alive)}
    elsewhere = 0.0  # score of a host that itself holds nothing
    matched = 0
    for run in match.runs:
        held: dict[str, list[int]] = {}
        sendable = 0
        for location in run.locations:
            node = match.nodes[location.node_id]
            shards = location.shards
            held.setdefault(host_of(node), [0, 0, 0])[location.tier - Tier.GPU] |= shards
            sendable |= shards if location.tier != Tier.GPU else 0
            if host_of(node) in hosts:
                counts = hosts[host_of(node)].nodes.setdefault(node.node_id, [0, 0, 0])
                counts[location.tier - Tier.GPU] += run.chunk_count
        # Only hosts that hold some of it are looked at: there may be as many runs as chunks, and very many hosts.
        sent = heads[sendable]
        remote = run.chunk_count * _worth(0, 0, 0, sent, wanted, weights)
        for name in held.keys() & hosts.keys():
            host, (gpu, staging, disk) = hosts[name], held[name]
            worth = _worth(heads[gpu], heads[staging], heads[disk], sent, wanted, weights)
            host.nearer += run.chunk_count * worth - remote
            if host.matched == matched and coverage.is_met_by(gpu | staging | disk):
                host.matched += run.chunk_count
        elsewhere += remote
        matched += run.chunk_count
    fills = _fills(alive)
    found = [
        RouteCandidate(
            host_id=name,
            matched_chunks=host.matched,
            score=round(elsewhere + host.nearer, _SCORE_DIGITS),
            arena_fill=fills[name],
            nodes=tuple(_node(match.nodes[node_id], counts) for node_id, counts in sorted(host.nodes.items())),
        )
        for name, host in hosts.items()
        if host.nodes or with_unmatched
    ]
    return sorted(found, key=lambda each: (-each.score, each.arena_fill, each.host_id))


def host_of(node: NodeInfo) -> str:
    """The host of a node; one that names none is a host of its own."""
    return node.host_id or node.node_id.hex()


def _open_hosts(alive: Iterable[LiveNode]) -> list[str]:
    return sorted({host_of(node.info) for node in alive if not node.info.draining})


def _worth(gpu: int, staging: int, disk: int, sendable: int, wanted: int, weights: RouteWeights) -> float:
    left, worth = wanted, 0.0
    for heads, weight in (
        (gpu, weights.gpu),
        (staging, weights.staging),
        (disk, weights.disk),
        (sendable, weights.remote),
    ):
        worth += weight * (heads & left).bit_count()
        left &= ~heads
    return worth / wanted.bit_count()


def _fills(alive: Iterable[LiveNode]) -> dict[str, float]:
    """Used part of the arenas of each host."""
    sums: dict[str, list[int]] = {}
    for node in alive:
        each = sums.setdefault(host_of(node.info), [0, 0])
        each[0] += node.load.arena_used_bytes
        each[1] += node.load.arena_capacity_bytes
    return {name: used / capacity if capacity else 0.0 for name, (used, capacity) in sums.items()}


def _node(node: NodeInfo, counts: Sequence[int]) -> RouteNode:
    gpu, staging, disk = counts
    return RouteNode(node=node, gpu_chunks=gpu, staging_chunks=staging, disk_chunks=disk)
