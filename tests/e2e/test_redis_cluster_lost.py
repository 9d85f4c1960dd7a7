"""The index over a real Redis Cluster that has lost a master: matches are shorter, and changes wait."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from kvpool.core.errors import KvPoolError, StoreUnavailable
from kvpool.testing import eventually
from kvpool_index.adapters.redis_reads import group_key
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_topologies import RedisCluster, running_cluster

pytestmark = pytest.mark.e2e

NEVER_S = 3600.0  # a store call that took its time would not end in that of a test
GROUP = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A Cluster of these tests' own: they may break it, and leave it whole."""
    with running_cluster() as running:
        yield running


class Lost:
    """An index over the Cluster, and a chain of which one group lies where a master will be lost."""

    def __init__(self, cluster: RedisCluster, prefix: str, index: RunningIndex, keyspace: bytes) -> None:
        self.cluster, self.index, self.prefix, self.keyspace = cluster, index, prefix.encode(), keyspace
        nodes_at, names_at = (cluster.owner(self.prefix + b":{%b}:x" % tag) for tag in (b"n", b"k"))
        self.master = next(one for one in cluster.servers if one not in (nodes_at, names_at))

    def owner(self, head: bytes) -> RedisServer:
        return self.cluster.owner(group_key(self.prefix, self.keyspace, head))

    def chain(self, lost_groups: tuple[int, ...], groups: int = 4) -> Chain:
        """A chain whose groups lie at the lost master just where they should."""
        hashes: list[bytes] = []
        for group in range(groups):
            head = secrets.token_bytes(16)
            while (self.owner(head) is self.master) is not (group in lost_groups):
                head = secrets.token_bytes(16)
            hashes += [head, *(secrets.token_bytes(16) for _ in range(GROUP - 1))]
        return Chain(self.keyspace, hashes)

    async def matched(self, chain: Chain, *, first: int = 0) -> int:
        answer = await self.index.stub.Match(chain.query(len(chain.hashes) - first, first=first), timeout=60)
        return answer.matched_chunks


@asynccontextmanager
async def lost_in(cluster: RedisCluster) -> AsyncIterator[Lost]:
    prefix = f"t{secrets.token_hex(6)}"
    store = RedisIndexStore(cluster.url, timeout_s=NEVER_S, key_prefix=prefix)
    try:
        async with running_index(store, config=IndexConfig(lease_ttl_ms=600_000)) as index:
            yield Lost(cluster, prefix, index, await open_keyspace(index.stub))
    finally:
        await store.close()


async def test_a_match_ends_where_a_master_is_lost_and_is_no_error(cluster: RedisCluster) -> None:
    async with lost_in(cluster) as one:
        inside, at_once, elsewhere = one.chain((2,)), one.chain((0, 3)), one.chain(())
        node = await FakeNode(one.index.stub).register()
        for chain in (inside, at_once, elsewhere):
            await node.announce(chain.added(range(4 * GROUP)))
            assert await one.matched(chain) == 4 * GROUP
        one.master.kill()
        for _ in range(5):  # a master that is known to be lost is not waited for
            assert await one.matched(inside) == 2 * GROUP
            assert await one.matched(inside, first=GROUP + 3) == GROUP - 3
            assert await one.matched(inside, first=2 * GROUP) == 0
            assert await one.matched(at_once) == 0
            assert await one.matched(elsewhere) == 4 * GROUP
        one.master.start()

        async def is_back() -> bool:
            """What it had is lost with it, and announced again by its owners."""
            with suppress(KvPoolError, grpc.aio.AioRpcError):
                await node.register()
                await node.announce(inside.added(range(4 * GROUP)))
            return await one.matched(inside) == 4 * GROUP

        await eventually(is_back)


async def test_announcements_for_a_lost_master_wait_and_keep_their_order(cluster: RedisCluster) -> None:
    async with lost_in(cluster) as one:
        chain = one.chain((1,))
        node = await FakeNode(one.index.stub).register()
        await node.announce(chain.added(range(4 * GROUP)))
        one.master.kill()
        # What a node does: what is not acknowledged is sent again, in order, on a new stream.
        waiting = [chain.removed(range(GROUP, GROUP + 4)), chain.added(range(GROUP, GROUP + 2)), chain.removed([0])]
        with pytest.raises(StoreUnavailable):
            await node.announce(waiting[0])
        assert await one.matched(chain) == GROUP
        one.master.start()
        left = [chain.added(range(4 * GROUP)), *waiting]

        async def are_sent() -> bool:
            with suppress(KvPoolError, grpc.aio.AioRpcError):
                await node.register()
                while left:
                    await node.announce(left[0])
                    del left[0]
            return not left

        await eventually(are_sent)

        async def is_read() -> bool:
            return await one.matched(chain, first=1) >= GROUP

        await eventually(is_read)
        assert await one.matched(chain, first=1) == GROUP + 1
        assert await one.matched(chain) == 0


async def test_without_any_master_a_match_is_an_error(cluster: RedisCluster) -> None:
    async with lost_in(cluster) as one:
        chain = one.chain((1,), groups=32)
        await (await FakeNode(one.index.stub).register()).announce(chain.added(range(GROUP)))
        assert len({one.owner(head).port for head in chain.hashes[::GROUP]}) == 3
        for server in cluster.servers:
            server.kill()
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await one.matched(chain)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        for server in cluster.servers:
            server.start()
