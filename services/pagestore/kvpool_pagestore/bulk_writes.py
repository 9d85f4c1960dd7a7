"""Taking written pages off a bulk stream: frames in, one result per page out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvpool.core.errors import InvalidRequest, KvPoolError, PageCorrupt
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import item_error_to_proto, page_key_from_proto, page_metadata_from_proto
from kvpool.wire.frames import BulkFrame
from kvpool_pagestore.ports import BulkSession, WriteGrant


def write_pages(session: BulkSession, frames: Iterable[BulkFrame]) -> Iterator[pb.WritePagesResponse]:
    """Fill, commit and answer page after page; at most one slot is held at a time.

    A page whose frames are malformed, missing or do not follow each other is answered with its error, what else comes
    of it is drained, and the stream goes on. Raises InvalidRequest for a frame that belongs to no page in turn.
    """
    page: _IncomingPage | None = None
    try:
        for frame in frames:
            index = frame.head.item_index
            expected = 0 if page is None else page.index + 1
            if index == expected:
                if page is not None and (cut_off := page.end()) is not None:
                    yield cut_off
                page = _IncomingPage(session, index)
            elif page is None or index != page.index:
                raise InvalidRequest(f"a frame where page {expected} was next", item_index=index)
            if (result := page.take(frame)) is not None:
                yield result
        if page is not None and (cut_off := page.end()) is not None:
            yield cut_off
    finally:
        if page is not None:
            page.let_go()


class _IncomingPage:
    """One page of the stream. It is answered exactly once: by `take` when it settles, or else by `end`."""

    def __init__(self, session: BulkSession, index: int) -> None:
        self.index = index
        self._session = session
        self._grant: WriteGrant | None = None
        self._page_bytes = 0
        self._received_bytes = 0
        self._begun = False
        self._answered = False

    def take(self, frame: BulkFrame) -> pb.WritePagesResponse | None:
        """Put a piece in its place. The result, once there is one; later pieces of a settled page are drained."""
        if self._answered:
            return None
        try:
            if not self._begun:
                self._begun = True
                if (admission := self._begin(frame.head)) is not Admission.RESERVED:
                    return self._answer(admission)
            self._put(frame)
            if self._received_bytes < self._page_bytes:
                return None
            return self._commit()
        except KvPoolError as error:
            return self._reject(error)

    def end(self) -> pb.WritePagesResponse | None:
        """The stream has gone on to the next page, or ended: the result, if there was none yet."""
        if self._answered:
            return None
        return self._reject(
            PageCorrupt(f"page {self.index} ended after {self._received_bytes} of {self._page_bytes} bytes")
        )

    def let_go(self) -> None:
        """Give the slot back, if there still is one; idempotent."""
        grant, self._grant = self._grant, None
        if grant is not None:
            grant.page.release()  # first: the slot may be handed on as soon as it is given back
            self._session.abort([grant])

    def _begin(self, head: pb.PageFrame) -> Admission:
        key = self._key(head)
        metadata = page_metadata_from_proto(head.metadata)
        if head.page_bytes <= 0:
            raise InvalidRequest(f"page_bytes must be > 0, got {head.page_bytes}")
        answer = self._session.reserve(key, head.page_bytes, metadata)
        if isinstance(answer, KvPoolError):
            raise answer
        if isinstance(answer, int):
            return Admission(answer)
        self._grant = answer
        self._page_bytes = head.page_bytes
        if len(answer.page) != head.page_bytes:
            raise InvalidRequest(f"page_bytes is {head.page_bytes}, the slot has {len(answer.page)}")
        return Admission.RESERVED

    def _key(self, head: pb.PageFrame) -> PageKey:
        if not head.key:
            raise InvalidRequest("the first frame of a page must carry its key")
        return page_key_from_proto(head.key)

    def _put(self, frame: BulkFrame) -> None:
        offset, size_bytes = frame.head.offset, len(frame.data)
        if offset != self._received_bytes:
            raise InvalidRequest(f"a piece at offset {offset} where {self._received_bytes} was next")
        if size_bytes == 0:
            raise InvalidRequest(f"an empty piece at offset {offset}")
        if offset + size_bytes > self._page_bytes:
            raise InvalidRequest(f"a piece ends at {offset + size_bytes} in a page of {self._page_bytes} bytes")
        assert self._grant is not None, "a page that was not admitted is answered before its first piece is taken"
        self._grant.page[offset : offset + size_bytes] = frame.data
        self._received_bytes += size_bytes

    def _commit(self) -> pb.WritePagesResponse:
        grant, self._grant = self._grant, None
        assert grant is not None, "only a page with a slot can be complete"
        error = self._session.commit(grant)
        grant.page.release()
        return self._answer(Admission.RESERVED) if error is None else self._reject(error)

    def _reject(self, error: KvPoolError) -> pb.WritePagesResponse:
        self.let_go()
        return self._answer(Admission.REJECTED, error)

    def _answer(self, admission: Admission, error: KvPoolError | None = None) -> pb.WritePagesResponse:
        self._answered = True
        return pb.WritePagesResponse(
            item_index=self.index,
            admission=pb.Admission.ValueType(admission),
            error=item_error_to_proto(error) if error is not None else None,
        )
