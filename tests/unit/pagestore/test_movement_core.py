"""The decisions behind moving pages: who lacks copies, who gets them, when, how fast, and what is hot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind, NodeLoad
from kvpool.core.grid import ShardGrid
from kvpool_pagestore.core.replication import (
    HeldChunk,
    Holder,
    HotChunks,
    ReplicaQueue,
    consecutive,
    is_safe_without,
    missing,
    others,
    pick,
    ranked,
)
from kvpool_pagestore.core.writeback import Pace
from tests.fixtures.pagestore import page_key
from tests.fixtures.splits import SPLITS, TP1, TP2, TP4, rank

THREE = ShardGrid(layers=3, kv_heads=1, layer_groups=3, splits=(1,))


def node(number: int, host: str = "", *, draining: bool = False) -> NodeInfo:
    return NodeInfo(
        node_id=bytes([number]) * 16,
        kind=NodeKind.PAGESTORE,
        host_id=host or f"host-{number}",
        bulk_endpoint=f"node-{number}:1",
        capacity_bytes=1 << 30,
        draining=draining,
    )


def chunk(index: int = 0, shards: int = 0b11, *, durable: bool = True, grid: ShardGrid = THREE) -> HeldChunk:
    return HeldChunk(
        keyspace=b"k" * 16,
        chunk_hash=index.to_bytes(16, "big"),
        chunk_index=index,
        group_head_hash=b"g" * 16,
        shards=shards,
        durable=durable,
        grid=grid,
    )


def test_a_copy_counts_if_it_is_whole_live_as_durable_and_stays() -> None:
    holders = [
        Holder(node=node(1), disk_shards=0b11, staging_shards=0),
        Holder(node=node(2), disk_shards=0b01, staging_shards=0b10),
        Holder(node=node(3, draining=True), disk_shards=0b11, staging_shards=0b11),
        Holder(node=node(4), disk_shards=0b111, staging_shards=0),
    ]
    assert [one.node_id[0] for one in others(chunk(), holders, node(1).node_id)] == [4]
    assert [one.node_id[0] for one in others(chunk(durable=False), holders, node(1).node_id)] == [2, 4]
    assert missing(chunk(), holders, node(2).node_id) == 0b10
    assert missing(chunk(), holders, node(9).node_id) == 0b11


def test_pages_of_another_split_are_copies_if_they_have_every_layer_and_head() -> None:
    first_half = rank(2, 0)
    holders = [
        Holder(node=node(2), disk_shards=TP2, staging_shards=0),
        Holder(node=node(3), disk_shards=first_half, staging_shards=TP2),
        Holder(node=node(4), disk_shards=TP4 | first_half, staging_shards=0),
    ]
    whole = chunk(shards=TP1, grid=SPLITS)
    assert [one.node_id[0] for one in others(whole, holders, node(1).node_id)] == [2, 4]
    assert [missing(whole, holders, node(number).node_id) for number in (2, 3, 4)] == [0, TP1, 0]
    halves = chunk(shards=TP2, grid=SPLITS)
    assert missing(halves, holders, node(3).node_id) == TP2 & ~first_half, "page by page of those that exist"
    part = chunk(shards=first_half, grid=SPLITS)
    assert [one.node_id[0] for one in others(part, holders, node(1).node_id)] == [2, 3, 4]
    both = chunk(shards=TP1 | TP2, grid=SPLITS)
    assert missing(both, holders, node(2).node_id) == 0


def test_targets_are_on_hosts_of_their_own_as_long_as_there_are_such() -> None:
    nodes = [node(1, "a"), node(2, "a"), node(3, "b"), node(4, "b")]
    assert [one.node_id[0] for one in pick(nodes, 2, {"a"})] == [3, 1]
    assert [one.node_id[0] for one in pick([one for one in nodes if one.host_id == "b"], 9, set())] == [3, 4]
    assert pick(nodes, -1, set()) == []


def test_ranking_leaves_out_oneself_and_those_that_drain_and_puts_ones_own_host_last() -> None:
    infos = [node(1, "me"), node(2, "me"), node(3), node(4, draining=True), node(5)]
    live = [LiveNode(info=one, load=NodeLoad(), lease_remaining_ms=1) for one in infos]
    order = [one.node_id[0] for one in ranked(live, infos[0], b"k" * 16, b"h" * 16)]
    assert set(order[:2]) == {3, 5} and order[2:] == [2]


@given(st.lists(st.tuples(st.integers(0, 15), st.sampled_from([1, 3]), st.booleans()), unique_by=lambda one: one[0]))
def test_runs_hold_every_chunk_once_and_can_be_asked_about_in_one_question(
    given_chunks: list[tuple[int, int, bool]],
) -> None:
    chunks = [chunk(index, shards, durable=durable) for index, shards, durable in given_chunks]
    runs = consecutive(chunks)
    assert sorted(one.chunk_index for run in runs for one in run) == sorted(one.chunk_index for one in chunks)
    for run in runs:
        assert [one.chunk_index for one in run] == list(range(run[0].chunk_index, run[0].chunk_index + len(run)))
        assert len({(one.shards, one.durable) for one in run}) == 1


def queue(max_chunks: int = 100) -> ReplicaQueue:
    return ReplicaQueue(max_chunks=max_chunks, linger_s=1.0, retry_first_s=2.0, retry_last_s=10.0)


def test_chunks_of_a_group_go_together_after_they_lingered() -> None:
    one = queue()
    assert one.next_due_s() is None and one.take(0.0) is None
    for number in range(3):
        assert one.add(page_key(number), b"g" * 16, 0.5 * number)
    assert one.add(page_key(2, 1), b"g" * 16, 1.0)  # another shard of a chunk that waits
    assert one.chunk_count == 3 and one.next_due_s() == 1.0 and one.take(0.9) is None
    group = one.take(1.0)
    assert group is not None and len(group.chunk_hashes) == 3
    assert one.chunk_count == 0 and one.take(99.0) is None


def test_what_failed_comes_again_ever_later_and_with_what_came_meanwhile() -> None:
    one = queue()
    one.add(page_key(1), b"g" * 16, 0.0, copies=3)
    due_s, delays = 1.0, []
    for _ in range(5):
        group = one.take(due_s)
        assert group is not None and one.failed(group, due_s)
        next_s = one.next_due_s()
        assert next_s is not None
        delays.append(next_s - due_s)
        due_s = next_s
    assert delays == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert one.add(page_key(2), b"g" * 16, due_s)
    group = one.take(due_s)
    assert group is not None and len(group.chunk_hashes) == 2 and group.copies == 3


def test_a_full_queue_refuses() -> None:
    one = queue(max_chunks=2)
    assert [one.add(page_key(number), b"g" * 16, 0.0) for number in range(3)] == [True, True, False]
    group = one.take(1.0)
    assert group is not None and one.add(page_key(9), b"h" * 16, 1.0)
    assert not one.failed(group, 1.0), "there is no room for what came back"
    assert one.chunk_count == 1


def test_a_chunk_is_hot_once_until_it_has_cooled() -> None:
    hot = HotChunks(uses_per_minute=60, capacity=10)
    reported = [hot.used(b"c", number * 0.5) for number in range(240)]  # two minutes at twice the rate
    assert reported.count(True) == 1 and reported.index(True) < 120
    assert not any(hot.used(b"c", 1000.0 + number) for number in range(20)), "it starts from zero"
    assert any(hot.used(b"c", 1020.0 + number * 0.5) for number in range(120))
    assert not any(HotChunks(uses_per_minute=60, capacity=10).used(b"d", number * 3.0) for number in range(1000))


def test_only_so_many_chunks_are_counted() -> None:
    hot = HotChunks(uses_per_minute=60, capacity=2)
    for number in range(100):
        assert not hot.used(b"%d" % (number % 3), 0.0), "the one that was unused longest is forgotten"
    assert not HotChunks(uses_per_minute=0, capacity=2).enabled


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.floats(0.0, 5.0))
def test_a_pace_is_never_exceeded(sizes: list[int], idle_s: float) -> None:
    pace, now_s, begun = Pace(100.0), 0.0, list[tuple[float, int]]()
    for number, size in enumerate(sizes):
        now_s += pace.wait_s(size, now_s)
        begun.append((now_s, size))
        now_s += idle_s if number % 7 == 3 else 0.0
    for first in range(len(begun)):
        sent = sum(size for _, size in begun[first:-1])
        assert sent <= 100.0 * (begun[-1][0] - begun[first][0]) + 1e-6


def test_chunks_used_most_come_first_and_cool() -> None:
    hot = HotChunks(uses_per_minute=10, capacity=100)
    for second in range(600):
        hot.used(b"steady", float(second))
        if second % 10 == 0:
            hot.used(b"seldom", float(second))
    (first, rate), (second_name, slow) = hot.most_used(2, 600.0)
    assert (first, second_name) == (b"steady", b"seldom")
    assert 55 < rate < 65 and 5 < slow < 7, "of a use a second some 60 a minute"
    assert hot.most_used(1, 660.0)[0][1] < 0.6 * rate
    assert hot.most_used(0, 600.0) == []


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_old_holders_that_decide_at_the_same_time_leave_enough_copies(factor: int, order: tuple[int, ...]) -> None:
    placed = {node(9).node_id}
    holders = [node(9), *map(node, order)]  # three old ones, and one by placement
    kept = [
        one
        for one in holders
        if one.node_id in placed
        or not is_safe_without(one.node_id, [other for other in holders if other is not one], placed, factor)
    ]
    assert len(kept) == factor and kept[0] == node(9)
    assert {one.node_id for one in kept[1:]} == {node(number).node_id for number in range(1, factor)}
