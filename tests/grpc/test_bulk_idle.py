"""Peers that hold a stream open and do nothing with it: their threads and slots come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvpool.core.errors import Overloaded
from kvpool.testing import ManualClock, eventually_sync
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1 import pagestore_pb2_grpc as pb_grpc
from kvpool_pagestore.bulk import servicer
from kvpool_pagestore.bulk.servicer import BulkLimits, OpenStreams, StreamWatch
from tests.fixtures.patience import PATIENCE_S
from tests.grpc.bulk_gateway import MemoryGateway, bulk_server, sealed_page
from tests.grpc.test_bulk_reads import begun, drained, fill, read, read_request
from tests.grpc.test_bulk_writes import frames_of, requests

FAR_S = 9 * 365 * 86400.0  # a deadline in the far future
IDLE = BulkLimits(idle_timeout_s=0.2, stream_cap_s=60)


@contextmanager
def one_thread(gateway: MemoryGateway, limits: BulkLimits) -> Iterator[tuple[str, pb_grpc.PageTransferServiceStub]]:
    with bulk_server(gateway, threads=1, limits=limits) as endpoint, grpc.insecure_channel(endpoint) as channel:
        yield endpoint, pb_grpc.PageTransferServiceStub(channel)


def serves_others(gateway: MemoryGateway, endpoint: str) -> None:
    page = gateway.store(0, 1000)
    eventually_sync(lambda: read(endpoint, [len(page)])[1] == [(0, None, True)])


@pytest.mark.parametrize("deadline_s", [None, FAR_S])
@pytest.mark.parametrize("sent", [0, 1, 2], ids=["nothing", "open", "half a page"])
def test_a_writer_that_says_nothing_more_is_let_go(sent: int, deadline_s: float | None) -> None:
    gateway, hold = MemoryGateway(), Event()

    def unfinished() -> Iterator[pb.WritePagesRequest]:
        yield from list(requests(frames_of(0, bytes(sealed_page(0, 200_000)))))[:sent]
        hold.wait(60)

    with one_thread(gateway, IDLE) as (endpoint, stub):
        call = stub.WritePages(unfinished(), timeout=deadline_s)
        with pytest.raises(grpc.RpcError):
            list(call)
        hold.set()
        serves_others(gateway, endpoint)
        eventually_sync(lambda: drained(gateway))


def silent_read(channel: grpc.Channel, hold: Event, deadline_s: float | None = None) -> grpc.Call:
    """A ReadPages call whose request does not come before `hold` is set."""

    def nothing() -> Iterator[bytes]:
        hold.wait(PATIENCE_S)
        yield from ()

    method: Any = channel.stream_stream("/kvpool.v1.PageTransferService/ReadPages")
    call: grpc.Call = method(nothing(), timeout=deadline_s)
    return call


@pytest.mark.parametrize("deadline_s", [None, FAR_S])
def test_a_reader_whose_request_does_not_come_is_let_go(deadline_s: float | None) -> None:
    gateway, hold = MemoryGateway(), Event()
    with bulk_server(gateway, threads=1, limits=IDLE) as endpoint, grpc.insecure_channel(endpoint) as channel:
        call = silent_read(channel, hold, deadline_s)
        assert call.code() is grpc.StatusCode.CANCELLED
        hold.set()
        serves_others(gateway, endpoint)


def test_readers_whose_requests_do_not_come_leave_threads_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "peer_host", str)  # each connection counts as a host of its own
    gateway, hold = MemoryGateway(), Event()
    page = gateway.store(0, 1000)
    limits = BulkLimits(streams_per_peer=2, idle_timeout_s=PATIENCE_S, stream_cap_s=PATIENCE_S)
    local_pool = [("grpc.use_local_subchannel_pool", 1)]
    with (
        bulk_server(gateway, threads=3, limits=limits) as endpoint,
        grpc.insecure_channel(endpoint, local_pool) as silent,
        grpc.insecure_channel(endpoint, local_pool) as other,
    ):
        held = [silent_read(silent, hold) for _ in range(3)]
        eventually_sync(lambda: [call.is_active() for call in held].count(False) == 1)
        (refused,) = (call for call in held if not call.is_active())
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        frames = list(pb_grpc.PageTransferServiceStub(other).ReadPages(read_request(1), timeout=PATIENCE_S))
        assert b"".join(frame.data for frame in frames) == page
        hold.set()
        for call in set(held) - {refused}:
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT, "it ended without a request"


@pytest.mark.parametrize("deadline_s", [None, FAR_S])
def test_a_reader_that_takes_nothing_more_is_let_go(deadline_s: float | None) -> None:
    gateway = MemoryGateway()
    fill(gateway)
    with one_thread(gateway, IDLE) as (endpoint, stub):
        call = stub.ReadPages(read_request(40), timeout=deadline_s)
        begun(gateway, call)
        serves_others(gateway, endpoint)
        with pytest.raises(grpc.RpcError):
            list(call)
        eventually_sync(lambda: drained(gateway))


def test_slow_readers_do_not_keep_the_threads_of_others() -> None:
    """They take something now and then, so that none of them is ever idle for long."""
    gateway = MemoryGateway()
    fill(gateway)
    patient = BulkLimits(idle_timeout_s=60, stream_cap_s=60, reader_grace_s=0.2, reader_bytes_per_s=1 << 40)
    with one_thread(gateway, patient) as (endpoint, stub):
        call = stub.ReadPages(read_request(40), timeout=FAR_S)
        begun(gateway, call)
        serves_others(gateway, endpoint)
        with pytest.raises(grpc.RpcError):
            list(call)
        eventually_sync(lambda: drained(gateway))


def test_a_reader_that_keeps_its_pace_is_not_let_go() -> None:
    """However slow the pagestore itself is: only the reader's time counts."""
    gateway = MemoryGateway()
    fill(gateway)
    strict = BulkLimits(reader_grace_s=PATIENCE_S, reader_bytes_per_s=1)
    with one_thread(gateway, strict) as (_, stub):
        assert len({frame.item_index for frame in stub.ReadPages(read_request(40), timeout=PATIENCE_S)}) == 40


