"""Prefetch, durable page writes and draining as clients call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.errors import DrainBlocked, InvalidRequest, KvPoolError, PageCorrupt, StoreFault
from kvpool.core.outcome import Admission
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy, WritePolicy
from kvpool.testing import eventually
from tests.fixtures.pagestore import KEYSPACE, KEYSPACES, SLOT_BYTES, metadata, new_world, page_key, sealed_page
from tests.fixtures.pagestore_calls import evict_all, open_session, store
from tests.fixtures.pagestore_server import Served, served


@asynccontextmanager
async def control_of(node: Served) -> AsyncIterator[PageStoreControl]:
    control = node.control()
    try:
        yield control
    finally:
        await control.close()


async def test_a_prefetch_brings_pages_from_disk_within_the_share_for_promotion() -> None:
    with new_world() as world:
        async with served(world) as node, control_of(node) as control:
            running = node.running
            peer = await open_session(running)
            await store(running, peer, range(20))
            await evict_all(running, peer)
            share = running.config.arena_bytes // 8 // SLOT_BYTES
            keys = [page_key(number) for number in range(20)]
            assert await control.prefetch([*keys, keys[0]]) == share, "more would push out what readers want"
            await eventually(lambda: running.metric("prefetched_pages_total") == share)
            assert await control.prefetch(keys[:share]) == 0, "they are here"
            assert await control.prefetch(keys[share:]) == share, "there is room again"


async def test_a_prefetch_of_what_is_not_on_disk_or_malformed_starts_nothing() -> None:
    with new_world() as world:
        async with served(world) as node, control_of(node) as control:
            assert await control.prefetch([page_key(1), page_key(1, 60), page_key(1, keyspace=b"o" * 16)]) == 0
            with pytest.raises(InvalidRequest):
                await control.prefetch([page_key(1)] * 5000)


def push(
    client: PageTransferClient, numbers: list[int], *, seed: int = 0, spoil: bool = False
) -> list[tuple[Admission, KvPoolError | None]]:
    """What a durable write of these pages is answered."""

    def pages() -> Iterator[PageToWrite]:
        for number in numbers:
            page = bytearray(sealed_page(page_key(number), seed))
            if spoil:
                page[1000] ^= 1
            yield PageToWrite(key=page_key(number), page=memoryview(page), metadata=metadata(number))

    answers: list[tuple[Admission, KvPoolError | None]] = []
    client.write_pages(
        KEYSPACES,
        list(pages()),
        lambda index, admission, error: answers.append((admission, error)),
        timeout_s=60,
        require_durable=True,
    )
    return answers


@asynccontextmanager
async def transfer_to(node: Served) -> AsyncIterator[PageTransferClient]:
    client = PageTransferClient(node.node.bulk_endpoint)
    try:
        yield client
    finally:
        client.close()


async def test_a_durable_write_is_answered_when_the_page_is_on_disk_whatever_its_keyspace_wants() -> None:
    with new_world() as world:
        async with served(world, linger_ms=10_000) as node, transfer_to(node) as client:
            reported = VersionedPolicy(
                keyspace=KEYSPACE, policy=KeyspacePolicy(write_policy=WritePolicy.STAGING_ONLY), version=1
            )
            world.index.policies[KEYSPACE] = reported
            await node.running.engine.policies.learn([KEYSPACE])
            answers = await asyncio.to_thread(push, client, list(range(20)))
            assert answers == [(Admission.RESERVED, None)] * 20
            assert node.running.engine.gauges().disk_pages == 20
            # Staged only, it is here and yet not durable: EXISTS comes after it is.
            peer = await open_session(node.running)
            assert await store(node.running, peer, [100]) == [None]
            assert node.running.engine.gauges().disk_pages == 20
            assert await asyncio.to_thread(push, client, [100, 0]) == [(Admission.EXISTS, None)] * 2
            assert node.running.engine.gauges().disk_pages == 21


async def test_a_durable_write_to_a_node_without_a_disk_is_rejected() -> None:
    with new_world(disk=False) as world:
        async with served(world, disk_bytes=0) as node, transfer_to(node) as client:
            ((admission, error),) = await asyncio.to_thread(push, client, [1])
            assert admission is Admission.REJECTED and isinstance(error, StoreFault)


async def test_wrong_bytes_are_never_stored_durably_or_not() -> None:
    with new_world() as world:
        async with served(world) as node, transfer_to(node) as client:
            (answer,) = await asyncio.to_thread(lambda: push(client, [1], spoil=True))
            assert answer[0] is Admission.REJECTED and isinstance(answer[1], PageCorrupt)
            assert node.running.engine.gauges().disk_pages == node.running.engine.gauges().staging_pages == 0


async def test_a_node_without_an_index_cannot_be_drained_and_says_so() -> None:
    with new_world() as world:
        async with served(world) as node, control_of(node) as control:
            with pytest.raises(DrainBlocked, match="no index"):
                async for _ in control.drain(timeout_s=60):
                    pass
            status = await control.status()
            assert not status.draining and status.replica_queue_chunks == 0
