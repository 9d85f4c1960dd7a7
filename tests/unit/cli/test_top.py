"""What `kvpool top` works out of two looks at a cluster, and how it is drawn."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment

from kvpool.client.pagestore_control import ListedChunk
from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind, NodeLoad, PageMetadata
from kvpool_cli.output import natural
from kvpool_cli.top_metrics import Samples, samples_from_text
from kvpool_cli.top_render import SORTS, ordered, render
from kvpool_cli.top_view import ClusterSnapshot, NodeSnapshot, View, view

STORE, AGENT = "kvpool_pagestore_", "kvpool_gpuagent_"


def node(kind: NodeKind, number: int, samples: Samples | None, *, draining: bool = False) -> NodeSnapshot:
    info = NodeInfo(
        node_id=bytes([kind, number]) * 8,
        kind=kind,
        host_id=f"host-{number}",
        endpoint=f"10.0.0.{number}:7200",
        incarnation=1,
        draining=draining,
    )
    load = NodeLoad(arena_capacity_bytes=1000, arena_used_bytes=100, disk_capacity_bytes=0)
    return NodeSnapshot(node=LiveNode(info=info, load=load, lease_remaining_ms=1000), samples=samples)


def pagestore(number: int, *, acquired: float = 0.0, faulty: float = 0.0) -> NodeSnapshot:
    samples = {
        (f"{STORE}arena_used_bytes", ""): 500.0,
        (f"{STORE}arena_capacity_bytes", ""): 1000.0,
        (f"{STORE}staging_pages", ""): 5.0,
        (f"{STORE}acquired_bytes_total", "staging"): acquired,
        (f"{STORE}evicted_pages_total", "staging"): acquired / 10,
        (f"{STORE}disk_faulty", ""): faulty,
        (f"{STORE}disk_state", ""): 2 * faulty,
    }
    return node(NodeKind.PAGESTORE, number, samples)


def agent(number: int, *, loaded: float = 0.0, matched: float = 0.0, unmatched: float = 0.0) -> NodeSnapshot:
    samples = {
        (f"{AGENT}loaded_bytes_total", "disk"): loaded,
        (f"{AGENT}loaded_tokens_total", "disk"): loaded / 100,
        (f"{AGENT}matched_chunks_total", "disk"): matched,
        (f"{AGENT}unmatched_chunks_total", ""): unmatched,
        (f"{AGENT}sessions", ""): 1.0,
    }
    return node(NodeKind.AGENT, number, samples)


def listed(number: int, reads: float, head: int = 0) -> ListedChunk:
    kept = PageMetadata(parent_hash=bytes(16), chunk_index=number, group_head_hash=bytes([head]) * 16)
    return ListedChunk(
        keyspace=b"k" * 16,
        chunk_hash=bytes([number]) * 16,
        metadata=kept,
        staging_shards=1,
        disk_shards=0,
        page_reads_per_minute=reads,
    )


def snapshot(at_s: float, *nodes: NodeSnapshot, hot: tuple[tuple[str, ListedChunk], ...] = ()) -> ClusterSnapshot:
    return ClusterSnapshot(
        at_s=at_s,
        index="index:7100",
        store="redis",
        store_reachable=True,
        nodes=nodes,
        keyspaces={b"k" * 16: "llama"},
        hot=hot,
    )


def test_samples_of_ours_are_read() -> None:
    text = """# HELP kvpool_pagestore_leases Leases.
