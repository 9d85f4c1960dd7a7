"""Answers of Route <-> messages of the index."""

from __future__ import annotations

from kvpool.core import cluster
from kvpool.v1 import index_pb2
from kvpool.wire.convert_cluster import is_node_known, node_info_from_proto, node_info_to_proto


def route_to_proto(answer: cluster.RouteAnswer) -> index_pb2.RouteResponse:
    """Hosts, best first."""
    candidates = [
        index_pb2.RouteCandidate(
            host_id=each.host_id,
            matched_chunks=each.matched_chunks,
            score=each.score,
            arena_fill=each.arena_fill,
            nodes=[_node_to_proto(node) for node in each.nodes],
        )
        for each in answer.candidates
    ]
    return index_pb2.RouteResponse(candidates=candidates, matched_chunks=answer.matched_chunks)


def route_from_proto(message: index_pb2.RouteResponse) -> cluster.RouteAnswer:
    """Raises InvalidRequest for a malformed node."""
    candidates = tuple(
        cluster.RouteCandidate(
            host_id=each.host_id,
            matched_chunks=each.matched_chunks,
            score=each.score,
            arena_fill=each.arena_fill,
            nodes=tuple(_node_from_proto(node) for node in each.nodes if is_node_known(node.node)),
        )
        for each in message.candidates
    )
    return cluster.RouteAnswer(matched_chunks=message.matched_chunks, candidates=candidates)


def _node_to_proto(node: cluster.RouteNode) -> index_pb2.RouteNode:
    return index_pb2.RouteNode(
        node=node_info_to_proto(node.node),
        gpu_chunks=node.gpu_chunks,
        staging_chunks=node.staging_chunks,
        disk_chunks=node.disk_chunks,
    )


def _node_from_proto(message: index_pb2.RouteNode) -> cluster.RouteNode:
    return cluster.RouteNode(
        node=node_info_from_proto(message.node),
        gpu_chunks=message.gpu_chunks,
        staging_chunks=message.staging_chunks,
        disk_chunks=message.disk_chunks,
    )
