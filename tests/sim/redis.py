"""A simulated Redis: the index's store in memory, behind a network that delays, loses answers, and may wipe it.

Every change of one chunk is atomic and no more, as with the scripts on a real Redis.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvpool.core.errors import StoreUnavailable
from kvpool_index.adapters.memory import MemoryIndexStore
from tests.sim.loop import SimLoop
from tests.sim.network import Network

_IDS_APART = 1000


class SimRedis:
    """The server. `store` is replaced when it is wiped."""

    def __init__(self, loop: SimLoop, network: Network, make: Callable[[], MemoryIndexStore]) -> None:
        self.loop, self.network = loop, network
        self._make = make
        self.store = make()
        self.down_until_s = 0.0
        self.loss = 0.0  # of calls whose answer is lost
        self.has_forgotten = False  # anything that it had acknowledged
        self._saved: MemoryIndexStore | None = None

    def wipe(self) -> None:
        """FLUSHALL."""
        self.has_forgotten = True
        self._go_on_with(self._make())

    def save(self) -> None:
        """What a failover would fall back to."""
        self._saved = _copied(self.store)

    def roll_back(self) -> None:
        """A failover that lost what was acknowledged since `save`."""
        if self._saved is not None:
            self.has_forgotten = True
            saved, self._saved = self._saved, None
            self._go_on_with(saved)

    def _go_on_with(self, store: MemoryIndexStore) -> None:
        """Ids of events are times in Redis: those that come now are higher than all before, those that are lost too."""
        counts = self.store.events._counts
        store.events._counts = [count + _IDS_APART for count in counts]
        self.store = store

    async def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        await self._reach()
        result = await getattr(getattr(self.store, part), method)(*args, **kwargs)
        await self._return()
        return result

    async def _reach(self) -> None:
        if self.network.chance(0.6):  # else the answer takes all the time
            await asyncio.sleep(self.network.delay_s())
        if self.loop.time() < self.down_until_s:
            await asyncio.sleep(0.5 if self.network.chance(0.5) else 0.0)
            raise StoreUnavailable("planted: the store is down")
        if self.network.chance(self.loss / 2):
            raise StoreUnavailable("planted: the request was lost")

    async def _return(self) -> None:
        if self.network.chance(0.6):
            await asyncio.sleep(self.network.delay_s())
        if self.network.chance(self.loss):
            raise StoreUnavailable("planted: the answer was lost")


class SimIndexStore:
    """An IndexStore of one index process. Parts are what the port names; their methods pass through."""

    kind = "redis"
    redis = None  # no connections, so nothing to tell of them

    def __init__(self, redis: SimRedis) -> None:
        self._redis = redis
        self.locations = _Locations(redis, "locations")
        self.nodes = _Part(redis, "nodes")
        self.keyspaces = _Part(redis, "keyspaces")
        self.events = _Events(redis, "events")

    def __getattr__(self, name: str) -> Any:
        return _Part(self._redis, name)

    async def check_layout(self) -> None:
        return None

    async def ping(self) -> float:
        await self._redis._reach()
        return 0.0

    async def run(self) -> None:
        return None

    async def close(self) -> None:
        return None


class _Part:
    def __init__(self, redis: SimRedis, name: str) -> None:
        self._redis, self._name = redis, name

    def __getattr__(self, method: str) -> Any:
        if inspect.isasyncgenfunction(getattr(getattr(self._redis.store, self._name), method)):
            return lambda *args, **kwargs: self._iterate(method, *args, **kwargs)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._redis.call(self._name, method, *args, **kwargs)

        return call

    async def _iterate(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await self._redis._reach()
        async for step in getattr(getattr(self._redis.store, self._name), method)(*args, **kwargs):
            yield step


class _Locations(_Part):
    async def apply(self, fence: Any, operations: Sequence[Any]) -> list[Any]:
        """Chunk by chunk: what was applied before a failure stays."""
        await self._redis._reach()
        states: list[Any] = []
        for operation in operations:
            if self._redis.network.chance(0.2):
                await asyncio.sleep(self._redis.network.delay_s())
            states += await self._redis.store.locations.apply(fence, [operation])
        await self._redis._return()
        return states


class _Events(_Part):
    @property
    def stream_count(self) -> int:
        return self._redis.store.events.stream_count

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        return await self._redis.store.events.read(*args, **kwargs)


def _copied(store: MemoryIndexStore) -> MemoryIndexStore:
    kept: dict[int, Any] = {}
    clock = store.nodes._clock
    kept[id(clock)] = clock
    for event in store.events._grown:
        kept[id(event)] = event
    return copy.deepcopy(store, kept)
