"""The index's store over Redis, on a few pipelined connections.

Matches have one for themselves, so that they do not queue behind batches of changes, and every reader that waits for
events has one, because nothing else gets through meanwhile.
"""

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
        max_in_flight: int = 1024,
        key_prefix: str = "kvpool",
        chunk_stream_count: int = 4,
        stream_entries: int = 512,
    ) -> None:
        """Raises StartupFailed for a URL that is none; the URL itself, which may hold a password, is not shown."""
        prefix = key_prefix.encode()
        try:
            reads, changes, *waiting = (
                RedisLink(url, timeout_s=timeout_s, max_in_flight=max_in_flight) for _ in range(chunk_stream_count + 3)
            )
        except (ValueError, OSError) as error:
            raise StartupFailed(f"redis_url cannot be used: {error}") from error
        self._links = (reads, changes, *waiting)
        self.events = RedisEventLog(
            changes, waiting, key_prefix=prefix, chunk_stream_count=chunk_stream_count, max_entries=stream_entries
        )
        self.nodes = RedisNodeDirectory(
            changes, key_prefix=prefix, event_key=self.events.node_key, event_entries=stream_entries
        )
        self.keyspaces = RedisKeyspaceRegistry(changes, key_prefix=prefix)
        self.locations = RedisLocationStore(reads, changes, self.nodes, key_prefix=prefix, tombstone_ms=_TOMBSTONE_MS)

    async def ping(self) -> float:
        started_at_s = time.perf_counter()
        await self._links[0].call(b"PING")
        return time.perf_counter() - started_at_s

    async def close(self) -> None:
        for link in self._links:
            await link.close()
