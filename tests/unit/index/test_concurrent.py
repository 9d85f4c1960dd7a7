"""Answering the requests of one stream concurrently."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpool_index.servicer_match import serve_concurrently


async def numbers(count: int, taken: list[int] | None = None) -> AsyncIterator[int]:
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield number


async def test_a_slow_answer_does_not_hold_up_the_others() -> None:
    gate, written = asyncio.Event(), list[int]()

    async def answer(number: int) -> int:
        if number == 0:
            await gate.wait()
        return number

    async def write(number: int) -> None:
        written.append(number)
        if len(written) == 4:
            gate.set()

    await serve_concurrently(numbers(5), answer, write, limit=8)
    assert written == [1, 2, 3, 4, 0]


async def test_requests_that_come_together_are_answered_together() -> None:
    begun, gate = list[int](), asyncio.Event()

    async def answer(number: int) -> int:
        begun.append(number)
        if len(begun) == 4:
            gate.set()
        await gate.wait()
        return number

    async def write(number: int) -> None:
        pass

    await serve_concurrently(numbers(9), answer, write, limit=4)
    assert sorted(begun) == list(range(9))


async def test_a_receiver_that_does_not_read_stops_the_reading() -> None:
    gate, taken = asyncio.Event(), list[int]()

    async def answer(number: int) -> int:
        return number

    async def write(number: int) -> None:
        await gate.wait()

    serving = asyncio.create_task(serve_concurrently(numbers(100, taken), answer, write, limit=3))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(taken) == 3
    gate.set()
    await serving
    assert len(taken) == 100


async def test_an_unexpected_error_ends_all() -> None:
    async def answer(number: int) -> int:
        if number == 2:
            raise ZeroDivisionError
        await asyncio.Event().wait()
        return number

    async def write(number: int) -> None:
        raise AssertionError("nothing is ready")

    with pytest.raises(ExceptionGroup):
        await serve_concurrently(numbers(5), answer, write, limit=8)
