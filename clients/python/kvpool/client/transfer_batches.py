"""The pages of one bulk call: which are settled, which piece comes next. No I/O; transfer.py moves the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed, PageCorrupt
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import enum_from_proto, is_newer, item_error_from_proto
from kvpool.wire.convert_pages import page_metadata_from_proto, page_metadata_to_proto
from kvpool.wire.frames import BulkFrame, encode_write_request, page_pieces

OnRead = Callable[[int, KvPoolError | None, bool], None]
"""(item index, error, hit), once per item. A hit is complete in its destination, and not verified."""

OnWritten = Callable[[int, Admission, KvPoolError | None], None]
"""(item index, admission, error), once per item. REJECTED comes with the error."""


def _ignore(_: PageMetadata) -> None:
    """The default: most readers need only the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageToRead:
    """`destination` has exactly the page's bytes; what it holds after a miss or an error is undefined.

    on_metadata: gets the page's metadata before the page is reported, and again when a stream is resumed.
    """

    key: PageKey
    destination: memoryview
    on_metadata: Callable[[PageMetadata], None] = _ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class PageToWrite:
    """`page` is a sealed page: header and payload. It is not read after the call has returned."""

    key: PageKey
    page: memoryview
    metadata: PageMetadata


class ReadBatch:
    """Pages being read. An attempt asks for those not settled yet, and gets their frames in that order."""

    def __init__(self, items: Sequence[PageToRead], first_index: int, on_page: OnRead) -> None:
        """`first_index`: of the first item, as the caller counts."""
        self._items = items
        self._first_index = first_index
        self._on_page = on_page
        self._unsettled = list(range(len(items)))  # in order
        self._asked: list[int] = []
        self._position = -1  # in `_asked`
        self._received_bytes = 0
        self._settled_now = False  # the page at `_position`

    @property
    def settled(self) -> bool:
        """Whether every item was reported."""
        return not self._unsettled

    def begin(self) -> list[bytes]:
        """Start an attempt: the keys to ask for."""
        self._asked = list(self._unsettled)
        self._position = -1
        return [self._items[item].key.pack() for item in self._asked]

    def take(self, frame: BulkFrame) -> None:
        """Put a piece in its place. Raises KvPoolError if the peer does not keep to the order of the pages."""
        position = frame.head.item_index
        if position == self._position + 1 and position < len(self._asked):
            self._next_page()
            self._begin_page(frame.head)
        elif position != self._position or position < 0:
            raise KvPoolError(f"the pagestore sent a frame of page {position} after page {self._position}")
        if not self._settled_now:
            self._put(frame)

    def fail_rest(self, error: KvPoolError) -> None:
        """Report what has not settled."""
        for item in list(self._unsettled):
            self._report(item, error, hit=False)

    def _next_page(self) -> None:
        if self._position >= 0 and not self._settled_now:
            self._settle(PageCorrupt(f"{self._key} ended after {self._received_bytes} bytes"))
        self._position += 1
        self._received_bytes = 0
        self._settled_now = False

    def _begin_page(self, head: pb.PageFrame) -> None:
        expected_bytes = len(self._destination)
        if head.outcome == pb.OUTCOME_MISS:
            self._settle(item_error_from_proto(head.error) if head.HasField("error") else None)
        elif head.outcome != pb.OUTCOME_HIT:
            self._settle(PageCorrupt(f"{self._key} came with outcome {head.outcome}"))
        elif head.page_bytes != expected_bytes:
            self._settle(PageCorrupt(f"{self._key} has {head.page_bytes} bytes there, {expected_bytes} were expected"))
        elif head.HasField("metadata"):  # not from a pagestore of an earlier version
            self._hand_over(head)

    def _hand_over(self, head: pb.PageFrame) -> None:
        try:
            self._items[self._asked[self._position]].on_metadata(page_metadata_from_proto(head.metadata))
        except InvalidRequest as error:
            self._settle(PageCorrupt(f"{self._key}: {error.message}"))

    def _put(self, frame: BulkFrame) -> None:
        offset, size_bytes = frame.head.offset, len(frame.data)
        destination = self._destination
        if offset != self._received_bytes or not 0 < size_bytes <= len(destination) - offset:
            self._settle(
                PageCorrupt(f"{self._key}: {size_bytes} bytes at offset {offset} where {self._received_bytes} was next")
            )
            return
        destination[offset : offset + size_bytes] = frame.data
        self._received_bytes += size_bytes
        if self._received_bytes == len(destination):
            self._settle(None, hit=True)

    @property
    def _destination(self) -> memoryview:
        return self._items[self._asked[self._position]].destination

    @property
    def _key(self) -> PageKey:
        return self._items[self._asked[self._position]].key

    def _settle(self, error: KvPoolError | None, *, hit: bool = False) -> None:
        self._settled_now = True
        self._report(self._asked[self._position], error, hit=hit)

    def _report(self, item: int, error: KvPoolError | None, *, hit: bool) -> None:
        self._unsettled.remove(item)
        self._on_page(self._first_index + item, error, hit)


