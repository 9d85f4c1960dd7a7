"""A stream of written pages goes on while the engine looks for slots."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, SessionUnknown
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert_pages import page_metadata_to_proto
from kvpool.wire.frames import BulkFrame
from kvpool_pagestore.bulk.ports import WriteGrant
from kvpool_pagestore.bulk.writes import write_pages
from tests.grpc.bulk_gateway import METADATA, MemoryGateway, MemorySession, key, sealed_page

PAGE = bytes(sealed_page(1, 200_000))
HALF = len(PAGE) // 2
FIRST = BulkFrame(
    pb.PageFrame(page_bytes=len(PAGE), key=key(1).pack(), metadata=page_metadata_to_proto(METADATA)), PAGE[:HALF]
)
SECOND = BulkFrame(pb.PageFrame(offset=HALF), PAGE[HALF:])


class LateSession(MemorySession):
    """Answers a reserve when `grant` is called."""

    def __init__(self, gateway: MemoryGateway) -> None:
        super().__init__(gateway)
        self._asked: tuple[PageKey, int, PageMetadata] | None = None
        self._reserving: Future[WriteGrant | int | KvPoolError] = Future()

    def reserve(
        self, page_key: PageKey, size_bytes: int, metadata: PageMetadata
    ) -> Future[WriteGrant | int | KvPoolError]:
        self._asked = page_key, size_bytes, metadata
        return self._reserving

    def grant(self) -> None:
        assert self._asked is not None, "the page was not reserved yet"
        self._reserving.set_result(super().reserve(*self._asked).result())

    def refuse(self) -> None:
        self._reserving.set_exception(SessionUnknown("the session has ended"))


def test_the_next_piece_is_taken_while_the_page_waits_for_a_slot() -> None:
    gateway = MemoryGateway()
    session = LateSession(gateway)

    def frames() -> Iterator[BulkFrame]:
        yield FIRST
        session.grant()  # asked for the next piece before the slot was there
        yield SECOND

    (answer,) = write_pages(session, frames())
    assert answer.admission == pb.ADMISSION_RESERVED
    assert gateway.pages[key(1)][0] == PAGE
    assert gateway.lease_count == 0


def test_a_slot_that_comes_after_the_stream_has_ended_is_given_back() -> None:
    gateway = MemoryGateway()
    session = LateSession(gateway)

    def frames() -> Iterator[BulkFrame]:
        yield FIRST
        session.grant()

    (answer,) = write_pages(session, frames())
    assert answer.error.reason == "PAGE_CORRUPT"
    assert not gateway.pages and gateway.lease_count == 0


def test_a_page_that_gets_no_slot_is_answered_with_the_reason() -> None:
    session = LateSession(MemoryGateway())

    def frames() -> Iterator[BulkFrame]:
        yield FIRST
        session.refuse()
        yield SECOND

    (answer,) = write_pages(session, frames())
    assert answer.error.reason == SessionUnknown.reason
