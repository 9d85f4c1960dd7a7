"""What a copy that was pulled from its owner inherits: no copy outlives its page, and a pin stays the owner's."""

from __future__ import annotations

from dataclasses import replace

from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.outcome import Tier
from kvpool.testing import ManualClock, eventually
from kvpool_pagestore.engine.fetch import PageRequest
from kvpool_pagestore.ports import PullItem
from tests.fixtures.pagestore import (
    TENANT,
    Running,
    ScriptedPeers,
    World,
    fill_page,
    metadata,
    new_world,
    page_key,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire_one, open_session

OWNER = RemoteSource(node_id=b"o" * 16, incarnation=7, bulk_endpoint="owner:1")


def owned_by(world: World, kept: PageMetadata | None) -> None:
    def answer(source: RemoteSource, item: PullItem) -> bool:
        if kept is not None:
            item.on_metadata(kept)
        fill_page(item.destination, item.key)
        return True

    world.peers = ScriptedPeers(answer)


def asked(**said: int) -> PageRequest:
    return PageRequest(key=page_key(1), metadata=replace(metadata(1), **said), sources=(OWNER,))  # type: ignore[arg-type]


async def pulled(running: Running, page: PageRequest) -> PageMetadata:
    answer = await acquire_one(running, await open_session(running), page)
    assert answer.grant is not None
    return answer.grant.slot.page.metadata


async def test_a_pulled_page_is_kept_as_its_owner_keeps_it_but_for_the_pin() -> None:
    with new_world(clock=ManualClock()) as world:
        kept = replace(
            metadata(1), ttl_ms=1000, expires_us=1 << 60, priority=7, prompt_tokens=4096, pinned_until_us=1 << 61
        )
        owned_by(world, kept)
        async with running_engine(world) as running:
            assert await pulled(running, asked(priority=-3, ttl_ms=5)) == replace(kept, pinned_until_us=0)


async def test_a_reader_cannot_pin_what_is_pulled() -> None:
    with new_world(clock=ManualClock()) as world:
        owned_by(world, None)  # an owner of an earlier version says nothing
        async with running_engine(world, max_pinned_share=0.0) as running:
            assert await pulled(running, asked(pinned_until_us=1 << 61, priority=2)) == replace(metadata(1), priority=2)


async def test_no_copy_outlives_the_page_of_its_owner() -> None:
    with new_world(clock=ManualClock()) as world:
        clock = world.clock
        assert isinstance(clock, ManualClock)
        owned_by(world, replace(metadata(1), ttl_ms=9000, expires_us=clock.wall_us() + 1_000_000))
        async with running_engine(world) as running:
            await pulled(running, asked())
            world.peers.answer = lambda source, item: False  # type: ignore[attr-defined]
            assert world.index.shards(1, Tier.STAGING) == 1
            clock.advance(1.0)
            assert (await acquire_one(running, await open_session(running), asked())).grant is None
            await eventually(lambda: not world.index.shards(1, Tier.STAGING))
            assert await running.engine.clear(TENANT, b"") == 0
