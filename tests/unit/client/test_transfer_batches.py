"""What a reading or writing batch makes of a peer that does not keep to the protocol."""

from __future__ import annotations

import pytest

from kvpool.client.transfer_batches import PageToRead, PageToWrite, ReadBatch, WriteBatch
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ArenaFull, KvPoolError, NotServed, PageCorrupt, ServiceUnavailable
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.v1 import common_pb2
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.frames import BulkFrame, decode_write_request

METADATA = PageMetadata(parent_hash=b"p" * 16, chunk_index=0, group_head_hash=b"g" * 16)


def key(number: int) -> PageKey:
    return PageKey(b"k" * 16, bytes([number]) * 16, 0)


class Reading:
    """A batch of pages of 10 bytes, its buffers and its reports."""

    def __init__(self, count: int, first_index: int = 0) -> None:
        self.buffers = [bytearray(10) for _ in range(count)]
        self.reports: list[tuple[int, type[KvPoolError] | None, bool]] = []
        items = [PageToRead(key=key(n), destination=memoryview(buffer)) for n, buffer in enumerate(self.buffers)]
        self.batch = ReadBatch(items, first_index, self.report)
        self.batch.begin()

    def report(self, index: int, error: KvPoolError | None, hit: bool) -> None:
        self.reports.append((index, None if error is None else type(error), hit))

    def take(self, index: int, data: bytes, offset: int = 0, **fields: int) -> None:
        self.batch.take(BulkFrame(pb.PageFrame(item_index=index, offset=offset, **fields), data))  # type: ignore[arg-type]

    def first(self, index: int, data: bytes, page_bytes: int = 10) -> None:
        self.take(index, data, outcome=pb.OUTCOME_HIT, page_bytes=page_bytes)


def test_only_what_has_not_settled_is_asked_for_again() -> None:
    reading = Reading(4, first_index=100)
    reading.first(0, b"0123456789")
    reading.take(1, b"", outcome=pb.OUTCOME_MISS)
    reading.first(2, b"01234")
    assert reading.batch.begin() == [key(2).pack(), key(3).pack()]
    reading.first(0, b"abcdefghij")
    reading.first(1, b"ABCDE")
    reading.take(1, b"FGHIJ", offset=5)
    assert reading.batch.settled
    assert [bytes(buffer) for buffer in reading.buffers] == [b"0123456789", bytes(10), b"abcdefghij", b"ABCDEFGHIJ"]
    assert reading.reports == [(100, None, True), (101, None, False), (102, None, True), (103, None, True)]
    reading.batch.fail_rest(ServiceUnavailable("too late"))
    assert len(reading.reports) == 4


@pytest.mark.parametrize(
    "second", [(b"5678", 4), (b"678", 6), (b"56789X", 5), (b"", 5), (b"5", -1), (b"5", 1 << 40)], ids=str
)
def test_pieces_that_do_not_follow_each_other_are_damage(second: tuple[bytes, int]) -> None:
    reading = Reading(2)
    reading.first(0, b"01234")
    reading.take(0, second[0], offset=second[1])
    reading.take(0, b"56789", offset=5)  # more of a settled page is ignored
    reading.first(1, b"0123456789")
    assert reading.reports == [(0, PageCorrupt, False), (1, None, True)]


def test_a_page_that_stops_early_or_has_another_length_is_damage() -> None:
    reading = Reading(4)
    reading.first(0, b"01234")
    reading.first(1, b"0123456789", page_bytes=11)
    reading.take(2, b"0123456789", page_bytes=10)  # neither hit nor miss
    reading.first(3, b"0123456789ABC")
    assert reading.reports == [(n, PageCorrupt, False) for n in range(4)]


def test_an_error_of_the_peer_is_passed_on() -> None:
    reading = Reading(1)
    error = common_pb2.ItemError(reason=ArenaFull.reason, message="no room")
    reading.batch.take(BulkFrame(pb.PageFrame(outcome=pb.OUTCOME_MISS, error=error)))
    assert reading.reports == [(0, ArenaFull, False)]


@pytest.mark.parametrize("index", [-1, 1, 2, 5])
def test_a_page_out_of_turn_ends_the_attempt(index: int) -> None:
    reading = Reading(2)
    with pytest.raises(KvPoolError, match="after page"):
        reading.first(index, b"0123456789")
    reading.first(0, b"0123456789")
    reading.first(1, b"0123456789")
    with pytest.raises(KvPoolError, match="after page"):
        reading.first(0 if index < 2 else 2, b"0123456789")


