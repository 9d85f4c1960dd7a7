"""Clients of several index replicas, of which one has lost its store: clients must not stay with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import StoreUnavailable
from kvpool_index.adapters.redis_store import RedisIndexStore
from tests.fixtures.index_server import running_index
from tests.fixtures.patience import patient
from tests.fixtures.redis_server import free_port
from tests.unit.client.servers import SPEC


async def test_a_replica_that_has_lost_its_store_is_left_for_one_that_has_not() -> None:
    """Its own connection to Redis is broken, say: it answers, and a node that stayed with it would lose its lease."""
    cut_off = RedisIndexStore(f"redis://127.0.0.1:{free_port()}/0", timeout_s=0.05)
    async with running_index(cut_off) as first, running_index() as second:
        both = (first.endpoint, second.endpoint)
        client = IndexClient(patient(index_endpoints=both, backoff_initial_s=0.005))
        with pytest.raises(StoreUnavailable):
            await client.open_keyspace("name", SPEC)
        opened = await client.open_keyspace("name", SPEC)
        matches = IndexClient(patient(index_endpoints=both))
        query = ChainQuery(keyspace=opened.keyspace, chunk_hashes=b"h" * 16)
        with pytest.raises(StoreUnavailable):
            await matches.match_stream.match(query)
        assert (await matches.match_stream.match(query)).matched_chunks == 0
        await client.close()
        await matches.close()
    await cut_off.close()


async def test_one_name_of_several_replicas_leads_to_another_when_one_has_lost_its_store() -> None:
    """As the name of a Kubernetes Service does: a connection stays with its replica, a new one may reach another."""
    cut_off = RedisIndexStore(f"redis://127.0.0.1:{free_port()}/0", timeout_s=0.05)
    async with running_index(cut_off) as first, running_index() as second:
        async with (
            balanced(first.endpoint, second.endpoint) as name,
            balanced(first.endpoint, second.endpoint) as again,
        ):
            client = client_at(name)
            with pytest.raises(StoreUnavailable):
                await client.open_keyspace("name", SPEC)
            opened = await client.open_keyspace("name", SPEC)
            query = ChainQuery(keyspace=opened.keyspace, chunk_hashes=b"h" * 16)
            matches = client_at(again)
            with pytest.raises(StoreUnavailable):
                await matches.match_stream.match(query)
            assert (await matches.match_stream.match(query)).matched_chunks == 0
            await client.close()
            await matches.close()
    await cut_off.close()


def client_at(endpoint: str) -> IndexClient:
    return IndexClient(patient(index_endpoints=(endpoint,), backoff_initial_s=0.005))


@asynccontextmanager
async def balanced(*endpoints: str) -> AsyncIterator[str]:
    """An endpoint whose connections go to `endpoints` in turn."""
    turns, open_ones = itertools.cycle(endpoints), set[asyncio.StreamWriter]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = next(turns).rsplit(":", 1)
        there, back = await asyncio.open_connection(host, int(port))
        open_ones.update((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in open_ones:
            writer.close()
        await server.wait_closed()
