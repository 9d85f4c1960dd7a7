"""What spans and logs tell of an engine's request."""

from __future__ import annotations

import logging

from kvpool.core.tracing import (
    CHUNKS,
    FAILED_CHUNKS,
    KEYSPACE,
    NO_SPAN,
    REQUEST_ID,
    SERVED_CHUNKS,
    Span,
    Tracer,
    rpc_attributes,
)
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent.session import EngineSession
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

_RPC = rpc_attributes("GpuAgentService", "EngineSession")
_HASH_BYTES = 16


def request_span(tracer: Tracer, session: EngineSession, request: gpuagent_pb2.EngineRequest) -> Span:
    """The agent's span of a match, store, load or lease."""
    if not tracer.recording:
        return NO_SPAN
    attributes = {
        **_RPC,
        KEYSPACE: session.rank.keyspace.hex(),
        CHUNKS: _chunk_count(request),
        REQUEST_ID: request.request_id,
        "kvpool.engine": session.engine_name,
    }
    return tracer.request(f"gpuagent.{request.WhichOneof('kind')}", request.trace, attributes=attributes)


def note_end(
    span: Span, engine_name: str, request: gpuagent_pb2.EngineRequest, response: gpuagent_pb2.EngineResponse
) -> None:
    """What became of it: to the span, and to the log at level debug."""
    debug = _log.isEnabledFor(logging.DEBUG)
    if not span.recording and not debug:
        return
    served, failed = _counts(response)
    span.set({SERVED_CHUNKS: served, FAILED_CHUNKS: failed})
    if response.HasField("load_done") and response.load_done.HasField("error"):
        span.fail(response.load_done.error.reason)
    if debug:
        told = fields(
            kind=request.WhichOneof("kind"),
            engine=engine_name,
            chunks=_chunk_count(request),
            served_chunks=served,
            refused=response.error.reason,
        )
        _log.debug("request ended", extra=told)


def _chunk_count(request: gpuagent_pb2.EngineRequest) -> int:
    match request.WhichOneof("kind"):
        case "match":
            return len(request.match.chunk_hashes) // _HASH_BYTES
        case "store":
            return len(request.store.chunk_hashes) // _HASH_BYTES
        case "lease":
            return len(request.lease.chunk_hashes) // _HASH_BYTES
        case _:
            return len(request.load.chunk_hashes) // _HASH_BYTES


def _counts(response: gpuagent_pb2.EngineResponse) -> tuple[int, int]:
    """Chunks that were matched, stored (or there already) or loaded, and those that failed."""
    match response.WhichOneof("kind"):
        case "match":
            return response.match.matched_chunks, 0
        case "store_done":
            done = response.store_done
            return done.stored_chunks + done.deduplicated_chunks, len(done.failed_chunks)
        case "lease_held":
            return response.lease_held.staged_chunks, 0
        case "load_done":
            return response.load_done.loaded_chunks, len(response.load_done.failed_chunks)
        case _:
            return 0, 0
