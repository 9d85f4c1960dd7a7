"""The index over a real Redis that Sentinels look after: masters that are killed, stopped, or demoted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

import grpc
import hiredis
import pytest

from kvpool.client import hashing
from kvpool.core.errors import KvPoolError, StoreUnavailable
from kvpool.testing import eventually
from kvpool.v1 import index_pb2
from kvpool.wire.status import error_from_rpc
from kvpool_index.adapters.redis_store import RedisIndexStore
from tests.e2e.announcing_load import loaded
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_topologies import RedisSentinels, ask, running_sentinels
from tests.fixtures.redis_topologies import redis_sentinels as redis_sentinels
from tests.grpc.test_client_index import Node, client_of, matched
from tests.unit.client.servers import SPEC

pytestmark = pytest.mark.e2e

TIMEOUT_S = 0.5
NEVER_S = 3600.0  # a store call that took its time would not end in that of a test


@pytest.fixture
def sentinels() -> Iterator[RedisSentinels]:
    """A deployment of the test's own, which it may break."""
    with running_sentinels() as running:
        yield running


@contextlib.asynccontextmanager
async def serving(sentinels: RedisSentinels, *, wait_replicas: int) -> AsyncIterator[RunningIndex]:
    """An index that acknowledges what so many replicas have."""
    store = RedisIndexStore(sentinels.url, timeout_s=TIMEOUT_S, wait_replicas=wait_replicas)
    async with running_index(store) as running:
        yield running
    await store.close()


@pytest.fixture
async def index(sentinels: RedisSentinels) -> AsyncIterator[RunningIndex]:
    """One replica is enough, so that there may be one less."""
    async with serving(sentinels, wait_replicas=1) as running:
        yield running


