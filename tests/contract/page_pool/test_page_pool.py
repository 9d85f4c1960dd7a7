"""What every PagePool promises."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import KvPoolError
from kvpool.core.page import HEADER_BYTES
from kvpool.core.spans import PageSpan
from kvpool.testing import eventually
from kvpool_gpuagent.core.pages import AcquiredPages, PageSlots, no_slots
from kvpool_gpuagent.core.sources import LoadSource
from kvpool_gpuagent.ports import PagePool
from tests.contract.page_pool.conftest import WINDOW_PAGES, Pools
from tests.fixtures.pagestore import PAGE_BYTES, PAYLOAD_BYTES
from tests.fixtures.patience import PATIENCE_S

WAIT_S = PATIENCE_S
HEAD = bytes(16)


def payloads(slots: PageSlots) -> list[npt.NDArray[np.uint8]]:
    """Where a device would copy to or from, one view a slot."""
    buffers = [(ctypes.c_uint8 * PAYLOAD_BYTES).from_address(at + HEADER_BYTES) for at in slots.addresses.tolist()]
    return [np.ctypeslib.as_array(buffer) for buffer in buffers]


def content(number: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, PAYLOAD_BYTES, dtype=np.uint8)


def fill(span: PageSpan, slots: PageSlots) -> None:
    """What a device does: payloads, and nothing else."""
    for page, payload in zip(slots.pages.tolist(), payloads(slots), strict=True):
        payload[:] = content(span.first_chunk_index + int(span.positions[page]))


def together(some: Sequence[PageSlots]) -> PageSlots:
    """As one, ordered by page."""
    if not some:
        return no_slots()
    pages = np.concatenate([slots.pages for slots in some])
    order = np.argsort(pages)
    return PageSlots(
        pages[order],
        np.concatenate([slots.addresses for slots in some])[order],
        np.concatenate([slots.sources for slots in some])[order],
        np.concatenate([slots.leases for slots in some])[order],
        some[0].session,
    )


async def reserve(pools: Pools, pool: PagePool, numbers: Sequence[int]) -> tuple[PageSpan, PageSlots]:
    """Slots for pages that are not there yet."""
    span = pools.span(numbers)
    answer = await pool.reserve(span, HEAD)
    assert answer.slots.pages.tolist() == list(range(len(numbers))), answer
    assert not answer.exists.size
    assert not answer.pending.size
    assert not answer.failed
    return span, answer.slots


async def store(pools: Pools, pool: PagePool, numbers: Sequence[int]) -> None:
    span, slots = await reserve(pools, pool, numbers)
    fill(span, slots)
    assert list(await pool.commit(span, slots)) == []


async def acquire(
    pools: Pools, pool: PagePool, numbers: Sequence[int]
) -> tuple[PageSlots, dict[int, KvPoolError | None]]:
    """Slots, which are the caller's, and what failed by number."""
    answers: list[AcquiredPages] = []
    async with aclosing(pool.acquire(pools.span(numbers), WAIT_S)) as settling:
        async for answer in settling:
            assert answer.slots.count or answer.failed
            answers.append(answer)
    settled = [page for answer in answers for page in answer.slots.pages.tolist()]
    failed = {page: error for answer in answers for page, error in answer.failed}
    assert sorted([*settled, *failed]) == list(range(len(numbers)))  # each page once
    slots = together([answer.slots for answer in answers])
    assert all(LoadSource(source) for source in slots.sources.tolist())
    return slots, {numbers[page]: error for page, error in failed.items()}


async def load(pools: Pools, pool: PagePool, numbers: Sequence[int]) -> list[int]:
    """Numbers of pages that are there; they are true."""
    slots, failed = await acquire(pools, pool, numbers)
    assert all(error is None for error in failed.values()), failed
    found = [numbers[page] for page in slots.pages.tolist()]
    for number, payload in zip(found, payloads(slots), strict=True):
        assert np.array_equal(payload, content(number))
    await pool.release(slots)
    return found


async def all_back(pools: Pools, *some: PagePool) -> None:
    """Every slot has come back; then the pools can be closed."""
    await eventually(lambda: not any(pools.slots_out(pool) for pool in some))
    for pool in some:
        await pool.close()


async def test_pages_that_one_pool_commits_are_read_by_another(pools: Pools) -> None:
    writer, reader = pools.make(), pools.make()
    await store(pools, writer, [0, 1, 2])
    assert await load(pools, reader, [0, 1, 2, 3]) == [0, 1, 2]
    await all_back(pools, writer, reader)


async def test_slots_are_memory_of_their_own(pools: Pools) -> None:
    pool = pools.make()
    await store(pools, pool, [0, 1, 2])
    _, writes = await reserve(pools, pool, [3, 4, 5])
    reads, _ = await acquire(pools, pool, [0, 1, 2])
    starts = np.sort(np.concatenate([writes.addresses, reads.addresses]))
    assert (np.diff(starts) >= PAGE_BYTES).all()
    await pool.abort(writes)
    await pool.release(reads)
    await all_back(pools, pool)


