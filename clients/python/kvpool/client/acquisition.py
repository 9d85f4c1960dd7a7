"""Pages of one `acquire` as they become ready."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from kvpool.client.page_items import AcquireResult, acquire_result_from_proto
from kvpool.client.session_stream import Reply
from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.core.spans import SpanAnswer
from kvpool.core.tracing import NO_SPAN, SERVED_PAGES, Span
from kvpool.v1 import pagestore_pb2
from kvpool.wire.convert import item_error_from_proto
from kvpool.wire.convert_spans import AnsweredPages, span_answer_from_proto

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlingRequest:
    """What an acquire needs of its session. is_mapped, map_segments: of arena segments, by id."""

    submit: Callable[[Reply[pagestore_pb2.SessionResponse]], Awaitable[None]]
    is_mapped: Callable[[int], bool]
    map_segments: Callable[[Iterable[int]], Awaitable[None]]
    release: Callable[[Sequence[int]], None]
    timeout_s: float
    span: Span = NO_SPAN  # it ends with the block


class Settling(ABC, Generic[ResultT]):
    """Iterate it inside `async with`: every page settles once, in the order in which pages become ready.

    Leases of results that were handed out belong to the caller. All others, also of answers that come after the caller
    has left, are released by themselves.
    """

    def __init__(self, request: SettlingRequest) -> None:
        self._request = request
        self._release, self._timeout_s, self._span = request.release, request.timeout_s, request.span
        self._hit_count = 0
        self._ends_at_s = 0.0
        self._ready: deque[ResultT] = deque()
        self._changed = asyncio.Event()
        self._sent = False
        self._final = False
        self._abandoned = False
        self._failure: KvPoolError | None = None

    # What an answer holds

    @abstractmethod
    def _results(self, response: pagestore_pb2.SessionResponse) -> list[ResultT]:
        """Raises InvalidRequest for an answer that cannot be understood."""

    @abstractmethod
    def _named_leases(self, response: pagestore_pb2.SessionResponse) -> list[int]:
        """Lease ids of an answer that cannot be understood."""

    @abstractmethod
    def _is_last(self, response: pagestore_pb2.SessionResponse) -> bool:
        """Whether the request has no more answers."""

    @abstractmethod
    def _leases(self, result: ResultT) -> list[int]: ...

    @abstractmethod
    def _segments(self, result: ResultT) -> set[int]: ...

    # For the caller

    async def __aenter__(self) -> Self:
        self._ends_at_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._ends_at_s):
                await self._request.submit(self)
                self._sent = True
        except BaseException as error:
            self._abandoned = True  # it may have been sent in the same instant
            self._end_span(error)
            if isinstance(error, TimeoutError):
                raise self._too_late() from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandoned = True
        self._give_back(self._ready)
        self._ready.clear()
        self._end_span(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ResultT:
        """raises: what ended the session or refused the request; DeadlineExceeded."""
        if self._ready and all(map(self._request.is_mapped, self._segments(self._ready[0]))):
            return self._ready.popleft()  # nearly always, and pages are many: a timer would cost more than the rest
        try:
            async with asyncio.timeout_at(self._ends_at_s):
                while not self._ready:
                    if self._failure is not None:
                        raise self._failure
                    if self._final:
                        raise StopAsyncIteration
                    self._changed.clear()
                    await self._changed.wait()
                await self._request.map_segments(self._segments(self._ready[0]))
        except TimeoutError:
            raise self._too_late() from None
        return self._ready.popleft()  # nothing is awaited any more: a cancelled caller loses no lease

    async def wait_settled(self) -> None:
        """Return when no more answers will come: only then do items that were not waited for leave the window."""
        while self._sent and not self._final and self._failure is None:
            self._changed.clear()
            await self._changed.wait()

    # For the stream

    def deliver(self, response: pagestore_pb2.SessionResponse) -> bool:
        """See stream.Reply."""
        if response.HasField("error"):
            self.fail(item_error_from_proto(response.error))
            return True
        try:
            results = self._results(response)
        except KvPoolError as error:
            self._release(self._named_leases(response))
            self.fail(error)
            return self._is_last(response)
        if self._span.recording:
            self._hit_count += sum(len(self._leases(result)) for result in results)
        if self._abandoned:
            self._give_back(results)
        else:
            self._ready.extend(results)
        self._final = self._is_last(response)
        self._changed.set()
        return self._final

    def fail(self, error: KvPoolError) -> None:
        """See stream.Reply."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    # Inside

    def _give_back(self, results: Iterable[ResultT]) -> None:
        leases = [lease_id for result in results for lease_id in self._leases(result)]
        if leases:
            self._release(leases)

    def _end_span(self, error: BaseException | None) -> None:
        if self._span.recording:
            self._span.set({SERVED_PAGES: self._hit_count})
            if error is not None:
                self._span.fail(error if isinstance(error, KvPoolError) else type(error).__name__)
            self._span.end()

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the pagestore did not settle all pages within {self._timeout_s:g} s")


class Acquisition(Settling[AcquireResult]):
    """Pages asked for one by one: each result is one of them."""

    def _results(self, response: pagestore_pb2.SessionResponse) -> list[AcquireResult]:
        return [acquire_result_from_proto(result) for result in response.acquire.results]

    def _named_leases(self, response: pagestore_pb2.SessionResponse) -> list[int]:
        return [result.slot.lease_id for result in response.acquire.results if result.slot.lease_id]

    def _is_last(self, response: pagestore_pb2.SessionResponse) -> bool:
        return response.acquire.final

    def _leases(self, result: AcquireResult) -> list[int]:
        return [] if result.slot is None else [result.slot.lease_id]

    def _segments(self, result: AcquireResult) -> set[int]:
        return set() if result.slot is None else {result.slot.segment_id}


class SpanAcquisition(Settling[SpanAnswer]):
    """Pages of a span: each result is what settled together. A request of no pages has no results."""

    def __init__(self, page_count: int, request: SettlingRequest) -> None:
        """page_count: of the span."""
        super().__init__(request)
        self._answered = AnsweredPages(page_count)

    def _results(self, response: pagestore_pb2.SessionResponse) -> list[SpanAnswer]:
        answer = span_answer_from_proto(response.span_answer, self._answered.page_count)
        self._answered.note(answer, final=response.span_answer.final)
        return [answer] if answer.granted.count or answer.failed else []

    def _named_leases(self, response: pagestore_pb2.SessionResponse) -> list[int]:
        return list(response.span_answer.lease_ids)

    def _is_last(self, response: pagestore_pb2.SessionResponse) -> bool:
        return response.span_answer.final

    def _leases(self, result: SpanAnswer) -> list[int]:
        lease_ids: list[int] = result.granted.lease_ids.tolist()
        return lease_ids

    def _segments(self, result: SpanAnswer) -> set[int]:
        return set(result.granted.segment_ids.tolist())
