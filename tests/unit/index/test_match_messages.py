"""Answers of a match stream that are put together from bytes say what the messages would."""

from typing import Any

import pytest

from kvpool.core.cluster import ChainMatch, Location, MatchRun, NodeInfo, NodeKind
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.outcome import Tier
from kvpool.v1 import index_pb2
from kvpool.wire.convert_cluster import chain_match_from_proto, chain_match_to_proto
from kvpool.wire.convert_matches import answers_from_proto
from kvpool_index.servicer_match import MatchMessages

NODES = [
    NodeInfo(node_id=bytes([number]) * 16, kind=NodeKind.PAGESTORE, endpoint=f"h:{number}", incarnation=number)
    for number in (1, 2)
]


def at(node: NodeInfo, tier: Tier, shards: int = 0xFFFF) -> Location:
    return Location(node_id=node.node_id, incarnation=node.incarnation, tier=tier, shards=shards)


MATCHES = [
    ChainMatch(matched_chunks=0),
    ChainMatch(
        matched_chunks=512,
        runs=(MatchRun(chunk_count=512, locations=(at(NODES[0], Tier.STAGING),)),),
        nodes={NODES[0].node_id: NODES[0]},
    ),
    ChainMatch(
        matched_chunks=303,
        runs=(
            MatchRun(chunk_count=3, locations=(at(NODES[0], Tier.GPU, 1), at(NODES[1], Tier.DISK, (1 << 64) - 2))),
            MatchRun(chunk_count=300, locations=(at(NODES[1], Tier.DISK),)),
        ),
        nodes={node.node_id: node for node in NODES},
    ),
]


@pytest.mark.parametrize("request_id", [0, 1, 127, 128, (1 << 63) - 1, -1, -(1 << 63)])
@pytest.mark.parametrize("found", MATCHES)
def test_they_are_the_same(found: ChainMatch, request_id: int) -> None:
    messages = MatchMessages()
    for _ in range(2):
        answer = index_pb2.MatchStreamResponse.FromString(messages.pack(request_id, found))
        assert answer == index_pb2.MatchStreamResponse(request_id=request_id, match=chain_match_to_proto(found))
        assert chain_match_from_proto(answer.match) == found


def _comparable(answer: ChainMatch | KvPoolError) -> object:
    return (answer.reason, answer.message) if isinstance(answer, KvPoolError) else answer


def test_several_answers_are_the_same_and_name_each_node_once() -> None:
    answers: list[ChainMatch | KvPoolError] = [
        MATCHES[0],
        InvalidRequest("cut off"),
        MATCHES[1],
        MATCHES[2],
        MATCHES[1],
    ]
    for first in (0, 1, 2):  # a miss, an error, a hit
        messages, asked = MatchMessages(), [*answers[first:], *answers[:first]]
        for _ in range(2):
            answer: Any = index_pb2.MatchStreamResponse.FromString(messages.pack_several(7, asked))
            received = answers_from_proto(answer)
            assert answer.request_id == 7
            assert [_comparable(each) for each in received] == [_comparable(each) for each in asked]
            named = [node.node_id for one in (answer, *answer.more) for node in one.match.nodes]
            assert sorted(named) == [node.node_id for node in NODES]


def test_an_answer_is_of_its_own_match_however_many_came_before() -> None:
    messages = MatchMessages()
    for number in range(1, 5000):
        node = NodeInfo(node_id=number.to_bytes(16, "big"), kind=NodeKind.PAGESTORE, endpoint="h:1", incarnation=number)
        found = ChainMatch(
            matched_chunks=1,
            runs=(MatchRun(chunk_count=1, locations=(at(node, Tier.DISK),)),),
            nodes={node.node_id: node},
        )
        data = messages.pack(number, found)
        if number % 499 == 0:
            assert index_pb2.MatchStreamResponse.FromString(data).match == chain_match_to_proto(found)
