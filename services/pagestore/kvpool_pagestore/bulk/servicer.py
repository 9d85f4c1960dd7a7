"""PageTransferService: page frames between the arena and the network, on threads of the bulk server.

A stream's thread is the only one that touches its slots, and it has stopped when its session is closed: whether the
stream ended, failed or lost its client, gRPC lets go of the generators below, and their `finally` gives all back.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from kvpool.core.addresses import peer_host
from kvpool.core.errors import InvalidRequest, KvPoolError, Overloaded, ServiceUnavailable
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import convert_items, item_error_to_proto
from kvpool.wire.convert_keyspace import session_keyspace_from_proto
from kvpool.wire.convert_pages import page_key_from_proto, page_metadata_to_proto
from kvpool.wire.frames import (
    DEFAULT_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MIN_FRAME_BYTES,
    BulkFrame,
    decode_write_request,
    encode_page_frame,
    page_pieces,
)
from kvpool.wire.versions import check_peer_version
from kvpool_pagestore.bulk.ports import BulkGateway, BulkSession, ReadGrant
from kvpool_pagestore.bulk.writes import UNANSWERED_DURABLE_MAX, UNANSWERED_PAGES_MAX, write_pages

SERVICE_NAME = "kvpool.v1.PageTransferService"
READ_KEYS_MAX = 1024
KEYSPACES_MAX = 64
_LOOK_MIN_S = 0.05

_Acquired = ReadGrant | KvPoolError | None

WriteMessage = BulkFrame | pb.WritePagesOpen | InvalidRequest
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLimits:
    """What one stream may take."""

    window_pages: int = 8  # leased at a time by a reading stream, or asked for
    acquire_timeout_s: float = 30.0  # of half a window, when pages have to come from disk
    stream_cap_s: float = 600.0  # of a whole stream, whatever deadline its client has set
    idle_timeout_s: float = 60.0  # between two pages read or two pieces written; longer than acquire_timeout_s
    reader_grace_s: float = 15.0  # a reader may take so long in all, and 1 s for each reader_bytes_per_s
    reader_bytes_per_s: float = 1 << 20  # slower ones would hold the few threads that serve all
    streams_per_peer: int = 6  # of one host, over all its connections


class OpenStreams:
    """Counts the streams of each peer, so that none takes all threads. Thread-safe."""

    def __init__(self, per_peer: int) -> None:
        self._per_peer = per_peer
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}  # by host

    @contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """Hold a place for a stream of `peer`, as gRPC names it. Raises Overloaded when there is none."""
        host = peer_host(peer)
        with self._lock:
            count = self._counts.get(host, 0)
            if count >= self._per_peer:
                raise Overloaded(f"{host} has {count} page streams open already")
            self._counts[host] = count + 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[host] -= 1
                if not self._counts[host]:
                    del self._counts[host]


class StreamWatch:
    """Ends a stream that does not move: each takes one of few threads, and a deadline is the client's own choice.

    Looks at the stream when it should have moved, on a thread of its own.
    """

    def __init__(self, context: grpc.ServicerContext, limits: BulkLimits) -> None:
        self._context = context
        self._limits = limits
        self._moved_s = time.monotonic()
        self._ends_at_s = self._moved_s + limits.stream_cap_s
        self._reader_left_s = limits.reader_grace_s  # only the time that the reader takes counts, not that of our disk
        self._handed_out_s = math.inf
        self._lock = threading.Lock()  # a watch that has ended starts no timer
        self._timer: threading.Timer | None = None
        self._ended = False
        self._look()

    def moved(self) -> None:
        """The client took or sent something."""
        self._moved_s = time.monotonic()

    def handed_out(self, size_bytes: int) -> None:
        """The reader has so many bytes to take from now on."""
        self._reader_left_s += size_bytes / self._limits.reader_bytes_per_s
        self._handed_out_s = time.monotonic()

    def taken(self) -> None:
        """The reader has taken what was handed out."""
        self._reader_left_s -= time.monotonic() - self._handed_out_s
        self._handed_out_s = math.inf

    def end(self) -> None:
        """The stream has ended."""
        with self._lock:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()

    def _look(self) -> None:
        with self._lock:
            if self._ended:
                return
            due_s = (
                self._ends_at_s,
                self._moved_s + self._limits.idle_timeout_s,
                self._handed_out_s + self._reader_left_s,
            )
            left_s = min(due_s) - time.monotonic()
            if left_s > 0:
                # A reader may be handed something a moment after this look.
                self._timer = threading.Timer(min(left_s, max(self._reader_left_s, _LOOK_MIN_S)), self._look)
                self._timer.daemon = True
                self._timer.start()
                return
        self._context.cancel()


class PageTransferServicer:
    """Serves any number of streams; how many at once is the server's limit."""

    def __init__(self, gateway: BulkGateway, tenant: Callable[[], str], limits: BulkLimits | None = None) -> None:
        """tenant: returns whose call the current thread handles."""
        self._gateway = gateway
        self._tenant = tenant
        self._limits = limits if limits is not None else BulkLimits()
        self._streams = OpenStreams(self._limits.streams_per_peer)

    def add_to(self, server: grpc.Server) -> None:
        """Register with our own codec; what travels is what the proto says."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            # A unary request is a stream of one message. As such it is read here, under the limits: gRPC would wait
            # for it on a bulk thread, without an end.
            "ReadPages": grpc.stream_stream_rpc_method_handler(
                self._read_requested, pb.ReadPagesRequest.FromString, encode_page_frame
            ),
            "WritePages": grpc.stream_stream_rpc_method_handler(
                self.WritePages, _decode_write_request, pb.WritePagesResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)])

    def _read_requested(
        self, requests: Iterator[pb.ReadPagesRequest], context: grpc.ServicerContext
    ) -> Iterator[BulkFrame]:
        with self._watched(context) as watch:
            request = next(_received(requests, watch), None)
        if request is None:
            raise InvalidRequest("ReadPages got no request")
        yield from self.ReadPages(request, context)

    def ReadPages(self, request: pb.ReadPagesRequest, context: grpc.ServicerContext) -> Iterator[BulkFrame]:
        check_peer_version(request.version, "the reader")
        keys = convert_items(request.keys, page_key_from_proto, "key", most=READ_KEYS_MAX)
        frame_bytes = _frame_bytes(request.frame_bytes)
        with (
            self._watched(context) as watch,
            self._session(request.keyspaces, request.expected_incarnation) as session,
        ):
            if request.verify:
                for start in range(0, len(keys), self._limits.window_pages):
                    yield from _verdicts(session, start, keys[start : start + self._limits.window_pages], watch)
                return
            timeout_s = partial(self._acquire_timeout_s, context)
            for start, granted in _acquired(session, keys, self._limits.window_pages, timeout_s):
                yield from _batch_frames(session, start, granted, frame_bytes, watch)

    def WritePages(
        self, requests: Iterator[WriteMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.WritePagesResponse]:
        with self._watched(context) as watch:
            received = _received(requests, watch)
            opening = next(received, None)
            if isinstance(opening, InvalidRequest):
                raise opening
            if not isinstance(opening, pb.WritePagesOpen):
                raise InvalidRequest("the first message of WritePages must be `open`")
            check_peer_version(opening.version, "the writer")
            durable = opening.require_durable
            with self._session(opening.keyspaces, opening.expected_incarnation, durable=durable) as session:
                # Answers that wait for a disk come together; more of them fit into one sync.
                unanswered = UNANSWERED_DURABLE_MAX if durable else UNANSWERED_PAGES_MAX
                yield from write_pages(session, _frames(received), unanswered)

    @contextmanager
    def _watched(self, context: grpc.ServicerContext) -> Iterator[StreamWatch]:
        """Hold one of the peer's streams, and cancel the call if it is slower than the limits."""
        with self._streams.place(context.peer()):
            watch = StreamWatch(context, self._limits)
            try:
                yield watch
            finally:
                watch.end()

    @contextmanager
    def _session(
        self, keyspaces: Sequence[pb.SessionKeyspace], expected_incarnation: int, *, durable: bool = False
    ) -> Iterator[BulkSession]:
        specs = convert_items(keyspaces, session_keyspace_from_proto, "keyspace", most=KEYSPACES_MAX)
        opened = self._gateway.open_bulk(self._tenant(), specs, expected_incarnation, require_durable=durable)
        with closing(opened) as session:
            yield session

    def _acquire_timeout_s(self, context: grpc.ServicerContext) -> float:
        return max(0.0, min(self._limits.acquire_timeout_s, context.time_remaining()))


