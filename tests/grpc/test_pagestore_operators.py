"""Evict, Pin and ListChunks as an operator's client calls them."""

from __future__ import annotations

import grpc
import pytest

from kvpool.client.pagestore_control import EvictOutcome
from kvpool.core.errors import InvalidRequest
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceStub
from tests.fixtures.pagestore import KEYSPACE, TENANT, metadata, new_world, page_key
from tests.fixtures.pagestore_calls import open_session, store
from tests.fixtures.pagestore_server import served

HASHES = [page_key(number).chunk_hash for number in range(20)]


async def test_an_operator_lists_pins_and_evicts() -> None:
    with new_world() as world:
        async with served(world) as node:
            await store(node.running, await open_session(node.running), range(20))
            await node.running.engine.flush(TENANT, b"")
            control = node.control()
            try:
                found = {chunk.chunk_hash: chunk async for chunk in control.list_chunks(KEYSPACE)}
                assert set(found) == set(HASHES)
                assert found[HASHES[5]].metadata == metadata(5)
                assert await control.pin(KEYSPACE, HASHES[:2], PINNED_FOREVER_US) == 2
                pinned = [chunk async for chunk in control.list_chunks(pinned_only=True)]
                assert {chunk.chunk_hash for chunk in pinned} == set(HASHES[:2])
                would = await control.preview_evict(KEYSPACE, HASHES[:4])
                assert (would.chunk_count, would.outcome.page_count, would.outcome.pinned_count) == (2, 2, 2)
                assert would.staging_bytes == would.disk_bytes > 0
                outcome = await control.evict(KEYSPACE, HASHES[:4])
                assert outcome == would.outcome
                assert outcome == EvictOutcome(page_count=2, pinned_count=2, undurable_count=0)
                assert (await control.evict(KEYSPACE, HASHES[4:6], staging_only=True)).page_count == 2
                assert (await control.evict(KEYSPACE, None, with_pinned=True)).page_count == 18
                assert [chunk async for chunk in control.list_chunks(b"")] == []
            finally:
                await control.close()


@pytest.mark.parametrize(
    "request_",
    [
        pb.EvictRequest(keyspace_id=b"short", whole_keyspace=True),
        pb.EvictRequest(keyspace_id=KEYSPACE),
        pb.EvictRequest(keyspace_id=KEYSPACE, chunk_hashes=[b"short"]),
        pb.EvictRequest(keyspace_id=KEYSPACE, chunk_hashes=[b"h" * 16], whole_keyspace=True),
        pb.EvictRequest(keyspace_id=KEYSPACE, chunk_hashes=[b"h" * 16] * 4097),
    ],
)
async def test_a_malformed_evict_is_refused(request_: pb.EvictRequest) -> None:
    with new_world() as world:
        async with served(world) as node, grpc.aio.insecure_channel(node.endpoint) as channel:
            stub = PageStoreServiceStub(channel)
            for call in (stub.Evict, stub.PreviewEvict):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(request_, timeout=60)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_malformed_listing_is_refused() -> None:
    with new_world() as world:
        async with served(world) as node:
            control = node.control()
            try:
                for wrong in ({"keyspace": b"short"}, {"most_read": -1}, {"most_read": 1025}):
                    with pytest.raises(InvalidRequest):
                        _ = [chunk async for chunk in control.list_chunks(**wrong)]
            finally:
                await control.close()
