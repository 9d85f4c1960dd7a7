"""A Redis, two index replicas over it and a pagestore, as processes that a test stops, kills and wakes again."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kvpool.client.index import IndexClient
from kvpool.client.page_items import ReserveItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import ChainQuery, PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey, page_bytes
from kvpool.core.payload import payload_bytes
from tests.e2e.service_processes import Process
from tests.fixtures.pagestore import GRID, KEYSPACE, KEYSPACES, SPEC, TENANT, fill_page
from tests.fixtures.patience import SERVICES_MS, patient
from tests.fixtures.redis_server import RedisServer, running_redis

INTERVAL_S = 0.5
HALVES = (1, 2)  # the shards of tests.fixtures.pagestore that have one KV head each: together a whole chunk
SHARDS = sum(1 << shard for shard in HALVES)
CLIENT = patient()
_HALF_BYTES = page_bytes(payload_bytes(SPEC, GRID, HALVES[0]))


class MadeChain:
    """Chunks with random hashes, as true ones look."""

    def __init__(self, count: int) -> None:
        self.hashes = [secrets.token_bytes(16) for _ in range(count)]

    def items(self, indexes: Sequence[int]) -> list[ReserveItem]:
        """Both pages of each chunk."""
        return [
            ReserveItem(PageKey(KEYSPACE, self.hashes[index], shard), _HALF_BYTES, self._metadata(index))
            for index in indexes
            for shard in HALVES
        ]

    def query(self, count: int = 0) -> ChainQuery:
        return ChainQuery(keyspace=KEYSPACE, chunk_hashes=b"".join(self.hashes[: count or None]), shards=SHARDS)

    def _metadata(self, index: int) -> PageMetadata:
        parent = self.hashes[index - 1] if index else bytes(16)
        return PageMetadata(parent_hash=parent, chunk_index=index, group_head_hash=self.hashes[index - index % 16])


class HealingCluster:
    """What the tests of healing and fencing run on."""

    def __init__(self, directory: Path, shm: Path, redis: RedisServer, lease_ttl_s: float) -> None:
        self._lease_ttl_ms = int(lease_ttl_s * 1e3)
        self._directory, self._shm, self.redis = directory, shm, redis
        self.indexes = [self.start_index(f"index{number}") for number in range(2)]
        endpoints = ",".join(index.wait_ready()["endpoint"] for index in self.indexes)
        self.store = Process(
            "kvpool_pagestore",
            directory / "store",
            *("--data-dir", str(directory / "store" / "data"), "--index-endpoints", endpoints, "--tenant", TENANT),
            *("--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--host-id", "a"),
            *("--socket", str(shm / "store.sock"), "--session-dir", str(shm), "--arena-bytes", str(32 << 20)),
            *("--segment-bytes", str(4 << 20), "--disk-bytes", str(256 << 20), "--linger-ms", "1"),
            *("--reconcile-interval-ms", str(int(INTERVAL_S * 1e3)), "--index-timeout-ms", "1000"),
            *("--heartbeat-interval-ms", "5000"),
        )

    def start_index(self, name: str) -> Process:
        return Process(
            "kvpool_index",
            self._directory / name,
            *("--listen", "127.0.0.1:0", "--tenant", TENANT, "--lease-ttl-ms", str(self._lease_ttl_ms)),
            *("--redis-timeout-ms", SERVICES_MS),
            variables={"KVPOOL_INDEX_REDIS_URL": self.redis.url},
        )

    def client(self, number: int = 0) -> IndexClient:
        """Of one replica alone."""
        return IndexClient(patient(index_endpoints=(self.indexes[number].ready["endpoint"],)))

    async def session(self) -> PageStoreSession:
        plan = SessionPlan(endpoint=f"unix:{self._shm / 'store.sock'}", peer_name="test", keyspaces=KEYSPACES)
        return await PageStoreSession.open(plan, CLIENT)

    @asynccontextmanager
    async def control(self) -> AsyncIterator[PageStoreControl]:
        made = PageStoreControl(f"unix:{self._shm / 'store.sock'}", CLIENT)
        yield made
        await made.close()

    def kill_all(self) -> None:
        for process in (*self.indexes, self.store):
            process.kill()


@asynccontextmanager
async def healing_cluster(directory: Path, lease_ttl_s: float = 6.0) -> AsyncIterator[HealingCluster]:
    """Everything is ended, and removed from shared memory, with the block.

    lease_ttl_s: a store that is not to be lost may not stand still for so long.
    """
    shm = Path(tempfile.mkdtemp(prefix="kvpool-test-", dir="/dev/shm"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        redis = stack.enter_context(running_redis())
        cluster = HealingCluster(directory, shm, redis, lease_ttl_s)
        stack.callback(cluster.kill_all)
        await asyncio.to_thread(cluster.store.wait_ready)
        yield cluster


async def store_chunks(session: PageStoreSession, chain: MadeChain, indexes: Sequence[int]) -> None:
    """Write both pages of chunks."""
    for start in range(0, len(indexes), 16):
        items = chain.items(indexes[start : start + 16])
        results = await session.reserve(items)
        leases = []
        for item, result in zip(items, results, strict=True):
            assert result.slot is not None, result
            with session.slot_view(*result.slot.place) as view:
                fill_page(view, item.key)
            leases.append(result.slot.lease_id)
        assert await session.commit(leases) == []


async def matched(client: IndexClient, chain: MadeChain) -> int:
    """Chunks matched; -1 if the index cannot tell now."""
    try:
        return (await client.match(chain.query())).matched_chunks
    except KvPoolError:
        return -1


def metric(process: Process, name: str) -> float:
    """One figure of a process."""
    with urllib.request.urlopen(process.ready["metrics_url"], timeout=60) as answer:
        text = answer.read().decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")))


async def open_keyspace(client: IndexClient) -> None:
    opened = await client.open_keyspace("test", SPEC)
    assert opened.keyspace == KEYSPACE
