"""Agents that say nothing for a while: which are gone, and which were only not listened to."""

from __future__ import annotations

import asyncio

from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still
from tests.unit.client.engine_peer import engine


async def test_an_engine_that_stood_still_hears_its_agent_before_it_judges_it() -> None:
    async with engine() as one:
        session, stream = await one.open(interval_ms=60_000)
        stood_still(3600.0)
        assert (await stream.next("heartbeat")).request_id == 0
        assert not session.broken.is_set()


async def test_a_silent_agent_ends_the_session() -> None:
    async with engine() as one:
        session, stream = await one.open(interval_ms=20)
        assert (await stream.next("heartbeat")).request_id == 0
        await asyncio.wait_for(session.broken.wait(), PATIENCE_S)
