"""Pages of other pagestores, over their bulk endpoints."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvpool.client.tls import TlsCredentials
from kvpool.client.transfer import PageToRead, PageTransferClient
from kvpool.client.transfer_batches import PageToWrite
from kvpool.core.cancel import CancelToken
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import InvalidRequest, KvPoolError, ServiceUnavailable, SessionBusy
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_pagestore.ports import PageWrite, PullItem

_log = logging.getLogger(__name__)

_PEERS_MAX: Final = 32  # connections kept; those of peers long unused are closed first


class GrpcPeerPages:
    """A ports.PeerPages. One connection per peer, shared by its pulls; an idle one is closed by gRPC after a minute."""

    def __init__(
        self,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        peers_max: int = _PEERS_MAX,
        tls: TlsCredentials | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`metadata` goes with every call: this node's credentials."""
        self._tracer = tracer
        self._metadata = metadata
        self._tls = tls
        self._peers_max = peers_max
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by endpoint, the one used last at the end
        self._closed = False

    def pull(
        self,
        source: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PullItem],
        deadline_s: float,
        on_page: Callable[[int, KvPoolError | None, bool], None],
        stop: CancelToken,
    ) -> None:
        """`deadline_s`: seconds from now. Items of another keyspace than the first one's are refused."""
        pages = [PageToRead(key=item.key, destination=item.destination, on_metadata=item.on_metadata) for item in items]
        if not pages:
            return
        keyspace = pages[0].key.keyspace
        if any(page.key.keyspace != keyspace for page in pages):
            _fail_all(len(pages), InvalidRequest("a pull is for pages of one keyspace"), on_page)
            return
        try:
            with self._peer(source.bulk_endpoint) as client:
                client.read_pages(
                    [(keyspace, spec)],
                    pages,
                    on_page,
                    timeout_s=deadline_s,
                    expected_incarnation=source.incarnation,
                    stop=stop,
                )
        except KvPoolError as error:  # before anything was asked for: read_pages itself raises none
            _fail_all(len(pages), error, on_page)

    def verify(self, source: RemoteSource, spec: KeyspaceSpec, keys: Sequence[PageKey], deadline_s: float) -> None:
        """`deadline_s`: seconds from now."""
        try:
            with self._peer(source.bulk_endpoint) as client:
                client.verify_pages(
                    [(keys[0].keyspace, spec)], keys, timeout_s=deadline_s, expected_incarnation=source.incarnation
                )
        except KvPoolError as error:
            _log.warning("%s did not verify pages that came corrupt from it: %s", source.bulk_endpoint, error)

    def push(
        self,
        target: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PageWrite],
        deadline_s: float,
        *,
        require_durable: bool,
        on_page: Callable[[int, KvPoolError | None], None],
        stop: CancelToken,
    ) -> None:
        """`deadline_s`: seconds from now. All items are of one keyspace."""
        pages = [PageToWrite(key=item.key, page=item.page, metadata=item.metadata) for item in items]

        def on_written(index: int, admission: Admission, error: KvPoolError | None) -> None:
            if error is None and admission is Admission.PENDING:
                error = SessionBusy("another writer is writing the page there")
            on_page(index, error)

        try:
            with self._peer(target.bulk_endpoint) as client:
                client.write_pages(
                    [(pages[0].key.keyspace, spec)] if pages else [],
                    pages,
                    on_written,
                    timeout_s=deadline_s,
                    expected_incarnation=target.incarnation,
                    require_durable=require_durable,
                    stop=stop,
                )
        except KvPoolError as error:  # before anything was sent: write_pages itself raises none
            for index in range(len(pages)):
                on_page(index, error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.client.close()

    @contextmanager
    def _peer(self, endpoint: str) -> Iterator[PageTransferClient]:
        with self._lock:
            if self._closed:
                raise ServiceUnavailable("this pagestore is shutting down")
            peer = self._peers.get(endpoint)
            if peer is None:
                client = PageTransferClient(endpoint, metadata=self._metadata, tls=self._tls, tracer=self._tracer)
                peer = self._peers[endpoint] = _Peer(client)
            self._peers.move_to_end(endpoint)
            peer.pull_count += 1
        try:
            yield peer.client
        finally:
            with self._lock:
                peer.pull_count -= 1
                surplus = self._take_surplus()
            for unused in surplus:
                unused.client.close()

    def _take_surplus(self) -> list[_Peer]:
        idle = [endpoint for endpoint, peer in self._peers.items() if peer.pull_count == 0]
        count = max(0, len(self._peers) - self._peers_max)
        return [self._peers.pop(endpoint) for endpoint in idle[:count]]


class _Peer:
    """A client, and how many pulls use it."""

    def __init__(self, client: PageTransferClient) -> None:
        self.client = client
        self.pull_count = 0


def _fail_all(count: int, error: KvPoolError, on_page: Callable[[int, KvPoolError | None, bool], None]) -> None:
    for index in range(count):
        on_page(index, error, False)