def _decode_write_request(message: bytes) -> WriteMessage:
    """Malformed bytes become a value, because gRPC would answer an exception here with INTERNAL."""
    try:
        return decode_write_request(message)
    except InvalidRequest as error:
        return error


def _received(requests: Iterator[_Message], watch: StreamWatch) -> Iterator[_Message]:
    """Yield the messages of a stream; a client that left or ran out of time is not an error of this server."""
    try:
        for request in requests:
            watch.moved()
            yield request
    except grpc.RpcError as error:
        raise ServiceUnavailable("the client has gone away") from error


def _frames(requests: Iterator[WriteMessage]) -> Iterator[BulkFrame]:
    for request in requests:
        if isinstance(request, InvalidRequest):
            raise request
        if not isinstance(request, BulkFrame):
            raise InvalidRequest("`open` may come only once, as the first message of WritePages")
        yield request


def _frame_bytes(asked: int) -> int:
    if asked == 0:
        return DEFAULT_FRAME_BYTES
    if not MIN_FRAME_BYTES <= asked <= MAX_FRAME_BYTES:
        raise InvalidRequest(f"frame_bytes must be 0 or {MIN_FRAME_BYTES} to {MAX_FRAME_BYTES}, got {asked}")
    return asked


def _verdicts(session: BulkSession, start: int, keys: Sequence[PageKey], watch: StreamWatch) -> Iterator[BulkFrame]:
    """Verify pages instead of sending them."""
    for index, answer in enumerate(session.verify(keys), start):
        watch.moved()
        error = item_error_to_proto(answer) if isinstance(answer, KvPoolError) else None
        outcome = pb.OUTCOME_HIT if answer is True else pb.OUTCOME_MISS
        yield BulkFrame(pb.PageFrame(item_index=index, outcome=outcome, error=error))


