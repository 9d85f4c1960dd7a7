"""What every PagePool promises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from kvpool.core.errors import KvPoolError
from kvpool.core.outcome import Admission
from kvpool.core.page import verify
from kvpool.testing import eventually
from kvpool_gpuagent.ports import PagePool, ReadSlot, WriteSlot
from tests.contract.page_pool.conftest import WINDOW_PAGES, Pools
from tests.fixtures.pagestore import PAGE_BYTES, SPEC, fill_page
from tests.fixtures.patience import PATIENCE_S

WAIT_S = PATIENCE_S


async def reserve(pools: Pools, pool: PagePool, numbers: Sequence[int]) -> list[WriteSlot]:
    """Slots for pages that are not there yet."""
    answers = await pool.reserve([pools.wish(number) for number in numbers], [PAGE_BYTES] * len(numbers))
    slots = [answer for answer in answers if isinstance(answer, WriteSlot)]
    assert len(slots) == len(numbers), answers
    return slots


async def store(pools: Pools, pool: PagePool, numbers: Sequence[int]) -> None:
    slots = await reserve(pools, pool, numbers)
    for slot in slots:
        fill_page(slot.page, slot.key)
    assert await pool.commit(slots) == [None] * len(numbers)


async def acquire(pools: Pools, pool: PagePool, numbers: Sequence[int]) -> dict[int, ReadSlot | KvPoolError | None]:
    """All answers by number; the slots are the caller's."""
    answers: dict[int, ReadSlot | KvPoolError | None] = {}
    async with aclosing(pool.acquire([pools.wish(number) for number in numbers], WAIT_S)) as settling:
        async for position, answer in settling:
            assert numbers[position] not in answers
            answers[numbers[position]] = answer
    assert set(answers) == set(numbers)
    return answers


async def load(pools: Pools, pool: PagePool, numbers: Sequence[int]) -> list[int]:
    """Numbers of pages that are there and true."""
    answers = await acquire(pools, pool, numbers)
    slots = {number: answer for number, answer in answers.items() if isinstance(answer, ReadSlot)}
    assert all(verify(slot.page, slot.key, SPEC.codec) is None for slot in slots.values())
    await pool.release(list(slots.values()))
    return sorted(slots)


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


async def test_what_exists_is_not_written_again(pools: Pools) -> None:
    first, second = pools.make(), pools.make()
    await store(pools, first, [0])
    assert await second.reserve([pools.wish(0)], [PAGE_BYTES]) == [int(Admission.EXISTS)]
    await all_back(pools, first, second)


async def test_what_is_aborted_is_never_seen_and_can_be_written_again(pools: Pools) -> None:
    pool = pools.make()
    slots = await reserve(pools, pool, [0, 1])
    for slot in slots:
        fill_page(slot.page, slot.key)
    await pool.abort(slots)
    assert await load(pools, pool, [0, 1]) == []
    await store(pools, pool, [0, 1])
    assert await load(pools, pool, [0, 1]) == [0, 1]
    await all_back(pools, pool)


async def test_a_page_that_is_not_sealed_is_not_committed(pools: Pools) -> None:
    pool = pools.make()
    good, bad = await reserve(pools, pool, [0, 1])
    fill_page(good.page, good.key)
    fill_page(bad.page, good.key)
    results = await pool.commit([good, bad])
    assert results[0] is None
    assert isinstance(results[1], KvPoolError)
    assert await load(pools, pool, [0, 1]) == [0]
    await all_back(pools, pool)


@pytest.mark.parametrize("how", ["commit", "abort", "release"])
async def test_a_view_dies_with_its_lease(pools: Pools, how: str) -> None:
    pool = pools.make()
    (slot,) = await reserve(pools, pool, [0])
    fill_page(slot.page, slot.key)
    page = slot.page
    if how == "abort":
        await pool.abort([slot])
    else:
        await pool.commit([slot])
    if how == "release":
        read = (await acquire(pools, pool, [0]))[0]
        assert isinstance(read, ReadSlot)
        page = read.page
        await pool.release([read])
    with pytest.raises(ValueError, match="released"):
        page[0]
    await all_back(pools, pool)


async def test_who_wants_more_than_is_free_waits_for_what_comes_back(pools: Pools) -> None:
    pool = pools.make()
    assert pool.window_pages >= WINDOW_PAGES // 2  # before it was reached, a pool knows no better
    await pool.connect()
    assert pool.window_pages == WINDOW_PAGES
    numbers = list(range(WINDOW_PAGES))
    slots = await reserve(pools, pool, numbers)
    for slot in slots:
        fill_page(slot.page, slot.key)
    waiting = asyncio.ensure_future(reserve(pools, pool, [100, 101]))
    await load(pools, pool, [999])  # time enough to grant what should wait
    assert not waiting.done()
    assert await pool.commit(slots) == [None] * WINDOW_PAGES
    await pool.abort(await waiting)

    held = await acquire(pools, pool, numbers)
    waiting_load = asyncio.ensure_future(load(pools, pool, numbers))
    await pool.abort(await reserve(pools, pool, [998]))
    assert not waiting_load.done()
    await pool.release([slot for slot in held.values() if isinstance(slot, ReadSlot)])
    assert await waiting_load == numbers
    await all_back(pools, pool)


async def test_a_caller_cancelled_while_it_waits_holds_nothing(pools: Pools) -> None:
    pool = pools.make()
    await pool.connect()
    slots = await reserve(pools, pool, range(WINDOW_PAGES))
    waiting = asyncio.ensure_future(reserve(pools, pool, [100]))
    await load(pools, pool, [999])
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await pool.abort(slots)
    await pool.abort(await reserve(pools, pool, range(WINDOW_PAGES)))
    await all_back(pools, pool)


async def test_a_consumer_that_leaves_early_owns_what_it_got_and_no_more(pools: Pools) -> None:
    pool = pools.make()
    await store(pools, pool, range(WINDOW_PAGES))
    got: list[ReadSlot] = []
    async with aclosing(pool.acquire([pools.wish(number) for number in range(WINDOW_PAGES)], WAIT_S)) as settling:
        async for _, answer in settling:
            assert isinstance(answer, ReadSlot)
            got.append(answer)
            if len(got) == 2:
                break
    await eventually(lambda: pools.slots_out(pool) in (2, 2 * PAGE_BYTES))
    assert all(verify(slot.page, slot.key, SPEC.codec) is None for slot in got)
    await pool.release(got)
    assert await load(pools, pool, range(WINDOW_PAGES)) == list(range(WINDOW_PAGES))
    await all_back(pools, pool)


async def test_a_reader_may_say_that_a_page_is_corrupt(pools: Pools) -> None:
    pool = pools.make()
    await store(pools, pool, [0, 1])
    answers = await acquire(pools, pool, [0, 1])
    good, bad = answers[0], answers[1]
    assert isinstance(good, ReadSlot)
    assert isinstance(bad, ReadSlot)
    await pool.release([good], corrupt=[bad])
    assert 0 in await load(pools, pool, [0, 1])
    await all_back(pools, pool)


async def test_nothing_asked_is_nothing_answered(pools: Pools) -> None:
    pool = pools.make()
    assert list(await pool.reserve([], [])) == []
    assert list(await pool.commit([])) == []
    await pool.abort([])
    await pool.release([])
    await all_back(pools, pool)
