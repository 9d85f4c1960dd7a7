"""Both stores of the index, behind one fixture: every contract test runs on each."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from kvpool.testing import ManualClock, eventually
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.ports import IndexStore
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_server import redis_server as redis_server

LEASE_MS = 500  # short, because with Redis a lease ends by real time, but long enough for a busy machine


@dataclass(frozen=True)
class Harness:
    """A store and the way its time passes. `peer` is a second client of the same store, as another replica has it."""

    store: IndexStore
    peer: IndexStore
    let_leases_end: Callable[[], Awaitable[None]]


@pytest.fixture(params=["memory", "redis"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    if request.param == "memory":
        clock = ManualClock()
        store = MemoryIndexStore(clock, chunk_stream_count=2, stream_entries=8)

        async def advance() -> None:
            clock.advance(LEASE_MS / 1000 + 0.001)

        yield Harness(store, store, advance)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    prefix = f"t{secrets.token_hex(6)}"
    first, second = (
        RedisIndexStore(server.url, key_prefix=prefix, chunk_stream_count=2, stream_entries=8) for _ in range(2)
    )

    async def all_ended() -> bool:
        return all(record.lease_remaining_ms <= 0 for record in await first.nodes.snapshot())

    async def wait() -> None:
        ended: bool = await eventually(all_ended, message="leases do not end")
        assert ended

    yield Harness(first, second, wait)
    await first.close()
    await second.close()
