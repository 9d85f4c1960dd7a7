"""Pages to and from a pagestore by bulk streams: synchronous, straight between the caller's buffers and the network.

Every item is answered for itself. A stream that breaks is resumed once, on a fresh connection, with the pages that had
not settled. This module checks that a page's pieces follow each other and add up. The page's sums are verified by the
code that uses the bytes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc

from kvpool.client.transfer_batches import (
    OnRead,
    OnWritten,
    PageToRead,
    PageToWrite,
    ReadBatch,
    WriteBatch,
)
from kvpool.core.cancel import CancelToken
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, Stopped
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert_keyspace import session_keyspaces_to_proto
from kvpool.wire.frames import DEFAULT_FRAME_BYTES, MAX_MESSAGE_BYTES, BulkFrame, decode_page_frame
from kvpool.wire.status import error_from_rpc
from kvpool.wire.tls import TlsCredentials
from kvpool.wire.tls_errors import narrowed
from kvpool.wire.versions import own_version_to_proto

__all__ = [
    "Keyspaces",
    "OnRead",
    "OnWritten",
    "PageToRead",
    "PageToWrite",
    "PageTransferClient",
    "PageTransferClients",
]

Keyspaces = Sequence[tuple[bytes, KeyspaceSpec]]
"""(16-byte id, spec) of every keyspace that the pages of a call belong to."""

_READ_KEYS_MAX: Final = 1024
_READ_PAGES: Final = "/kvpool.v1.PageTransferService/ReadPages"
_WRITE_PAGES: Final = "/kvpool.v1.PageTransferService/WritePages"
_ATTEMPTS: Final = 2
_CLIENTS_MAX: Final = 128  # endpoints of a pool: a connection costs a handshake, an idle one little
_CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a fresh channel is a fresh connection
    ("grpc.client_idle_timeout_ms", 60_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
]


class PageTransferClient:
    """Streams to one pagestore's bulk endpoint. Thread-safe; calls that run at once share one connection."""

    def __init__(
        self,
        endpoint: str,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        frame_bytes: int = DEFAULT_FRAME_BYTES,
        tls: TlsCredentials | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`metadata` goes with every call. Connects when first used, and again when the files of `tls` have changed.

        tracer: calls carry the context that is current in their thread.
        """
        self._tracer = tracer
        self._endpoint = endpoint
        self._tls = tls
        self._metadata = tuple(metadata)
        self._frame_bytes = frame_bytes
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._closed = False

    def read_pages(
        self,
        keyspaces: Keyspaces,
        items: Sequence[PageToRead],
        on_page: OnRead,
        *,
        timeout_s: float,
        expected_incarnation: int = 0,
        stop: CancelToken | None = None,
    ) -> None:
        """Read pages into their destinations. Never raises a KvPoolError: what goes wrong is reported per item.

        Once `stop` is stopped, what has not settled is reported as Stopped; no destination is touched after the return.
        """
        ends_at_s = time.monotonic() + timeout_s
        request = pb.ReadPagesRequest(
            expected_incarnation=expected_incarnation,
            frame_bytes=self._frame_bytes,
            keyspaces=session_keyspaces_to_proto(keyspaces),
            version=own_version_to_proto(),
        )
        for start in range(0, len(items), _READ_KEYS_MAX):
            batch = ReadBatch(items[start : start + _READ_KEYS_MAX], start, on_page)
            error = self._attempts(batch, _ReadAttempt(request, batch, self._call_metadata(), stop), ends_at_s, stop)
            batch.fail_rest(error)

    def verify_pages(
        self, keyspaces: Keyspaces, keys: Sequence[PageKey], *, timeout_s: float, expected_incarnation: int = 0
    ) -> None:
        """Have the pagestore verify pages that came corrupt from it, and drop its bad copies. Raises KvPoolError."""
        request = pb.ReadPagesRequest(
            expected_incarnation=expected_incarnation,
            keys=[key.pack() for key in keys[:_READ_KEYS_MAX]],
            keyspaces=session_keyspaces_to_proto(keyspaces),
            version=own_version_to_proto(),
            verify=True,
        )
        with self._connected() as channel:
            method = channel.unary_stream(_READ_PAGES, pb.ReadPagesRequest.SerializeToString, decode_page_frame)
            call = method(request, timeout=timeout_s, metadata=self._call_metadata())
            try:
                for _ in range(len(request.keys)):
                    if next(call, None) is None:
                        break
            finally:
                call.cancel()

    def write_pages(
        self,
        keyspaces: Keyspaces,
        items: Sequence[PageToWrite],
        on_page: OnWritten,
        *,
        timeout_s: float,
        expected_incarnation: int = 0,
        require_durable: bool = False,
        stop: CancelToken | None = None,
    ) -> None:
        """Write pages. Never raises a KvPoolError: what goes wrong is reported per item.

        After a broken stream a page whose answer was lost is sent again, and answered with EXISTS.
        require_durable: RESERVED and EXISTS come only once the page is on the peer's disk. Once `stop` is stopped, what
        has not settled is reported as Stopped; no page is read after the return.
        """
        opening = pb.WritePagesOpen(
            expected_incarnation=expected_incarnation,
            keyspaces=session_keyspaces_to_proto(keyspaces),
            require_durable=require_durable,
            version=own_version_to_proto(),
        )
        batch = WriteBatch(items, opening, on_page, self._frame_bytes)
        attempt = _WriteAttempt(batch, self._call_metadata(), stop)
        error = self._attempts(batch, attempt, time.monotonic() + timeout_s, stop)
        batch.fail_rest(error)

    def _call_metadata(self) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, *self._tracer.metadata())

    def close(self) -> None:
        """End the connection; running calls fail. Idempotent."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.channel.close()

    def _attempts(
        self,
        batch: ReadBatch | WriteBatch,
        attempt: Callable[[grpc.Channel, float], None],
        ends_at_s: float,
        stop: CancelToken | None = None,
    ) -> KvPoolError:
        """Run the call until all pages have settled or a retry cannot help. Return the error for the others."""
        error: KvPoolError = ServiceUnavailable(f"{self._endpoint} answered nothing")
        for _ in range(_ATTEMPTS):
            if batch.settled or (stop is not None and stop.cancelled):
                break
            remaining_s = ends_at_s - time.monotonic()
            if remaining_s <= 0:
                return DeadlineExceeded(f"no time was left to call {self._endpoint}")
            try:
                with self._connected() as channel:
                    attempt(channel, remaining_s)
                error = ServiceUnavailable(f"{self._endpoint} ended a stream before all pages were answered")
            except KvPoolError as raised:
                error = raised
            if not isinstance(error, ServiceUnavailable):
                break
        if stop is not None and stop.cancelled:
            return Stopped(f"pages of {self._endpoint} are not wanted any more")
        return error

    @contextmanager
    def _connected(self) -> Iterator[grpc.Channel]:
        """A channel for one call. When the call fails as if the connection were broken, the next one gets a new one."""
        with self._lock:
            if self._closed:
                raise ServiceUnavailable(f"the client of {self._endpoint} is closed; open a new one")
            generation = self._tls.generation if self._tls is not None else 0
            outdated = self._connection
            if outdated is None or outdated.generation != generation:
                self._connection = _Connection(self._new_channel(), generation)
                if outdated is not None and outdated.call_count == 0:
                    outdated.channel.close()
            connection = self._connection
            assert connection is not None
            connection.call_count += 1
        try:
            yield connection.channel
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed under us
            if isinstance(error, grpc.RpcError):
                raised = narrowed(error_from_rpc(error), self._tls)
            else:
                raised = ServiceUnavailable(str(error))
            if isinstance(raised, ServiceUnavailable):
                self._retire(connection)
            raise raised from error
        finally:
            with self._lock:
                connection.call_count -= 1
                unused = connection is not self._connection and connection.call_count == 0
            if unused:
                connection.channel.close()

    def _new_channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self._endpoint, options=_CHANNEL_OPTIONS)
        _, credentials = self._tls.channel_credentials()
        options = [*_CHANNEL_OPTIONS, *self._tls.channel_options()]
        return grpc.secure_channel(self._endpoint, credentials, options=options)

    def _retire(self, connection: _Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None


class _Connection:
    """A channel, the generation of its certificates, and how many calls use it."""

    def __init__(self, channel: grpc.Channel, generation: int) -> None:
        self.channel = channel
        self.generation = generation
        self.call_count = 0


class PageTransferClients:
    """One client per endpoint, shared by its calls; unused ones above a limit are closed, the least recent first.

    Thread-safe. An idle connection is closed by gRPC after a minute.
    """

    def __init__(
        self,
        *,
        clients_max: int = _CLIENTS_MAX,
        metadata: Sequence[tuple[str, str]] = (),
        tls: TlsCredentials | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """metadata: of each call."""
        self._clients_max, self._metadata, self._tls, self._tracer = clients_max, metadata, tls, tracer
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _SharedClient] = OrderedDict()  # by endpoint, the one used last at the end
        self._closed = False

    @contextmanager
    def client(self, endpoint: str) -> Iterator[PageTransferClient]:
        """The client of an endpoint, for one call. After `close` it is one that is closed."""
        with self._lock:
            shared = self._clients.get(endpoint)
            if shared is None:
                client = PageTransferClient(endpoint, metadata=self._metadata, tls=self._tls, tracer=self._tracer)
                shared = self._clients[endpoint] = _SharedClient(client)
                if self._closed:
                    client.close()
            self._clients.move_to_end(endpoint)
            shared.call_count += 1
        try:
            yield shared.client
        finally:
            with self._lock:
                shared.call_count -= 1
                surplus = self._take_surplus()
            for unused in surplus:
                unused.client.close()

    def close(self) -> None:
        """End all connections; running calls fail. Idempotent."""
        with self._lock:
            self._closed = True
            clients = list(self._clients.values())
        for shared in clients:
            shared.client.close()

    def _take_surplus(self) -> list[_SharedClient]:
        count = len(self._clients) - self._clients_max
        if count <= 0:
            return []
        unused = [endpoint for endpoint, shared in self._clients.items() if shared.call_count == 0]
        return [self._clients.pop(endpoint) for endpoint in unused[:count]]


class _SharedClient:
    """A client, and how many calls use it."""

    def __init__(self, client: PageTransferClient) -> None:
        self.client = client
        self.call_count = 0


class _ReadAttempt:
    """One ReadPages call for what a batch has not settled."""

    def __init__(
        self,
        request: pb.ReadPagesRequest,
        batch: ReadBatch,
        metadata: tuple[tuple[str, str], ...],
        stop: CancelToken | None,
    ) -> None:
        self._request = request
        self._batch = batch
        self._metadata = metadata
        self._stop = stop

    def __call__(self, channel: grpc.Channel, timeout_s: float) -> None:
        del self._request.keys[:]
        self._request.keys.extend(self._batch.begin())
        method = channel.unary_stream(_READ_PAGES, pb.ReadPagesRequest.SerializeToString, decode_page_frame)
        call = method(self._request, timeout=timeout_s, metadata=self._metadata)
        stop = self._stop
        remove = stop.on_cancel(call.cancel) if stop is not None else None
        try:
            frame: BulkFrame
            for frame in call:
                if stop is not None and stop.cancelled:  # what has arrived before would still be handed out
                    break
                self._batch.take(frame)
        except grpc.RpcError as error:
            if stop is None or not stop.cancelled:
                raise
            raise Stopped("the transfer was stopped") from error  # which says nothing about the connection
        finally:
            if remove is not None:
                remove()
            call.cancel()  # has no effect on a call that has ended


class _WriteAttempt:
    """One WritePages call for what a batch has not settled."""

    def __init__(self, batch: WriteBatch, metadata: tuple[tuple[str, str], ...], stop: CancelToken | None) -> None:
        self._batch = batch
        self._metadata = metadata
        self._stop = stop

    def __call__(self, channel: grpc.Channel, timeout_s: float) -> None:
        method: grpc.StreamStreamMultiCallable[bytes, pb.WritePagesResponse] = channel.stream_stream(
            _WRITE_PAGES, None, pb.WritePagesResponse.FromString
        )
        call = method(self._batch.begin(), timeout=timeout_s, metadata=self._metadata)
        stop = self._stop
        remove = stop.on_cancel(call.cancel) if stop is not None else None
        try:
            for response in call:
                self._batch.take(response)
        except grpc.RpcError as error:
            if stop is None or not stop.cancelled:
                raise
            raise Stopped("the transfer was stopped") from error  # which says nothing about the connection
        finally:
            if remove is not None:
                remove()
            call.cancel()
            self._batch.end_attempt()
