"""The index over a real Redis that Sentinels look after: masters that are killed, stopped, or demoted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
import hiredis
import pytest

from kvpool.client import hashing
from kvpool.core.errors import KvPoolError, LeaseLost, StoreUnavailable
from kvpool.testing import eventually
from kvpool.v1 import index_pb2
from kvpool.wire.status import error_from_rpc
from kvpool_index.adapters.redis_store import RedisIndexStore
from tests.fixtures.index_node import AnnounceCall, Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_topologies import RedisSentinels, ask, running_sentinels
from tests.fixtures.redis_topologies import redis_sentinels as redis_sentinels
from tests.grpc.test_client_index import Node, client_of, matched
from tests.unit.client.servers import SPEC

pytestmark = pytest.mark.e2e

TIMEOUT_S = 0.5
FAST_S = 2.0  # what a call may take when nobody answers, on a busy machine
FAILOVER_S = 10.0  # they are set to 0.4 s; this machine may be busy
PIECE = 4096  # chunks of one match


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


class Load:
    """A node that announces one chunk after another, as a client does: what is not acknowledged is sent again."""

    def __init__(self, index: RunningIndex, keyspace: bytes, node: FakeNode) -> None:
        self.chain = Chain(keyspace)
        self.node = node
        self.acknowledged = 0
        self.interruptions = 0
        self._stub = index.stub
        self._task = asyncio.create_task(self._run())

    async def advance(self, count: int = 8, deadline_s: float = FAILOVER_S) -> None:
        """Wait for acknowledgements."""
        target = self.acknowledged + count
        await eventually(lambda: self.acknowledged >= target or self._task.done(), deadline_s)
        assert self.acknowledged >= target, self._task

    async def stop(self) -> int:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.acknowledged

    async def matched(self) -> int:
        """Chunks of the chain that are known, counting from its beginning."""
        matched = 0
        for first in range(0, len(self.chain.hashes), PIECE):
            matched += (await self._stub.Match(self.chain.query(PIECE, first=first))).matched_chunks
            if matched % PIECE:
                break
        return matched

    async def _run(self) -> None:
        while True:
            try:
                async with self.node.announcing() as stream:
                    await self._announce(stream)
            except (StoreUnavailable, LeaseLost, asyncio.InvalidStateError):  # the last: it ended before it was used
                self.interruptions += 1
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self.node.register()

    async def _announce(self, stream: AnnounceCall) -> None:
        while True:
            if self.acknowledged == len(self.chain.hashes):
                self.chain.hashes.extend(Chain(self.chain.keyspace).hashes)
            await stream.send(self.chain.added([self.acknowledged]))
            self.acknowledged += 1


async def loaded(index: RunningIndex) -> Load:
    return Load(index, await open_keyspace(index.stub), await FakeNode(index.stub).register())


async def test_a_killed_master_costs_nothing_that_was_acknowledged(
    sentinels: RedisSentinels, index: RunningIndex
) -> None:
    load = await loaded(index)
    watch = index.stub.Watch(index_pb2.WatchRequest())
    await load.advance()
    before = load.acknowledged
    killed = sentinels.master()
    killed.kill()
    killed_at_s = time.monotonic()
    await load.advance()
    assert time.monotonic() - killed_at_s < FAILOVER_S and load.interruptions > 0
    assert sentinels.master() is not killed
    acknowledged = await load.stop()
    assert await load.matched() >= acknowledged > before
    assert index.metric("kvpool_index_redis_failovers_total") == 1
    assert index.metric("kvpool_index_redis_reconnects_total") > 0
    await eventually(lambda: index.metric("kvpool_index_redis_masters_up") == 1)
    assert await sees(watch, load.chain.hashes[acknowledged - 1]), "watchers go on by themselves"
    watch.cancel()


async def sees(watch: grpc.aio.UnaryStreamCall[index_pb2.WatchRequest, index_pb2.WatchResponse], chunk: bytes) -> bool:
    """Whether an event of the chunk comes, or the advice to begin anew."""
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
        chain = hashing.Chain.of(opened.hash_key, list(range(16 * 40)), 16)
        node = Node(client, opened.keyspace, chain, opened.grid.all_shards)
        await node.link.start()
        node.put(*range(10))
        await node.link.wait_announced()
        sentinels.master().kill()
        for held in range(10, 40):
            node.put(held)
        started_at_s = time.monotonic()
        await node.link.wait_announced(FAILOVER_S)

        async def all_matched() -> bool:
            return await matched(client, node) == 40

        await eventually(all_matched, FAILOVER_S)
        assert time.monotonic() - started_at_s < FAILOVER_S and not node.superseded
        await node.link.close()
        await client.close()
    await store.close()


async def test_a_stopped_master_is_left_and_not_gone_back_to(sentinels: RedisSentinels, index: RunningIndex) -> None:
    load = await loaded(index)
    await load.advance()
    stopped = sentinels.master()
    stopped.pause()
    started_at_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await index.stub.Match(load.chain.query(8))
    assert isinstance(error_from_rpc(caught.value), StoreUnavailable) and time.monotonic() - started_at_s < FAST_S
    await eventually(lambda: sentinels.master() is not stopped, FAILOVER_S)
    await load.advance()
    stopped.resume()
    await load.advance()

    def demoted() -> bool:
        with contextlib.suppress(OSError):  # a Sentinel closes all connections to what it demotes
            role = ask(stopped.port, "ROLE")
            return isinstance(role, list) and role[0] == "slave"
        return False

    await eventually(demoted, FAILOVER_S)
    await load.advance()
    acknowledged = await load.stop()
    assert await load.matched() >= acknowledged
    assert index.metric("kvpool_index_redis_failovers_total") == 1


async def test_a_planned_failover_loses_nothing_if_all_replicas_have_it(sentinels: RedisSentinels) -> None:
    """The old master lives and takes writes until it is told; one replica that still follows it would confirm them."""
    async with serving(sentinels, wait_replicas=2) as index:
        load = await loaded(index)
        await load.advance()
        demoted = sentinels.master()

        def replaced() -> bool:
            with contextlib.suppress(hiredis.ReplyError):  # it is on its way; a Sentinel may give up, though
                ask(sentinels.sentinel_ports[0], "SENTINEL", "FAILOVER", "kvpool")
            return sentinels.master() is not demoted

        await eventually(replaced, FAILOVER_S)
        await eventually(lambda: index.metric("kvpool_index_redis_failovers_total") == 1)
        await load.advance()
        acknowledged = await load.stop()
        assert await load.matched() >= acknowledged


async def test_a_minority_of_sentinels_decides_and_delays_nothing(sentinels: RedisSentinels) -> None:
    sentinels.pause_sentinel(0)
    store = RedisIndexStore(sentinels.url, timeout_s=5.0)
    started_at_s = time.monotonic()
    assert await store.ping() >= 0
    assert time.monotonic() - started_at_s < 2.0
    await store.close()
    sentinels.resume_sentinel(0)


async def test_a_server_that_is_no_master_is_not_used(redis_sentinels: RedisSentinels) -> None:
    """As a Sentinel may name one that has just been demoted."""
    replica = next(server for server in redis_sentinels.servers if server is not redis_sentinels.master())
    async with lying_sentinel(replica) as url:
        store = RedisIndexStore(url, timeout_s=TIMEOUT_S)
        with pytest.raises(StoreUnavailable, match="it is no master but a slave"):
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


async def test_servers_that_are_something_else_are_told_so(redis_sentinels: RedisSentinels) -> None:
    server = redis_sentinels.master()
    hosts = f"127.0.0.1:{server.port}"
    for url, cause in (
        (f"redis+sentinel://{hosts}/kvpool", "unknown command 'SENTINEL'"),
        (f"redis+cluster://{hosts}", "cluster support disabled"),
    ):
        store = RedisIndexStore(url, timeout_s=TIMEOUT_S)
        with pytest.raises(StoreUnavailable, match=cause):
            await store.ping()
        await store.close()
    async with lying_sentinel(server, facts=()) as url:
        store = RedisIndexStore(url, timeout_s=TIMEOUT_S)
        with pytest.raises(StoreUnavailable, match="is no Sentinel, by its answer"):
            await store.ping()
        await store.close()


async def test_too_few_replicas_acknowledge_nothing(redis_sentinels: RedisSentinels) -> None:
    store = RedisIndexStore(redis_sentinels.url, timeout_s=TIMEOUT_S, key_prefix="few", wait_replicas=3)
    with pytest.raises(StoreUnavailable, match="only 2 of 3 replicas"):
        await store.events.append([(0, b"payload")])
    await store.close()


@pytest.mark.parametrize(
    ("changed", "cause"),
    [(("/kvpool/0", "/other"), "No such master"), (("redis+sentinel://", "redis+sentinel://:wrong@"), "login was")],
)
async def test_what_is_wrong_is_said(redis_sentinels: RedisSentinels, changed: tuple[str, str], cause: str) -> None:
    store = RedisIndexStore(redis_sentinels.url.replace(*changed), timeout_s=TIMEOUT_S)
    with pytest.raises(KvPoolError, match=cause) as caught:
        await store.ping()
    assert isinstance(caught.value, StoreUnavailable) and "wrong" not in str(caught.value)
    await store.close()
