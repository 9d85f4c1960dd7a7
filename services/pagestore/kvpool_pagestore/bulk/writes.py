"""Taking written pages off a bulk stream: frames in, one result per page out.

Two threads share a stream. One takes frames and fills slots; the stream's own answers. On one thread the network would
stand still during each commit and each answer, which are mostly waiting: that made writing three times as slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread
from typing import Final

from kvpool.core.errors import InvalidRequest, KvPoolError, PageCorrupt
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import item_error_to_proto
from kvpool.wire.convert_pages import page_key_from_proto, page_metadata_from_proto
from kvpool.wire.frames import BulkFrame
from kvpool_pagestore.bulk.ports import BulkSession, WriteGrant

UNANSWERED_PAGES_MAX: Final = 4
"""Pages of a stream that are filled, or being committed, and not answered; besides the one that is being filled."""

UNANSWERED_DURABLE_MAX: Final = 16
"""The same for a stream whose answers wait for the disk."""

SMALL_PAGE_BYTES: Final = 128 << 10
"""A page of so many bytes that comes in one frame is put together with others, and this many count as one page:"""
SMALL_PAGES: Final = 8

_Answer = Callable[[], pb.WritePagesResponse]
"""Called once, on the stream's thread: waits for the commit, if there is one."""


def write_pages(
    session: BulkSession, frames: Iterable[BulkFrame], unanswered_max: int = UNANSWERED_PAGES_MAX
) -> Iterator[pb.WritePagesResponse]:
    """Fill, commit and answer page after page, in order.

    A page whose frames are malformed, missing or do not follow each other is answered with its error, what else comes
    of it is drained, and the stream goes on. Raises InvalidRequest for a frame that belongs to no page in turn, and
    what `frames` raises. Frames are iterated on a thread that has ended when this generator has.
    """
    answers = _Answers(unanswered_max)
    filling = Thread(target=_fill, args=(session, frames, answers), name="bulk-fill", daemon=True)
    filling.start()
    answer: _Answer | BaseException | None = None
    try:
        while (answer := answers.get()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            yield answer()
    finally:
        # The client has left, or its stream makes no sense: `frames` ends soon, and commits that run end by themselves.
        while answer is not None:
            answer = answers.get()
            if answer is not None and not isinstance(answer, BaseException):
                answer()
        filling.join()


class _Answers:
    """Of one stream, in order; `put` waits while too many pages are unanswered."""

    def __init__(self, unanswered_max: int) -> None:
        self._free = unanswered_max * SMALL_PAGES
        self._changed = Condition()
        self._waiting: deque[tuple[_Answer | BaseException | None, int]] = deque()

    def put(self, answer: _Answer | BaseException | None, *, small: bool = False) -> None:
        """small: of a small page."""
        room = 1 if small else SMALL_PAGES
        with self._changed:
            self._changed.wait_for(lambda: self._free >= room)
            self._free -= room
            self._waiting.append((answer, room))
            self._changed.notify()

    def get(self) -> _Answer | BaseException | None:
        """The next one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            answer, room = self._waiting.popleft()
            self._free += room
            self._changed.notify()
        return answer


def _fill(session: BulkSession, frames: Iterable[BulkFrame], answers: _Answers) -> None:
    """Put one answer for each page, then an exception if the stream failed, then None."""
    page: _IncomingPage | None = None
    try:
        for frame in frames:
            index = frame.head.item_index
            expected = 0 if page is None else page.index + 1
            if index == expected:
                if page is not None and (cut_off := page.end()) is not None:
                    answers.put(cut_off)
                page = _IncomingPage(session, index)
            elif page is None or index != page.index:
                raise InvalidRequest(f"a frame where page {expected} was next", item_index=index)
            if (answer := page.take(frame)) is not None:
                answers.put(answer, small=page.small)
        if page is not None and (cut_off := page.end()) is not None:
            answers.put(cut_off)
    except BaseException as error:
        answers.put(error)
    finally:
        if page is not None:
            page.let_go()
        answers.put(None)


class _IncomingPage:
    """One page of the stream. It is answered exactly once: by `take` when it settles, or else by `end`."""

    def __init__(self, session: BulkSession, index: int) -> None:
        self.index = index
        self.small = False  # put together with others
        self._session = session
        self._reserving: Future[WriteGrant | int | KvPoolError] | None = None
        self._kept: list[BulkFrame] = []  # until there is a slot for them: at most two
        self._grant: WriteGrant | None = None
        self._page_bytes = 0
        self._received_bytes = 0
        self._begun = False
        self._answered = False

    def take(self, frame: BulkFrame) -> _Answer | None:
        """Put a piece in its place. The answer, once there is one; later pieces of a settled page are drained."""
        if self._answered:
            return None
        try:
            if not self._begun:
                self._begun = True
                if 0 < frame.head.page_bytes == len(frame.data) <= SMALL_PAGE_BYTES and not frame.head.offset:
                    return self._put_whole(frame)
                self._begin(frame.head)
            self._kept.append(frame)
            if self._reserving is not None:
                is_first = len(self._kept) == 1
                if is_first and len(frame.data) < self._page_bytes and not self._reserving.done():
                    return None  # the next piece comes while the engine finds a slot
                if (admission := self._reserved()) is not Admission.RESERVED:
                    return self._answer(admission)
            for kept in self._kept:
                self._put(kept)
            self._kept.clear()
            if self._received_bytes < self._page_bytes:
                return None
            return self._commit()
        except KvPoolError as error:
            return self._reject(error)

    def end(self) -> _Answer | None:
        """The stream has gone on to the next page, or ended: the answer, if there was none yet."""
        if self._answered:
            return None
        return self._reject(
            PageCorrupt(f"page {self.index} ended after {self._received_bytes} of {self._page_bytes} bytes")
        )

    def let_go(self) -> None:
        """Give the slot back, if there still is one; idempotent."""
        self._kept.clear()
        reserving, self._reserving = self._reserving, None
        if (
            reserving is not None
            and reserving.exception() is None
            and isinstance(answer := reserving.result(), WriteGrant)
        ):
            self._grant = answer
        grant, self._grant = self._grant, None
        if grant is not None:
            grant.page.release()  # first: the slot may be handed on as soon as it is given back
            self._session.abort([grant])

    def _begin(self, head: pb.PageFrame) -> None:
        key = self._key(head)
        metadata = page_metadata_from_proto(head.metadata)
        if head.page_bytes <= 0:
            raise InvalidRequest(f"page_bytes must be > 0, got {head.page_bytes}")
        self._page_bytes = head.page_bytes
        self._reserving = self._session.reserve(key, head.page_bytes, metadata)

    def _reserved(self) -> Admission:
        """Wait for the slot."""
        assert self._reserving is not None, "a page is reserved once"
        reserving, self._reserving = self._reserving, None
        answer = reserving.result()
        if isinstance(answer, KvPoolError):
            raise answer
        if isinstance(answer, int):
            return Admission(answer)
        self._grant = answer
        if len(answer.page) != self._page_bytes:
            raise InvalidRequest(f"page_bytes is {self._page_bytes}, the slot has {len(answer.page)}")
        return Admission.RESERVED

    def _key(self, head: pb.PageFrame) -> PageKey:
        if not head.key:
            raise InvalidRequest("the first frame of a page must carry its key")
        return page_key_from_proto(head.key)

    def _put_whole(self, frame: BulkFrame) -> _Answer:
        key, metadata = self._key(frame.head), page_metadata_from_proto(frame.head.metadata)
        put = self._session.put(key, memoryview(frame.data), metadata)
        self._answered = self.small = True
        return partial(_await_put, self.index, put)

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

    def _commit(self) -> _Answer:
        grant, self._grant = self._grant, None
        assert grant is not None, "only a page with a slot can be complete"
        self._answered = True
        return partial(_await_commit, self.index, grant, self._session.commit(grant))

    def _reject(self, error: KvPoolError) -> _Answer:
        self.let_go()
        return self._answer(Admission.REJECTED, error)

    def _answer(self, admission: Admission, error: KvPoolError | None = None) -> _Answer:
        self._answered = True
        self._kept.clear()
        return partial(_response, self.index, admission, error)


def _await_commit(index: int, grant: WriteGrant, commit: Future[KvPoolError | None]) -> pb.WritePagesResponse:
    try:
        error = commit.result()
    except KvPoolError as raised:
        error = raised
    finally:
        grant.page.release()
    return _response(index, Admission.RESERVED if error is None else Admission.REJECTED, error)


def _await_put(index: int, put: Future[int | KvPoolError]) -> pb.WritePagesResponse:
    try:
        answer = put.result()
    except KvPoolError as raised:
        answer = raised
    if isinstance(answer, KvPoolError):
        return _response(index, Admission.REJECTED, answer)
    return _response(index, Admission(answer), None)


def _response(index: int, admission: Admission, error: KvPoolError | None) -> pb.WritePagesResponse:
    return pb.WritePagesResponse(
        item_index=index,
        admission=pb.Admission.ValueType(admission),
        error=item_error_to_proto(error) if error is not None else None,
    )