def test_a_deadline_beyond_the_cap_does_not_lift_it() -> None:
    gateway = MemoryGateway()
    fill(gateway)
    with one_thread(gateway, BulkLimits(stream_cap_s=0.2)) as (endpoint, stub):
        call = stub.ReadPages(read_request(40), timeout=FAR_S)
        begun(gateway, call)
        serves_others(gateway, endpoint)
        call.cancel()


class NoTimer:
    """In the place of threading.Timer: nothing happens by itself."""

    daemon = False

    def __init__(self, delay_s: float, happens: Callable[[], None]) -> None: ...

    def start(self) -> None: ...

    def cancel(self) -> None: ...


class Looking(StreamWatch):
    """A watch that looks when its stream has moved, after most of the time that it may idle."""

    clock = ManualClock()
    moved_count = 0

    def moved(self) -> None:
        super().moved()
        Looking.moved_count += 1
        self.clock.advance(0.9 * IDLE.idle_timeout_s)
        self._look()


def test_who_keeps_moving_is_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = MemoryGateway()
    page = bytes(sealed_page(0, 400_000))
    monkeypatch.setattr(servicer, "StreamWatch", Looking)
    monkeypatch.setattr(servicer, "time", SimpleNamespace(monotonic=Looking.clock.monotonic_s))
    monkeypatch.setattr(servicer, "threading", SimpleNamespace(Lock=Lock, Timer=NoTimer))
    monkeypatch.setattr(Looking, "moved_count", 0)

    def slow() -> Iterator[pb.WritePagesRequest]:
        yield from requests(frames_of(0, page))  # eight messages: longer in all than a stream may idle

    with one_thread(gateway, IDLE) as (_, stub):
        (answer,) = stub.WritePages(slow(), timeout=60)
        assert answer.admission == pb.ADMISSION_RESERVED
        eventually_sync(lambda: drained(gateway))
    assert Looking.moved_count == 8


def test_one_peer_leaves_streams_to_others_and_its_refusals_are_counted() -> None:
    gateway, hold, registry = MemoryGateway(), Event(), CollectorRegistry()
    gateway.store(0, 1000)

    def unfinished() -> Iterator[pb.WritePagesRequest]:
        yield from list(requests(frames_of(0, bytes(sealed_page(0, 200_000)))))[:1]
        hold.wait(PATIENCE_S)

    limits = BulkLimits(streams_per_peer=2)
    with (
        bulk_server(gateway, threads=4, limits=limits, registry=registry) as endpoint,
        grpc.insecure_channel(endpoint) as first,
        grpc.insecure_channel(endpoint, [("grpc.use_local_subchannel_pool", 1)]) as second,
    ):
        stubs = [pb_grpc.PageTransferServiceStub(channel) for channel in (first, second)]
        held = [stub.WritePages(unfinished()) for stub in stubs]
        eventually_sync(lambda: len(gateway.sessions) == 2)
        for stub in stubs:  # of either connection: the peer is the host
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.ReadPages(read_request(1)))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        def refusals() -> list[float]:
            samples = [one for metric in registry.collect() for one in metric.samples]
            return [one.value for one in samples if one.labels.get("grpc_code") == "RESOURCE_EXHAUSTED"]

        eventually_sync(lambda: 2 in refusals())
        hold.set()
        for call in held:
            list(call)
        serves_others(gateway, endpoint)


def test_streams_of_one_peer_do_not_count_for_another() -> None:
    streams = OpenStreams(per_peer=1)
    with streams.place("ipv4:10.0.0.1:4000"), streams.place("ipv4:10.0.0.2:4000"):
        with pytest.raises(Overloaded, match=r"10\.0\.0\.1"), streams.place("ipv4:10.0.0.1:4001"):
            pass
    with streams.place("ipv4:10.0.0.1:4000"):
        pass
