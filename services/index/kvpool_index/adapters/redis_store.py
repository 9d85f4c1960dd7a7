"""The index's store over Redis: one connection pool for calls and one for readers that wait."""

import time
from typing import Final

from kvpool.core.errors import StartupFailed
from kvpool_index.adapters.redis_events import RedisEventLog
from kvpool_index.adapters.redis_link import RedisLink
from kvpool_index.adapters.redis_locations import RedisLocationStore
from kvpool_index.adapters.redis_nodes import RedisKeyspaceRegistry, RedisNodeDirectory

_TOMBSTONE_MS: Final = 60_000


class RedisIndexStore:
    """IndexStore over one Redis. Nothing is connected until it is used, so that Redis may come later than the index."""

    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.5,
        connections: int = 32,
        key_prefix: str = "kvpool",
        chunk_stream_count: int = 4,
        stream_entries: int = 512,
    ) -> None:
        """Raises StartupFailed for a URL that is none; the URL itself, which may hold a password, is not shown."""
        prefix = key_prefix.encode()
        try:
            self._link = RedisLink(url, timeout_s=timeout_s, connections=connections)
            # Readers that wait hold their connections: a pool of their own keeps them from starving the calls.
            self._waiting = RedisLink(url, timeout_s=timeout_s, connections=2 * (chunk_stream_count + 1))
        except (ValueError, KeyError) as error:
            raise StartupFailed("redis_url must be redis://, rediss:// or unix:// with a valid address") from error
        self.events = RedisEventLog(
            self._link,
            self._waiting,
            key_prefix=prefix,
            chunk_stream_count=chunk_stream_count,
            max_entries=stream_entries,
        )
        self.nodes = RedisNodeDirectory(
            self._link, key_prefix=prefix, event_key=self.events.node_key, event_entries=stream_entries
        )
        self.keyspaces = RedisKeyspaceRegistry(self._link, key_prefix=prefix)
        self.locations = RedisLocationStore(self._link, self.nodes, key_prefix=prefix, tombstone_ms=_TOMBSTONE_MS)

    async def ping(self) -> float:
        started_at_s = time.perf_counter()
        await self._link.call(b"PING")
        return time.perf_counter() - started_at_s

    async def close(self) -> None:
        await self._waiting.close()
        await self._link.close()
