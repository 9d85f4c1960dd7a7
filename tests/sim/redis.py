"""A simulated Redis: the index's store in memory, behind a network that delays, loses answers, and may wipe it.

Every change of one chunk is atomic and no more, as with the scripts on a real Redis.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from kvpool.core.clock import Clock
from kvpool.core.cluster import UNNUMBERED, NodeInfo, RegistrationAttempt
from kvpool.core.errors import StoreUnavailable
from kvpool_index.adapters.memory import MemoryLocationStore
from kvpool_index.adapters.memory_nodes import (
    MemoryEventLog,
    MemoryKeyspaceRegistry,
    MemoryNodeDirectory,
    MemoryPolicyRegistry,
)
from kvpool_index.core.events import ORIGIN, LogEntry, entry_order
from kvpool_index.core.nodes import NodeRecord
from kvpool_index.ports import NodeGrant
from tests.sim.loop import SimLoop
from tests.sim.network import Network

_STREAMS = 5
_STREAM_ENTRIES = 512
_IDS_APART = 1_000_000  # more than a history has events


class SimEventLog(MemoryEventLog):
    """An event log that can be copied, and whose ids can jump: in Redis they are times."""

    def __init__(self) -> None:
        super().__init__(stream_count=_STREAMS, max_entries=_STREAM_ENTRIES)
        self.jumped = 0  # how far ids are above the count of entries from now on
        self._appended: list[tuple[int, bytes, int]] = []  # stream, payload, and `jumped` then
        self._jumped: list[list[int]] = [[] for _ in range(_STREAMS)]  # the same of each entry that a stream ever had

    def __deepcopy__(self, memo: dict[int, object]) -> SimEventLog:
        """Return a log that nobody waits at; those who wait for entries of this one go on doing so."""
        copied = SimEventLog()
        for stream, payload, copied.jumped in self._appended:
            copied.append_now(stream, payload)
        copied.jumped = self.jumped
        return copied

    def append_now(self, stream: int, payload: bytes) -> None:
        self._appended.append((stream, payload, self.jumped))
        self._jumped[stream].append(self.jumped)
        super().append_now(stream, payload)

    async def tails(self) -> tuple[str, ...]:
        return tuple(_entry_id(_number(entry_id) + self.jumped) for entry_id in await super().tails())

    async def read(self, stream: int, after: str, *, limit: int, wait_s: float) -> list[LogEntry]:
        number = _number(after) - self.jumped
        if number < 0:  # from before a jump: all that is there comes after it
            number, wait_s = 0, 0.0
        numbers = [
            (_number(entry.entry_id), entry)
            for entry in await super().read(stream, _entry_id(number), limit=limit, wait_s=wait_s)
        ]
        jumped = self._jumped[stream]
        return [replace(entry, entry_id=_entry_id(number + jumped[number - 1])) for number, entry in numbers]

    async def is_kept(self, stream: int, entry_id: str) -> bool:
        number = _number(entry_id) - self.jumped
        return number >= 0 and await super().is_kept(stream, _entry_id(number))


def _number(entry_id: str) -> int:
    return entry_order(entry_id)[0]


def _entry_id(number: int) -> str:
    return f"{number}-0" if number else ORIGIN


class SimNodes(MemoryNodeDirectory):
    """A directory that remembers by which attempt each node was registered last."""

    def __init__(self, clock: Clock, events: SimEventLog) -> None:
        super().__init__(clock, events)
        self.attempts: dict[bytes, RegistrationAttempt] = {}

    async def register(
        self,
        info: NodeInfo,
        *,
        attempt: RegistrationAttempt = UNNUMBERED,
        **more: Any,
    ) -> NodeGrant:
        grant = await super().register(info, attempt=attempt, **more)
        if not grant.is_repeat:
            self.attempts[info.node_id] = attempt
        return grant

    async def find(self, node_id: bytes) -> NodeRecord | None:
        """Return what is known of one node."""
        return next((record for record in await self.snapshot() if record.info.node_id == node_id), None)


class SimStore:
    """What the server holds: the index's store in memory, of parts that can be copied and asked."""

    def __init__(self, clock: Clock) -> None:
        self.events = SimEventLog()
        self.nodes = SimNodes(clock, self.events)
        self.keyspaces = MemoryKeyspaceRegistry(clock)
        self.policies = MemoryPolicyRegistry(clock)
        self.locations = MemoryLocationStore(clock, self.nodes)


class SimRedis:
    """The server. `store` is replaced when it is wiped."""

    def __init__(self, loop: SimLoop, network: Network, clock: Clock) -> None:
        self.loop, self.network = loop, network
        self._clock = clock
        self.store = SimStore(clock)
        self.down_until_s = 0.0
        self.loss = 0.0  # of calls whose answer is lost
        self.has_forgotten = False  # anything that it had acknowledged
        self._saved: SimStore | None = None

    def wipe(self) -> None:
        """FLUSHALL."""
        self.has_forgotten = True
        self._go_on_with(SimStore(self._clock))

    def save(self) -> None:
        """What a failover would fall back to."""
        self._saved = copy.deepcopy(self.store)

    def roll_back(self) -> None:
        """A failover that lost what was acknowledged since `save`."""
        if self._saved is not None:
            self.has_forgotten = True
            saved, self._saved = self._saved, None
            self._go_on_with(saved)

    def _go_on_with(self, store: SimStore) -> None:
        """Ids of events that come now are higher than all before, those that are lost too."""
        store.events.jumped = self.store.events.jumped + _IDS_APART
        self.store = store

    async def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        await self.reach()
        result = await getattr(getattr(self.store, part), method)(*args, **kwargs)
        await self.answer()
        return result

    async def reach(self) -> None:
        """A request is on its way to the server. Raises StoreUnavailable if it is lost."""
        if self.network.chance(0.6):  # else the answer takes all the time
            await asyncio.sleep(self.network.delay_s())
        if self.loop.time() < self.down_until_s:
            await asyncio.sleep(0.5 if self.network.chance(0.5) else 0.0)
            raise StoreUnavailable("planted: the store is down")
        if self.network.chance(self.loss / 2):
            raise StoreUnavailable("planted: the request was lost")

    async def answer(self) -> None:
        """An answer is on its way back. Raises StoreUnavailable if it is lost."""
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
        await self._redis.reach()
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
        await self._redis.reach()
        async for step in getattr(getattr(self._redis.store, self._name), method)(*args, **kwargs):
            yield step


class _Locations(_Part):
    async def apply(self, fence: Any, operations: Sequence[Any]) -> list[Any]:
        """Chunk by chunk: what was applied before a failure stays."""
        await self._redis.reach()
        states: list[Any] = []
        for operation in operations:
            if self._redis.network.chance(0.2):
                await asyncio.sleep(self._redis.network.delay_s())
            states += await self._redis.store.locations.apply(fence, [operation])
        await self._redis.answer()
        return states


class _Events(_Part):
    @property
    def stream_count(self) -> int:
        return self._redis.store.events.stream_count

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        return await self._redis.store.events.read(*args, **kwargs)
