"""What a node link does when announcements cannot be told in order: drop, tell afresh, replace the stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvpool.core.cluster import LocationChange
from kvpool.core.errors import (
    InvalidRequest,
    LeaseLost,
)
from kvpool.testing import eventually
from tests.unit.client.index_peer import (
    KEYSPACE,
    acknowledge,
    change,
    chunks,
    node,
    opened,
)


async def test_overflow_drops_the_keyspace_at_the_index_and_tells_the_truth() -> None:
    async with node(pending_max=2) as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        in_flight = await stream.next("batch")
        one.truth = {9: 0b1}
        one.link.announce([change(number, added=0, removed=1) for number in range(5)])
        assert one.link.pending_count == 0
        assert one.index.dropped == [], "a batch in flight could come after the drop"
        acknowledge(stream, in_flight)
        request = await stream.next("batch")
        assert one.index.dropped == [KEYSPACE]
        assert chunks(request) == [9]


async def test_a_refused_batch_does_not_block_later_ones_for_ever() -> None:
    async with node() as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        await stream.next("batch")
        one.truth = {2: 1}
        stream.end(InvalidRequest("malformed"))
        stream = await opened(one)
        request = await stream.next("batch")
        assert chunks(request) == [2]
        assert one.index.dropped == [KEYSPACE]


async def test_a_stream_without_acknowledgements_is_replaced() -> None:
    async with node(ack_timeout_s=0.05) as one:
        await one.link.start()
        stream = await opened(one)
        one.link.announce([change(1)])
        first = await stream.next("batch")
        stream = await opened(one)
        assert await stream.next("batch") == first


async def test_a_snapshot_that_fails_half_way_is_taken_again() -> None:
    async with node() as one:
        await one.link.start()
        await opened(one)
        good, failures = one.snapshot, 0

        def bad() -> Iterator[LocationChange]:
            nonlocal failures
            failures += 1
            yield change(1)
            raise RuntimeError("the ledger changed while it was read")

        one.link._announcer._snapshot = bad
        one.index.renew_error = LeaseLost("expired")
        await eventually(lambda: failures >= 2)
        one.truth = {1: 1, 2: 1}
        one.link._announcer._snapshot = good
        told: set[int] = set()
        while told < {1, 2}:
            stream = await one.index.streams.next()
            with contextlib.suppress(TimeoutError):
                told |= set(chunks(await stream.next("batch", timeout_s=0.2)))
