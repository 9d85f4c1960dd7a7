"""One window of pages read from the arena: acquired, verified, taken, released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from kvpool.client.page_items import AcquireItem, Slot
from kvpool.client.pagestore import PageStoreSession
from kvpool.connectors.direct_values import OpenSpace, WantedPage
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageFault, payload_view, verify

_log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")
_RELEASED_TOGETHER = 16


@dataclass(slots=True)
class WindowRead:
    """good: pages that were taken. error: why the window ended early; leases are given back either way."""

    good: set[WantedPage] = field(default_factory=set)
    corrupt_count: int = 0
    error: KvPoolError | None = None


class _TakenLeases:
    """Given back together: a message for each took as long as its copy."""

    def __init__(self, session: PageStoreSession) -> None:
        self._session, self._lease_ids = session, list[int]()

    def add(self, lease_id: int) -> None:
        self._lease_ids.append(lease_id)
        if len(self._lease_ids) >= _RELEASED_TOGETHER:
            self.give_back()

    def give_back(self) -> None:
        if self._lease_ids:
            self._session.release_soon(self._lease_ids)
            self._lease_ids = []


async def read_window(
    session: PageStoreSession,
    space: OpenSpace,
    pages: Sequence[WantedPage],
    sources: Sequence[tuple[RemoteSource, ...]],
    wait_s: float,
    threads: Executor,
    take: Callable[[int, int, memoryview], None],
) -> WindowRead:
    """Take what can be had of a window within wait_s. Returns (also when cancelled) only after the last copy."""
    read = WindowRead()
    items = [
        AcquireItem(space.page_key(page.chunk, page.shard), remote, page.chunk.metadata if remote else None)
        for page, remote in zip(pages, sources, strict=True)
    ]
    copies: list[asyncio.Task[None]] = []
    taken_leases = _TakenLeases(session)

    async def take_one(page: WantedPage, slot: Slot) -> None:
        try:
            taken = await in_thread(threads, _take_page, session, space, page, slot, take)
        except BaseException:  # cancelled, or a copy that must not fail: the slot is read no more either way
            taken_leases.add(slot.lease_id)
            raise
        if isinstance(taken, PageFault):
            _log.error("kvpool: page %s must not be used: %s", space.page_key(page.chunk, page.shard), taken)
            read.corrupt_count += 1
            await _give_up_corrupt(session, slot.lease_id)
            return
        taken_leases.add(slot.lease_id)
        if taken:
            read.good.add(page)

    try:
        async with session.acquire(items, wait_s=wait_s) as answers:
            async for answer in answers:
                if answer.slot is not None:
                    copies.append(
                        asyncio.create_task(take_one(pages[answer.item_index], answer.slot), name="kvpool copy")
                    )
    except KvPoolError as error:
        read.error = error
    finally:
        try:
            await all_ended(copies)
        finally:
            taken_leases.give_back()
    return read


def _take_page(
    session: PageStoreSession,
    space: OpenSpace,
    page: WantedPage,
    slot: Slot,
    take: Callable[[int, int, memoryview], None],
) -> bool | PageFault:
    """Runs in a thread. False: the slot is not ours any more, or the copy failed."""
    size_bytes = space.payload_bytes(page.shard)
    key, codec = space.page_key(page.chunk, page.shard), int(space.space.spec.codec)
    try:
        with session.slot_view(slot) as view:
            fault = verify(view, key, codec, size_bytes)
            if fault is not None:
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


async def _ended(running: Sequence[asyncio.Future[ResultT]]) -> None:
    cancelled: asyncio.CancelledError | None = None
    while any(not one.done() for one in running):
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def all_ended(copies: Sequence[asyncio.Task[None]]) -> None:
    """Wait for copies, cancelled or not: whoever gave the memory may reuse it afterwards. Raises what one raised."""
    await _ended(copies)
    errors = [error for copy in copies if (error := copy.exception()) is not None]
    if errors:
        raise errors[0]
