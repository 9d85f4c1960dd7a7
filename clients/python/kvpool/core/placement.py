"""Which nodes should hold chunks of a chain; the index and nodes that copy pages compute it alike."""

import math
from collections.abc import Iterable

from blake3 import blake3

from kvpool.core.cluster import NodeInfo, NodeKind

_UNIT = float(1 << 52)


def place(nodes: Iterable[NodeInfo], *, keyspace: bytes, chain_head: bytes, host_id: str, count: int) -> list[NodeInfo]:
    """At most `count` pagestores that take new chunks, best first.

    Those of the caller's host come first, then the others; within each part by rendezvous hashing weighted by capacity:
    a chain keeps its nodes as long as they live, and a node that joins takes over its fair share and no more.
    """
    candidates = [node for node in nodes if node.kind == NodeKind.PAGESTORE and not node.draining]

    def rank(node: NodeInfo) -> tuple[bool, float, bytes]:
        away = not (host_id and node.host_id == host_id)
        return away, -rendezvous_score(node, keyspace, chain_head), node.node_id

    return sorted(candidates, key=rank)[:count]


def rendezvous_score(node: NodeInfo, keyspace: bytes, chain_head: bytes) -> float:
    """-weight / ln(u), u in (0, 1) from a hash of node and chain: each wins with a chance equal to its weight."""
    digest = blake3(node.node_id + keyspace + chain_head).digest(length=8)
    u = ((int.from_bytes(digest, "little") >> 12) + 0.5) / _UNIT
    return -max(1, node.capacity_bytes) / math.log(u)
