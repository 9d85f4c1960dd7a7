"""Words of a peer that arrive after its session has ended: they were in the pipe, and must change nothing."""

from __future__ import annotations

import pytest

from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.engine.sessions import SessionRequest
from tests.fixtures.pagestore import KEYSPACES, SLOT_BYTES, TENANT, new_world, running_engine
from tests.fixtures.pagestore_calls import acquire_one, open_session, reserve_item, store, wanted


@pytest.mark.parametrize("corrupt", [False, True])
async def test_a_late_release_does_not_keep_the_slot_in_quarantine_permanently(corrupt: bool) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            read = (await acquire_one(running, peer, wanted(1))).grant
            assert read is not None
            running.engine.sessions.end(peer, "test")
            leases = [read.lease_id]
            running.engine.pages.release(peer, [] if corrupt else leases, leases if corrupt else [])
            assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES, "the peer may still be reading"
            previous = peer.session.session_id
            request = SessionRequest(
                tenant=TENANT, keyspaces=KEYSPACES, previous_session_id=previous, previous_drained=True
            )
            await running.engine.open_session(request, 0)
            assert running.engine.gauges().arena_quarantined_bytes == 0


async def test_a_late_abort_does_not_free_a_slot_that_may_still_be_written() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            (write,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(write, Grant)
            running.engine.sessions.end(peer, "test")
            running.engine.pages.abort(peer, [write.lease_id])
            gauges = running.engine.gauges()
            assert (gauges.arena_used_bytes, gauges.arena_quarantined_bytes) == (SLOT_BYTES, SLOT_BYTES)
