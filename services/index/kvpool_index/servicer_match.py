"""Match streams: messages answered concurrently, one question each or several about chains of one keyspace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar, cast

from kvpool.core.cluster import ChainMatch, ChainQuery, Location, NodeInfo
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.tracing import CHUNKS, KEYSPACE, QUESTIONS, REQUEST_ID, SERVED_CHUNKS, Tracer, rpc_attributes
from kvpool.v1 import index_pb2 as pb
from kvpool.wire.convert import check_count, item_error_to_proto
from kvpool.wire.convert_cluster import chain_query_from_proto, location_to_proto, node_info_to_proto
from kvpool.wire.frames import varint
from kvpool_index.core.entries import check_query
from kvpool_index.engine.index import IndexEngine
from kvpool_server.logs import fields, note_request

_log = logging.getLogger(__name__)
_RPC = rpc_attributes("IndexService", "MatchStream")
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
_END: Final = object()

_HASH_BYTES: Final = 16


class MatchAnswers:
    """Answers the messages of match streams. A malformed question gets an error; its stream goes on."""

    def __init__(self, engine: IndexEngine) -> None:
        self._engine = engine
        self._tracer = engine.tracer
        self._max_chunks = engine.config.max_match_chunks
        self._max_questions = engine.config.max_match_questions
        self._messages = MatchMessages()

    async def answer(self, tenant: str, request: pb.MatchStreamRequest) -> bytes:
        """The bytes of a MatchStreamResponse."""
        note_request(request.request_id)
        try:
            if request.more:
                return self._messages.pack_several(request.request_id, await self._several(tenant, request))
            query = chain_query_from_proto(request.match, chunks_max=self._max_chunks)
            (found,) = await self._ask(tenant, request, [query])
            return self._messages.pack(request.request_id, found)
        except KvPoolError as error:
            refusal = item_error_to_proto(error)
            return pb.MatchStreamResponse(request_id=request.request_id, error=refusal).SerializeToString()

    async def _several(self, tenant: str, request: pb.MatchStreamRequest) -> list[ChainMatch | KvPoolError]:
        """Per question. Raises what is about all of them."""
        questions = self._questions(request)
        asked = [each for each in questions if isinstance(each, ChainQuery)]
        found = iter(await self._ask(tenant, request, asked) if asked else ())
        return [next(found) if isinstance(each, ChainQuery) else each for each in questions]

    def _questions(self, request: pb.MatchStreamRequest) -> list[ChainQuery | InvalidRequest]:
        """Raises InvalidRequest for too many, or too many chunks in all."""
        check_count(1 + len(request.more), "number of questions", most=self._max_questions)
        hashes_bytes = len(request.match.chunk_hashes) + sum(len(chain.chunk_hashes) for chain in request.more)
        check_count(hashes_bytes // _HASH_BYTES, "number of chunk_hashes of all questions", most=self._max_chunks)
        chains = (None, *request.more)  # the first one is in the question itself
        return [self._question(request.match, chain) for chain in chains]

    def _question(self, asked: pb.MatchRequest, chain: pb.MatchChain | None) -> ChainQuery | InvalidRequest:
        try:
            query = chain_query_from_proto(asked, chain, chunks_max=self._max_chunks)
            check_query(query)
        except InvalidRequest as error:
            return error
        return query

    async def _ask(
        self, tenant: str, request: pb.MatchStreamRequest, queries: Sequence[ChainQuery]
    ) -> list[ChainMatch]:
        asking = self._engine.matches.match_several(tenant, queries)
        if self._tracer.recording:
            return await traced_match(self._tracer, request, queries, asking)
        return await asking


async def traced_match(
    tracer: Tracer,
    request: pb.MatchStreamRequest,
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


async def serve_concurrently(
    requests: AsyncIterator[RequestT],
    answer: Callable[[RequestT], Awaitable[ResponseT]],
    write: Callable[[ResponseT], Awaitable[None]],
    *,
    limit: int,
) -> None:
    """Answer until there are no more requests; answers are written one at a time, in the order in which they are ready.

    At most `limit` requests are read and not written, so that a slow receiver slows its own requests. An exception of
    any part ends the rest and is raised, in an ExceptionGroup.

    Workers take turns at reading, and each answers the request that it has read: a task for each request, and the pass
    of the loop until it runs, would cost as much as judging a match.
    """
    reading, writing = asyncio.Lock(), asyncio.Lock()
    workers, waiting, ended = 1, 0, False

    async def read() -> RequestT | object:
        nonlocal ended
        async with reading:
            request = _END if ended else await anext(requests, _END)
            ended = request is _END
        return request

    async def work() -> None:
        nonlocal workers, waiting
        while True:
            waiting += 1
            request = await read()
            waiting -= 1
            if request is _END:
                return
            if not waiting and workers < limit:
                workers += 1
                group.create_task(work())
            response = await answer(cast("RequestT", request))
            async with writing:
                await write(response)

    async with asyncio.TaskGroup() as group:
        group.create_task(work())


ItemT = TypeVar("ItemT")

_KEPT_PARTS: Final = 4096
_NUMBER, _BYTES = 0, 2  # how a field's value is written: as a varint, with a length
_REQUEST_ID_TAG: Final = bytes([1 << 3 | _NUMBER])  # of MatchStreamResponse
_MATCH_TAG: Final = bytes([2 << 3 | _BYTES])
_MORE_TAG: Final = bytes([4 << 3 | _BYTES])
_MATCH_TAGS: Final = (_MATCH_TAG, bytes([1 << 3 | _BYTES]))  # of MatchStreamResponse, of MatchChainResult
_ERROR_TAGS: Final = (bytes([3 << 3 | _BYTES]), bytes([2 << 3 | _BYTES]))
_MATCHED_CHUNKS_TAG: Final = bytes([1 << 3 | _NUMBER])  # of MatchResponse
_RUNS_TAG: Final = bytes([2 << 3 | _BYTES])
_CHUNK_COUNT_TAG: Final = bytes([1 << 3 | _NUMBER])  # of MatchRun
_ALL_BITS: Final = (1 << 64) - 1  # a negative number is written as the unsigned one of the same bits


class MatchMessages:
    """Answers of MatchStream as bytes. Locations and nodes of matches are the same objects again and again (see
    MatchCache), so that each is serialized once.
    """

    def __init__(self) -> None:
        # By id of the object, which is kept so that it stays.
        self._locations: dict[int, tuple[tuple[Location, ...], bytes]] = {}
        self._nodes: dict[int, tuple[NodeInfo, bytes]] = {}

    def pack(self, request_id: int, found: ChainMatch) -> bytes:
        """The bytes of a MatchStreamResponse."""
        match = self._pack_match(found, found.nodes.values())
        return b"".join((_REQUEST_ID_TAG, varint(request_id & _ALL_BITS), _MATCH_TAG, varint(len(match)), match))

    def pack_several(self, request_id: int, answers: Sequence[ChainMatch | KvPoolError]) -> bytes:
        """The same for a request with several questions; each node is named once."""
        named: set[bytes] = set()
        parts = [_REQUEST_ID_TAG, varint(request_id & _ALL_BITS)]
        for at, answer in enumerate(answers):
            if isinstance(answer, KvPoolError):
                tags, content = _ERROR_TAGS, item_error_to_proto(answer).SerializeToString()
            else:
                new = [node for node_id, node in answer.nodes.items() if node_id not in named]
                named.update(answer.nodes)
                tags, content = _MATCH_TAGS, self._pack_match(answer, new)
            part = tags[at > 0] + varint(len(content)) + content
            parts += (_MORE_TAG, varint(len(part)), part) if at else (part,)
        return b"".join(parts)

    def _pack_match(self, found: ChainMatch, nodes: Iterable[NodeInfo]) -> bytes:
        parts = [_MATCHED_CHUNKS_TAG, varint(found.matched_chunks)]
        for run in found.runs:
            known = self._locations.get(id(run.locations)) or self._pack_locations(run.locations)
            content = _CHUNK_COUNT_TAG + varint(run.chunk_count) + known[1]
            parts += (_RUNS_TAG, varint(len(content)), content)
        for node in nodes:
            parts.append((self._nodes.get(id(node)) or self._pack_node(node))[1])
        return b"".join(parts)

    def _pack_locations(self, locations: tuple[Location, ...]) -> tuple[tuple[Location, ...], bytes]:
        run = pb.MatchRun(locations=[location_to_proto(location) for location in locations])
        return _keep(self._locations, locations, run.SerializeToString())

    def _pack_node(self, node: NodeInfo) -> tuple[NodeInfo, bytes]:
        return _keep(self._nodes, node, pb.MatchResponse(nodes=[node_info_to_proto(node)]).SerializeToString())


def _keep(known: dict[int, tuple[ItemT, bytes]], item: ItemT, data: bytes) -> tuple[ItemT, bytes]:
    if len(known) >= _KEPT_PARTS:
        known.clear()
    kept = known[id(item)] = (item, data)
    return kept
