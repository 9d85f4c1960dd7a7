"""Reserve, commit, acquire and release through the engine, on a real arena."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.core.errors import (
    KvPoolError,
)
from kvpool.core.outcome import Tier
from kvpool.testing import eventually
from kvpool_pagestore.core.ledger import Grant
from kvpool_pagestore.engine_acquire import Acquired
from kvpool_pagestore.engine_flights import Source
from kvpool_pagestore.engine_pages import ReserveItem, WantedPage
from kvpool_pagestore.engine_sessions import PeerSession, SessionRequest
from tests.fixtures.pagestore import (
    KEYSPACES,
    PAGE_BYTES,
    TENANT,
    Running,
    fill_page,
    metadata,
    new_world,
    page_key,
    running_engine,
)


async def open_session(running: Running, **changes: object) -> PeerSession:
    request = SessionRequest(tenant=TENANT, keyspaces=KEYSPACES, **changes)  # type: ignore[arg-type]
    return await running.engine.open_session(request, 0)


def reserve_item(number: int, shard: int = 0, page_bytes: int = PAGE_BYTES) -> ReserveItem:
    return ReserveItem(key=page_key(number, shard), page_bytes=page_bytes, metadata=metadata(number))


async def store(running: Running, peer: PeerSession, numbers: Sequence[int]) -> list[KvPoolError | None]:
    """Reserve, fill and commit pages that are not there yet."""
    answers = await running.engine.pages.reserve(peer, [reserve_item(number) for number in numbers])
    grants = [answer for answer in answers if isinstance(answer, Grant)]
    assert len(grants) == len(numbers), answers
    for grant in grants:
        fill_page(running.engine.pages.view(grant), grant.slot.page.key)
    return await running.engine.pages.commit(peer, [grant.lease_id for grant in grants])


async def acquire(
    running: Running, peer: PeerSession, wanted: Sequence[WantedPage], wait_s: float = 5.0
) -> list[Acquired]:
    """Everything that an acquire answers, in item order."""
    done = asyncio.get_running_loop().create_future()
    settled: list[Acquired] = []

    def on_acquired(acquired: Sequence[Acquired], final: bool) -> None:
        settled.extend(acquired)
        if final:
            done.set_result(None)

    running.engine.pages.acquire(peer, wanted, wait_s=wait_s, on_acquired=on_acquired)
    await done
    return sorted(settled, key=lambda one: one.item_index)


async def test_a_committed_page_is_served_from_staging_and_announced() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            assert await store(running, peer, [1, 2]) == [None, None]
            (one, missing) = await acquire(running, peer, [WantedPage(key=page_key(1)), WantedPage(key=page_key(9))])
            assert one.grant is not None and one.source is Source.STAGING
            expected = bytearray(PAGE_BYTES)
            fill_page(memoryview(expected), page_key(1))
            assert running.engine.pages.view(one.grant) == expected
            assert missing.grant is None and missing.error is None
            await eventually(lambda: world.index.shards(1, Tier.STAGING) == 1)
            running.engine.pages.release(peer, [one.grant.lease_id])
            assert running.engine.gauges().leases == 0
