"""The table of nodes that one replica keeps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvpool.core.cluster import NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import InvalidRequest
from kvpool_index.core.nodes import (
    MAX_INCARNATION,
    REFRESH_STEP_NODES,
    NodeRecord,
    NodeTable,
    check_registration,
    pack_info,
    pack_load,
    unpack_info,
    unpack_load,
)


def record(
    number: int, *, remaining_ms: int = 5000, alive: bool = True, ended: bool = False, incarnation: int = 1
) -> NodeRecord:
    info = NodeInfo(node_id=bytes([number]) * 16, kind=NodeKind.PAGESTORE, endpoint="h:1", incarnation=incarnation)
    ordinal = number * 100 + incarnation
    return NodeRecord(
        info=info, load=NodeLoad(), ordinal=ordinal, alive=alive, ended=ended, lease_remaining_ms=remaining_ms
    )


def replace_all(table: NodeTable, records: Sequence[NodeRecord], asked_at_s: float) -> None:
    for _ in table.replacing(records, asked_at_s):
        pass


def test_a_lease_ends_by_the_local_clock() -> None:
    table = NodeTable()
    replace_all(table, [record(1), record(2, remaining_ms=1000)], asked_at_s=50.0)
    assert [node.info.node_id[0] for node in table.live_nodes(50.5)] == [1, 2]
    assert table.live_by_ordinal(201, 50.999) is not None
    assert table.live_by_ordinal(201, 51.0) is None
    assert table.live_record(bytes([2]) * 16, 51.0) is None
    assert table.knows_ordinal(201), "its lease may still be renewed"
    assert [node.lease_remaining_ms for node in table.live_nodes(51.0)] == [4000]


def test_ended_and_dead_nodes_are_not_live() -> None:
    table = NodeTable()
    replace_all(table, [record(1, alive=False, ended=True), record(2, alive=False)], asked_at_s=0.0)
    assert table.live_nodes(0.0) == [] and table.live_by_ordinal(201, 0.0) is None
    assert not table.knows_ordinal(101) and table.knows_ordinal(201)


def test_a_new_incarnation_takes_the_place_of_the_old() -> None:
    table = NodeTable()
    table.put(record(1), 0.0)
    table.put(record(1, incarnation=2), 0.0)
    assert not table.knows_ordinal(101)
    live = table.live_by_ordinal(102, 0.0)
    assert live is not None and live.incarnation == 2
    table.forget(bytes([1]) * 16)
    assert not table.knows_ordinal(102) and table.record(bytes([1]) * 16) is None


def test_renewals_served_here_count_at_once() -> None:
    table, node_id = NodeTable(), bytes([1]) * 16
    table.put(record(1, remaining_ms=1000), 0.0)
    assert table.renewed(node_id, 1, NodeLoad(page_count=3), 9.0)
    assert not table.renewed(node_id, 2, NodeLoad(), 99.0)
    assert not table.renewed(bytes(16), 1, NodeLoad(), 99.0)
    (node,) = table.live_nodes(8.0)
    assert node.load.page_count == 3 and table.live_nodes(9.0) == []


def test_who_departed() -> None:
    table = NodeTable()
    replace_all(
        table,
        [
            record(1),
            record(2, remaining_ms=-1),
            record(3, remaining_ms=-1, alive=False),
            record(4, remaining_ms=-1000, alive=False, ended=True),
        ],
        asked_at_s=0.0,
    )
    assert [info.node_id[0] for info in table.departed(1000)] == [2, 4]


def test_a_refresh_takes_bounded_steps_and_keeps_renewals_that_come_meanwhile() -> None:
    table = NodeTable()
    records = [
        record(1)._replace(info=replace(record(1).info, node_id=n.to_bytes(16, "big")), ordinal=n) for n in range(9000)
    ]
    replace_all(table, records[:2], 0.0)
    steps = table.replacing(records, asked_at_s=0.0)
    next(steps)
    assert len(table) == 2, "until the end the old ones count"
    assert table.renewed(records[0].info.node_id, records[0].info.incarnation, NodeLoad(page_count=5), 99.0)
    assert 1 + sum(1 for _ in steps) == -(-9000 // REFRESH_STEP_NODES) >= 9000 / 256
    assert len(table) == 9000
    assert [node.load.page_count for node in table.live_nodes(98.0)] == [5]


def test_a_node_that_renews_and_then_ends_during_a_refresh_does_not_stop_it() -> None:
    table = NodeTable()
    replace_all(table, [record(1), record(2)], 0.0)
    steps = table.replacing([record(1), record(2)], asked_at_s=1.0)
    next(steps)
    assert table.renewed(record(1).info.node_id, 1, NodeLoad(), 9.0)
    table.forget(record(1).info.node_id)
    for _ in steps:
        pass
    assert [node.info.node_id[0] for node in table.live_nodes(2.0)] == [1, 2], (
        "as the store said; the end is made again"
    )


def test_infos_and_loads_survive_the_store() -> None:
    info = NodeInfo(
        node_id=bytes(range(16)),
        kind=NodeKind.AGENT,
        host_id='é"\\',
        endpoint="[::1]:5",
        bulk_endpoint="h:6",
        local_socket="/run/x y",
        capacity_bytes=(1 << 62) + 1,
        metrics_url="http://h:1/metrics",
        incarnation=77,
        draining=True,
    )
    assert unpack_info(pack_info(info), 77) == info
    newer = pack_info(info).replace(b"{", b'{"from_a_newer_version":1,', 1)
    assert unpack_info(newer, 77) == info
    of_new_kind = unpack_info(pack_info(info).replace(b'"kind":2', b'"kind":9'), 77)
    assert (of_new_kind.kind, replace(of_new_kind, kind=NodeKind.AGENT)) == (9, info)
    assert b'"kind":9' in pack_info(of_new_kind)
    load = NodeLoad(arena_capacity_bytes=1, arena_used_bytes=2, disk_capacity_bytes=3, disk_used_bytes=4, page_count=5)
    assert unpack_load(pack_load(load)) == load
    assert unpack_load(None) == NodeLoad()


@pytest.mark.parametrize(
    ("info", "last", "named"),
    [
        (NodeInfo(node_id=bytes(16), kind=NodeKind.AGENT, incarnation=MAX_INCARNATION), 0, "node.incarnation"),
        (NodeInfo(node_id=bytes(16), kind=NodeKind.AGENT), MAX_INCARNATION, "last_incarnation"),
        (NodeInfo(node_id=bytes(16), kind=NodeKind.PAGESTORE), 0, "endpoint"),
    ],
)
def test_registrations_that_are_refused(info: NodeInfo, last: int, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_registration(info, last)
    check_registration(NodeInfo(node_id=bytes(16), kind=NodeKind.AGENT), 5)
