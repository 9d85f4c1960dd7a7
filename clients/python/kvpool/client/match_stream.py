"""Matches on one open stream to the index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from kvpool.client.endpoints import Endpoints
from kvpool.client.session_stream import SessionStream
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, ServiceUnavailable, StoreUnavailable
from kvpool.core.tracing import CHUNKS, QUESTIONS, SERVED_CHUNKS, SpanKind, rpc_attributes
from kvpool.v1 import index_pb2
from kvpool.wire.convert import item_error_from_proto
from kvpool.wire.convert_cluster import chain_match_from_proto
from kvpool.wire.convert_matches import answers_from_proto, may_be_asked_together, questions_to_proto

if TYPE_CHECKING:
    from kvpool.v1.index_pb2_grpc import IndexServiceAsyncStub

_RPC = rpc_attributes("IndexService", "MatchStream")
_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# Of one message. Every index takes as much unless it is configured to take less; then questions are asked one by one.
QUESTIONS_MAX: Final = 256
CHUNKS_MAX: Final = 1024

_Stream = SessionStream[index_pb2.MatchStreamRequest, index_pb2.MatchStreamResponse]


class MatchStream:
    """Many matches in flight on one stream, which is opened when first needed and again after it broke.

    A stream that breaks fails its matches at once; the next one opens a stream to the next replica.
    """

    def __init__(self, endpoints: Endpoints[IndexServiceAsyncStub]) -> None:
        self._endpoints = endpoints
        self._config = endpoints.config
        self._tracer = endpoints.config.tracer
        self._stream: _Stream | None = None
        self._endpoint = ""  # of the stream
        self._single: _Stream | None = None  # one to an index that answers one question a message
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

    async def match_many(
        self, queries: Sequence[ChainQuery], *, timeout_s: float | None = None
    ) -> list[ChainMatch | KvPoolError]:
        """The answers to several questions, or why there is none: those of one keyspace, for the same shards and host,
        that follow each other go in few messages. Takes timeout_s at most; raises nothing of what `match` does.
        """
        limit_s = self._config.match_timeout_s if timeout_s is None else timeout_s
        ends_at_s = asyncio.get_running_loop().time() + limit_s
        parts = list(_parts(queries))
        answers = await _all([self._match_part(part, ends_at_s) for part in parts])
        return [answer for part in answers for answer in part]

    async def _match(self, query: ChainQuery, limit_s: float) -> ChainMatch:
        _, answer = await self._ask([query], limit_s)
        if answer.HasField("error"):
            raise item_error_from_proto(answer.error)
        return chain_match_from_proto(answer.match)

    async def _match_part(self, queries: Sequence[ChainQuery], ends_at_s: float) -> list[ChainMatch | KvPoolError]:
        if len(queries) > 1 and not self._asks_singly:
            try:
                answers = await self._match_together(queries, _left_s(ends_at_s))
            except InvalidRequest as error:  # more than this index takes at once, or one that spoils all
                _log.debug("questions are asked again one by one: %s", error)
            except KvPoolError as error:
                return [error] * len(queries)
            else:
                if len(answers) == len(queries):
                    return answers
        if not (left_s := _left_s(ends_at_s)):
            return [DeadlineExceeded("no time was left to ask one by one")] * len(queries)
        return await _all([self._match_or_error(query, left_s) for query in queries])

    async def _match_together(self, queries: Sequence[ChainQuery], limit_s: float) -> list[ChainMatch | KvPoolError]:
        """One answer each, or only one at all from an index that does not know of several. Raises what is about all."""
        with self._tracer.part("kvpool.index.match", kind=SpanKind.CLIENT, attributes=_RPC) as span:
            stream, message = await self._ask(queries, limit_s)
            answers = answers_from_proto(message)
            if isinstance(answers[0], KvPoolError) and len(answers) == 1:
                raise answers[0]
            if len(answers) != len(queries):
                self._single = stream  # until the next one: that may lead to another index
            if span.recording:
                served = sum(answer.matched_chunks for answer in answers if isinstance(answer, ChainMatch))
                asked = sum(query.chunk_count for query in queries)
                span.set({QUESTIONS: len(queries), CHUNKS: asked, SERVED_CHUNKS: served})
        return answers

    async def _match_or_error(self, query: ChainQuery, limit_s: float) -> ChainMatch | KvPoolError:
        try:
            return await self.match(query, timeout_s=limit_s)
        except KvPoolError as error:
            return error

    @property
    def _asks_singly(self) -> bool:
        return self._single is not None and self._single is self._stream and self._single.failure is None

    async def _ask(
        self, queries: Sequence[ChainQuery], limit_s: float
    ) -> tuple[_Stream, index_pb2.MatchStreamResponse]:
        stream, endpoint = self._open(), self._endpoint
        asked_s = asyncio.get_running_loop().time()
        try:
            answer = await stream.exchange(questions_to_proto(0, queries), limit_s)
        except DeadlineExceeded:
            if stream.last_received_s < asked_s:  # not slow but silent: the connection may be dead without our knowing
                await stream.abort(f"the index did not answer within {limit_s:g} s")
            raise
        if answer.HasField("error"):
            error = item_error_from_proto(answer.error)
            if isinstance(error, StoreUnavailable) and self._endpoints.leave(endpoint):
                await stream.abort(error)  # another replica may have its store: the next stream is to it
        return stream, answer

    def _open(self) -> _Stream:
        if self._closed:
            raise ServiceUnavailable("this match stream is closed; open a new client")
        if self._stream is None or self._stream.failure is not None:
            endpoint = self._endpoint = self._endpoints.endpoint

            def on_broken(error: KvPoolError) -> None:
                if not self._closed:
                    self._endpoints.fail(endpoint)

            call = self._endpoints.stub().MatchStream(metadata=self._config.metadata)
            self._stream = SessionStream(call, self._config, name="match stream", on_broken=on_broken)
        return self._stream

    async def close(self) -> None:
        """End the stream; matches in flight fail. Idempotent."""
        self._closed = True
        if self._stream is not None:
            await self._stream.abort("the match stream was closed")


def _parts(queries: Sequence[ChainQuery]) -> Iterator[Sequence[ChainQuery]]:
    """Questions of one message each, in order."""
    start = chunks = 0
    for at, query in enumerate(queries):
        fits = at - start < QUESTIONS_MAX and chunks + query.chunk_count <= CHUNKS_MAX
        if at > start and not (fits and may_be_asked_together(queries[start], query)):
            yield queries[start:at]
            start, chunks = at, 0
        chunks += query.chunk_count
    if queries:
        yield queries[start:]


def _left_s(ends_at_s: float) -> float:
    return max(0.0, ends_at_s - asyncio.get_running_loop().time())


async def _all(asking: Sequence[Coroutine[object, object, ResultT]]) -> list[ResultT]:
    """All results, in order; a task for each only if there are several."""
    if len(asking) == 1:
        return [await asking[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one, name="kvpool match") for one in asking]
    return [task.result() for task in tasks]
