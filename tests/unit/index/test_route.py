"""Routes: scores by tier, partial shards, several nodes on a host, ties."""

from typing import Any

import pytest

from kvpool.core.cluster import ChainMatch, LiveNode, Location, MatchRun, NodeInfo, NodeKind, NodeLoad, RouteCandidate
from kvpool.core.coverage import Coverage
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Tier
from kvpool_index.config import IndexConfig
from kvpool_index.core import route as route_module
from kvpool_index.core.route import RouteWeights, route

WEIGHTS = RouteWeights(gpu=1.0, staging=0.8, disk=0.5, remote=0.25)
FOUR = ShardGrid(layers=4, kv_heads=1, layer_groups=4, splits=(1,))
GRID = FOUR.all_shards


def live(name: bytes, host: str, *, used: int = 0, draining: bool = False, agent: bool = False) -> LiveNode:
    kind = NodeKind.AGENT if agent else NodeKind.PAGESTORE
    info = NodeInfo(node_id=name * 16, kind=kind, host_id=host, incarnation=1, draining=draining)
    load = NodeLoad() if agent else NodeLoad(arena_capacity_bytes=100, arena_used_bytes=used)
    return LiveNode(info=info, load=load, lease_remaining_ms=1000)


def at(node: LiveNode, tier: Tier, shards: int = GRID) -> Location:
    return Location(node_id=node.info.node_id, incarnation=1, tier=tier, shards=shards)


def routed(
    runs: list[MatchRun],
    *alive: LiveNode,
    wanted: int = 0,
    with_unmatched: bool = False,
    grid: ShardGrid = FOUR,
) -> list[RouteCandidate]:
    match = ChainMatch(
        matched_chunks=sum(run.chunk_count for run in runs),
        runs=tuple(runs),
        nodes={node.info.node_id: node.info for node in alive},
    )
    return route(match, alive, coverage=Coverage.of(grid, wanted), weights=WEIGHTS, with_unmatched=with_unmatched)


def run(count: int, *where: Location) -> MatchRun:
    return MatchRun(chunk_count=count, locations=where)


def brief(found: list[RouteCandidate]) -> list[tuple[str, int, float]]:
    return [(each.host_id, each.matched_chunks, each.score) for each in found]


def test_the_nearer_tier_wins_and_other_hosts_count_as_remote() -> None:
    a, b, c = live(b"a", "one"), live(b"b", "two"), live(b"c", "three", agent=True)
    found = routed([run(10, at(a, Tier.DISK), at(b, Tier.STAGING), at(c, Tier.GPU))], a, b, c)
    assert brief(found) == [("three", 10, 10.0), ("two", 10, 8.0), ("one", 10, 5.0)]
    found = routed([run(4, at(a, Tier.STAGING)), run(6, at(b, Tier.STAGING))], a, b)
    assert brief(found) == [("two", 0, 5.8), ("one", 4, 4.7)]


def test_a_cache_of_another_host_can_send_nothing() -> None:
    a, b = live(b"a", "one", agent=True), live(b"b", "two")
    found = routed([run(4, at(a, Tier.GPU))], a, b, with_unmatched=True)
    assert brief(found) == [("one", 4, 4.0), ("two", 0, 0.0)]


def test_ranks_of_one_host_hold_a_chunk_together() -> None:
    ranks = [live(bytes([65 + rank]), "one", agent=True) for rank in range(4)]
    store, other = live(b"s", "one"), live(b"o", "two")
    whole = [at(node, Tier.GPU, 1 << rank) for rank, node in enumerate(ranks)]
    found = routed([run(3, *whole, at(other, Tier.STAGING))], *ranks, store, other)
    assert brief(found) == [("one", 3, 3.0), ("two", 3, pytest.approx(2.4))]
    assert [(node.node.node_id[:1], node.gpu_chunks) for node in found[0].nodes] == [
        (bytes([65 + rank]), 3) for rank in range(4)
    ]
    # Half in the caches, one quarter on its disk, one quarter only elsewhere.
    part = [*whole[:2], at(store, Tier.DISK, 0b0100), at(other, Tier.STAGING)]
    (first, second) = routed([run(1, *part)], *ranks, store, other)
    assert (second.host_id, second.score, second.matched_chunks) == ("one", (1 + 1 + 0.5 + 0.25) / 4, 0)
    assert first.score == 0.8


