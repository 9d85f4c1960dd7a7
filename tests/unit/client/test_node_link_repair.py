"""What a node link does when announcements cannot be sent in order: drop, send again, replace the stream."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.core.errors import InvalidRequest, StoreUnavailable
from kvpool.core.location_digest import fingerprint, holding
from kvpool.testing import eventually
from kvpool_server.node import reconciler
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.index_peer import (
    KEYSPACE,
    Node,
    acknowledge,
    change,
    chunks,
    node,
    opened,
)


async def test_after_an_overflow_ranges_are_reported_as_a_whole() -> None:
    async with node(pending_max=2) as one:
        await one.link.start()
        stream = await opened(one)
        await eventually(lambda: one.link.reconciler.round_count)
        one.link.announce([change(1)])
        in_flight = await stream.next("batch")
        one.truth = {9: 0b1}
        one.link.announce([change(number, added=0, removed=1) for number in range(5)])
        one.link.announce([change(9)])
        assert one.link.pending_count == 0
        waiting = asyncio.create_task(one.link.wait_announced())
        acknowledge(stream, in_flight)
        request = await stream.next("replace_range")
        assert chunks(request) == [9]
        assert not waiting.done()
        acknowledge(stream, request)
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert one.index.dropped == []


async def test_a_refused_batch_does_not_block_later_ones_for_ever() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        one.truth = {1: 1, 2: 1}
        one.link.announce([change(1)])
        await stream.next("batch")
        one.link.announce([change(2)])
        stream.end(InvalidRequest("malformed"))
        stream = await opened(one)
        reported = set(chunks(first := await stream.next()))
        acknowledge(stream, first)
        while reported < {1, 2}:
            request = await stream.next()
            reported |= set(chunks(request))
            acknowledge(stream, request)


async def test_a_stream_without_acknowledgements_is_replaced() -> None:
    async with node(ack_timeout_s=0.05) as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        first = await stream.next("batch")
        stream = await opened(one)
        assert await stream.next("batch") == first


async def next_range(one: Node) -> Any:
    """The next range that is sent as a whole, on whichever stream."""
    reading: set[asyncio.Task[Any]] = set()
    while True:
        opening = asyncio.create_task(opened(one))
        await asyncio.wait({opening, *reading}, return_when=asyncio.FIRST_COMPLETED)
        if reported := [task for task in reading if task.done()]:
            for task in {opening, *reading}:
                task.cancel()
            return reported[0].result()
        reading.add(asyncio.create_task(opening.result().next("replace_range")))


@pytest.mark.parametrize("failing_call", [1, 2])
async def test_a_truth_that_fails_is_asked_again(failing_call: int) -> None:
    """The first call is the comparison's, the second that of the range that differs."""
    async with node(truth={1: 1}, reconcile_interval_s=0.05) as one:
        calls = 0

        def fail() -> None:
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise RuntimeError("the ledger is broken")

        one.on_locate = fail
        one.index.digests[0] = 12345  # it has something else
        await one.link.start()
        request = await next_range(one)
        assert chunks(request) == [1] and calls > failing_call


async def test_what_an_index_has_nothing_of_is_reported_to_it_without_computing_digests() -> None:
    async with node(truth=dict.fromkeys(range(1, 4), 1)) as one:
        await one.link.start()
        stream = await opened(one)
        assert sorted(chunks(await stream.next("replace_range"))) == [1, 2, 3]
        assert one.located == 3, "each chunk is looked up once, to name it"


async def test_a_range_that_changes_all_the_time_is_reported_all_the_same() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        await eventually(lambda: one.link.reconciler.round_count == 1)
        one.truth = {7: 1}
        one.on_locate = lambda: one.link.announce([change(3, added=0, removed=1)])
        one.link.announce([change(7)])
        acknowledge(stream, await stream.next("batch"))
        one.link.reconciler.start_round(unsure=False)
        while (request := await stream.next()).WhichOneof("kind") == "batch":
            acknowledge(stream, request)
        assert chunks(request) == [7]


