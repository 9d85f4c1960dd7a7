"""What the index does with one Redis that hangs, goes, refuses, or is set up wrongly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvpool.core.errors import KvPoolError, Overloaded, StoreUnavailable
from kvpool.testing import eventually
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.core.redis_stats import PROBLEMS
from tests.fixtures.index_server import running_index
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.redis_topologies import ask

pytestmark = pytest.mark.e2e

TIMEOUT_S = 0.3
SLACK_S = 1.0


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis(shared: RedisServer) -> Iterator[RedisServer]:
    """A server that a test may stop; it runs again afterwards."""
    yield shared
    shared.resume()


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[RedisIndexStore]:
    made = RedisIndexStore(redis.url, timeout_s=TIMEOUT_S, max_in_flight=8)
    yield made
    await made.close()


async def append(store: RedisIndexStore) -> None:
    await store.events.append([(0, b"payload")])


async def failures(store: RedisIndexStore, count: int) -> list[KvPoolError]:
    """The errors of as many calls at once."""
    outcomes = await asyncio.gather(*(append(store) for _ in range(count)), return_exceptions=True)
    assert all(isinstance(outcome, KvPoolError) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, KvPoolError)]


@pytest.mark.parametrize("connected", [True, False])
async def test_a_redis_that_hangs_costs_each_call_its_timeout(
    redis: RedisServer, store: RedisIndexStore, connected: bool
) -> None:
    if connected:
        await eventually(lambda: works(store))
    redis.pause()

    async def all_fail_in_time() -> bool:
        """Whether they did, unless this machine stood still meanwhile."""
        started_at_s = time.monotonic()
        errors = await failures(store, 8)
        assert all(isinstance(error, StoreUnavailable) for error in errors)
        return time.monotonic() - started_at_s < TIMEOUT_S + SLACK_S

    for _ in range(2):
        await eventually(all_fail_in_time)
    redis.resume()
    await eventually(lambda: works(store))


async def works(store: RedisIndexStore) -> bool:
    try:
        await append(store)
    except StoreUnavailable:
        return False
    return True


async def test_who_waits_for_a_connection_is_counted_too(redis: RedisServer, store: RedisIndexStore) -> None:
    redis.pause()
    kinds = [type(error) for error in await failures(store, 20)]
    assert kinds.count(StoreUnavailable) == 8 and kinds.count(Overloaded) == 12


async def test_closing_ends_what_waits_with_an_error(redis: RedisServer, store: RedisIndexStore) -> None:
    redis.pause()
    for _ in range(2):
        calls = [asyncio.create_task(append(store)) for _ in range(3)]
        await asyncio.sleep(0)
        await store.close()
        for call in calls:
            with pytest.raises(StoreUnavailable, match="not wanted any more"):
                await call


async def test_a_redis_that_is_gone_is_not_stormed(redis: RedisServer, store: RedisIndexStore) -> None:
    await eventually(lambda: works(store))
    redis.kill()
    started_at_s, calls = time.monotonic(), 0
    while time.monotonic() < started_at_s + 1.0 or store.redis.failed_connects < 3:
        await failures(store, 8)
        calls += 8
    attempts, passed_s = store.redis.failed_connects, time.monotonic() - started_at_s
    assert attempts <= 20 + passed_s * 20 and calls >= attempts, "pauses of 5 ms to 150 ms, with jitter"
    redis.start()
    await eventually(lambda: works(store))
    assert store.redis.reconnects >= 1


async def test_a_master_that_became_a_replica_is_left(redis: RedisServer) -> None:
    store = RedisIndexStore(redis.url, timeout_s=PATIENCE_S)
    await append(store)
    ask(redis.port, "REPLICAOF", "127.0.0.1", "1")
    connects = store.redis.connects
    with pytest.raises(StoreUnavailable, match="READONLY"):
        await append(store)
    ask(redis.port, "REPLICAOF", "NO", "ONE")
    await append(store)
    assert store.redis.connects == connects + 1, "by a new connection, which may lead elsewhere"
    await store.close()


async def test_what_is_set_up_wrongly_is_reported(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    ask(redis.port, "CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru")
    store = RedisIndexStore(redis.url, wait_replicas=1)
    async with running_index(store) as index:
        await eventually(lambda: index.metric("kvpool_index_redis_masters_up") == 1)

        def problems() -> set[str]:
            return {kind for kind in PROBLEMS if index.metric("kvpool_index_redis_problem", kind=kind)}

        await eventually(lambda: problems() == {"eviction", "no_persistence", "missing_replicas"})
    assert "maxmemory-policy is allkeys-lru" in caplog.text
    await store.close()
    ask(redis.port, "CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")


async def test_memory_that_is_nearly_used_up_is_reported_before_it_is(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    ask(redis.port, "CONFIG", "SET", "maxmemory", "1mb", "maxmemory-policy", "noeviction")
    store = RedisIndexStore(redis.url)
    async with running_index(store) as index:
        await eventually(lambda: index.metric("kvpool_index_redis_problem", kind="full") == 1)
    assert "of 1 MiB are used" in caplog.text
    await store.close()
    ask(redis.port, "CONFIG", "SET", "maxmemory", "0")
