"""The index over a real Redis: two replicas, and a Redis that fails and comes back."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from kvpool.core import errors
from kvpool.testing import eventually
from kvpool.v1 import index_pb2
from kvpool.wire.status import error_from_rpc
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import GroupRead
from tests.fixtures.index_node import TIMEOUT_S, Chain, FakeNode, open_keyspace, refusal
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.redis_server import RedisServer, running_redis

CONFIG = IndexConfig(lease_ttl_ms=600_000)
HANGS_S = 0.3
NEVER_S = 3600.0  # a store call that took its time would not end in that of a test


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server of the test's own, which it may kill; it keeps its data."""
    with running_redis(persist=True) as server:
        yield server


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[RedisIndexStore]:
    made = RedisIndexStore(redis.url, timeout_s=NEVER_S)
    yield made
    await made.close()


@pytest.fixture
async def index(store: RedisIndexStore) -> AsyncIterator[RunningIndex]:
    async with running_index(store, config=CONFIG) as running:
        yield running


async def works(index: RunningIndex, chain: Chain) -> bool:
    """Whether matches are answered again."""
    try:
        return (await index.stub.Match(chain.query())).matched_chunks > 0
    except grpc.aio.AioRpcError as error:
        assert isinstance(error_from_rpc(error), errors.StoreUnavailable)
        return False


async def test_replicas_share_what_they_know(index: RunningIndex, redis: RedisServer) -> None:
    second = RedisIndexStore(redis.url, timeout_s=TIMEOUT_S)
    async with running_index(second, config=CONFIG) as other:
        chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
        assert await open_keyspace(other.stub) == chain.keyspace
        await node.announce(chain.added(range(40)))
        assert (await other.stub.Match(chain.query())).matched_chunks == 40
        listed = await other.stub.ListNodes(index_pb2.ListNodesRequest())
        assert [each.info.node_id for each in listed.nodes] == [node.node_id]
        elsewhere = FakeNode(other.stub, node.node_id, incarnation=node.incarnation, epoch=node.epoch)
        async with node.announcing() as early:
            await early.send(chain.removed([39]))
            await elsewhere.announce(chain.removed([38]))
            with pytest.raises(errors.LeaseLost):
                await early.send(chain.added([38, 39]))
        assert (await index.stub.Match(chain.query())).matched_chunks == 38
    await second.close()


async def test_without_redis_calls_fail_fast_and_recover(index: RunningIndex, redis: RedisServer) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(40)))
    stream = index.stub.MatchStream()
    await stream.write(index_pb2.MatchStreamRequest(request_id=1, match=chain.query()))
    answer = await stream.read()
    assert isinstance(answer, index_pb2.MatchStreamResponse) and answer.match.matched_chunks == 40

    redis.kill()
    for _ in range(5):
        call = index.stub.Match(chain.query())
        assert isinstance(await refusal(call), errors.StoreUnavailable)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await stream.write(index_pb2.MatchStreamRequest(request_id=2, match=chain.query()))
    answer = await stream.read()
    assert isinstance(answer, index_pb2.MatchStreamResponse) and answer.error.reason == "STORE_UNAVAILABLE"
    with pytest.raises(grpc.aio.AioRpcError):
        await node.renew()
    assert not (await index.stub.GetIndexInfo(index_pb2.GetIndexInfoRequest())).store_reachable
    await eventually(lambda: index.metric("kvpool_index_store_up") == 0)

    redis.start()
    await node.register()
    await eventually(lambda: works(index, chain), message="no recovery without a restart")
    await stream.write(index_pb2.MatchStreamRequest(request_id=3, match=chain.query()))
    answer = await stream.read()
    assert isinstance(answer, index_pb2.MatchStreamResponse) and answer.match.matched_chunks == 40
    await eventually(lambda: index.metric("kvpool_index_store_up") == 1)
    stream.cancel()


async def test_a_redis_that_hangs_is_as_good_as_down(redis: RedisServer) -> None:
    store = RedisIndexStore(redis.url, timeout_s=HANGS_S)
    async with running_index(store, config=CONFIG) as index:
        keyspace = await eventually(lambda: opened(index))  # which may take longer than that where it stands still
        chain = Chain(keyspace)
        redis.command("CLIENT", "PAUSE", "1000000", "ALL")

        async def fail_together() -> bool:
            """And not one after the other; not distinguished while this machine stands still."""
            started_at_s = time.monotonic()
            for error in await asyncio.gather(*(refusal(index.stub.Match(chain.query())) for _ in range(20))):
                assert isinstance(error, errors.StoreUnavailable)
            return time.monotonic() - started_at_s < 10 * HANGS_S

        await eventually(fail_together)
    await store.close()


