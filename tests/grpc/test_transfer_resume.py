"""The transfer client and the peers of a pagestore against servers that break, hang or are not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import grpc

from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient
from kvpool.core.cancel import CancelToken
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvPoolError,
    ServiceUnavailable,
    StaleIncarnation,
    Stopped,
)
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.frames import BulkFrame
from kvpool_pagestore.adapters.peer import GrpcPeerPages
from kvpool_pagestore.bulk.servicer import BulkLimits, PageTransferServicer, WriteMessage
from kvpool_pagestore.ports import PullItem
from kvpool_server.interceptors.errors import SyncErrors
from kvpool_server.listen import TcpAddress
from kvpool_server.server import BulkServer
from tests.fixtures.redis_server import free_port
from tests.grpc.bulk_gateway import INCARNATION, KEYSPACES, METADATA, SPEC, MemoryGateway, bulk_server, key, sealed_page

Report = tuple[int, KvPoolError | None, bool]


class BreakingServicer(PageTransferServicer):
    """Breaks the first `break_count` streams after a few messages, and remembers what was asked for and from where."""

    def __init__(self, gateway: MemoryGateway, break_count: int, after_messages: int) -> None:
        super().__init__(gateway, lambda: "tenant")
        self.break_count = break_count
        self.after_messages = after_messages
        self.read_requests: list[list[bytes]] = []
        self.connections: list[str] = []

    def ReadPages(self, request: pb.ReadPagesRequest, context: grpc.ServicerContext) -> Iterator[BulkFrame]:
        self.read_requests.append(list(request.keys))
        self.connections.append(context.peer())
        frames = super().ReadPages(request, context)
        if len(self.connections) <= self.break_count:
            yield from islice(frames, self.after_messages)
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        yield from frames

    def WritePages(
        self, requests: Iterator[WriteMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.WritePagesResponse]:
        self.connections.append(context.peer())
        responses = super().WritePages(requests, context)
        if len(self.connections) <= self.break_count:
            yield from islice(responses, self.after_messages)
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        yield from responses


@contextmanager
def serving(servicer: PageTransferServicer) -> Iterator[str]:
    server = BulkServer(threads=4, interceptors=[SyncErrors()])
    servicer.add_to(server.grpc)
    port = server.listen_tcp(TcpAddress("127.0.0.1", 0))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0.0)


@contextmanager
def closing_client(endpoint: str) -> Iterator[PageTransferClient]:
    client = PageTransferClient(endpoint, frame_bytes=64 << 10)
    try:
        yield client
    finally:
        client.close()


def read(client: PageTransferClient, sizes: list[int], timeout_s: float = 60) -> tuple[list[bytearray], list[Report]]:
    buffers = [bytearray(size) for size in sizes]
    reports: list[Report] = []
    items = [PageToRead(key=key(number), destination=memoryview(buffer)) for number, buffer in enumerate(buffers)]
    client.read_pages(KEYSPACES, items, lambda *report: reports.append(report), timeout_s=timeout_s)
    return buffers, reports


def test_a_broken_read_goes_on_with_the_pages_not_settled_on_a_fresh_connection() -> None:
    gateway = MemoryGateway()
    pages = [gateway.store(number, 150_000) for number in range(4)]  # three frames each
    servicer = BreakingServicer(gateway, break_count=1, after_messages=5)
    with serving(servicer) as endpoint, closing_client(endpoint) as client:
        buffers, reports = read(client, [len(page) for page in pages])
    assert buffers == pages
    assert reports == [(number, None, True) for number in range(4)]
    keys = [key(number).pack() for number in range(4)]
    assert servicer.read_requests == [keys, keys[1:]]
    assert len(set(servicer.connections)) == 2


def test_a_read_that_breaks_twice_reports_what_is_left() -> None:
    gateway = MemoryGateway()
    pages = [gateway.store(number, 150_000) for number in range(4)]
    servicer = BreakingServicer(gateway, break_count=9, after_messages=4)
    with serving(servicer) as endpoint, closing_client(endpoint) as client:
        buffers, reports = read(client, [len(page) for page in pages])
    assert [(index, hit) for index, _, hit in reports] == [(0, True), (1, True), (2, False), (3, False)]
    assert isinstance(reports[2][1], ServiceUnavailable)
    assert buffers[:2] == pages[:2]


def test_a_broken_write_goes_on_with_the_pages_not_answered() -> None:
    gateway = MemoryGateway()
    servicer = BreakingServicer(gateway, break_count=1, after_messages=2)
    pages = [sealed_page(number, 150_000) for number in range(4)]
    reports: list[tuple[int, Admission]] = []
    items = [PageToWrite(key=key(n), page=memoryview(page), metadata=METADATA) for n, page in enumerate(pages)]
    with serving(servicer) as endpoint, closing_client(endpoint) as client:
        client.write_pages(
            KEYSPACES, items, lambda index, admission, _: reports.append((index, admission)), timeout_s=60
        )
    assert [index for index, _ in reports] == [0, 1, 2, 3]
    assert {admission for _, admission in reports} <= {Admission.RESERVED, Admission.EXISTS}
    assert [gateway.pages[key(number)][0] for number in range(4)] == pages
    assert len(set(servicer.connections)) == 2


def test_a_server_that_is_not_there_fails_fast() -> None:
    with closing_client(f"127.0.0.1:{free_port()}") as client:
        _, reports = read(client, [10, 10], timeout_s=3600)  # which would be longer than the time of a test
    assert [type(error) for _, error, _ in reports] == [ServiceUnavailable, ServiceUnavailable]


def test_a_server_that_hangs_costs_the_deadline_and_no_more() -> None:
    gateway, hang = MemoryGateway(), threading.Event()

    class Hanging(PageTransferServicer):
        def ReadPages(self, request: pb.ReadPagesRequest, context: grpc.ServicerContext) -> Iterator[BulkFrame]:
            hang.wait(60)
            yield from ()

    with serving(Hanging(gateway, lambda: "tenant")) as endpoint, closing_client(endpoint) as client:
        _, reports = read(client, [10], timeout_s=0.2)
        hang.set()
    assert isinstance(reports[0][1], DeadlineExceeded)


def test_a_write_to_a_server_that_hangs_ends_when_it_is_stopped() -> None:
    gateway, hang, stop = MemoryGateway(), threading.Event(), CancelToken()
    page = sealed_page(0, 150_000)
    reports: list[KvPoolError | None] = []

    class Hanging(PageTransferServicer):
        def WritePages(
            self, requests: Iterator[WriteMessage], context: grpc.ServicerContext
        ) -> Iterator[pb.WritePagesResponse]:
            stop.cancel()
            hang.wait(60)
            yield from ()

    with serving(Hanging(gateway, lambda: "tenant")) as endpoint, closing_client(endpoint) as client:
        items = [PageToWrite(key=key(number), page=memoryview(page), metadata=METADATA) for number in range(2)]
        client.write_pages(
            KEYSPACES, items, lambda index, admission, error: reports.append(error), timeout_s=3600, stop=stop
        )
        hang.set()
    assert [type(error) for error in reports] == [Stopped, Stopped]


def test_a_closed_client_reports_and_does_not_connect() -> None:
    client = PageTransferClient("127.0.0.1:1")
    client.close()
    client.close()
    assert [type(error) for _, error, _ in read(client, [10])[1]] == [ServiceUnavailable]


class Pulling:
    """Reports of a pull."""

    def __init__(self, peers: GrpcPeerPages, endpoint: str, incarnation: int = INCARNATION) -> None:
        self.peers = peers
        self.source = RemoteSource(node_id=b"n" * 16, incarnation=incarnation, bulk_endpoint=endpoint)
        self.reports: list[tuple[int, type[KvPoolError] | None, bool]] = []
        self.stop = CancelToken()

    def pull(self, items: Sequence[tuple[PageKey, bytearray]]) -> None:
        wanted = [PullItem(key=page_key, destination=memoryview(buffer)) for page_key, buffer in items]
        self.peers.pull(self.source, SPEC, wanted, 60.0, self.report, self.stop)

    def report(self, index: int, error: KvPoolError | None, hit: bool) -> None:
        self.reports.append((index, None if error is None else type(error), hit))


@contextmanager
def closing_peers(clients_max: int = 32) -> Iterator[GrpcPeerPages]:
    peers = GrpcPeerPages(clients_max=clients_max)
    try:
        yield peers
    finally:
        peers.close()


def test_a_pull_fills_the_slots_and_reports_misses() -> None:
    gateway = MemoryGateway()
    page = gateway.store(0, 300_000)
    slot = bytearray(len(page))
    with bulk_server(gateway) as endpoint, closing_peers() as peers:
        pulling = Pulling(peers, endpoint)
        pulling.pull([(key(0), slot), (key(1), bytearray(10))])
        pulling.pull([])
    assert slot == page
    assert pulling.reports == [(0, None, True), (1, None, False)]


def test_a_pull_from_another_incarnation_fails_for_every_page() -> None:
    gateway = MemoryGateway()
    with bulk_server(gateway) as endpoint, closing_peers() as peers:
        pulling = Pulling(peers, endpoint, INCARNATION + 1)
        pulling.pull([(key(0), bytearray(10)), (key(1), bytearray(10))])
    assert pulling.reports == [(0, StaleIncarnation, False), (1, StaleIncarnation, False)]


def test_a_pull_of_two_keyspaces_or_after_close_is_refused() -> None:
    with closing_peers() as peers:
        pulling = Pulling(peers, "127.0.0.1:1")
        other = PageKey(b"o" * 16, b"c" * 16, 0)
        pulling.pull([(key(0), bytearray(10)), (other, bytearray(10))])
    pulling.pull([(key(0), bytearray(10))])
    assert [error for _, error, _ in pulling.reports] == [InvalidRequest, InvalidRequest, ServiceUnavailable]


def test_connections_to_peers_are_kept_and_bounded() -> None:
    gateway = MemoryGateway()
    page = gateway.store(0, 1000)
    servicers = [BreakingServicer(gateway, 0, 0) for _ in range(3)]

    def pull(endpoint: str) -> None:
        pulling = Pulling(peers, endpoint)
        pulling.pull([(key(0), bytearray(len(page)))])
        assert pulling.reports == [(0, None, True)]

    with (
        serving(servicers[0]) as first,
        serving(servicers[1]) as second,
        serving(servicers[2]) as third,
        closing_peers(clients_max=2) as peers,
    ):
        for endpoint in (first, second, first, third, first, second):
            pull(endpoint)
    assert [len(set(servicer.connections)) for servicer in servicers] == [1, 2, 1]


def test_pulls_at_once_all_arrive() -> None:
    gateway = MemoryGateway()
    pages = [gateway.store(number, 500_000) for number in range(8)]
    slots = [bytearray(len(page)) for page in pages]
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            raise

    limits = BulkLimits(streams_per_peer=8)
    with bulk_server(gateway, threads=8, limits=limits) as endpoint, closing_peers() as peers:
        pulls = [Pulling(peers, endpoint) for _ in range(8)]
        works = [lambda n=n: pulls[n].pull([(key(n), slots[n])]) for n in range(8)]
        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert slots == pages