def test_only_wanted_shards_count() -> None:
    a, b = live(b"a", "one"), live(b"b", "two")
    found = routed([run(2, at(a, Tier.STAGING, 0b0011), at(b, Tier.DISK))], a, b, wanted=0b0011)
    assert brief(found) == [("one", 2, 1.6), ("two", 2, 1.0)]


def test_shards_of_another_split_count_by_the_heads_that_they_have() -> None:
    a, b = live(b"a", "one"), live(b"b", "two")
    grid = ShardGrid(layers=2, kv_heads=12, layer_groups=2, splits=(1, 2, 3, 4))
    tp1, halves, quarters = (grid.whole_chunk(split) for split in (1, 2, 4))
    first_half = grid.bitmap_for(range(2), range(6))
    # TP 2 and TP 1 stored, TP 1 asks; the half of it is none.
    found = routed([run(2, at(a, Tier.STAGING, halves), at(b, Tier.DISK, tp1))], a, b, grid=grid)
    assert brief(found) == [("one", 2, 1.6), ("two", 2, 1.0)]
    found = routed([run(2, at(a, Tier.STAGING, first_half), at(b, Tier.DISK, tp1))], a, b, grid=grid)
    assert brief(found) == [("one", 0, 0.8 + 0.25), ("two", 2, 1.0)]
    # TP 1 and half of TP 2 stored, a rank of TP 4 asks.
    rank = grid.bitmap_for(range(2), range(3, 6))
    stored = run(1, at(a, Tier.DISK, tp1), at(b, Tier.STAGING, first_half))
    assert brief(routed([stored], a, b, wanted=rank, grid=grid)) == [("two", 1, 0.8), ("one", 1, 0.5)]
    # A third lies across quarters: three of its four heads in staging, the other one on disk.
    third, quarter = grid.bitmap_for(range(2), range(4)), grid.bitmap_for(range(2), range(3))
    part = run(1, at(a, Tier.STAGING, quarter), at(a, Tier.DISK, quarters))
    assert brief(routed([part], a, wanted=third, grid=grid)) == [("one", 1, 0.725)]


def test_ties_go_to_the_emptier_arenas_and_then_by_name() -> None:
    nodes = [live(b"a", "one", used=90), live(b"b", "two", used=10), live(b"c", "three", used=10)]
    found = routed([run(2, *(at(node, Tier.STAGING) for node in nodes))], *nodes)
    assert [each.host_id for each in found] == ["three", "two", "one"]
    assert [each.arena_fill for each in found] == [0.1, 0.1, 0.9]


def test_hosts_that_drain_are_left_out_and_empty_ones_only_named_when_asked_for() -> None:
    a, b, c = live(b"a", "one", draining=True), live(b"b", "two"), live(b"c", "")
    runs = [run(2, at(a, Tier.STAGING))]
    assert routed(runs, a, b, c) == []
    found = routed(runs, a, b, c, with_unmatched=True)
    assert brief(found) == [((b"c" * 16).hex(), 0, 0.5), ("two", 0, 0.5)]


def test_work_grows_with_what_is_held_and_not_with_hosts_times_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [live(bytes([number]), f"{number:03}") for number in range(200)]
    runs = [run(1, at(nodes[number], Tier.STAGING), at(nodes[number + 1], Tier.DISK)) for number in range(100)]
    judged = 0
    worth = route_module._worth

    def counted(*values: Any) -> float:
        nonlocal judged
        judged += 1
        return worth(*values)

    monkeypatch.setattr(route_module, "_worth", counted)
    found = routed(runs, *nodes, with_unmatched=True)
    assert judged <= 3 * len(runs)
    scores = {each.host_id: each.score for each in found}
    assert scores["199"] == 100 * 0.25 and scores["000"] == 0.8 + 99 * 0.25
    assert scores["050"] == pytest.approx(0.8 + 0.5 + 98 * 0.25) and len(found) == 200
    assert [each.host_id for each in found if each.matched_chunks] == ["001", "000"]


def test_weights_are_not_negative() -> None:
    with pytest.raises(ValueError, match="route_weight_disk"):
        IndexConfig(route_weight_disk=-0.1)