async def test_standing_still_is_no_reason_for_a_pause_of_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It pauses for what it took of the event loop, and standing still is not its work."""
    hours = itertools.count(0.0, 3600.0)
    clocks = SimpleNamespace(perf_counter=lambda: next(hours), monotonic=lambda: next(hours), thread_time=lambda: 0.0)
    monkeypatch.setattr(reconciler, "time", clocks)
    async with node(truth={1: 1}) as one:
        await one.link.start()
        stream = await opened(one)
        assert chunks(await stream.next("replace_range")) == [1]


async def test_differences_that_the_index_reports_are_repaired_within_the_interval() -> None:
    right = fingerprint(KEYSPACE + bytes(16) + bytes([1]) * 8, holding((0, 1, 0), 0b11))
    async with node(truth={1: 1}, reconcile_interval_s=0.05) as one:
        one.index.digests[0] = right
        await one.link.start()
        stream = await opened(one)
        await eventually(lambda: one.link.reconciler.round_count >= 2)
        one.index.digests[0] = 12345  # it has something that the node does not hold
        request = await stream.next("replace_range")
        assert chunks(request) == [1]
        one.index.digests[0] = right
        acknowledge(stream, request)
        rounds, began_s = one.link.reconciler.round_count, asyncio.get_running_loop().time()
        await eventually(lambda: one.link.reconciler.round_count >= rounds + 2)
        # The second of two rounds began after the first.
        assert one.link.reconciler.age_s <= asyncio.get_running_loop().time() - began_s
        assert one.link.reconciler.replaced_count >= 1


async def test_an_index_that_cannot_compare_now_is_asked_again() -> None:
    async with node(truth={1: 1}) as one:
        one.index.reconcile_error = StoreUnavailable("redis is away")
        await one.link.start()
        stream = await opened(one)
        assert chunks(await stream.next("replace_range")) == [1]


async def test_a_node_that_never_held_anything_compares_in_one_call_and_seldom() -> None:
    async with node(reconcile_interval_s=0.002) as one:
        await one.link.start()
        await opened(one)
        rounds = one.link.reconciler
        await eventually(lambda: rounds.round_count >= 2)
        # More, where this machine stood still for thirty intervals; the last one may still run.
        assert one.index.compared - rounds.round_count in (0, 1), "4,096 ranges each"
        assert rounds.age_s <= asyncio.get_running_loop().time()
        one.link.announce([change(1)])
        await eventually(lambda: one.index.compared > rounds.round_count + 1)


async def test_a_cleared_keyspace_is_looked_up_again_though_its_chunks_were_not_announced() -> None:
    async with node(truth={1: 1}) as one:
        one.index.digests[0] = fingerprint(KEYSPACE + bytes(16) + bytes([1]) * 8, holding((0, 1, 0), 0b11))
        await one.link.start()
        await opened(one)
        rounds = one.link.reconciler
        await eventually(lambda: rounds.round_count == 1)
        one.truth.clear()
        one.index.digests.clear()
        await one.link.drop_keyspace(KEYSPACE)
        rounds.start_round(unsure=False)
        await eventually(lambda: rounds.round_count == 2)
        assert rounds.replaced_count == 0


async def test_a_drop_may_take_longer_than_other_calls() -> None:
    """The index looks through all that it has: with a million chunks the usual deadline ended it each time."""
    async with node() as one:
        await one.link.start()
        await one.link.drop_keyspace(KEYSPACE)
        assert one.index.drop_time_s > 4 * one.client.endpoints.config.call_timeout_s


async def test_a_round_is_not_complete_while_the_index_refuses_its_repairs() -> None:
    """Nor does a refused repair count as one that failed."""
    async with node(truth={1: 1}) as one:
        one.index.digests[0] = 12345  # it has something else
        await one.link.start()
        stream = await opened(one)
        assert chunks(await stream.next("replace_range")) == [1]
        await eventually(lambda: one.index.compared == 32)  # all is compared, and the round waits for its repair
        one.link.announce([change(2)])  # waits for an acknowledgement, and then comes first
        stream.end(InvalidRequest("malformed"))
        stream = await opened(one)
        first, again = await stream.next("batch"), await stream.next("replace_range")
        one.link.announce([change(number) for number in range(3, 7)])
        acknowledge(stream, first)
        full = await stream.next("batch")  # there was no room for it before that acknowledgement
        assert one.link.reconciler.round_count == 0
        acknowledge(stream, again)
        acknowledge(stream, full)
        await eventually(lambda: one.link.reconciler.round_count == 1)