async def test_what_exists_is_not_written_again(pools: Pools) -> None:
    first, second = pools.make(), pools.make()
    await store(pools, first, [0, 1])
    span = pools.span([0, 1, 2])
    answer = await second.reserve(span, HEAD)
    assert (answer.exists.tolist(), answer.pending.tolist(), answer.failed) == ([0, 1], [], ())
    assert answer.slots.pages.tolist() == [2]
    fill(span, answer.slots)
    assert list(await second.commit(span, answer.slots)) == []
    assert await load(pools, first, [0, 1, 2]) == [0, 1, 2]
    await all_back(pools, first, second)


async def test_what_is_aborted_is_never_seen_and_can_be_written_again(pools: Pools) -> None:
    pool = pools.make()
    span, slots = await reserve(pools, pool, [0, 1])
    fill(span, slots)
    await pool.abort(slots)
    assert await load(pools, pool, [0, 1]) == []
    await store(pools, pool, [0, 1])
    assert await load(pools, pool, [0, 1]) == [0, 1]
    await all_back(pools, pool)


async def test_some_slots_of_a_reserve_are_committed_and_others_aborted(pools: Pools) -> None:
    pool = pools.make()
    span, slots = await reserve(pools, pool, [0, 1, 2, 3])
    fill(span, slots)
    kept = np.array([True, False, True, False])
    await pool.abort(slots.where(~kept))
    assert list(await pool.commit(span, slots.where(kept))) == []
    assert await load(pools, pool, [0, 1, 2, 3]) == [0, 2]
    await all_back(pools, pool)


async def test_a_page_may_be_read_by_several_at_once(pools: Pools) -> None:
    pool = pools.make()
    await store(pools, pool, [0, 1])
    first, _ = await acquire(pools, pool, [0, 1])
    second, _ = await acquire(pools, pool, [0, 1])
    await pool.release(first)
    for number, payload in enumerate(payloads(second)):
        assert np.array_equal(payload, content(number))
    await pool.release(second)
    await all_back(pools, pool)


async def test_who_wants_more_than_is_free_waits_for_what_comes_back(pools: Pools) -> None:
    pool = pools.make()
    assert pool.window_pages >= WINDOW_PAGES // 2  # before it was reached, a pool knows no better
    await pool.connect()
    assert pool.window_pages == WINDOW_PAGES
    numbers = list(range(WINDOW_PAGES))
    span, slots = await reserve(pools, pool, numbers)
    fill(span, slots)
    waiting = asyncio.ensure_future(reserve(pools, pool, [100, 101]))
    await load(pools, pool, [999])  # time enough to grant what should wait
    assert not waiting.done()
    assert list(await pool.commit(span, slots)) == []
    await pool.abort((await waiting)[1])

    held, _ = await acquire(pools, pool, numbers)
    waiting_load = asyncio.ensure_future(load(pools, pool, numbers))
    await pool.abort((await reserve(pools, pool, [998]))[1])
    assert not waiting_load.done()
    await pool.release(held)
    assert await waiting_load == numbers
    await all_back(pools, pool)


async def test_a_caller_cancelled_while_it_waits_holds_nothing(pools: Pools) -> None:
    pool = pools.make()
    await pool.connect()
    _, slots = await reserve(pools, pool, range(WINDOW_PAGES))
    waiting = asyncio.ensure_future(reserve(pools, pool, [100]))
    await load(pools, pool, [999])
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await pool.abort(slots)
    await pool.abort((await reserve(pools, pool, range(WINDOW_PAGES)))[1])
    await all_back(pools, pool)


async def test_a_consumer_that_leaves_early_owns_what_it_got_and_no_more(pools: Pools) -> None:
    pool = pools.make()
    await store(pools, pool, range(WINDOW_PAGES))
    got: list[PageSlots] = []
    async with aclosing(pool.acquire(pools.span(range(WINDOW_PAGES)), WAIT_S)) as settling:
        async for answer in settling:
            got.append(answer.slots)
            break
    held = together(got)
    await eventually(lambda: pools.slots_out(pool) in (held.count, held.count * PAGE_BYTES))
    for page, payload in zip(held.pages.tolist(), payloads(held), strict=True):
        assert np.array_equal(payload, content(page))
    await pool.release(held)
    assert await load(pools, pool, range(WINDOW_PAGES)) == list(range(WINDOW_PAGES))
    await all_back(pools, pool)


async def test_nothing_asked_is_nothing_answered(pools: Pools) -> None:
    pool = pools.make()
    whole = pools.span([0])
    span = PageSpan(
        keyspace=whole.keyspace,
        chunk_hashes=whole.chunk_hashes,
        first_chunk_index=0,
        parent_hash=whole.parent_hash,
        group_heads=whole.group_heads,
        positions=whole.positions[:0],
        shards=whole.shards[:0],
    )
    answer = await pool.reserve(span, HEAD)
    assert not answer.slots.count
    assert list(await pool.commit(span, no_slots())) == []
    await pool.abort(no_slots())
    await pool.release(no_slots())
    async with aclosing(pool.acquire(span, WAIT_S)) as settling:
        assert [one async for one in settling if one.slots.count or one.failed] == []
    await all_back(pools, pool)
