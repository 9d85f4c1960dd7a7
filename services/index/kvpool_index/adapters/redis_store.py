"""The index's store over Redis, on a few pipelined connections to each master.

Matches have a lane for themselves, so that they do not queue behind batches of changes; leases and names have one, so
that they do not either; and every reader that waits for events has one, because nothing else gets through meanwhile.
"""

import asyncio
import time
from contextlib import suppress
from typing import Final

from kvpool.core.errors import Overloaded, StartupFailed, StoreUnavailable
from kvpool_index.adapters.redis_cluster import Cluster
from kvpool_index.adapters.redis_events import RedisEventLog
from kvpool_index.adapters.redis_health import RedisHealth
from kvpool_index.adapters.redis_lanes import OneMaster, RedisDeployment
from kvpool_index.adapters.redis_layout import RedisLayout
from kvpool_index.adapters.redis_link import LinkOptions, ReplicaWait, link_to
from kvpool_index.adapters.redis_locations import RedisLocationStore
from kvpool_index.adapters.redis_nodes import RedisKeyspaceRegistry, RedisNodeDirectory
from kvpool_index.adapters.redis_policies import RedisPolicyRegistry
from kvpool_index.adapters.redis_sentinel import SentinelMaster
from kvpool_index.adapters.redis_url import parse_redis_url
from kvpool_index.core.redis_stats import RedisStats

_TOMBSTONE_MS: Final = 60_000
_LOOK_INTERVAL_S: Final = 1.0


class RedisIndexStore:
    """IndexStore over Redis. Nothing is connected until it is used, so that Redis may come later than the index."""

    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.5,
        max_in_flight: int = 1024,
        key_prefix: str = "kvpool",
        chunk_stream_count: int = 4,
        stream_entries: int = 4096,
        wait_replicas: int = 0,
    ) -> None:
        """wait_replicas: that must have a batch of changes, within half of timeout_s, before it counts as applied.

        Raises StartupFailed for a URL that is none; the URL itself, which may hold a password, is not shown.
        """
        prefix = key_prefix.encode()
        self.redis = RedisStats()
        self._layout = RedisLayout(key_prefix)
        try:
            self.deployment = open_deployment(
                url, timeout_s=timeout_s, max_in_flight=max_in_flight, stats=self.redis, layout=self._layout
            )
        except (ValueError, OSError) as error:
            raise StartupFailed(f"redis_url cannot be used: {error}") from error
        wait_ms = max(1, int(timeout_s * 500))
        replicas = ReplicaWait(replica_count=wait_replicas, wait_ms=wait_ms) if wait_replicas else None
        lane = self.deployment.lane
        reads, changes, self._control = lane(), lane(replicas), lane()
        waiting = [lane() for _ in range(chunk_stream_count + 1)]
        self._health = RedisHealth(self._control, self.deployment.kind, self.redis, wait_replicas=wait_replicas)
        self.events = RedisEventLog(
            changes,
            self._control,
            waiting,
            key_prefix=prefix,
            chunk_stream_count=chunk_stream_count,
            max_entries=stream_entries,
        )
        self.nodes = RedisNodeDirectory(
            self._control, self.redis, key_prefix=prefix, event_key=self.events.node_key, event_entries=stream_entries
        )
        self.keyspaces = RedisKeyspaceRegistry(self._control, self.redis, key_prefix=prefix)
        self.policies = RedisPolicyRegistry(self._control, self.redis, key_prefix=prefix)
        self.locations = RedisLocationStore(reads, changes, self.nodes, key_prefix=prefix, tombstone_ms=_TOMBSTONE_MS)

    async def check_layout(self) -> None:
        with suppress(StoreUnavailable, Overloaded, ConnectionError):  # out of reach, or refused: the latter is noted
            replies = await self._control.exchange(self._layout.claim(), [self._layout.key] * 2)
            self._layout.take(replies[-1])
        self._layout.check()

    async def ping(self) -> float:
        started_at_s = time.perf_counter()
        for master in await self._control.masters():
            await master.call(b"PING")
        return time.perf_counter() - started_at_s

    async def run(self) -> None:
        """Look about once a second who the masters are and how they do; to be run as long as the store is used.

        Raises StartupFailed when its keys have come to be of another layout.
        """
        while True:
            await self.deployment.look()
            await self._health.look()
            await self.check_layout()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def close(self) -> None:
        await self.deployment.close()


def open_deployment(
    url: str,
    *,
    timeout_s: float,
    max_in_flight: int,
    stats: RedisStats | None = None,
    layout: RedisLayout | None = None,
) -> RedisDeployment:
    """What a URL leads to; connected when it is used. Raises ValueError and OSError, see parse_redis_url.

    layout: that its keys must have; None: any.
    """
    parsed = parse_redis_url(url)
    counted = stats if stats is not None else RedisStats()

    def options(*, masters_only: bool = False) -> LinkOptions:
        return LinkOptions(
            login=parsed.login,
            timeout_s=timeout_s,
            max_in_flight=max_in_flight,
            stats=counted,
            masters_only=masters_only,
            layout=layout,
        )

    if parsed.topology == "cluster":
        return Cluster(parsed.servers, options())
    if parsed.sentinel_login is not None:
        asking = LinkOptions(
            login=parsed.sentinel_login, timeout_s=timeout_s / 2, max_in_flight=max_in_flight, stats=RedisStats()
        )
        sentinels = [link_to(server, asking) for server in parsed.servers]
        return SentinelMaster(sentinels, parsed.service, options(masters_only=True))
    return OneMaster(parsed.servers[0], options())
