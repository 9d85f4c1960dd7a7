"""Events of a watch <-> messages of the index."""

from __future__ import annotations

from kvpool.core import cluster
from kvpool.v1 import common_pb2, index_pb2
from kvpool.wire.convert import check_count, check_id, check_optional_id
from kvpool.wire.convert_cluster import (
    is_node_known,
    known_locations_from_proto,
    known_nodes_from_proto,
    location_to_proto,
    node_info_from_proto,
    node_info_to_proto,
)


def index_event_to_proto(event: cluster.IndexEvent) -> index_pb2.WatchResponse:
    """One event of a watch."""
    value, position = event.event, event.position
    match value:
        case cluster.ChunkEvent():
            (chunk,) = chunk_batch_to_proto(cluster.ChunkBatch(events=(value,))).events
            return index_pb2.WatchResponse(position=position, chunk=chunk)
        case cluster.ChunkBatch():
            return index_pb2.WatchResponse(position=position, chunks=chunk_batch_to_proto(value))
        case cluster.NodeEvent():
            node = index_pb2.NodeEvent(node=node_info_to_proto(value.node), alive=value.alive)
            return index_pb2.WatchResponse(position=position, node=node)
        case cluster.HeartbeatEvent():
            heartbeat = index_pb2.HeartbeatEvent(age_ms=value.age_ms, watch_age_ms=value.watch_age_ms)
            return index_pb2.WatchResponse(position=position, heartbeat=heartbeat)
        case cluster.ResyncEvent():
            nodes = [node_info_to_proto(each) for each in value.nodes]
            return index_pb2.WatchResponse(
                position=position, resync=index_pb2.ResyncEvent(cause=value.cause, nodes=nodes)
            )


def chunk_batch_to_proto(batch: cluster.ChunkBatch) -> index_pb2.ChunkEvents:
    """Chunk events without a position, which may differ between the watchers that get them."""
    places: dict[int, list[common_pb2.Location]] = {}  # by id: chunks at the same places share their locations
    events: list[index_pb2.ChunkEvent] = []
    for event in batch.events:
        locations = places.get(id(event.locations))
        if locations is None:
            locations = places[id(event.locations)] = [location_to_proto(place) for place in event.locations]
        events.append(
            index_pb2.ChunkEvent(
                keyspace_id=event.keyspace,
                chunk_hash=event.chunk_hash,
                group_head_hash=event.group_head_hash,
                locations=locations,
                version=event.version,
            )
        )
    return index_pb2.ChunkEvents(events=events)


def index_event_from_proto(message: index_pb2.WatchResponse) -> cluster.IndexEvent | None:
    """None for an event that only a newer release knows. Raises InvalidRequest for a malformed one."""
    event: cluster.ChunkEvent | cluster.NodeEvent | cluster.ResyncEvent | cluster.ChunkBatch | cluster.HeartbeatEvent
    match message.WhichOneof("event"):
        case "chunk":
            event = _chunk_from_proto(message.chunk)
        case "chunks":
            event = cluster.ChunkBatch(events=tuple(_chunk_from_proto(chunk) for chunk in message.chunks.events))
        case "node" if is_node_known(message.node.node):
            event = cluster.NodeEvent(node=node_info_from_proto(message.node.node), alive=message.node.alive)
        case "heartbeat":
            event = cluster.HeartbeatEvent(
                age_ms=check_count(message.heartbeat.age_ms, "heartbeat.age_ms"),
                watch_age_ms=check_count(message.heartbeat.watch_age_ms, "heartbeat.watch_age_ms"),
            )
        case "resync":
            nodes = known_nodes_from_proto(message.resync.nodes)
            event = cluster.ResyncEvent(cause=message.resync.cause, nodes=nodes)
        case _:
            return None
    return cluster.IndexEvent(position=message.position, event=event)


def _chunk_from_proto(message: index_pb2.ChunkEvent) -> cluster.ChunkEvent:
    return cluster.ChunkEvent(
        keyspace=check_id(message.keyspace_id, "chunk.keyspace_id"),
        chunk_hash=message.chunk_hash,
        group_head_hash=check_optional_id(message.group_head_hash, "chunk.group_head_hash"),
        locations=known_locations_from_proto(message.locations),
        version=message.version,
    )
