"""Renewals of a lease at an index that is busy, or gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvpool.core.cluster import NodeLoad
from kvpool.core.errors import DeadlineExceeded
from kvpool_server.node.lease_stream import LeaseStream
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.index_peer import NODE_ID, ScriptedIndex, node

LOAD = NodeLoad()


@asynccontextmanager
async def stream_to_busy_index() -> AsyncIterator[tuple[LeaseStream, ScriptedIndex]]:
    """One renewal was answered; then the index stops to answer."""
    async with node() as one:
        index, leases = one.index, LeaseStream(one.client.endpoints)
        await leases.renew(NODE_ID, 42, LOAD, timeout_s=PATIENCE_S)
        index.answers_renewals.clear()
        try:
            yield leases, index
        finally:
            index.answers_renewals.set()
            leases.close()


async def timed_out(leases: LeaseStream, incarnation: int = 42) -> None:
    with pytest.raises(DeadlineExceeded):
        await leases.renew(NODE_ID, incarnation, LOAD, timeout_s=0.001)


async def test_a_renewal_that_takes_longer_than_its_timeout_is_waited_for_and_not_begun_again() -> None:
    async with stream_to_busy_index() as (leases, index):
        await timed_out(leases)
        await timed_out(leases)
        index.answers_renewals.set()
        await leases.renew(NODE_ID, 42, LOAD, timeout_s=PATIENCE_S)
        assert (index.renewals, index.lease_streams) == (2, 1)
        await leases.renew(NODE_ID, 42, LOAD, timeout_s=PATIENCE_S)
        assert (index.renewals, index.lease_streams) == (3, 1)


async def test_a_stream_that_answers_nothing_for_a_whole_lease_is_replaced() -> None:
    async with stream_to_busy_index() as (leases, index):
        for _ in range(3):
            await timed_out(leases)
        index.answers_renewals.set()
        await leases.renew(NODE_ID, 42, LOAD, timeout_s=PATIENCE_S)
        assert index.lease_streams == 2


async def test_the_answer_for_an_earlier_incarnation_is_not_taken_for_the_later_one() -> None:
    async with stream_to_busy_index() as (leases, index):
        await timed_out(leases)
        index.answers_renewals.set()
        await leases.renew(NODE_ID, 43, LOAD, timeout_s=PATIENCE_S)
        assert index.lease_streams == 2
