"""ReadPages of a real bulk server over a gateway in memory: our client, stock protobuf, and clients that go away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc
import pytest

from kvpool.client.transfer import PageToRead, PageTransferClient
from kvpool.core.errors import InvalidRequest, KvPoolError, Overloaded, PageCorrupt, StaleIncarnation
from kvpool.testing import eventually_sync
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1 import pagestore_pb2_grpc as pb_grpc
from kvpool.wire.convert_keyspace import session_keyspaces_to_proto
from kvpool.wire.status import error_from_rpc
from kvpool_pagestore.bulk.servicer import BulkLimits
from tests.grpc.bulk_gateway import INCARNATION, KEYSPACES, MemoryGateway, bulk_server, key

Report = tuple[int, KvPoolError | None, bool]


@pytest.fixture
def gateway() -> MemoryGateway:
    return MemoryGateway()


@pytest.fixture
def endpoint(gateway: MemoryGateway) -> Iterator[str]:
    with bulk_server(gateway, limits=BulkLimits(window_pages=3)) as endpoint:
        yield endpoint


@pytest.fixture
def channel(endpoint: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(endpoint) as channel:
        yield channel


def read_request(count: int, **fields: Any) -> pb.ReadPagesRequest:
    keys = [key(number).pack() for number in range(count)]
    return pb.ReadPagesRequest(keys=keys, keyspaces=session_keyspaces_to_proto(KEYSPACES), **fields)


def read(
    endpoint: str, sizes: list[int], *, frame_bytes: int = 1 << 20, expected_incarnation: int = 0
) -> tuple[list[bytearray], list[Report]]:
    """Read pages 0, 1, ... of `sizes` with our client."""
    buffers = [bytearray(size) for size in sizes]
    reports: list[Report] = []
    items = [PageToRead(key=key(number), destination=memoryview(buffer)) for number, buffer in enumerate(buffers)]
    client = PageTransferClient(endpoint, frame_bytes=frame_bytes)
    client.read_pages(
        KEYSPACES,
        items,
        lambda *report: reports.append(report),
        timeout_s=60,
        expected_incarnation=expected_incarnation,
    )
    client.close()
    return buffers, reports


def drained(gateway: MemoryGateway) -> bool:
    return gateway.opened_count > 0 and gateway.lease_count == 0 and not gateway.sessions


@pytest.mark.parametrize("frame_bytes", [64 << 10, 1 << 20, 4 << 20])
def test_pages_arrive_bit_for_bit_in_windows(gateway: MemoryGateway, endpoint: str, frame_bytes: int) -> None:
    pages = [gateway.store(number, 1 + number * 150_001) for number in range(10)]
    buffers, reports = read(endpoint, [len(page) for page in pages], frame_bytes=frame_bytes)
    assert buffers == pages
    assert reports == [(number, None, True) for number in range(10)]
    assert gateway.lease_count_max == 3
    eventually_sync(lambda: drained(gateway))


def test_pages_are_sent_while_later_ones_are_still_on_their_way(gateway: MemoryGateway, channel: grpc.Channel) -> None:
    gateway.store(0, 1000)
    gateway.store(1, 1000)
    gateway.late[key(2)] = Future()
    call = pb_grpc.PageTransferServiceStub(channel).ReadPages(read_request(3), timeout=60)
    assert [next(call).item_index, next(call).item_index] == [0, 1]
    gateway.late[key(2)].set_result([None])
    assert next(call) == pb.PageFrame(item_index=2, outcome=pb.OUTCOME_MISS)
    assert next(call, None) is None
    eventually_sync(lambda: drained(gateway))


def test_pages_on_their_way_are_called_off_when_their_reader_leaves(
    gateway: MemoryGateway, channel: grpc.Channel
) -> None:
    gateway.store(0, 1000)
    gateway.store(1, 3 << 20)
    gateway.late[key(2)] = Future()
    call = pb_grpc.PageTransferServiceStub(channel).ReadPages(read_request(3, frame_bytes=64 << 10), timeout=60)
    next(call)
    call.cancel()
    eventually_sync(lambda: drained(gateway))
    assert gateway.late[key(2)].cancelled()


def test_stock_protobuf_reads_the_same_pages(gateway: MemoryGateway, channel: grpc.Channel) -> None:
    pages = [gateway.store(number, 100_000) for number in range(2)]
    stub = pb_grpc.PageTransferServiceStub(channel)
    frames = list(stub.ReadPages(read_request(3, frame_bytes=64 << 10), timeout=60))
    first = [frame for frame in frames if frame.item_index == 0]
    assert [(frame.outcome, frame.page_bytes, frame.offset) for frame in first] == [
        (pb.OUTCOME_HIT, len(pages[0]), 0),
        (pb.OUTCOME_UNSPECIFIED, 0, 64 << 10),
    ]
    assert b"".join(frame.data for frame in first) == pages[0]
    assert b"".join(frame.data for frame in frames if frame.item_index == 1) == pages[1]
    assert frames[-1] == pb.PageFrame(item_index=2, outcome=pb.OUTCOME_MISS)


def test_misses_and_errors_are_distinguished(gateway: MemoryGateway, endpoint: str) -> None:
    page = gateway.store(2, 1000)
    gateway.errors[key(1)] = PageCorrupt("bad digest")
    buffers, reports = read(endpoint, [100, 100, len(page)])
    assert [(index, hit) for index, _, hit in reports] == [(0, False), (1, False), (2, True)]
    assert reports[0][1] is None
    assert isinstance(reports[1][1], PageCorrupt)
    assert buffers[2] == page


def test_a_page_of_another_length_is_not_taken(gateway: MemoryGateway, endpoint: str) -> None:
    pages = [gateway.store(number, 1000) for number in range(2)]
    buffers, reports = read(endpoint, [len(pages[0]) - 1, len(pages[1])])
    assert isinstance(reports[0][1], PageCorrupt)
    assert reports[1] == (1, None, True)
    assert buffers == [bytearray(len(pages[0]) - 1), pages[1]]


def test_another_incarnation_is_refused(gateway: MemoryGateway, endpoint: str, channel: grpc.Channel) -> None:
    page = gateway.store(0, 1000)
    assert read(endpoint, [len(page)], expected_incarnation=INCARNATION)[1] == [(0, None, True)]
    _, reports = read(endpoint, [len(page), 5], expected_incarnation=INCARNATION - 1)
    assert [(index, type(error), hit) for index, error, hit in reports] == [
        (0, StaleIncarnation, False),
        (1, StaleIncarnation, False),
    ]
    with pytest.raises(grpc.RpcError) as raised:
        list(pb_grpc.PageTransferServiceStub(channel).ReadPages(read_request(1, expected_incarnation=1), timeout=60))
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("request_message", "part"),
    [
        (pb.ReadPagesRequest(keys=[key(0).pack(), b"short"]), "key 1"),
        (pb.ReadPagesRequest(keys=[key(0).pack()] * 1025), "1025"),
        (pb.ReadPagesRequest(frame_bytes=(64 << 10) - 1), "frame_bytes"),
        (pb.ReadPagesRequest(frame_bytes=(4 << 20) + 1), "frame_bytes"),
        (pb.ReadPagesRequest(keyspaces=[pb.SessionKeyspace(keyspace_id=b"short")]), "keyspace 0"),
        (pb.ReadPagesRequest(keyspaces=[*session_keyspaces_to_proto(KEYSPACES)] * 65), "65"),
    ],
)
def test_malformed_requests_name_what_is_wrong(
    gateway: MemoryGateway, channel: grpc.Channel, request_message: pb.ReadPagesRequest, part: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(pb_grpc.PageTransferServiceStub(channel).ReadPages(request_message, timeout=60))
    error = error_from_rpc(raised.value)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, InvalidRequest) and part in error.message
    assert error.item_index == (int(part[-1]) if " " in part else None)
    assert gateway.opened_count == 0


def fill(gateway: MemoryGateway) -> None:
    """More than gRPC and the kernel buffer: a reader that stops leaves its stream in the middle of a page."""
    for number in range(40):
        gateway.store(number, 1 << 20)


def begun(gateway: MemoryGateway, call: Any) -> None:
    """Take a first frame, unless the stream has ended before: this machine may stand still for so long."""
    eventually_sync(lambda: gateway.opened_count > 0)
    with suppress(grpc.RpcError):
        next(call)


def test_a_reader_that_cancels_gives_its_leases_back(gateway: MemoryGateway, channel: grpc.Channel) -> None:
    fill(gateway)
    call = pb_grpc.PageTransferServiceStub(channel).ReadPages(read_request(40), timeout=60)
    next(call)
    eventually_sync(lambda: gateway.lease_count == 3)
    call.cancel()
    eventually_sync(lambda: drained(gateway))


def test_a_reader_whose_deadline_passes_gives_its_leases_back(gateway: MemoryGateway, channel: grpc.Channel) -> None:
    fill(gateway)

    def reached() -> bool:
        """Whether the call came to the server before its deadline."""
        call = pb_grpc.PageTransferServiceStub(channel).ReadPages(read_request(40), timeout=0.3)
        with suppress(grpc.RpcError):
            next(call)
        return gateway.opened_count > 0

    eventually_sync(reached)
    eventually_sync(lambda: drained(gateway))


KILLED_READER = """
import sys, time, grpc
from tests.grpc.test_bulk_reads import pb_grpc, read_request
call = pb_grpc.PageTransferServiceStub(grpc.insecure_channel(sys.argv[1])).ReadPages(read_request(40), timeout=60)
next(call)
print("reading", flush=True)
time.sleep(60)
"""


def test_a_reader_that_is_killed_gives_its_leases_back(gateway: MemoryGateway, endpoint: str) -> None:
    fill(gateway)
    command = [sys.executable, "-c", KILLED_READER, endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}) as process:
        assert process.stdout is not None and process.stdout.readline() == b"reading\n"
        eventually_sync(lambda: gateway.lease_count == 3)
        process.kill()
    eventually_sync(lambda: drained(gateway))


def test_streams_are_bounded_and_the_surplus_is_refused_at_once(gateway: MemoryGateway) -> None:
    fill(gateway)
    with bulk_server(gateway, threads=1) as endpoint, grpc.insecure_channel(endpoint) as channel:
        slow = pb_grpc.PageTransferServiceStub(channel).ReadPages(read_request(40), timeout=60)
        next(slow)
        _, reports = read(endpoint, [100])
        assert isinstance(reports[0][1], Overloaded)
        slow.cancel()
        eventually_sync(lambda: read(endpoint, [100])[1][0][1] is not None and drained(gateway))


def test_a_stream_without_deadline_is_ended_by_the_cap(gateway: MemoryGateway) -> None:
    fill(gateway)
    limits = BulkLimits(stream_cap_s=0.2)
    with bulk_server(gateway, limits=limits) as endpoint, grpc.insecure_channel(endpoint) as channel:
        call = pb_grpc.PageTransferServiceStub(channel).ReadPages(read_request(40))
        begun(gateway, call)
        eventually_sync(lambda: drained(gateway))
        with pytest.raises(grpc.RpcError):
            list(call)


def test_pages_that_came_corrupt_are_verified_by_their_source(
    gateway: MemoryGateway, endpoint: str, channel: grpc.Channel
) -> None:
    for number in range(5):
        gateway.store(number, 1000)
    gateway.pages[key(1)][0][500] ^= 1
    stub = pb_grpc.PageTransferServiceStub(channel)
    frames = list(stub.ReadPages(read_request(6, verify=True), timeout=60))
    assert [frame.outcome for frame in frames] == [
        pb.OUTCOME_MISS if number in (1, 5) else pb.OUTCOME_HIT for number in range(6)
    ]
    assert frames[1].error.reason == PageCorrupt.reason and not any(frame.data for frame in frames)
    assert sorted(gateway.pages) == [key(number) for number in (0, 2, 3, 4)]
    gateway.pages[key(2)][0][500] ^= 1
    client = PageTransferClient(endpoint)
    client.verify_pages(KEYSPACES, [key(2), key(3)], timeout_s=60)
    client.close()
    assert sorted(gateway.pages) == [key(number) for number in (0, 3, 4)]