class WriteBatch:
    """Pages being written. gRPC takes the messages of an attempt on a thread of its own."""

    def __init__(
        self, items: Sequence[PageToWrite], opening: pb.WritePagesOpen, on_page: OnWritten, frame_bytes: int
    ) -> None:
        self._items = items
        self._opening = opening
        self._on_page = on_page
        self._frame_bytes = frame_bytes
        self._answered_count = 0  # results come in order, so that these are the first ones
        self._first = 0  # item of the attempt's first page
        self._lock = threading.Lock()  # held while page bytes are looked at, and to end an attempt
        self._attempt = 0

    @property
    def settled(self) -> bool:
        """Whether every item was reported."""
        return self._answered_count == len(self._items)

    def begin(self) -> Iterator[bytes]:
        """Start an attempt: the messages to send, already encoded."""
        self._first = self._answered_count
        return self._messages(self._attempt, self._first)

    def end_attempt(self) -> None:
        """After this the attempt's messages read no page, even if gRPC still asks for them."""
        with self._lock:
            self._attempt += 1

    def take(self, response: pb.WritePagesResponse) -> None:
        """The result of the next page. Raises KvPoolError if it is another page's."""
        item = self._first + response.item_index
        if item != self._answered_count or self.settled:
            raise KvPoolError(f"the pagestore answered page {response.item_index} out of order")
        error = item_error_from_proto(response.error) if response.HasField("error") else None
        admission = Admission.REJECTED
        if is_newer(response.admission, Admission):
            error = error or NotServed(f"admission {response.admission} is of a newer pagestore")
        else:
            admission = enum_from_proto(response.admission, Admission, "admission")
        if admission is Admission.REJECTED and error is None:
            error = KvPoolError("the pagestore rejected the page and did not say why")
        self._report(admission, error)

    def fail_rest(self, error: KvPoolError) -> None:
        """Report what has not settled."""
        while not self.settled:
            self._report(Admission.REJECTED, error)

    def _report(self, admission: Admission, error: KvPoolError | None) -> None:
        item = self._answered_count
        self._answered_count += 1
        self._on_page(item, admission, error)

    def _messages(self, attempt: int, first: int) -> Iterator[bytes]:
        yield encode_write_request(self._opening)
        for item in range(first, len(self._items)):
            for begin, end in page_pieces(len(self._items[item].page), self._frame_bytes):
                with self._lock:
                    if self._attempt != attempt:
                        return
                    if self._answered_count > item:
                        break  # answered before all of it was sent: it exists there, or was refused
                    message = self._message(item - first, self._items[item], begin, end)
                yield message

    def _message(self, position: int, item: PageToWrite, begin: int, end: int) -> bytes:
        head = pb.PageFrame(item_index=position, offset=begin)
        if begin == 0:
            head.page_bytes = len(item.page)
            head.key = item.key.pack()
            head.metadata.CopyFrom(page_metadata_to_proto(item.metadata))
        with item.page[begin:end] as piece:
            return encode_write_request(BulkFrame(head, piece))