async def opened(index: RunningIndex) -> bytes:
    """The usual keyspace; b"" while the store does not answer in its time."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        return await open_keyspace(index.stub)
    return b""


async def test_announcements_survive_an_outage(index: RunningIndex, redis: RedisServer) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with node.announcing() as stream:
        await stream.send(chain.added([0]))
        redis.kill()
        with pytest.raises(errors.StoreUnavailable):
            await stream.send(chain.added([1]))
    redis.start()
    await node.register()
    await node.announce(chain.added([1]))
    assert (await index.stub.Match(chain.query())).matched_chunks == 2


async def test_a_wiped_redis_is_filled_again(index: RunningIndex, redis: RedisServer) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(4)))
    before = node.incarnation
    redis.flush()
    redis.command("SCRIPT", "FLUSH")
    assert (await index.stub.Match(chain.query())).matched_chunks == 0
    with pytest.raises(errors.LeaseLost):
        await node.renew()
    await node.register()
    assert node.incarnation == before
    await node.announce(chain.added(range(3)))
    assert (await index.stub.Match(chain.query())).matched_chunks == 3
    assert await open_keyspace(index.stub) == chain.keyspace


async def test_watchers_are_notified_of_a_wiped_redis(index: RunningIndex, redis: RedisServer) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    call = index.stub.Watch(index_pb2.WatchRequest())
    await eventually(lambda: index.metric("kvpool_index_watchers") == 1)
    await node.announce(chain.added([0]))
    event = await call.read()
    assert isinstance(event, index_pb2.WatchResponse) and event.chunk.chunk_hash == chain.hashes[0]
    redis.flush()
    await node.register()
    await node.announce(chain.added([1]))
    kinds = list[str | None]()
    while "resync" not in kinds:
        event = await call.read()
        assert isinstance(event, index_pb2.WatchResponse)
        kinds.append(event.WhichOneof("event"))
    call.cancel()


async def test_death_is_announced_once_by_several_replicas(redis: RedisServer) -> None:
    stores = [RedisIndexStore(redis.url, timeout_s=TIMEOUT_S) for _ in range(3)]
    config = IndexConfig(lease_ttl_ms=200)
    async with (
        running_index(stores[0], config=config) as one,
        running_index(stores[1], config=config) as two,
        running_index(stores[2], config=config) as three,
    ):
        await FakeNode(one.stub).register()

        def deaths() -> float:
            return sum(each.metric("kvpool_index_node_events_total", event="died") for each in (one, two, three))

        await eventually(lambda: deaths() == 1)
        entries = await stores[0].events.read(4, "0-0", limit=10, wait_s=0)
        assert len(entries) == 2, "one event of its coming and one of its going"
    for store in stores:
        await store.close()


async def test_a_cancelled_read_leaves_the_connection_in_order(store: RedisIndexStore) -> None:
    """Replies that come for a caller who left must not be taken for those of the next one."""
    head = bytes(16)
    for attempt in range(50):
        leaving = asyncio.create_task(store.locations.read(bytes(16), [GroupRead(head, [bytes(8)] * 16)]))
        for _ in range(attempt % 5):
            await asyncio.sleep(0)
        leaving.cancel()
        assert await store.locations.read(bytes(16), [GroupRead(head, [bytes(8)] * 3)]) == [None] * 3
        await asyncio.gather(leaving, return_exceptions=True)


async def test_what_redis_refuses_is_unavailable(redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "requirepass", "secret")
    refused = RedisIndexStore(redis.url, timeout_s=TIMEOUT_S)
    with pytest.raises(errors.StoreUnavailable, match="NOAUTH"):
        await refused.ping()
    await refused.close()
    for url in (f"redis://:secret@127.0.0.1:{redis.port}/3", f"redis://default:secret@127.0.0.1:{redis.port}"):
        accepted = RedisIndexStore(url, timeout_s=TIMEOUT_S)
        assert await accepted.ping() >= 0
        await accepted.close()
    wrong = RedisIndexStore(f"redis://:wrong@127.0.0.1:{redis.port}", timeout_s=TIMEOUT_S)
    with pytest.raises(errors.StoreUnavailable, match="login was refused") as caught:
        await wrong.ping()
    assert "wrong@" not in str(caught.value)
    await wrong.close()


async def test_a_server_that_is_no_redis(redis: RedisServer) -> None:
    async def gibberish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(gibberish, "127.0.0.1", 0, family=socket.AF_INET)
    store = RedisIndexStore(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(errors.StoreUnavailable):
        await store.ping()
    await store.close()
    server.close()
    await server.wait_closed()


async def test_a_password_that_a_server_repeats_is_not_passed_on() -> None:
    async def without_auth(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"-ERR unknown command 'AUTH', with args beginning with: 'secret' \r\n+PONG\r\n$-1\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(without_auth, "127.0.0.1", 0, family=socket.AF_INET)
    url = f"redis://:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}"
    store = RedisIndexStore(url, timeout_s=TIMEOUT_S)
    with pytest.raises(errors.StoreUnavailable, match="unknown command 'AUTH'") as caught:
        await store.ping()
    assert "secret" not in str(caught.value)
    await store.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("url", ["http://x", "redis://host:port", "redis://h:1/?retry_on_timeout=1", "rubbish"])
async def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(errors.StartupFailed, match="redis_url"):
        RedisIndexStore(url)
