"""`kvpool cache route`: its table and its document."""

from kvpool.core.cluster import NodeInfo, NodeKind, RouteAnswer, RouteCandidate, RouteNode
from kvpool_cli.output import as_text
from kvpool_cli.route import render, to_document

NODE = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, host_id="east", endpoint="east:7200")
ANSWER = RouteAnswer(
    matched_chunks=40,
    candidates=(
        RouteCandidate(
            host_id="east",
            matched_chunks=30,
            score=27.0,
            arena_fill=0.5,
            nodes=(RouteNode(node=NODE, staging_chunks=30),),
        ),
        RouteCandidate(host_id="west", matched_chunks=0, score=12.0),
    ),
)


def test_the_table_names_hosts_best_first() -> None:
    lines = as_text(render(ANSWER)).splitlines()
    assert lines[0] == "the cluster holds 40 chunks of the prefix"
    assert [line.split() for line in lines[-2:]] == [
        ["east", "27.0", "30", "0", "30", "0", "50%"],
        ["west", "12.0", "0", "0", "0", "0", "0%"],
    ]
    assert as_text(render(RouteAnswer(matched_chunks=0, candidates=()))).endswith("no host holds any of it")


def test_the_document() -> None:
    document = to_document(ANSWER)
    assert (document["version"], document["matched_chunks"]) == (1, 40)
    first, second = document["candidates"]
    assert (first["host"], first["score"], first["nodes"][0]["kind"]) == ("east", 27.0, "pagestore")
    assert second["nodes"] == []
