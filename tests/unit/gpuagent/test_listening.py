"""An engine that says nothing is given up, unless it could not be heard."""

from __future__ import annotations

import asyncio

from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.testing import eventually
from kvpool_gpuagent.listening import Listener
from tests.fixtures.standstill import stood_still


async def test_an_engine_that_says_nothing_is_silent_once() -> None:
    ends: list[KvPoolError] = []
    listener = Listener(0.001, ends.append)
    listener.start()
    await eventually(lambda: ends)
    assert [type(end) for end in ends] == [DeadlineExceeded] and "silent for 0.004 s" in ends[0].message
    listener.stop()


async def test_nobody_is_silent_who_need_not_say_anything_more() -> None:
    ends: list[KvPoolError] = []
    listener = Listener(1.0, ends.append)
    listener.start()
    listener.stop()
    listener.stop()
    stood_still(3600.0)
    await asyncio.sleep(0)
    assert not ends and len(asyncio.all_tasks()) == 1


async def test_an_agent_that_stood_still_does_not_give_up_an_engine_that_is_well() -> None:
    ends: list[KvPoolError] = []
    looks: list[float] = []
    listener = Listener(10.0, ends.append)
    true_look = listener._silence.look

    def look(now_s: float) -> bool:
        looks.append(now_s)
        return true_look(now_s)

    listener._silence.look = look  # type: ignore[method-assign]
    listener.start()
    for pause in range(1, 10):
        await asyncio.sleep(0)
        stood_still(3600.0)
        await eventually(lambda pause=pause: len(looks) == pause)  # type: ignore[misc]
        listener.heard()  # what it said meanwhile, read now
    assert not ends
    listener.stop()
