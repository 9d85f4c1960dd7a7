"""What spans and logs tell of a match on a stream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import KvPoolError
from kvpool.core.tracing import CHUNKS, KEYSPACE, REQUEST_ID, SERVED_CHUNKS, Tracer, rpc_attributes
from kvpool.v1 import index_pb2
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

_RPC = rpc_attributes("IndexService", "MatchStream")


async def traced_match(
    tracer: Tracer, request: index_pb2.MatchStreamRequest, query: ChainQuery, match: Awaitable[ChainMatch | KvPoolError]
) -> ChainMatch | KvPoolError:
    """The result of `match`, with a span around it."""
    attributes = {
        **_RPC,
        KEYSPACE: query.keyspace.hex(),
        CHUNKS: query.chunk_count,
        REQUEST_ID: request.request_id,
    }
    with tracer.request("index.match", request.trace, attributes=attributes) as span:
        found = await match
        if isinstance(found, KvPoolError):
            span.fail(found)
        else:
            span.set({SERVED_CHUNKS: found.matched_chunks})
        if _log.isEnabledFor(logging.DEBUG):
            served = 0 if isinstance(found, KvPoolError) else found.matched_chunks
            _log.debug("match ended", extra=fields(chunks=query.chunk_count, served_chunks=served))
    return found
