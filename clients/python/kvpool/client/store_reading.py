"""One window of pages read from the arena: acquired, verified unless the session trusts the arena, taken, released."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from kvpool.client.page_items import AcquireItem, Slot
from kvpool.client.pagestore import PageStoreSession
from kvpool.client.store_values import OpenedShards, WantedPage
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageFault, payload_view, verify

_log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")
_RELEASED_TOGETHER = 16
_RELEASED_BYTES = 128 << 20  # or so many, if that is less: others may wait for the room


@dataclass(frozen=True, slots=True)
class CopyThreads:
    """Threads that copy pages between the arena and the caller's memory."""

    executor: Executor
    count: int


@dataclass(slots=True)
class WindowRead:
    """good: pages that were taken. error: why the window ended early; leases are given back either way."""

    good: set[WantedPage] = field(default_factory=set)
    corrupt_count: int = 0
    error: KvPoolError | None = None


class _TakenLeases:
    """Given back together: a message for each took as long as its copy."""

    def __init__(self, session: PageStoreSession) -> None:
        self._session, self._lease_ids, self._bytes = session, list[int](), 0

    def add(self, slot: Slot) -> None:
        self._lease_ids.append(slot.lease_id)
        self._bytes += slot.page_bytes
        if len(self._lease_ids) >= _RELEASED_TOGETHER or self._bytes >= _RELEASED_BYTES:
            self.give_back()

    def give_back(self) -> None:
        if self._lease_ids:
            self._session.release_soon(self._lease_ids)
            self._lease_ids, self._bytes = [], 0


async def read_window(
    session: PageStoreSession,
    space: OpenedShards,
    pages: Sequence[WantedPage],
    sources: Sequence[tuple[RemoteSource, ...]],
    wait_s: float,
    threads: CopyThreads,
    take: Callable[[int, int, memoryview], None],
) -> WindowRead:
    """Take what can be had of a window within wait_s. Returns (also when cancelled) only after the last copy."""
    read = WindowRead()
    items = [
        AcquireItem(space.page_key(page.chunk, page.shard), remote, page.chunk.metadata if remote else None)
        for page, remote in zip(pages, sources, strict=True)
    ]
    copying = _Copying(session, space, threads, take, read)
    try:
        async with session.acquire(items, wait_s=wait_s) as answers:
            async for answer in answers:
                if answer.slot is not None:
                    copying.begin(pages[answer.item_index], answer.slot)
    except KvPoolError as error:
        read.error = error
    finally:
        await copying.end()
    return read


class _Copying:
    """Pages of a window on their way to the caller. A thread takes one after the other until none waits, as each
    hand-over by the event loop takes longer than the copy of a small page, and longer still beside a busy engine."""

    def __init__(
        self,
        session: PageStoreSession,
        space: OpenedShards,
        threads: CopyThreads,
        take: Callable[[int, int, memoryview], None],
        read: WindowRead,
    ) -> None:
        self._session, self._space, self._threads, self._take, self._read = session, space, threads, take, read
        self._leases = _TakenLeases(session)
        self._waiting: deque[tuple[WantedPage, Slot]] = deque()
        self._lanes: list[asyncio.Task[None]] = []
        self._running = 0

    def begin(self, page: WantedPage, slot: Slot) -> None:
        """Copy it some time; its lease is given back then."""
        self._waiting.append((page, slot))
        if self._running < self._threads.count:
            self._running += 1
            self._lanes.append(asyncio.create_task(self._copy(), name="kvpool copy"))

    async def end(self) -> None:
        """Wait for the last copy, cancelled or not. Raises what one raised."""
        try:
            await all_ended(self._lanes)
        finally:
            self._leases.give_back()

    async def _copy(self) -> None:
        ended: deque[tuple[WantedPage, Slot, bool | PageFault]] = deque()
        try:
            while self._waiting:
                await in_thread(self._threads.executor, self._take_waiting, ended)
                while ended:
                    page, slot, result = ended.popleft()
                    if isinstance(result, PageFault):
                        await self._give_up(page, slot, result)
                    else:
                        self._leases.add(slot)
                        if result:
                            self._read.good.add(page)
        except BaseException:  # cancelled, or a copy that must not fail: the slots are read no more either way
            for _, slot, _ in ended:
                self._leases.add(slot)
            while (left := self._next_waiting()) is not None:
                self._leases.add(left[1])
            raise
        finally:
            self._running -= 1

    def _take_waiting(self, ended: deque[tuple[WantedPage, Slot, bool | PageFault]]) -> None:
        """Runs in several threads at once."""
        while (waiting := self._next_waiting()) is not None:
            result: bool | PageFault = False
            try:
                result = _take_page(self._session, self._space, *waiting, self._take)
            finally:
                ended.append((*waiting, result))

    def _next_waiting(self) -> tuple[WantedPage, Slot] | None:
        """The caller's from now on; any thread may ask."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    async def _give_up(self, page: WantedPage, slot: Slot, fault: PageFault) -> None:
        _log.error("kvpool: page %s must not be used: %s", self._space.page_key(page.chunk, page.shard), fault)
        self._read.corrupt_count += 1
        await _give_up_corrupt(self._session, slot.lease_id)


def _take_page(
    session: PageStoreSession,
    space: OpenedShards,
    page: WantedPage,
    slot: Slot,
    take: Callable[[int, int, memoryview], None],
) -> bool | PageFault:
    """Runs in a thread. False: the slot is not ours any more, or the copy failed."""
    size_bytes = space.payload_bytes(page.shard)
    key, codec = space.page_key(page.chunk, page.shard), int(space.space.spec.codec)
    try:
        with session.slot_view(*slot.place) as view:
            if not session.trusts_arena and (fault := verify(view, key, codec, size_bytes)) is not None:
                return fault
            with payload_view(view, size_bytes) as payload:
                take(page.position, page.shard, payload)
    except KvPoolError as error:
        _log.warning("kvpool: page %s was not taken: %s", key, error)
        return False
    return True


async def _give_up_corrupt(session: PageStoreSession, lease_id: int) -> None:
    try:
        await session.release([], corrupt_lease_ids=[lease_id])
    except KvPoolError as error:
        # The session broke, and its leases end by the pagestore's rules. It finds out by itself when it reads the page.
        _log.warning("kvpool: a corrupt page could not be reported: %s", error)


async def in_thread(
    threads: Executor, work: Callable[Arguments, ResultT], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> ResultT:
    """What `work` returns. A copy cannot be stopped, so a caller that is cancelled is so only after its end."""
    running = asyncio.wrap_future(threads.submit(work, *args, **kwargs))
    await _ended([running])
    return running.result()


async def _ended(running: Sequence[asyncio.Future[ResultT]], cancel: bool = False) -> None:
    cancelled: asyncio.CancelledError | None = None
    while any(not one.done() for one in running):
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
            if cancel:
                for one in running:
                    one.cancel()
    if cancelled is not None:
        raise cancelled


async def all_ended(copies: Sequence[asyncio.Task[None]], *, cancel: bool = False) -> None:
    """Wait for copies, cancelled or not: the memory's owner may reuse it afterwards. Raises what one raised.

    cancel: pass a cancellation on, for copies that end by themselves what cannot be stopped.
    """
    await _ended(copies, cancel)
    errors = [error for copy in copies if (error := copy.exception()) is not None]
    if errors:
        raise errors[0]