def _acquired(
    session: BulkSession, keys: Sequence[PageKey], window_pages: int, timeout_s: Callable[[], float]
) -> Iterator[tuple[int, Sequence[_Acquired]]]:
    """Answers for all keys, batch after batch, each with the position of its first key.

    A batch is half a window: while one is being sent, the pages of the next one come, from disk if they must.
    """
    batches: deque[tuple[int, Future[Sequence[_Acquired]]]] = deque()
    asked = 0

    def ask(page_count: int) -> None:
        nonlocal asked
        if batch := keys[asked : asked + page_count]:
            batches.append((asked, session.acquire(batch, timeout_s())))
            asked += len(batch)

    try:
        ask(window_pages - window_pages // 2)
        ask(window_pages // 2)
        while batches:
            start, acquired = batches.popleft()
            granted = acquired.result()
            yield start, granted
            ask(len(granted))
    finally:
        for _, acquired in batches:
            if not acquired.cancel() and acquired.exception() is None:
                _release_views(acquired.result())


def _release_views(granted: Sequence[_Acquired]) -> list[ReadGrant]:
    """The grants of an answer; their pages are not looked at any more."""
    grants = [answer for answer in granted if isinstance(answer, ReadGrant)]
    for grant in grants:
        grant.page.release()
    return grants


def _batch_frames(
    session: BulkSession, start: int, granted: Sequence[_Acquired], frame_bytes: int, watch: StreamWatch
) -> Iterator[BulkFrame]:
    """Frames of one batch. The pages are given back when the last one is sent, or when the stream ends."""
    try:
        for index, answer in enumerate(granted, start):
            watch.moved()
            if isinstance(answer, ReadGrant):
                yield from _page_frames(index, answer, frame_bytes, watch)
            else:
                error = item_error_to_proto(answer) if answer is not None else None
                yield BulkFrame(pb.PageFrame(item_index=index, outcome=pb.OUTCOME_MISS, error=error))
    finally:
        # The views first: the slots may be handed on as soon as they are given back.
        session.release(_release_views(granted))


def _page_frames(index: int, grant: ReadGrant, frame_bytes: int, watch: StreamWatch) -> Iterator[BulkFrame]:
    page_bytes = len(grant.page)
    head = pb.PageFrame(
        item_index=index,
        outcome=pb.OUTCOME_HIT,
        page_bytes=page_bytes,
        metadata=page_metadata_to_proto(grant.metadata),
    )
    for begin, end in page_pieces(page_bytes, frame_bytes):
        if begin:
            head = pb.PageFrame(item_index=index, offset=begin)
        # gRPC asks for the next frame when it has serialized this one, that is, copied it. It still refers to the
        # frame then, so the view is released here: no view may outlive the lease.
        with grant.page[begin:end] as piece:
            watch.handed_out(end - begin)
            yield BulkFrame(head, piece)
            watch.taken()
