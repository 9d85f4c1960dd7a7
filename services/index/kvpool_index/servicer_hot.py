"""Messages of the index's streams that are written without an object for each."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar, cast

import grpc

from kvpool.core.cluster import ChainMatch, ChunkBatch, IndexEvent, Location, NodeInfo
from kvpool.core.errors import KvPoolError
from kvpool.v1 import index_pb2 as pb
from kvpool.v1 import index_pb2_grpc as pb_grpc
from kvpool.wire.convert import item_error_to_proto
from kvpool.wire.convert_cluster import location_to_proto, node_info_to_proto
from kvpool.wire.convert_watch import chunk_batch_to_proto, index_event_to_proto

ItemT = TypeVar("ItemT")

_KEPT_BATCHES: Final = 64
_KEPT_PARTS: Final = 4096
_NUMBER, _BYTES = 0, 2  # how a field's value is written: as a varint, with a length
_CHUNKS_TAG: Final = bytes([6 << 3 | _BYTES])  # of WatchResponse.chunks
_REQUEST_ID_TAG: Final = bytes([1 << 3 | _NUMBER])  # of MatchStreamResponse
_MATCH_TAG: Final = bytes([2 << 3 | _BYTES])
_MORE_TAG: Final = bytes([4 << 3 | _BYTES])
_MATCH_TAGS: Final = (_MATCH_TAG, bytes([1 << 3 | _BYTES]))  # of MatchStreamResponse, of MatchChainResult
_ERROR_TAGS: Final = (bytes([3 << 3 | _BYTES]), bytes([2 << 3 | _BYTES]))
_MATCHED_CHUNKS_TAG: Final = bytes([1 << 3 | _NUMBER])  # of MatchResponse
_RUNS_TAG: Final = bytes([2 << 3 | _BYTES])
_CHUNK_COUNT_TAG: Final = bytes([1 << 3 | _NUMBER])  # of MatchRun
_ALL_BITS: Final = (1 << 64) - 1  # a negative number is written as the unsigned one of the same bits


class WatchMessages:
    """Watch events as bytes. A batch that many watchers get is serialized once; only its position is each one's own."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[ChunkBatch, bytes]] = {}  # by id of the batch, which is kept so that it stays

    def pack(self, event: IndexEvent) -> bytes:
        """The bytes of a WatchResponse. Fields of a message may come one after the other from anywhere."""
        batch = event.event
        if not isinstance(batch, ChunkBatch):
            return index_event_to_proto(event).SerializeToString()
        known = self._batches.get(id(batch))
        if known is None:
            if len(self._batches) >= _KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            content = chunk_batch_to_proto(batch).SerializeToString()
            known = self._batches[id(batch)] = (batch, _CHUNKS_TAG + varint(len(content)) + content)
        return pb.WatchResponse(position=event.position).SerializeToString() + known[1]


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


def varint(number: int) -> bytes:
    """A number >= 0 as protobuf writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def add_index_servicer(servicer: pb_grpc.IndexServiceServicer, server: grpc.aio.Server) -> None:
    """Register the servicer as generated code does, with methods in `_AS_BYTES` answering in bytes."""
    catcher = _Catcher()
    pb_grpc.add_IndexServiceServicer_to_server(servicer, cast(grpc.aio.Server, catcher))
    handlers = dict(catcher.handlers)
    for method, rebuild in _AS_BYTES.items():
        handlers[method] = rebuild(handlers[method])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(catcher.service, handlers),))
    server.add_registered_method_handlers(catcher.service, handlers)


class _Catcher:
    """Takes what generated code would register."""

    def __init__(self) -> None:
        self.service = ""
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Not needed: the same handlers come below."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """What is wanted."""
        self.service, self.handlers = service, handlers


def _watch(handler: Any) -> Any:
    return grpc.unary_stream_rpc_method_handler(handler.unary_stream, handler.request_deserializer, bytes)


def _match_stream(handler: Any) -> Any:
    return grpc.stream_stream_rpc_method_handler(handler.stream_stream, handler.request_deserializer, bytes)


_AS_BYTES: Final[dict[str, Callable[[Any], Any]]] = {"Watch": _watch, "MatchStream": _match_stream}
