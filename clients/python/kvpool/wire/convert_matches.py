"""Several questions about chains of one keyspace <-> one message of a match stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvpool.core.cluster import ChainMatch, ChainQuery, NodeInfo
from kvpool.core.errors import KvPoolError
from kvpool.v1 import index_pb2
from kvpool.wire.convert import item_error_from_proto
from kvpool.wire.convert_cluster import chain_match_from_proto, chain_query_to_proto


def may_be_asked_together(one: ChainQuery, other: ChainQuery) -> bool:
    """Whether they differ in nothing but the chain."""
    return (one.keyspace, one.shards, one.host_id) == (other.keyspace, other.shards, other.host_id)


def questions_to_proto(request_id: int, queries: Sequence[ChainQuery]) -> index_pb2.MatchStreamRequest:
    """At least one; all may be asked together."""
    more = [
        index_pb2.MatchChain(
            chunk_hashes=query.chunk_hashes,
            first_chunk_index=query.first_chunk_index,
            group_head_hash=query.group_head_hash,
        )
        for query in queries[1:]
    ]
    return index_pb2.MatchStreamRequest(request_id=request_id, match=chain_query_to_proto(queries[0]), more=more)


def answers_from_proto(message: index_pb2.MatchStreamResponse) -> list[ChainMatch | KvPoolError]:
    """One for each question that was answered. Raises InvalidRequest for a malformed answer."""
    nodes: dict[bytes, NodeInfo] = {}
    answers = [_answer(message, nodes)]
    known: dict[bytes, ChainMatch | KvPoolError] = {}  # pages lie at few places: most answers are equal
    for one in message.more:
        data = one.SerializeToString()
        answer = known.get(data)
        if answer is None:
            answer = known[data] = _answer(one, nodes)
        answers.append(answer)
    return answers


def _answer(
    message: index_pb2.MatchStreamResponse | index_pb2.MatchChainResult, nodes: dict[bytes, NodeInfo]
) -> ChainMatch | KvPoolError:
    """nodes: that the answers before it have named, to which it adds its own."""
    if message.HasField("error"):
        return item_error_from_proto(message.error)
    match = chain_match_from_proto(message.match)
    nodes |= match.nodes
    named = {place.node_id for run in match.runs for place in run.locations}
    if named == match.nodes.keys():
        return match
    return replace(match, nodes={node_id: nodes[node_id] for node_id in named if node_id in nodes})
