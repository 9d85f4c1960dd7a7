"""Placement: local first, else in proportion to capacity, and stable."""

import random
from collections import Counter
from dataclasses import replace

from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.placement import place, rendezvous_score

KEYSPACE = bytes(16)


def store(number: int, capacity: int = 100, host: str = "") -> NodeInfo:
    return NodeInfo(
        node_id=bytes([number]) * 16, kind=NodeKind.PAGESTORE, endpoint="h:1", capacity_bytes=capacity, host_id=host
    )


def first_choices(nodes: list[NodeInfo], chains: int) -> list[bytes]:
    random_bytes = random.Random(7).randbytes
    heads = [random_bytes(16) for _ in range(chains)]
    return [place(nodes, keyspace=KEYSPACE, chain_head=head, host_id="", count=1)[0].node_id for head in heads]


def test_the_callers_host_comes_first() -> None:
    nodes = [store(1, 10**6), store(2, 1, "here"), store(3, 10**6), store(4, 2, "here")]
    for head in range(50):
        chosen = place(nodes, keyspace=KEYSPACE, chain_head=bytes([head]) * 16, host_id="here", count=3)
        assert {node.node_id for node in chosen[:2]} == {nodes[1].node_id, nodes[3].node_id}
        assert len(chosen) == 3
    assert {node.host_id for node in place(nodes, keyspace=KEYSPACE, chain_head=bytes(16), host_id="", count=1)} == {""}


def test_agents_and_draining_nodes_take_nothing() -> None:
    nodes = [replace(store(1), kind=NodeKind.AGENT), replace(store(2), draining=True), store(3)]
    assert place(nodes, keyspace=KEYSPACE, chain_head=bytes(16), host_id="", count=16) == [nodes[2]]
    assert place(nodes[:2], keyspace=KEYSPACE, chain_head=bytes(16), host_id="", count=1) == []


def test_shares_follow_capacity() -> None:
    shares = Counter(first_choices([store(1, 1 << 30), store(2, 3 << 30)], 2000))
    assert 0.71 < shares[bytes([2]) * 16] / 2000 < 0.79


def test_a_node_that_joins_only_takes_over() -> None:
    before = first_choices([store(1), store(2)], 900)
    after = first_choices([store(1), store(2), store(3)], 900)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {bytes([3]) * 16}
    assert 0.28 < len(moved) / 900 < 0.39


def test_scores_are_finite_for_no_capacity() -> None:
    assert 0 < rendezvous_score(store(1, 0), KEYSPACE, bytes(16)) < float("inf")
