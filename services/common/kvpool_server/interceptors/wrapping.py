"""One way to wrap all four kinds of gRPC handlers, for grpc.aio and for the thread-pool server.

gRPC gives an interceptor the handler object and wants another one back. Here an interceptor only says what goes
around a call, as a context manager; the classes below put it around unary and streaming handlers alike.
"""

import abc
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from kvpool.core.errors import NotServed

# The stubs type handlers by message, which an interceptor does not know.
Handler: TypeAlias = Any
Metadata: TypeAlias = Mapping[str, str | bytes]


@dataclass(frozen=True, slots=True)
class Call:
    """What an interceptor knows about the call it goes around."""

    method: str  # "/package.Service/Method", one that is served
    streaming: bool  # whether requests, responses or both are a stream
    context: Any  # grpc.ServicerContext or grpc.aio.ServicerContext

    @property
    def service(self) -> str:
        return self.method.strip("/").partition("/")[0]

    def metadata(self) -> Metadata:
        """The request's metadata; of a repeated key the last value."""
        return {str(key): value for key, value in self.context.invocation_metadata() or ()}

    def remaining_s(self) -> float | None:
        """Seconds to the client's deadline, 0 when it has passed, None when there is none."""
        remaining_s = self.context.time_remaining()
        # Without a deadline grpc.aio says None, and the thread-pool server a date beyond the year 2100.
        return None if remaining_s is None or remaining_s > _NO_DEADLINE_S else float(remaining_s)


_NO_DEADLINE_S = 10 * 365 * 86400.0


class AioWrapper(grpc.aio.ServerInterceptor):
    """Puts another handler in the place of each, once. Base of the grpc.aio interceptors."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}  # method -> (inner, wrapped); methods are a closed set

    @abc.abstractmethod
    def wrap(self, method: str, inner: Handler) -> Handler:
        """The handler to use instead."""

    def not_served(self) -> None:
        """Called for a method that this server does not serve."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        inner = await continuation(handler_call_details)
        if inner is None:
            self.not_served()
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not inner:
            known = self._wrapped[method] = (inner, self.wrap(method, inner))
        return known[1]


class AioInterceptor(AioWrapper):
    """Base of those that say what goes around a call.

    Handlers must be coroutine functions or async generator functions; a method that is neither (a generated base
    class has those) is not served. An async generator is run by a coroutine that writes what it yields: that way
    its `finally` blocks run in the call's own task as soon as the call ends, and not when it is garbage-collected.
    """

    @abc.abstractmethod
    def around(self, call: Call) -> AbstractAsyncContextManager[None]:
        """What happens before and after the handler."""

    def wrap(self, method: str, inner: Handler) -> Handler:
        behavior = as_coroutine(method, behavior_of(inner))
        streaming = inner.request_streaming or inner.response_streaming

        async def run(request: Any, context: Any) -> Any:
            async with self.around(Call(method, streaming, context)):
                return await behavior(request, context)

        return rebuild(inner, run, inner.request_deserializer)


class SyncWrapper(grpc.ServerInterceptor):
    """The same for a thread-pool server."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}  # set and get are atomic; a lost race wraps twice

    @abc.abstractmethod
    def wrap(self, method: str, inner: Handler) -> Handler:
        """The handler to use instead."""

    def not_served(self) -> None:
        """Called for a method that this server does not serve."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        inner = continuation(handler_call_details)
        if inner is None:
            self.not_served()
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not inner:
            known = self._wrapped[method] = (inner, self.wrap(method, inner))
        return known[1]


class SyncInterceptor(SyncWrapper):
    """Base of those of a thread-pool server that say what goes around a call."""

    @abc.abstractmethod
    def around(self, call: Call) -> AbstractContextManager[None]:
        """What happens before and after the handler. Entered and left on one thread."""

    def wrap(self, method: str, inner: Handler) -> Handler:
        behavior = behavior_of(inner)
        streaming = inner.request_streaming or inner.response_streaming

        def run(request: Any, context: Any) -> Any:
            with self.around(Call(method, streaming, context)):
                return behavior(request, context)

        def run_stream(request: Any, context: Any) -> Iterator[Any]:
            with self.around(Call(method, streaming, context)), _closing(behavior(request, context)) as responses:
                yield from responses

        return rebuild(inner, run_stream if inner.response_streaming else run, inner.request_deserializer)


def behavior_of(handler: Handler) -> Callable[[Any, Any], Any]:
    """Return the function of a handler of any of the four kinds."""
    behavior: Callable[[Any, Any], Any] | None = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    assert behavior is not None, "grpc builds no handler without a function"
    return behavior


def rebuild(
    handler: Handler, behavior: Callable[[Any, Any], Any], deserializer: Callable[[bytes], Any] | None
) -> Handler:
    """A handler of the same kind with another function and another way to read requests."""
    build: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return build(behavior, deserializer, handler.response_serializer)


def as_coroutine(method: str, behavior: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """The function of a handler as a coroutine function, whatever it is."""
    if inspect.iscoroutinefunction(behavior):
        return behavior
    if inspect.isasyncgenfunction(behavior):

        async def write_all(request: Any, context: Any) -> None:
            async with _aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return write_all

    async def refuse(request: Any, context: Any) -> None:
        raise NotServed(f"{method} is not served by this version")

    return refuse


_aclosing: Callable[[Any], AbstractAsyncContextManager[AsyncIterator[Any]]] = contextlib.aclosing


@contextlib.contextmanager
def _closing(responses: Any) -> Iterator[Any]:
    """Close a generator at once when its call ends early; other iterators have no close."""
    try:
        yield responses
    finally:
        close = getattr(responses, "close", None)
        if close is not None:
            close()