class Writing:
    """A batch of two pages of 10 bytes in pieces of 4."""

    def __init__(self) -> None:
        self.pages = [bytearray(b"0123456789"), bytearray(b"abcdefghij")]
        self.reports: list[tuple[int, Admission, type[KvPoolError] | None]] = []
        items = [PageToWrite(key=key(n), page=memoryview(p), metadata=METADATA) for n, p in enumerate(self.pages)]
        self.batch = WriteBatch(items, pb.WritePagesOpen(expected_incarnation=5), self.report, 4)

    def report(self, index: int, admission: Admission, error: KvPoolError | None) -> None:
        self.reports.append((index, admission, None if error is None else type(error)))

    def answer(self, index: int, admission: int = pb.ADMISSION_RESERVED) -> None:
        self.batch.take(pb.WritePagesResponse(item_index=index, admission=admission))  # type: ignore[arg-type]


def test_the_second_attempt_sends_what_was_not_answered() -> None:
    writing = Writing()
    first = [decode_write_request(message) for message in writing.batch.begin()]
    assert len(first) == 1 + 3 + 3
    writing.answer(0)
    opening, *frames = [decode_write_request(message) for message in writing.batch.begin()]
    assert opening == pb.WritePagesOpen(expected_incarnation=5)
    pieces = [frame for frame in frames if isinstance(frame, BulkFrame)]
    assert b"".join(piece.data for piece in pieces) == b"abcdefghij"
    assert [(piece.head.item_index, piece.head.offset) for piece in pieces] == [(0, 0), (0, 4), (0, 8)]
    assert (pieces[0].head.key, pieces[0].head.page_bytes) == (key(1).pack(), 10)
    writing.answer(0, pb.ADMISSION_EXISTS)
    assert writing.reports == [(0, Admission.RESERVED, None), (1, Admission.EXISTS, None)]


def test_a_page_answered_early_is_not_sent_to_its_end() -> None:
    writing = Writing()
    messages = writing.batch.begin()
    next(messages), next(messages)
    writing.answer(0, pb.ADMISSION_EXISTS)
    frame = decode_write_request(next(messages))
    assert isinstance(frame, BulkFrame) and frame.head.item_index == 1


def test_no_page_is_looked_at_after_the_attempt_has_ended() -> None:
    writing = Writing()
    messages = writing.batch.begin()
    next(messages), next(messages)
    writing.batch.end_attempt()
    for page in writing.pages:
        page[:] = b"overwrite!"
    assert list(messages) == []


def test_answers_that_make_no_sense_end_the_attempt() -> None:
    writing = Writing()
    for index, admission in ((1, pb.ADMISSION_RESERVED), (-1, pb.ADMISSION_RESERVED), (0, 0)):
        with pytest.raises(KvPoolError):
            writing.answer(index, admission)
    writing.answer(0, pb.ADMISSION_REJECTED)
    writing.batch.fail_rest(ServiceUnavailable("gone"))
    assert writing.reports == [(0, Admission.REJECTED, KvPoolError), (1, Admission.REJECTED, ServiceUnavailable)]


def test_an_admission_that_only_a_newer_pagestore_has_fails_its_page_alone() -> None:
    writing = Writing()
    writing.answer(0, 99)
    writing.answer(1, pb.ADMISSION_EXISTS)
    assert writing.reports == [(0, Admission.REJECTED, NotServed), (1, Admission.EXISTS, None)]


def test_what_the_owner_keeps_beside_a_page_is_handed_over_before_the_page() -> None:
    said: list[PageMetadata] = []
    buffers = [bytearray(2), bytearray(2)]
    items = [
        PageToRead(key=key(n), destination=memoryview(buffer), on_metadata=said.append)
        for n, buffer in enumerate(buffers)
    ]
    reports: list[tuple[int, bool, int]] = []
    batch = ReadBatch(items, 0, lambda index, error, hit: reports.append((index, hit, len(said))))
    batch.begin()
    kept = common_pb2.PageMetadata(parent_hash=b"p" * 16, group_head_hash=b"g" * 16, expires_us=5)
    batch.take(BulkFrame(pb.PageFrame(item_index=0, outcome=pb.OUTCOME_HIT, page_bytes=2, metadata=kept), b"ab"))
    kept.chunk_index = -1
    batch.take(BulkFrame(pb.PageFrame(item_index=1, outcome=pb.OUTCOME_HIT, page_bytes=2, metadata=kept), b"ab"))
    assert reports == [(0, True, 1), (1, False, 1)], "a page that could not have been kept is not taken"
    assert said == [PageMetadata(parent_hash=b"p" * 16, chunk_index=0, group_head_hash=b"g" * 16, expires_us=5)]
