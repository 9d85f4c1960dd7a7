"""What an index says of itself <-> its message."""

from __future__ import annotations

from kvpool.core import cluster
from kvpool.v1 import index_pb2
from kvpool.wire.versions import own_version_to_proto


def index_info_to_proto(info: cluster.IndexInfo) -> index_pb2.GetIndexInfoResponse:
    """Limits and versions."""
    return index_pb2.GetIndexInfoResponse(
        version=info.version,
        store=info.store,
        max_match_chunks=info.max_match_chunks,
        max_batch_items=info.max_batch_items,
        lease_ttl_ms=info.lease_ttl_ms,
        store_reachable=info.store_reachable,
        max_match_questions=info.max_match_questions,
        peer_version=own_version_to_proto(),
    )


def index_info_from_proto(message: index_pb2.GetIndexInfoResponse) -> cluster.IndexInfo:
    """Limits and versions."""
    return cluster.IndexInfo(
        version=message.version,
        store=message.store,
        max_match_chunks=message.max_match_chunks,
        max_batch_items=message.max_batch_items,
        lease_ttl_ms=message.lease_ttl_ms,
        store_reachable=message.store_reachable,
        max_match_questions=max(1, message.max_match_questions),
    )
