"""What spans and logs tell of a match on a stream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence

from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.tracing import CHUNKS, KEYSPACE, QUESTIONS, REQUEST_ID, SERVED_CHUNKS, Tracer, rpc_attributes
from kvpool.v1 import index_pb2
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

_RPC = rpc_attributes("IndexService", "MatchStream")


async def traced_match(
    tracer: Tracer,
    request: index_pb2.MatchStreamRequest,
    queries: Sequence[ChainQuery],
    match: Awaitable[list[ChainMatch]],
) -> list[ChainMatch]:
    """The result of `match`, with a span around it. queries: at least one."""
    chunk_count, served = sum(query.chunk_count for query in queries), 0
    attributes = {
        **_RPC,
        KEYSPACE: queries[0].keyspace.hex(),
        QUESTIONS: len(queries),
        CHUNKS: chunk_count,
        REQUEST_ID: request.request_id,
    }
    with tracer.request("index.match", request.trace, attributes=attributes) as span:
        try:
            found = await match
            served = sum(each.matched_chunks for each in found)
            span.set({SERVED_CHUNKS: served})
        finally:
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("match ended", extra=fields(chunks=chunk_count, served_chunks=served))
    return found
