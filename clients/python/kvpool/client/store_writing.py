"""One window of pages written in the arena: reserved, filled, sealed unless the session trusts the arena, committed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kvpool.client.page_items import ReserveItem, Slot
from kvpool.client.pagestore import PageStoreSession
from kvpool.client.retry import Backoff
from kvpool.client.store_reading import CopyThreads, all_ended, in_thread
from kvpool.client.store_values import OpenedShards, WantedPage
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import ArenaFull, InvalidRequest, KvPoolError, Overloaded
from kvpool.core.outcome import Admission
from kvpool.core.page import page_bytes, payload_view, seal

_log = logging.getLogger(__name__)
_THERE = (Admission.EXISTS, Admission.PENDING)
_PAUSE_INITIAL_S, _PAUSE_MAX_S = 0.01, 0.2
_FILLED_TOGETHER_MAX = 8  # by then a hand-over and a commit are a small part of the copies
_COMMIT_AT_LEAST_S = 0.5  # pages that are filled are worth a moment more


@dataclass(slots=True)
class WindowWritten:
    """good: pages that are there now or soon. error: what the first page that is not there was refused with.

    sources: the other hosts' nodes that took pages.
    """

    good: set[WantedPage] = field(default_factory=set)
    written_bytes: int = 0
    error: KvPoolError | None = None
    sources: dict[WantedPage, RemoteSource] = field(default_factory=dict)


async def write_with_retry(
    write: Callable[[Sequence[WantedPage], float], Awaitable[WindowWritten]],
    pages: Sequence[WantedPage],
    ends_at_s: float,
    room_wait_s: float,
) -> WindowWritten:
    """Write a window; pages for which staging has no room are tried again, as long as some become durable.

    write: tries some pages, within seconds. ends_at_s: by the loop's clock. room_wait_s: without a page for which there
    was room.
    """
    loop, backoff = asyncio.get_running_loop(), Backoff(_PAUSE_INITIAL_S, _PAUSE_MAX_S)
    whole, left = WindowWritten(), list(pages)
    gives_up_at_s = min(ends_at_s, loop.time() + room_wait_s)
    while True:
        written = await write(left, ends_at_s - loop.time())
        whole.good |= written.good
        whole.written_bytes += written.written_bytes
        whole.sources |= written.sources
        left = [page for page in left if page not in written.good]
        if written.good:
            gives_up_at_s = min(ends_at_s, loop.time() + room_wait_s)
            backoff.reset()
        pause_s = backoff.next_s()
        if not isinstance(written.error, (ArenaFull, Overloaded)) or loop.time() + pause_s >= gives_up_at_s:
            whole.error = written.error
            return whole
        await asyncio.sleep(pause_s)


async def write_window(
    session: PageStoreSession,
    space: OpenedShards,
    pages: Sequence[WantedPage],
    wait_s: float,
    threads: CopyThreads,
    fill: Callable[[int, int, memoryview], None],
) -> WindowWritten:
    """Write what is admitted of a window. Returns (also when cancelled) only after the last copy."""
    written, ends_at_s = WindowWritten(), asyncio.get_running_loop().time() + wait_s
    items = [
        ReserveItem(
            space.page_key(page.chunk, page.shard), page_bytes(space.payload_bytes(page.shard)), page.chunk.metadata
        )
        for page in pages
    ]
    results = await session.reserve(items, timeout_s=wait_s)
    reserved: list[tuple[WantedPage, Slot]] = []
    for page, result in zip(pages, results, strict=True):
        if result.slot is not None:
            reserved.append((page, result.slot))
        elif result.admission in _THERE:
            written.good.add(page)
        elif written.error is None:
            written.error = result.error or ArenaFull("the pagestore has no room for more pages now")
    size = max(1, min(_FILLED_TOGETHER_MAX, len(reserved) // threads.count))
    batches = [reserved[start : start + size] for start in range(0, len(reserved), size)]
    copies = [
        asyncio.create_task(_write(session, space, batch, ends_at_s, threads, fill, written), name="kvpool copy")
        for batch in batches
    ]
    await all_ended(copies, cancel=True)
    return written


async def _write(
    session: PageStoreSession,
    space: OpenedShards,
    reserved: Sequence[tuple[WantedPage, Slot]],
    ends_at_s: float,
    threads: CopyThreads,
    fill: Callable[[int, int, memoryview], None],
    written: WindowWritten,
) -> None:
    """Some pages of a window, committed together while others are still filled."""

    def fill_all() -> list[bool]:
        return [_fill_page(session, space, page, slot, fill) for page, slot in reserved]

    try:
        filled = await in_thread(threads.executor, fill_all)
    except BaseException:
        session.abort_soon([slot.lease_id for _, slot in reserved])
        raise
    unfilled = [slot.lease_id for (_, slot), whole in zip(reserved, filled, strict=True) if not whole]
    if unfilled:
        session.abort_soon(unfilled)
    ready = [one for one, whole in zip(reserved, filled, strict=True) if whole]
    left_s = max(_COMMIT_AT_LEAST_S, ends_at_s - asyncio.get_running_loop().time())
    try:
        lease_ids = [slot.lease_id for _, slot in ready]
        errors = dict(await session.commit(lease_ids, sealed=not session.trusts_arena, timeout_s=left_s))
    except KvPoolError as failure:
        written.error = written.error or failure
        return
    for index, (page, _) in enumerate(ready):
        if index not in errors:
            written.good.add(page)
            written.written_bytes += space.payload_bytes(page.shard)
        else:
            written.error = written.error or errors[index]


def _fill_page(
    session: PageStoreSession,
    space: OpenedShards,
    page: WantedPage,
    slot: Slot,
    fill: Callable[[int, int, memoryview], None],
) -> bool:
    """Runs in a thread. False: the slot is not ours any more, or the copy was refused."""
    size_bytes = space.payload_bytes(page.shard)
    key = space.page_key(page.chunk, page.shard)
    try:
        if slot.page_bytes != page_bytes(size_bytes):
            raise InvalidRequest(f"a slot of {slot.page_bytes} bytes was given for one of {page_bytes(size_bytes)}")
        with session.slot_view(*slot.place) as view:
            with payload_view(view, size_bytes) as payload:
                fill(page.position, page.shard, payload)
            if not session.trusts_arena:
                seal(view, key, int(space.space.spec.codec), size_bytes)
    except KvPoolError as error:
        _log.warning("kvpool: page %s was not written: %s", key, error)
        return False
    return True
