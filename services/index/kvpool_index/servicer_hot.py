"""Messages of the index's streams that are written without an object for each."""

from collections.abc import Callable
from typing import Any, Final, cast

import grpc

from kvpool.core.cluster import ChunkBatch, IndexEvent
from kvpool.v1 import index_pb2 as pb
from kvpool.v1 import index_pb2_grpc as pb_grpc
from kvpool.wire.convert_watch import chunk_batch_to_proto, index_event_to_proto

_KEPT_BATCHES: Final = 64
_CHUNKS_TAG: Final = bytes([6 << 3 | 2])  # of WatchResponse.chunks: a field with a length


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


_AS_BYTES: Final[dict[str, Callable[[Any], Any]]] = {"Watch": _watch}
