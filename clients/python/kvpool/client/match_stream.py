"""Matches on one open stream to the index."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvpool.client.channel import Endpoints
from kvpool.client.stream import RequestStream
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, StoreUnavailable
from kvpool.core.tracing import CHUNKS, SERVED_CHUNKS, SpanKind, rpc_attributes
from kvpool.v1 import index_pb2
from kvpool.wire.convert import item_error_from_proto
from kvpool.wire.convert_cluster import chain_match_from_proto, chain_query_to_proto

if TYPE_CHECKING:
    from kvpool.v1.index_pb2_grpc import IndexServiceAsyncStub

_RPC = rpc_attributes("IndexService", "MatchStream")
_Stream = RequestStream[index_pb2.MatchStreamRequest, index_pb2.MatchStreamResponse]


class MatchStream:
    """Many matches in flight on one stream, which is opened when first needed and again after it broke.

    A stream that breaks fails its matches at once; the next one opens a stream to the next replica.
    """

    def __init__(self, endpoints: Endpoints[IndexServiceAsyncStub]) -> None:
        self._endpoints = endpoints
        self._config = endpoints.config
        self._tracer = endpoints.config.tracer
        self._stream: _Stream | None = None
        self._closed = False

    async def match(self, query: ChainQuery, *, timeout_s: float | None = None) -> ChainMatch:
        """The longest covered prefix.

        raises: KeyspaceUnknown, InvalidRequest, StoreUnavailable, ServiceUnavailable, DeadlineExceeded.
        """
        limit_s = self._config.match_timeout_s if timeout_s is None else timeout_s
        with self._tracer.part("kvpool.index.match", kind=SpanKind.CLIENT, attributes=_RPC) as span:
            found = await self._match(query, limit_s)
            if span.recording:
                span.set({CHUNKS: query.chunk_count, SERVED_CHUNKS: found.matched_chunks})
        return found

    async def _match(self, query: ChainQuery, limit_s: float) -> ChainMatch:
        stream = self._open()
        request_id = stream.next_id()
        request = index_pb2.MatchStreamRequest(request_id=request_id, match=chain_query_to_proto(query))
        self._tracer.stamp(request)
        asked_s = asyncio.get_running_loop().time()
        try:
            answer = await stream.request(request_id, request, timeout_s=limit_s)
        except DeadlineExceeded:
            if stream.last_received_s < asked_s:  # not slow but silent: the connection may be dead without our knowing
                await stream.abort(ServiceUnavailable(f"the index did not answer within {limit_s:g} s"))
            raise
        if answer.HasField("error"):
            error = item_error_from_proto(answer.error)
            if isinstance(error, StoreUnavailable) and self._endpoints.count > 1:
                await stream.abort(error)  # another replica may have its store: the next stream is to it
            raise error
        return chain_match_from_proto(answer.match)

    def _open(self) -> _Stream:
        if self._closed:
            raise ServiceUnavailable("this match stream is closed; open a new client")
        if self._stream is None or self._stream.failure is not None:
            endpoint = self._endpoints.endpoint

            def on_broken(error: KvPoolError) -> None:
                if not self._closed:
                    self._endpoints.fail(endpoint)

            self._stream = RequestStream(
                self._endpoints.stub().MatchStream(metadata=self._config.metadata),
                lambda response: response.request_id,
                name="match stream",
                in_flight_max=self._config.requests_in_flight_max,
                tls=self._config.tls,
                on_broken=on_broken,
            )
        return self._stream

    async def close(self) -> None:
        """End the stream; matches in flight fail. Idempotent."""
        self._closed = True
        if self._stream is not None:
            await self._stream.abort(ServiceUnavailable("the match stream was closed"))
