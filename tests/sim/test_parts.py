"""The simulation's own parts: time, order, death, threads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from tests.sim.loop import SimLoop, Violation
from tests.sim.threads import SimWorkers, pause_s


def test_time_jumps_to_the_next_timer() -> None:
    loop, seen = SimLoop(Random(1)), list[float]()

    async def main() -> None:
        for pause in (5.0, 100.0):
            await asyncio.sleep(pause)
            seen.append(loop.time())

    _run(loop, main())
    assert seen == [5.0, 105.0]


def test_a_dead_process_does_nothing_any_more() -> None:
    loop, done = SimLoop(Random(1)), list[str]()
    victim = loop.process("victim")

    async def work() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            done.append("unwound")

    async def main() -> None:
        loop.spawn(victim, work())
        await asyncio.sleep(0.5)
        loop.kill(victim)
        await asyncio.sleep(2)
        assert not done

    _run(loop, main())


def test_a_paused_process_goes_on_where_it_was() -> None:
    loop, at = SimLoop(Random(1)), list[float]()
    sleeper = loop.process("sleeper")

    async def work() -> None:
        await asyncio.sleep(1)
        at.append(loop.time())

    async def main() -> None:
        loop.spawn(sleeper, work())
        await asyncio.sleep(0.5)
        loop.pause(sleeper)
        await asyncio.sleep(5)
        loop.resume(sleeper)
        await asyncio.sleep(0.1)

    _run(loop, main())
    assert at == [5.5]


def test_callbacks_of_one_process_keep_their_order_and_processes_mix() -> None:
    orders = set()
    for seed in range(8):
        loop, order = SimLoop(Random(seed)), list[str]()
        for name in "ab":
            process = loop.process(name)
            for number in range(3):
                loop.call_soon(order.append, f"{name}{number}", context=process.context.copy())

        async def main() -> None:
            await asyncio.sleep(0.1)

        _run(loop, main())
        assert [one for one in order if one[0] == "a"] == ["a0", "a1", "a2"]
        orders.add(tuple(order))
    assert len(orders) > 1


def test_blocking_calls_can_be_held_up_in_their_middle() -> None:
    loop, seen = SimLoop(Random(1)), list[str]()
    workers = SimWorkers(loop, threads=1, delay_s=lambda: 0.0, blocking=lambda: 1.0)

    def blocking() -> int:
        seen.append(f"begun {loop.time()}")
        pause_s(loop, 2.0)
        return 7

    async def main() -> None:
        call = asyncio.ensure_future(workers.run(blocking))
        await asyncio.sleep(1.0)
        seen.append("meanwhile")
        assert await call == 7
        seen.append(f"ended {loop.time()}")

    _run(loop, main())
    assert seen == ["begun 0.0", "meanwhile", "ended 2.0"]


def test_a_history_in_which_nothing_can_happen_is_a_failure() -> None:
    loop = SimLoop(Random(1))

    async def main() -> None:
        await loop.create_future()

    with pytest.raises(Violation, match="nothing can happen"):
        _run(loop, main())


def _run(loop: SimLoop, main: Coroutine[Any, Any, None]) -> None:
    try:
        loop.run(main, 1000.0)
    finally:
        loop.close()
