"""Scratch that an engine lends: ranges one after another, none after the engine was given up."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvpool.core.errors import InvalidRequest, Stopped
from kvpool.core.launches import Launch, Launched, LaunchKind
from kvpool.core.page import HEADER_BYTES, PageKey
from kvpool_gpuagent.adapters.gpu_lent_scratch import LentCopy, LentScratch
from kvpool_gpuagent.launches import SessionLaunches
from kvpool_gpuagent.ports import MappedHandle, PageCopy
from tests.fixtures.patience import PATIENCE_S

PAGE_BYTES = 8192
ADDRESS = 1 << 20


def page(number: int, blocks: tuple[int, ...] = (0, 1)) -> PageCopy:
    key = PageKey(b"k" * 16, number.to_bytes(16, "big"), 0)
    return PageCopy(key=key, page=memoryview(bytearray(PAGE_BYTES)), block_ids=np.array(blocks))


def scratch_of(pages: int) -> tuple[LentScratch, SessionLaunches, list[Launch]]:
    sent: list[Launch] = []
    launches = SessionLaunches(MappedHandle(size_bytes=pages * PAGE_BYTES), sent.append, PATIENCE_S)
    return LentScratch(launches, ADDRESS), launches, sent


async def taken(scratch: LentScratch, count: int) -> tuple[LentCopy, ...]:
    places = await scratch.take([page(number) for number in range(count)], sums=True)
    assert places is not None
    return places


async def test_pages_lie_side_by_side_and_nobody_overtakes_who_waits() -> None:
    scratch, _, _ = scratch_of(4)
    first = await taken(scratch, 3)
    assert [copy.scratch_offset for copy in first] == [number * PAGE_BYTES + HEADER_BYTES for number in range(3)]
    assert [copy.payload_address - ADDRESS for copy in first] == [copy.scratch_offset for copy in first]
    large = asyncio.ensure_future(taken(scratch, 2))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(taken(scratch, 1))
    await asyncio.sleep(0)
    assert not large.done() and not small.done()  # though there is room for the small one
    scratch.give(first)
    assert [copy.scratch_offset for copy in await large] == [HEADER_BYTES, PAGE_BYTES + HEADER_BYTES]
    assert [copy.scratch_offset for copy in await small] == [2 * PAGE_BYTES + HEADER_BYTES]


async def test_after_an_engine_was_given_up_nobody_gets_or_waits_for_its_scratch() -> None:
    scratch, _, _ = scratch_of(2)
    told: list[str] = []
    scratch.on_given_up.append(lambda: told.append("once"))
    first = await taken(scratch, 2)
    waiting = asyncio.ensure_future(scratch.take([page(5)], sums=True))
    await asyncio.sleep(0)
    for _ in range(2):
        scratch.give_up("the test")
    assert told == ["once"]
    assert await waiting is None
    scratch.give(first)
    assert await scratch.take([page(6)], sums=True) is None


async def test_a_launch_names_each_chunk_once_and_its_answer_comes_back() -> None:
    scratch, launches, sent = scratch_of(4)
    pages = [page(0, (3, 4)), page(0, (3, 4)), page(1, (5, 6))]
    places = await scratch.take(pages, sums=False)
    assert places is not None
    work = asyncio.ensure_future(scratch.launch(LaunchKind.GATHER, places))
    await asyncio.sleep(0)
    (launch,) = sent
    assert launch.block_ids.tolist() == [[3, 4], [5, 6]]
    assert [one.chunk for one in launch.pages] == [0, 0, 1]
    assert not launch.sums
    launches.ended(Launched(launch.ticket))
    assert await work == Launched(launch.ticket)
    with pytest.raises(InvalidRequest, match=f"launch {launch.ticket} is not out"):
        launches.ended(Launched(launch.ticket))


async def test_an_error_gives_the_engine_up_and_the_end_of_the_session_ends_the_wait() -> None:
    scratch, launches, sent = scratch_of(4)
    failing, last = await taken(scratch, 1), await taken(scratch, 1)
    work = [asyncio.ensure_future(scratch.launch(LaunchKind.SCATTER, places)) for places in (failing, last)]
    await asyncio.sleep(0)
    launches.ended(Launched(sent[0].ticket, error=InvalidRequest("no")))
    assert await work[0] is None
    assert scratch.given_up
    launches.end()
    with pytest.raises(Stopped):
        await work[1]
    with pytest.raises(Stopped):
        await launches.ask(LaunchKind.GATHER, [], np.zeros((0, 1), dtype=np.int64), sums=True)
    assert len(sent) == 2
