"""All stores of the index, behind one fixture: every contract test runs on each."""

import secrets
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from kvpool.core.cluster import NodeLoad
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.adapters.redis_store import RedisIndexStore, open_deployment
from kvpool_index.core.nodes import Renewal
from kvpool_index.ports import IndexStore
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis_server import redis_server as redis_server
from tests.fixtures.redis_topologies import redis_cluster as redis_cluster
from tests.fixtures.redis_topologies import redis_sentinels as redis_sentinels

LEASE_MS = 60_000
_RECORD = struct.Struct("<QIQIQBB")  # of register_node.lua; the fifth is the end of the lease
_TIMEOUT_S = PATIENCE_S  # the tests are not about it, and the machine may be busy


@dataclass(frozen=True)
class Harness:
    """A store and the way its time passes. `peer` is a second client of the same store, as another replica has it."""

    store: IndexStore
    peer: IndexStore
    let_leases_end: Callable[[], Awaitable[None]]


@pytest.fixture(params=["memory", "redis_server", "redis_sentinels", "redis_cluster"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    if request.param == "memory":
        clock = ManualClock()
        store = MemoryIndexStore(clock, chunk_stream_count=2, stream_entries=8)

        async def advance() -> None:
            clock.advance(LEASE_MS / 1000 + 0.001)

        yield Harness(store, store, advance)
        return
    url: str = request.getfixturevalue(request.param).url
    prefix = f"t{secrets.token_hex(6)}"
    first, second = (
        RedisIndexStore(url, timeout_s=_TIMEOUT_S, key_prefix=prefix, chunk_stream_count=2, stream_entries=8)
        for _ in range(2)
    )

    yield Harness(first, second, lambda: end_leases(url, prefix))
    await first.close()
    await second.close()


async def renew(
    store: IndexStore, node_id: bytes, incarnation: int, load: NodeLoad | None, *, lease_ttl_ms: int
) -> None:
    """Renew one lease. Raises what it was refused for."""
    one = Renewal(node_id=node_id, incarnation=incarnation, load=load, lease_ttl_ms=lease_ttl_ms)
    (refusal,) = await store.nodes.renew([one])
    if refusal is not None:
        raise refusal


async def end_leases(url: str, prefix: str) -> None:
    """Put the end of every lease into the past: Redis's own clock cannot be moved."""
    deployment = open_deployment(url, timeout_s=_TIMEOUT_S, max_in_flight=1)
    connections, key = deployment.connection_group(), f"{prefix}:{{n}}:records".encode()
    flat = await connections.call(key, b"HGETALL", key)
    for node_id, packed in zip(flat[::2], flat[1::2], strict=True):
        fields = list(_RECORD.unpack(packed))
        fields[4] = time.time_ns() // 1000 - 1000  # Redis runs on this machine, by the same clock
        await connections.call(key, b"HSET", key, node_id, _RECORD.pack(*fields))
    await deployment.close()
