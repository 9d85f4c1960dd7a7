"""Tracing as the code sees it: spans of one request, and the context that travels with its messages.

The classes here record nothing and are what everything uses by default. `kvpool.tracing` has those that record, on top
of OpenTelemetry; nothing else knows it.

Spans never carry token ids, prompts, page bytes or chunk hashes: only who, how much, how long and how it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Final, Protocol, Self

from kvpool.core.errors import KvPoolError

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]

# Attribute names of our own; those of gRPC and databases are OpenTelemetry's (rpc.*, db.*, error.type).
KEYSPACE: Final = "kvpool.keyspace"  # its id, in hexadecimal digits
QUESTIONS: Final = "kvpool.questions"  # of one message, about a chain each
CHUNKS: Final = "kvpool.chunks"  # that were asked for
SERVED_CHUNKS: Final = "kvpool.chunks.served"  # matched, loaded or stored
FAILED_CHUNKS: Final = "kvpool.chunks.failed"
PAGES: Final = "kvpool.pages"
SERVED_PAGES: Final = "kvpool.pages.served"
BYTES: Final = "kvpool.bytes"
TIER: Final = "kvpool.tier"  # where bytes came from: staging, disk, remote
OUTCOME: Final = "kvpool.outcome"  # one word of a closed set
PEER: Final = "kvpool.peer"  # endpoint of another node
REQUEST_ID: Final = "kvpool.request_id"  # of the message, on its stream


class SpanKind(Enum):
    """Which side of a border between processes a span describes."""

    INTERNAL = "internal"
    CLIENT = "client"
    SERVER = "server"


class CarriedContext(Protocol):
    """A trace context in a message: see TraceContext in common.proto."""

    @property
    def traceparent(self) -> str: ...
    @property
    def tracestate(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A trace context in plain text, as W3C's headers have it; it may come from anybody and be nonsense."""

    traceparent: str
    tracestate: str = ""


class Span:
    """One piece of work. Either `with span: ...`, which makes it the current one and ends it, or `end` it yourself."""

    __slots__ = ()
    recording: bool = False  # whether attributes are worth computing

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def fail(self, error: KvPoolError | str) -> None:
        """It failed: mark it with the error's reason. The message stays out: it may name a path or a key."""

    def current(self) -> AbstractContextManager[object]:
        """Make it the current span while a block runs, without ending it."""
        return _NOTHING

    def end(self) -> None:
        """It is over. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_NOTHING: Final = nullcontext()
NO_SPAN: Final = Span()


class Tracer:
    """Makes spans. This one makes none, in as little time as a call takes."""

    __slots__ = ()
    recording: bool = False  # False: there is never a context to carry

    def request(
        self,
        name: str,
        carried: CarriedContext | None = None,
        *,
        kind: SpanKind = SpanKind.SERVER,
        attributes: Attributes | None = None,
    ) -> Span:
        """A request: it goes on with the trace that came with it, else with the current one, else it begins one."""
        return NO_SPAN

    def within(self, carried: CarriedContext) -> AbstractContextManager[object]:
        """Make the context that came with a request the current one while a block runs; none if it is nonsense."""
        return _NOTHING

    def part(self, name: str, *, kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes | None = None) -> Span:
        """A part of the current span; nothing outside of one."""
        return NO_SPAN

    def part_of(self, causes: Iterable[object | None], name: str, *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """A part of the request that began it, whose trace `here` carries, with links to others that share it.

        causes: results of `here`; None among them do not count. Nothing if there is no other.
        """
        return NO_SPAN

    def linked(self, name: str, causes: Iterable[object | None]) -> Span:
        """Work that comes after requests and belongs to none of them: a trace of its own with links to those of its
        causes (results of `here`) that are recorded; nothing if none is."""
        return NO_SPAN

    def here(self) -> object | None:
        """The current span's context, to be used later or elsewhere; None if there is none."""
        return None

    def stamp(self, message: Any) -> None:
        """Write the current context into the field `trace` of a message; nothing if there is none."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The current context as metadata of a call; empty if there is none."""
        return ()

    def log_fields(self) -> Mapping[str, str]:
        """trace_id and span_id of the current span, in hexadecimal digits; empty if there is none."""
        return {}

    def close(self) -> None:
        """Send what is left, within a few seconds. Idempotent. May block: call it off the event loop."""


NO_TRACER: Final = Tracer()


def rpc_attributes(service: str, method: str) -> Attributes:
    """How OpenTelemetry names a gRPC method, for spans of client and server kind. service: as in "IndexService"."""
    return {"rpc.system": "grpc", "rpc.service": f"kvpool.v1.{service}", "rpc.method": method}
