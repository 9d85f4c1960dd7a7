"""Messages that are no protobuf, or too much of one: refused like any other bad request, and not by gRPC itself.

gRPC would log a stack trace for each and answer with UNKNOWN or INTERNAL: a client that sends bytes at random could
fill the disk with logs, and would look like a bug of ours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from kvpool.core.errors import InvalidRequest
from kvpool.wire.weight import FREE_BYTES, check_weight
from kvpool_server.interceptors.wrapping import AioWrapper, Handler, SyncWrapper, as_coroutine, behavior_of, rebuild

Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a message up to where an exception is turned into a status."""

    error: InvalidRequest


class AioMessages(AioWrapper):
    """For a grpc.aio server."""

    def wrap(self, method: str, inner: Handler) -> Handler:
        deserialize = inner.request_deserializer
        if deserialize is None:
            return inner
        behavior = as_coroutine(method, behavior_of(inner))
        if inner.request_streaming:
            # A message of a stream is read when the handler asks for it: what is raised there comes out of the handler.
            return rebuild(inner, behavior, _reading(method, deserialize))

        async def run(request: Any, context: Any) -> Any:
            return await behavior(_checked(request), context)

        return rebuild(inner, run, _standing_in(method, deserialize))


class SyncMessages(SyncWrapper):
    """For a thread-pool server, which hides from the handler of a stream what its deserializer raises."""

    def wrap(self, method: str, inner: Handler) -> Handler:
        behavior, deserialize = behavior_of(inner), inner.request_deserializer
        if deserialize is None:
            return inner

        def run(request: Any, context: Any) -> Any:
            return behavior(map(_checked, request) if inner.request_streaming else _checked(request), context)

        def run_stream(request: Any, context: Any) -> Iterator[Any]:
            yield from run(request, context)

        return rebuild(inner, run_stream if inner.response_streaming else run, _standing_in(method, deserialize))


def _reading(method: str, deserialize: Deserializer) -> Deserializer:
    """Raises InvalidRequest for what cannot be read, or would take too much memory."""
    # Generated code reads by a method of the message's class.
    message = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def read(data: bytes) -> Any:
        try:
            if message is not None and len(data) > FREE_BYTES:
                check_weight(data, message)
            return deserialize(data)
        except DecodeError as error:
            raise InvalidRequest(f"{method} got {len(data)} bytes that are no message of it ({error})") from None

    return read


def _standing_in(method: str, deserialize: Deserializer) -> Deserializer:
    read_or_raise = _reading(method, deserialize)

    def read(data: bytes) -> Any:
        try:
            return read_or_raise(data)
        except InvalidRequest as error:
            return _Unreadable(error)

    return read


def _checked(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise request.error
    return request