kvpool_pagestore_leases 3.0
kvpool_pagestore_acquired_bytes_total{source="disk"} 1e+06
kvpool_pagestore_acquired_bytes_created{source="disk"} 1.7e+09
kvpool_gpuagent_load_duration_seconds_bucket{le="0.1"} 4.0
kvpool_index_failures_total{a="x",b="y"} 1.0
kvpool_index_failures_total{a="x",b="z"} 2.0
kvpool_pagestore_arena_used_bytes NaN
kvpool_pagestore_disk_used_bytes +Inf
python_info{version="3"} 1
"""
    assert samples_from_text(text) == {
        ("kvpool_pagestore_leases", ""): 3.0,
        ("kvpool_pagestore_acquired_bytes_total", "disk"): 1e6,
        ("kvpool_index_failures_total", ""): 3.0,
    }


def test_rates_are_differences_over_time_and_reads_are_the_agents_where_there_is_one() -> None:
    before = snapshot(10.0, pagestore(1, acquired=1000), agent(1), pagestore(2))
    now = snapshot(
        12.0,
        pagestore(1, acquired=3000),
        agent(1, loaded=400, matched=30, unmatched=10),
        pagestore(2, acquired=600),
    )
    seen = view(before, now)
    first, second = seen.hosts
    assert first.stats.read_bytes == {"staging": 0.0, "disk": 200.0, "remote": 0.0}
    assert second.stats.read_bytes["staging"] == 300.0, "no agent there: what the pagestore leased"
    assert seen.total.tokens["disk"] == 2.0
    assert seen.total.hit_share == 0.75
    assert seen.total.evicted["staging"] == 100.0 + 30.0
    assert (seen.total.staging_used_bytes, seen.total.staging_capacity_bytes) == (1000, 2000)


def test_a_counter_that_went_back_and_a_node_that_came_make_no_negative_or_huge_rates() -> None:
    before = snapshot(0.0, pagestore(1, acquired=9000))
    seen = view(before, snapshot(1.0, pagestore(1, acquired=50), pagestore(2, acquired=1 << 40)))
    assert [row.stats.read_bytes["staging"] for row in seen.hosts] == [50.0, 0.0]


def test_a_node_without_metrics_shows_what_it_reported_to_the_index() -> None:
    quiet = node(NodeKind.PAGESTORE, 3, None)
    (row,) = view(snapshot(0.0, quiet), snapshot(1.0, quiet)).hosts
    assert (row.stats.staging_used_bytes, row.states, row.healthy) == (100, ["no metrics"], True)


def test_trouble_is_named() -> None:
    hurt = pagestore(1, faulty=1.0)
    seen = view(snapshot(0.0, hurt), snapshot(1.0, hurt, node(NodeKind.PAGESTORE, 2, {}, draining=True)))
    assert [(row.states, row.healthy) for row in seen.hosts] == [(["DISK OFF"], False), (["draining"], True)]
    (row,) = (line for line in segments(seen, 80, 24) if "DISK OFF" in "".join(part.text for part in line))
    assert all(part.style and part.style.reverse for part in row)


def test_a_pagestore_that_hangs_is_in_trouble_though_its_lease_lives() -> None:
    silent = replace(node(NodeKind.PAGESTORE, 1, None), is_silent=True)
    seen = view(snapshot(0.0, silent), snapshot(1.0, silent, pagestore(2)))
    assert [(row.states, row.healthy) for row in seen.hosts] == [(["NO ANSWER", "no metrics"], False), ([], True)]


def test_names_of_any_script_neither_overflow_nor_shift_columns() -> None:
    names = ["\u6a21\u578b" * 20, "e\u0301" * 60, "host-2", "\u00b2", "9" * 5000]
    nodes = []
    for number, name in enumerate(names):
        one = pagestore(number)
        nodes.append(replace(one, node=replace(one.node, info=replace(one.node.info, host_id=name))))
    hot = (("\u6a21\u578b" * 20, listed(1, 10)),)
    seen = view(snapshot(0.0, *nodes), replace(snapshot(1.0, *nodes, hot=hot), keyspaces={b"k" * 16: "\u6a21" * 30}))
    for columns in (40, 80, 81, 160):
        assert max(map(cell_len, drawn(seen, columns, 40))) <= columns
    hosts = [line for line in drawn(seen, 160, 40) if line.endswith("  ok")]
    assert len(hosts) == len(names) and len({cell_len(line) for line in hosts}) == 1


def test_hot_chunks_are_gathered_by_chain_group() -> None:
    hot = (("host-2", listed(1, 10)), ("host-10", listed(1, 5)), ("host-2", listed(2, 1)), ("host-2", listed(9, 99, 7)))
    chains = view(snapshot(0.0), snapshot(1.0, hot=hot)).hot
    assert [(chain.keyspace, chain.page_reads_per_minute, chain.chunk_count) for chain in chains] == [
        ("llama", 99, 1),
        ("llama", 16, 2),
    ]
    assert chains[1].hosts == ("host-2", "host-10")


def many(count: int) -> View:
    before = snapshot(0.0, *(pagestore(number) for number in range(count)))
    hot = tuple((f"host-{number}", listed(number, 10.0 + number, number)) for number in range(40))
    return view(before, snapshot(1.0, *(pagestore(number, acquired=number) for number in range(count)), hot=hot))


def segments(seen: View, columns: int, lines: int, **options: Any) -> list[list[Segment]]:
    console = Console(file=io.StringIO(), width=columns, height=lines, force_terminal=True, color_system="standard")
    return console.render_lines(render(seen, columns=columns, lines=lines, **options), pad=False)


def drawn(seen: View, columns: int, lines: int, **options: Any) -> list[str]:
    return ["".join(part.text for part in line).rstrip() for line in segments(seen, columns, lines, **options)]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 50), (40, 13), (81, 14), (300, 100)])
@pytest.mark.parametrize("hosts", [0, 1, 64])
def test_any_terminal_is_filled_and_never_overflows(columns: int, lines: int, hosts: int) -> None:
    seen = many(hosts)
    for sort in SORTS:
        shown = drawn(seen, columns, lines, sort=sort, clock="12:00:00")
        assert len(shown) == lines if hosts == 64 else 0 < len(shown) <= lines
        assert all(cell_len(line) <= columns for line in shown)


@pytest.mark.parametrize(("columns", "lines"), [(10, 5), (1, 1)])
def test_a_tiny_terminal_is_no_error(columns: int, lines: int) -> None:
    assert all(cell_len(line) <= columns for line in drawn(many(3), columns, lines))


def test_hosts_scroll_to_the_last() -> None:
    seen = many(64)
    top = drawn(seen, 80, 24)
    assert any(text.startswith("host-0 ") for text in top) and any("more hosts" in text for text in top)
    end = drawn(seen, 80, 24, first_host=1000)
    assert any(text.startswith("host-63 ") for text in end)
    assert any(text.startswith("HOT CHAIN") for text in end)


def test_hosts_are_ordered_by_name_or_figure() -> None:
    rows = view(snapshot(0.0), snapshot(1.0, pagestore(10), pagestore(2), pagestore(1, faulty=1.0))).hosts
    assert [row.host for row in ordered(rows, "name")] == ["host-1", "host-2", "host-10"]
    assert ordered(rows, "state")[0].host == "host-1"
    assert [row.host for row in ordered(many(3).hosts, "read")] == ["host-2", "host-1", "host-0"]
    assert natural("host-2") < natural("host-10")


def test_a_store_out_of_reach_is_in_the_first_line() -> None:
    seen = replace(many(1), store_reachable=False)
    assert "NOT REACHABLE" in drawn(seen, 80, 24)[0]
