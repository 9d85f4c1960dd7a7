"""Waits that end early lose nothing and leave nothing running."""

import asyncio

import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import DeadlineExceeded, Stopped
from kvpool_gpuagent.adapters.budget import Budget
from kvpool_gpuagent.engine.waiting import until_cancelled


async def value(result: int = 7) -> int:
    return result


async def never(ended: list[str]) -> int:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")
    return 0


async def test_work_that_ends_first_is_answered() -> None:
    assert await until_cancelled(value(), CancelToken()) == 7


async def test_a_stop_cancels_the_work_and_waits_for_it() -> None:
    stop, ended = CancelToken(), list[str]()
    waiting = asyncio.ensure_future(until_cancelled(never(ended), stop))
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(Stopped):
        await waiting
    assert ended == ["cancelled"]


async def test_the_time_may_be_up() -> None:
    ended = list[str]()
    with pytest.raises(DeadlineExceeded):
        await until_cancelled(never(ended), CancelToken(), timeout_s=0.01)
    assert ended == ["cancelled"]


async def test_after_a_stop_nothing_is_begun() -> None:
    stop, ended = CancelToken(), list[str]()
    stop.cancel()
    with pytest.raises(Stopped):
        await until_cancelled(never(ended), stop)
    assert ended == []


async def test_a_result_that_comes_with_the_cancellation_is_not_lost() -> None:
    stop = CancelToken()

    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 5
        return 0

    waiting = asyncio.ensure_future(until_cancelled(stubborn(), stop))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stop.cancel()
    assert await waiting == 5


async def test_a_cancelled_caller_leaves_nothing_running() -> None:
    ended = list[str]()
    waiting = asyncio.ensure_future(until_cancelled(never(ended), CancelToken()))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["cancelled"]


async def test_a_task_that_stops_its_own_wait_is_not_cancelled_after_it() -> None:
    stop = CancelToken()

    async def stops_itself() -> int:
        stop.cancel()
        return 3

    assert await until_cancelled(stops_itself(), stop) == 3
    await asyncio.sleep(0)  # would raise
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_stop_and_a_caller_that_leaves_at_once_cancel_the_caller() -> None:
    stop, ended = CancelToken(), list[str]()
    waiting = asyncio.ensure_future(until_cancelled(never(ended), stop))
    await asyncio.sleep(0)
    stop.cancel()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["cancelled"]


async def test_a_budget_serves_in_order_and_forgets_who_left() -> None:
    budget, granted = Budget(4), list[str]()

    async def take(name: str, count: int) -> None:
        await budget.take(count)
        granted.append(name)

    await take("first", 3)
    large, small = asyncio.ensure_future(take("large", 4)), asyncio.ensure_future(take("small", 1))
    await asyncio.sleep(0)
    assert granted == ["first"]  # the small one fits, but came later
    large.cancel()
    await asyncio.gather(large, small, return_exceptions=True)
    assert granted == ["first", "small"]
    assert budget.used == 4
    budget.give(4)
    assert budget.used == 0


async def test_a_grant_that_comes_as_its_taker_leaves_goes_back() -> None:
    budget = Budget(1)
    await budget.take(1)
    waiting = asyncio.ensure_future(budget.take(1))
    await asyncio.sleep(0)
    budget.give(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used == 0


async def test_a_budget_that_shrinks_grants_a_large_wish_only_when_nothing_is_out() -> None:
    budget = Budget(4)
    await budget.take(1)
    waiting = asyncio.ensure_future(budget.take(4))
    await asyncio.sleep(0)
    budget.resize(2)
    assert not waiting.done()
    budget.give(1)
    await waiting
    assert budget.used == 4
