"""Where the chunks of a match would come from."""

import pytest

from kvpool.core.cluster import ChainMatch, Location, MatchRun, NodeInfo, NodeKind
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Tier
from kvpool_gpuagent.core.sources import LoadSource, source_runs
from tests.fixtures.splits import SPLITS, TP1, TP2, TP4, rank

HERE, THERE, SILENT, GONE = (bytes([number]) * 16 for number in range(1, 5))
SHARDS = 0b0110
FOUR = ShardGrid(layers=4, kv_heads=1, layer_groups=4, splits=(1,))


def node(node_id: bytes, bulk_endpoint: str) -> NodeInfo:
    return NodeInfo(node_id=node_id, kind=NodeKind.PAGESTORE, bulk_endpoint=bulk_endpoint, incarnation=5)


NODES = {HERE: node(HERE, "here:1"), THERE: node(THERE, "there:1"), SILENT: node(SILENT, "")}


def at(node_id: bytes, tier: Tier, shards: int) -> Location:
    return Location(node_id=node_id, incarnation=5, tier=tier, shards=shards)


@pytest.mark.parametrize(
    ("locations", "source"),
    [
        ([at(HERE, Tier.STAGING, 0b1111)], LoadSource.STAGING),
        ([at(HERE, Tier.STAGING, 0b0110), at(THERE, Tier.STAGING, 0b1111)], LoadSource.STAGING),
        ([at(HERE, Tier.STAGING, 0b0100), at(HERE, Tier.DISK, 0b0010)], LoadSource.DISK),
        ([at(HERE, Tier.DISK, 0b1111), at(THERE, Tier.STAGING, 0b1111)], LoadSource.DISK),
        ([at(HERE, Tier.STAGING, 0b0100), at(THERE, Tier.STAGING, 0b0010)], LoadSource.REMOTE),
        ([at(THERE, Tier.DISK, 0b1111)], LoadSource.REMOTE),
    ],
)
def test_a_run_counts_as_the_slowest_source_that_its_shards_need(locations: list[Location], source: LoadSource) -> None:
    match = ChainMatch(matched_chunks=3, runs=(MatchRun(chunk_count=3, locations=tuple(locations)),), nodes=NODES)
    (run,) = source_runs(match, FOUR, SHARDS, HERE)
    assert (run.chunk_count, run.source, run.readable) == (3, source, SHARDS)


def test_other_nodes_are_asked_in_the_order_of_the_match_and_once_each() -> None:
    locations = (
        at(SILENT, Tier.STAGING, 0b1111),  # has no bulk endpoint
        at(GONE, Tier.STAGING, 0b1111),  # the index names it no more
        at(THERE, Tier.GPU, 0b1111),  # a hint that only a peer rank can use
        at(THERE, Tier.STAGING, 0b0010),
        at(HERE, Tier.STAGING, 0b0010),
        at(THERE, Tier.DISK, 0b0100),
    )
    match = ChainMatch(matched_chunks=1, runs=(MatchRun(chunk_count=1, locations=locations),), nodes=NODES)
    (run,) = source_runs(match, FOUR, SHARDS, HERE)
    assert [(source.node_id, source.incarnation, source.bulk_endpoint) for source in run.remote] == [
        (THERE, 5, "there:1")
    ]


def test_without_a_local_pagestore_everything_is_remote() -> None:
    run = MatchRun(chunk_count=1, locations=(at(HERE, Tier.STAGING, 0b1111),))
    (found,) = source_runs(ChainMatch(matched_chunks=1, runs=(run,), nodes=NODES), FOUR, SHARDS, b"")
    assert found.source is LoadSource.REMOTE
    assert [source.node_id for source in found.remote] == [HERE]


@pytest.mark.parametrize(
    ("wanted", "locations", "source", "readable"),
    [
        # TP 2 stored, TP 1 asks; TP 1 stored, a rank of TP 4 asks.
        (TP1, [at(HERE, Tier.STAGING, TP2)], LoadSource.STAGING, TP2),
        (rank(4, 3), [at(HERE, Tier.STAGING, TP1)], LoadSource.STAGING, TP1),
        # The same pages here and there: no way to another node for another split.
        (TP1, [at(THERE, Tier.STAGING, TP1), at(HERE, Tier.STAGING, TP2)], LoadSource.STAGING, TP2),
        (TP1, [at(HERE, Tier.STAGING, rank(2, 0)), at(HERE, Tier.DISK, rank(2, 1))], LoadSource.DISK, TP2),
        # Staging is faster than the wanted split on disk.
        (TP1, [at(HERE, Tier.STAGING, TP2), at(HERE, Tier.DISK, TP1)], LoadSource.STAGING, TP2),
        # Half of it here is not enough.
        (TP1, [at(HERE, Tier.STAGING, rank(2, 0)), at(THERE, Tier.STAGING, TP1)], LoadSource.REMOTE, TP1),
        (TP1, [at(HERE, Tier.STAGING, rank(2, 0)), at(THERE, Tier.STAGING, rank(2, 1))], LoadSource.REMOTE, TP2),
        # An engine's cache is no source as long as a pagestore is one.
        (rank(2, 0), [at(THERE, Tier.GPU, rank(2, 0)), at(THERE, Tier.DISK, TP1)], LoadSource.REMOTE, TP1),
        (rank(2, 0), [at(THERE, Tier.GPU, rank(2, 0))], LoadSource.REMOTE, rank(2, 0)),
    ],
)
def test_shards_of_another_split_are_read(
    wanted: int, locations: list[Location], source: LoadSource, readable: int
) -> None:
    match = ChainMatch(matched_chunks=2, runs=(MatchRun(chunk_count=2, locations=tuple(locations)),), nodes=NODES)
    (run,) = source_runs(match, SPLITS, wanted, HERE)
    assert (run.source, run.readable) == (source, readable)


def test_only_nodes_with_shards_to_read_are_asked() -> None:
    other = bytes([9]) * 16
    nodes = {**NODES, other: node(other, "other:1")}
    locations = (at(THERE, Tier.STAGING, TP4), at(other, Tier.STAGING, TP1))
    match = ChainMatch(matched_chunks=1, runs=(MatchRun(chunk_count=1, locations=locations),), nodes=nodes)
    (run,) = source_runs(match, SPLITS, TP1, HERE)
    assert [source.node_id for source in run.remote] == [other]