async def kvpool_error(call: Awaitable[object]) -> None:
    """Await a call. Raises its error as one of ours."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


async def test_a_killed_master_costs_nothing_that_was_acknowledged(
    sentinels: RedisSentinels, index: RunningIndex
) -> None:
    load = await loaded(index)
    watch = index.stub.Watch(index_pb2.WatchRequest())
    await load.advance()
    before = load.acknowledged
    killed = sentinels.master()
    killed.kill()
    await load.advance()
    assert load.interruptions > 0
    assert sentinels.master() is not killed
    acknowledged = await load.stop()
    assert acknowledged > before
    await load.has_matched(acknowledged)
    assert index.metric("kvpool_index_redis_failovers_total") >= 1, "one; more where servers stood still"
    assert index.metric("kvpool_index_redis_reconnects_total") > 0
    await eventually(lambda: index.metric("kvpool_index_redis_masters_up") == 1)
    assert await sees(watch, load.chain.hashes[acknowledged - 1]), "watchers go on by themselves"
    watch.cancel()


async def sees(watch: grpc.aio.UnaryStreamCall[index_pb2.WatchRequest, index_pb2.WatchResponse], chunk: bytes) -> bool:
    """Whether an event of the chunk comes, or the advice to start over."""
    while isinstance(event := await watch.read(), index_pb2.WatchResponse):
        if event.WhichOneof("event") == "resync" or event.chunk.chunk_hash == chunk:
            return True
    return False


async def test_a_node_goes_on_by_itself(sentinels: RedisSentinels) -> None:
    """With the client that pagestores use, and without waiting for replicas."""
    store = RedisIndexStore(sentinels.url, timeout_s=TIMEOUT_S)
    async with running_index(store) as index:
        client = client_of(index)
        opened = await client.open_keyspace("chat", SPEC)
        chain = hashing.Prompt.of(opened.hash_key, list(range(16 * 40)), 16)
        node = Node(client, opened.keyspace, chain, opened.grid.all_shards)
        await node.link.start()
        node.put(*range(10))
        await node.link.wait_announced(PATIENCE_S)
        sentinels.master().kill()
        for held in range(10, 40):
            node.put(held)
        await node.link.wait_announced(PATIENCE_S)

        async def all_matched() -> bool:
            with contextlib.suppress(StoreUnavailable):
                return await matched(client, node) == 40
            return False

        await eventually(all_matched)
        assert not node.superseded
        await node.link.close()
        await client.close()
    await store.close()


async def test_a_stopped_master_is_left_and_not_gone_back_to(sentinels: RedisSentinels, index: RunningIndex) -> None:
    load = await loaded(index)
    await load.advance()
    stopped = sentinels.master()
    stopped.pause()
    with contextlib.suppress(StoreUnavailable):  # it is, unless the failover came first, while we stood still
        await kvpool_error(index.stub.Match(load.chain.query(8)))
    await eventually(lambda: sentinels.master() is not stopped)
    await load.advance()
    stopped.resume()
    await load.advance()

    def demoted() -> bool:
        with contextlib.suppress(OSError):  # a Sentinel closes all connections to what it demotes
            role = ask(stopped.port, "ROLE")
            return isinstance(role, list) and role[0] == "slave"
        return False

    await eventually(demoted)
    await load.advance()
    await load.has_matched(await load.stop())
    assert index.metric("kvpool_index_redis_failovers_total") >= 1, "one; more where servers stood still"


async def test_a_planned_failover_loses_nothing_if_all_replicas_have_it(sentinels: RedisSentinels) -> None:
    """The old master lives and takes writes until it is demoted; a replica that still follows it confirms them."""
    async with serving(sentinels, wait_replicas=2) as index:
        load = await loaded(index)
        await load.advance()
        demoted = sentinels.master()

        def replaced() -> bool:
            with contextlib.suppress(hiredis.ReplyError):  # it is on its way; a Sentinel may give up, though
                ask(sentinels.sentinel_ports[0], "SENTINEL", "FAILOVER", "kvpool")
            return sentinels.master() is not demoted

        await eventually(replaced)
        await eventually(lambda: index.metric("kvpool_index_redis_failovers_total") >= 1)
        await load.advance()
        await load.has_matched(await load.stop())


async def test_a_minority_of_sentinels_decides_and_delays_nothing(sentinels: RedisSentinels) -> None:
    sentinels.pause_sentinel(0)
    store = RedisIndexStore(sentinels.url, timeout_s=NEVER_S)
    assert await store.ping() >= 0
    await store.close()
    sentinels.resume_sentinel(0)


async def test_a_server_that_is_no_master_is_not_used(redis_sentinels: RedisSentinels) -> None:
    """As a Sentinel may name one that has just been demoted."""
    replica = next(server for server in redis_sentinels.servers if server is not redis_sentinels.master())
    async with lying_sentinel(replica) as url:
        store = RedisIndexStore(url, timeout_s=PATIENCE_S)
        with pytest.raises(StoreUnavailable, match="it is not a master but a slave"):
            await store.ping()
        await store.close()


@contextlib.asynccontextmanager
async def lying_sentinel(named: RedisServer, facts: Sequence[str] = ("config-epoch", "7")) -> AsyncIterator[str]:
    """Names one server as the master, whatever it is asked for."""
    answer = packed_list(*facts) + packed_list("127.0.0.1", str(named.port))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(1 << 16):
            writer.write(answer if b"MASTER" in command else b"+PONG\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"redis+sentinel://127.0.0.1:{server.sockets[0].getsockname()[1]}/kvpool"
    server.close()


def packed_list(*words: str) -> bytes:
    return f"*{len(words)}\r\n".encode() + b"".join(f"${len(word)}\r\n{word}\r\n".encode() for word in words)


async def test_servers_that_are_something_else_are_refused_with_the_cause(redis_sentinels: RedisSentinels) -> None:
    server = redis_sentinels.master()
    hosts = f"127.0.0.1:{server.port}"
    for url, cause in (
        (f"redis+sentinel://{hosts}/kvpool", "unknown command 'SENTINEL'"),
        (f"redis+cluster://{hosts}", "cluster support disabled"),
    ):
        store = RedisIndexStore(url, timeout_s=PATIENCE_S)
        with pytest.raises(StoreUnavailable, match=cause):
            await store.ping()
        await store.close()
    async with lying_sentinel(server, facts=()) as url:
        store = RedisIndexStore(url, timeout_s=PATIENCE_S)
        with pytest.raises(StoreUnavailable, match="is not a Sentinel, by its answer"):
            await store.ping()
        await store.close()


async def test_too_few_replicas_acknowledge_nothing(redis_sentinels: RedisSentinels) -> None:
    store = RedisIndexStore(redis_sentinels.url, timeout_s=TIMEOUT_S, key_prefix="few", wait_replicas=3)

    async def is_refused() -> bool:
        """Before its time is over, in half of which replicas do not always answer."""
        with pytest.raises(StoreUnavailable) as refused:
            await store.events.append([(0, b"payload")])
        return "only 2 of 3 replicas" in str(refused.value)

    await eventually(is_refused)
    await store.close()


@pytest.mark.parametrize(
    ("changed", "cause"),
    [(("/kvpool/0", "/other"), "No such master"), (("redis+sentinel://", "redis+sentinel://:wrong@"), "login was")],
)
async def test_what_is_wrong_is_said(redis_sentinels: RedisSentinels, changed: tuple[str, str], cause: str) -> None:
    store = RedisIndexStore(redis_sentinels.url.replace(*changed), timeout_s=PATIENCE_S)
    with pytest.raises(KvPoolError, match=cause) as caught:
        await store.ping()
    assert isinstance(caught.value, StoreUnavailable) and "wrong" not in str(caught.value)
    await store.close()
