"""Where the chunks of a match would come from."""

import pytest

from kvpool.core.cluster import ChainMatch, Location, MatchRun, NodeInfo, NodeKind
from kvpool.core.outcome import Tier
from kvpool_gpuagent.core.bandwidth import LoadSource
from kvpool_gpuagent.core.sources import source_runs

HERE, THERE, SILENT, GONE = (bytes([number]) * 16 for number in range(1, 5))
SHARDS = 0b0110


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
    (run,) = source_runs(match, SHARDS, HERE)
    assert (run.chunk_count, run.source) == (3, source)


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
    (run,) = source_runs(match, SHARDS, HERE)
    assert [(source.node_id, source.incarnation, source.bulk_endpoint) for source in run.remote] == [
        (THERE, 5, "there:1")
    ]


def test_without_a_local_pagestore_everything_is_remote() -> None:
    run = MatchRun(chunk_count=1, locations=(at(HERE, Tier.STAGING, 0b1111),))
    (found,) = source_runs(ChainMatch(matched_chunks=1, runs=(run,), nodes=NODES), SHARDS, b"")
    assert found.source is LoadSource.REMOTE
    assert [source.node_id for source in found.remote] == [HERE]
