"""What every EventLog promises. The fixture's logs keep eight entries a stream, or somewhat more."""

import asyncio

import pytest

from kvpool_index.core.events import ORIGIN, entry_order
from tests.contract.location_store.conftest import Harness

MANY = 500  # Redis trims whole nodes of a stream, of a hundred entries each


async def test_entries_come_in_order_and_by_stream(harness: Harness) -> None:
    log = harness.store.events
    assert log.stream_count == 3
    assert await log.tails() == (ORIGIN,) * 3
    await log.append([(0, b"a"), (1, b"b"), (0, b"c\0\xff")])
    entries = await harness.peer.events.read(0, ORIGIN, limit=10, wait_s=0)
    assert [entry.payload for entry in entries] == [b"a", b"c\0\xff"]
    orders = [entry_order(entry.entry_id) for entry in entries]
    assert orders == sorted(set(orders))
    assert [entry.payload for entry in await log.read(0, entries[0].entry_id, limit=10, wait_s=0)] == [b"c\0\xff"]
    assert [entry.payload for entry in await log.read(0, ORIGIN, limit=1, wait_s=0)] == [b"a"]
    assert await log.read(0, entries[1].entry_id, limit=10, wait_s=0) == []
    tails = await log.tails()
    assert tails[0] == entries[1].entry_id and tails[2] == ORIGIN


async def test_a_reader_waits_for_the_next_entry(harness: Harness) -> None:
    log = harness.store.events
    await log.append([(1, b"old")])
    position = (await log.tails())[1]
    assert await log.read(1, position, limit=10, wait_s=0.02) == []
    reading = asyncio.create_task(log.read(1, position, limit=10, wait_s=30))
    while not reading.done():
        await asyncio.sleep(0)
        await harness.peer.events.append([(1, b"new")])
    assert next(entry.payload for entry in await reading) == b"new"


@pytest.mark.slow
async def test_waiting_outlasts_the_timeout_of_calls(harness: Harness) -> None:
    assert await harness.store.events.read(0, ORIGIN, limit=1, wait_s=0.7) == []


async def test_it_is_reported_when_entries_are_gone(harness: Harness) -> None:
    log = harness.store.events
    assert await log.is_kept(0, ORIGIN)
    await log.append([(0, b"first")])
    (first,) = await log.read(0, ORIGIN, limit=1, wait_s=0)
    assert await log.is_kept(0, ORIGIN) and await log.is_kept(0, first.entry_id)
    await log.append([(0, b"%d" % number) for number in range(MANY)])
    assert not await log.is_kept(0, ORIGIN) and not await log.is_kept(0, first.entry_id)
    entries = await log.read(0, ORIGIN, limit=MANY, wait_s=0)
    assert len(entries) < MANY and entries[-1].payload == b"%d" % (MANY - 1)
    assert await log.is_kept(0, entries[0].entry_id) and await log.is_kept(0, entries[-1].entry_id)
    assert await log.is_kept(1, ORIGIN), "each stream by itself"


async def test_a_position_from_nowhere_is_not_kept(harness: Harness) -> None:
    assert not await harness.store.events.is_kept(0, "99999999999999-7")
