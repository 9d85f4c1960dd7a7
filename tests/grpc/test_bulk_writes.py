"""WritePages of a real bulk server over a gateway in memory: a page is stored whole and verified, or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from threading import Event

import grpc
import pytest

from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.errors import ArenaFull, InvalidRequest, KvPoolError, PageCorrupt, StaleIncarnation
from kvpool.core.outcome import Admission
from kvpool.testing import eventually_sync
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1 import pagestore_pb2_grpc as pb_grpc
from kvpool.wire.convert_keyspace import session_keyspaces_to_proto
from kvpool.wire.convert_pages import page_metadata_to_proto
from kvpool.wire.status import error_from_rpc
from tests.grpc.bulk_gateway import KEYSPACES, METADATA, MemoryGateway, bulk_server, key, sealed_page

Report = tuple[int, Admission, KvPoolError | None]
PIECE = 64 << 10


@pytest.fixture
def gateway() -> MemoryGateway:
    return MemoryGateway()


@pytest.fixture
def endpoint(gateway: MemoryGateway) -> Iterator[str]:
    with bulk_server(gateway) as endpoint:
        yield endpoint


@pytest.fixture
def stub(endpoint: str) -> Iterator[pb_grpc.PageTransferServiceStub]:
    with grpc.insecure_channel(endpoint) as channel:
        yield pb_grpc.PageTransferServiceStub(channel)


def write(endpoint: str, pages: list[bytearray], expected_incarnation: int = 0) -> list[Report]:
    """Write pages 0, 1, ... with our client."""
    items = [
        PageToWrite(key=key(number), page=memoryview(page), metadata=METADATA) for number, page in enumerate(pages)
    ]
    reports: list[Report] = []
    client = PageTransferClient(endpoint, frame_bytes=PIECE)
    client.write_pages(
        KEYSPACES,
        items,
        lambda *report: reports.append(report),
        timeout_s=60,
        expected_incarnation=expected_incarnation,
    )
    client.close()
    return reports


def opening() -> pb.WritePagesRequest:
    return pb.WritePagesRequest(open=pb.WritePagesOpen(keyspaces=session_keyspaces_to_proto(KEYSPACES)))


def frames_of(index: int, page: bytes, number: int | None = None) -> list[pb.PageFrame]:
    """A page of two or more pieces, as a good client sends it."""
    frames = [
        pb.PageFrame(item_index=index, offset=offset, data=page[offset : offset + PIECE])
        for offset in range(0, len(page), PIECE)
    ]
    frames[0].page_bytes = len(page)
    frames[0].key = key(index if number is None else number).pack()
    frames[0].metadata.CopyFrom(page_metadata_to_proto(METADATA))
    return frames


def requests(frames: Iterable[pb.PageFrame]) -> Iterator[pb.WritePagesRequest]:
    yield opening()
    for frame in frames:
        yield pb.WritePagesRequest(frame=frame)


def drained(gateway: MemoryGateway) -> bool:
    return gateway.opened_count > 0 and gateway.lease_count == 0 and not gateway.sessions


def test_pages_are_stored_with_their_metadata(gateway: MemoryGateway, endpoint: str) -> None:
    pages = [sealed_page(number, 1 + number * 100_000) for number in range(5)]
    assert write(endpoint, pages) == [(number, Admission.RESERVED, None) for number in range(5)]
    assert gateway.pages == {key(number): (page, METADATA) for number, page in enumerate(pages)}
    assert gateway.lease_count_max == 1
    eventually_sync(lambda: drained(gateway))


def test_stock_protobuf_writes_the_same_pages(gateway: MemoryGateway, stub: pb_grpc.PageTransferServiceStub) -> None:
    pages = [sealed_page(number, 200_000) for number in range(2)]
    frames = [frame for index, page in enumerate(pages) for frame in frames_of(index, bytes(page))]
    responses = list(stub.WritePages(requests(frames), timeout=60))
    assert responses == [pb.WritePagesResponse(item_index=i, admission=pb.ADMISSION_RESERVED) for i in range(2)]
    assert [gateway.pages[key(number)][0] for number in range(2)] == pages


def test_pages_that_exist_or_are_being_written_are_drained(gateway: MemoryGateway, endpoint: str) -> None:
    pages = [sealed_page(number, 300_000) for number in range(3)]
    stored = gateway.store(0, 500)
    gateway.pending.add(key(1))
    assert write(endpoint, pages) == [
        (0, Admission.EXISTS, None),
        (1, Admission.PENDING, None),
        (2, Admission.RESERVED, None),
    ]
    assert gateway.pages[key(0)][0] == stored
    assert key(1) not in gateway.pages


def test_stock_frames_of_a_page_that_exists_are_ignored(
    gateway: MemoryGateway, stub: pb_grpc.PageTransferServiceStub
) -> None:
    gateway.store(0, 500)
    frames = frames_of(0, bytes(sealed_page(0, 300_000))) + frames_of(1, bytes(sealed_page(1, 300_000)))
    responses = list(stub.WritePages(requests(frames), timeout=60))
    assert [response.admission for response in responses] == [pb.ADMISSION_EXISTS, pb.ADMISSION_RESERVED]


def test_a_full_arena_is_reported_per_page(gateway: MemoryGateway, endpoint: str) -> None:
    gateway.errors[key(0)] = ArenaFull("every slot is leased")
    reports = write(endpoint, [sealed_page(number, 100_000) for number in range(2)])
    assert [(admission, type(error)) for _, admission, error in reports] == [
        (Admission.REJECTED, ArenaFull),
        (Admission.RESERVED, type(None)),
    ]


def test_another_incarnation_is_refused(gateway: MemoryGateway, endpoint: str) -> None:
    reports = write(endpoint, [sealed_page(number, 100) for number in range(2)], expected_incarnation=1)
    assert [type(error) for _, _, error in reports] == [StaleIncarnation, StaleIncarnation]
    assert gateway.pages == {}


PAGE = bytes(sealed_page(0, 300_000))


def changed(position: int, **fields: object) -> list[pb.PageFrame]:
    """The frames of a good page, one of them changed."""
    frames = frames_of(0, PAGE)
    for name, value in fields.items():
        setattr(frames[position], name, value)
    return frames


def flipped() -> list[pb.PageFrame]:
    frames = frames_of(0, PAGE)
    data = frames[2].data
    frames[2].data = data[:77] + bytes([data[77] ^ 4]) + data[78:]
    return frames


BROKEN: dict[str, tuple[list[pb.PageFrame], type[KvPoolError]]] = {
    "a missing piece": (frames_of(0, PAGE)[:2] + frames_of(0, PAGE)[3:], InvalidRequest),
    "pieces in another order": ([frames_of(0, PAGE)[i] for i in (0, 2, 1, 3, 4)], InvalidRequest),
    "a piece twice": ([frames_of(0, PAGE)[i] for i in (0, 1, 1, 2, 3, 4)], InvalidRequest),
    "an overlapping piece": (changed(1, offset=PIECE - 1), InvalidRequest),
    "a negative offset": (changed(0, offset=-1), InvalidRequest),
    "an empty piece": (changed(1, data=b""), InvalidRequest),
    "a piece beyond the end": (changed(4, data=b"x" * PIECE), InvalidRequest),
    "a page cut off": (frames_of(0, PAGE)[:-1], PageCorrupt),
    "nothing but a head": ([pb.PageFrame(page_bytes=5, key=key(0).pack())], InvalidRequest),
    "no length": (changed(0, page_bytes=0), InvalidRequest),
    "a negative length": (changed(0, page_bytes=-5), InvalidRequest),
    "a length too short": (changed(0, page_bytes=len(PAGE) - 1), InvalidRequest),
    "a length too long": (changed(0, page_bytes=len(PAGE) + 1), PageCorrupt),
    "no key": (changed(0, key=b""), InvalidRequest),
    "a short key": (changed(0, key=b"k" * 33), InvalidRequest),
    "a bit flipped": (flipped(), PageCorrupt),
    "another page's bytes": (frames_of(0, PAGE, number=9), PageCorrupt),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_page_is_never_visible_and_harms_no_other(
    gateway: MemoryGateway, stub: pb_grpc.PageTransferServiceStub, name: str
) -> None:
    frames, expected = BROKEN[name]
    good = bytes(sealed_page(1, 100_000))
    responses = list(stub.WritePages(requests([*frames, *frames_of(1, good)]), timeout=60))
    assert [response.item_index for response in responses] == [0, 1]
    assert responses[0].admission == pb.ADMISSION_REJECTED
    assert responses[0].error.reason == expected.reason
    assert responses[1].admission == pb.ADMISSION_RESERVED
    assert {page_key: bytes(page) for page_key, (page, _) in gateway.pages.items()} == {key(1): good}
    eventually_sync(lambda: drained(gateway))


def test_a_last_page_cut_off_is_answered_when_the_stream_ends(
    gateway: MemoryGateway, stub: pb_grpc.PageTransferServiceStub
) -> None:
    responses = list(stub.WritePages(requests(frames_of(0, PAGE)[:-1]), timeout=60))
    assert [response.error.reason for response in responses] == [PageCorrupt.reason]
    assert gateway.pages == {}


BROKEN_STREAMS: dict[str, list[pb.WritePagesRequest]] = {
    "nothing": [],
    "no open": [pb.WritePagesRequest(frame=frames_of(0, PAGE)[0])],
    "open twice": [opening(), opening()],
    "an empty message": [opening(), pb.WritePagesRequest()],
    "a page left out": [opening(), pb.WritePagesRequest(frame=frames_of(1, PAGE)[0])],
    "back to an old page": [*requests([frames_of(0, PAGE)[0], frames_of(1, PAGE)[0], frames_of(0, PAGE)[1]])],
    "a negative page": [opening(), pb.WritePagesRequest(frame=pb.PageFrame(item_index=-1))],
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
def test_a_stream_that_makes_no_sense_is_ended(
    gateway: MemoryGateway, stub: pb_grpc.PageTransferServiceStub, name: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.WritePages(iter(BROKEN_STREAMS[name]), timeout=60))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error_from_rpc(raised.value), InvalidRequest)
    assert gateway.pages == {}
    eventually_sync(lambda: gateway.lease_count == 0 and not gateway.sessions)


@pytest.mark.parametrize("garbage", [b"\xff", b"\x7a\x05abc", b"\x7b", b"\x0a\x7f"])
def test_garbage_is_an_invalid_argument(gateway: MemoryGateway, endpoint: str, garbage: bytes) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/kvpool.v1.PageTransferService/WritePages"
        )
        for messages in ([garbage], [opening().SerializeToString(), garbage]):
            with pytest.raises(grpc.RpcError) as raised:
                list(method(iter(messages), timeout=60))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    eventually_sync(lambda: not gateway.sessions)


def test_a_writer_that_cancels_in_the_middle_of_a_page_gives_its_slot_back(
    gateway: MemoryGateway, stub: pb_grpc.PageTransferServiceStub, caplog: pytest.LogCaptureFixture
) -> None:
    hold = Event()

    def unfinished() -> Iterator[pb.WritePagesRequest]:
        yield from requests(frames_of(0, PAGE)[:2])
        hold.wait(60)

    call = stub.WritePages(unfinished(), timeout=60)
    eventually_sync(lambda: gateway.lease_count == 1)
    call.cancel()
    hold.set()
    eventually_sync(lambda: drained(gateway))
    assert gateway.pages == {}
    assert caplog.records == []  # clients may leave: nothing for an operator to look at


KILLED_WRITER = """
import sys, time, grpc
from tests.grpc.test_bulk_writes import PAGE, frames_of, pb_grpc, requests
def unfinished():
    yield from requests(frames_of(0, PAGE)[:2])
    time.sleep(60)
call = pb_grpc.PageTransferServiceStub(grpc.insecure_channel(sys.argv[1])).WritePages(unfinished(), timeout=60)
list(call)
"""


def test_a_writer_that_is_killed_in_the_middle_of_a_page_gives_its_slot_back(
    gateway: MemoryGateway, endpoint: str
) -> None:
    command = [sys.executable, "-c", KILLED_WRITER, endpoint]
    with subprocess.Popen(command, env={"PYTHONPATH": ":".join(sys.path)}) as process:
        eventually_sync(lambda: gateway.lease_count == 1)
        process.kill()
    eventually_sync(lambda: drained(gateway))
    assert gateway.pages == {}
