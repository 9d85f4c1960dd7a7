"""Pages of one `acquire` as they become ready."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from kvpool.client.page_items import AcquireResult, Slot, acquire_result_from_proto
from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.core.tracing import NO_SPAN, SERVED_PAGES, Span
from kvpool.v1 import pagestore_pb2
from kvpool.wire.convert import item_error_from_proto


class Acquisition:
    """Iterate it inside `async with`: every item settles once, in the order in which pages become ready.

    Leases of results that were handed out belong to the caller. All others, also of answers that come after the caller
    has left, are released by themselves.
    """

    def __init__(
        self,
        *,
        submit: Callable[[Acquisition], Awaitable[None]],
        is_prepared: Callable[[Slot], bool],
        prepare: Callable[[Slot], Awaitable[None]],
        release: Callable[[Sequence[int]], None],
        timeout_s: float,
        span: Span = NO_SPAN,
    ) -> None:
        """span: of the request; it ends with the block."""
        self._submit = submit
        self._is_prepared, self._prepare = is_prepared, prepare
        self._release = release
        self._timeout_s = timeout_s
        self._span = span
        self._hit_count = 0
        self._ends_at_s = 0.0
        self._ready: deque[AcquireResult] = deque()
        self._changed = asyncio.Event()
        self._sent = False
        self._final = False
        self._abandoned = False
        self._failure: KvPoolError | None = None

    async def __aenter__(self) -> Self:
        self._ends_at_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._ends_at_s):
                await self._submit(self)
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

    async def __anext__(self) -> AcquireResult:
        """raises: what ended the session or refused the request; DeadlineExceeded."""
        if self._ready and ((slot := self._ready[0].slot) is None or self._is_prepared(slot)):
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
                slot = self._ready[0].slot
                if slot is not None:
                    await self._prepare(slot)
        except TimeoutError:
            raise self._too_late() from None
        return self._ready.popleft()  # nothing is awaited any more: a cancelled caller loses no lease

    def _end_span(self, error: BaseException | None) -> None:
        if self._span.recording:
            self._span.set({SERVED_PAGES: self._hit_count})
            if error is not None:
                self._span.fail(error if isinstance(error, KvPoolError) else type(error).__name__)
            self._span.end()

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the pagestore did not settle all pages within {self._timeout_s:g} s")

    async def wait_settled(self) -> None:
        """Return when no more answers will come: only then do items that were not waited for leave the window."""
        while self._sent and not self._final and self._failure is None:
            self._changed.clear()
            await self._changed.wait()

    def deliver(self, response: pagestore_pb2.SessionResponse) -> bool:
        """See stream.Reply."""
        if response.HasField("error"):
            self.fail(item_error_from_proto(response.error))
            return True
        try:
            results = [acquire_result_from_proto(result) for result in response.acquire.results]
        except KvPoolError as error:
            self._release([result.slot.lease_id for result in response.acquire.results if result.slot.lease_id])
            self.fail(error)
            return response.acquire.final
        if self._span.recording:
            self._hit_count += sum(result.slot is not None for result in results)
        if self._abandoned:
            self._give_back(results)
        else:
            self._ready.extend(results)
        self._final = response.acquire.final
        self._changed.set()
        return self._final

    def fail(self, error: KvPoolError) -> None:
        """See stream.Reply."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    def _give_back(self, results: Sequence[AcquireResult] | deque[AcquireResult]) -> None:
        leases = [result.slot.lease_id for result in results if result.slot is not None]
        if leases:
            self._release(leases)
