"""Watch streams: what the one reader of the log delivers, fanned out to watchers with bounded buffers."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvpool.core.clock import Clock
from kvpool.core.cluster import HeartbeatEvent, IndexEvent, ResyncEvent
from kvpool.core.errors import Overloaded, StoreUnavailable
from kvpool_index.config import IndexConfig
from kvpool_index.core.events import CheckedEnd, EntryEvents, Interest, Position, WatchBuffer
from kvpool_index.engine.keyspaces import KeyspaceService
from kvpool_index.engine.log_reader import LogReader
from kvpool_index.engine.nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import EventLog

_log = logging.getLogger(__name__)

_BEHIND: Final = "this receiver fell behind"
_NOT_KEPT: Final = "the position to resume from is no longer kept"
_LOG_GAP: Final = "the log of events has a gap"
_BEGINS: Final = "the watch begins"
_ENTRIES_TOGETHER: Final = 8  # in one message to a replica: some 500 chunks, which it learns in one turn of its loop
_HEARTBEAT_S: Final = 1.0
_NOT_READ_YET_S: Final = 0.1
_GAP_SPREAD_S: Final = 2.0  # without heartbeats a replica uses what it has for 3 s at most

_Item: TypeAlias = EntryEvents | CheckedEnd


@dataclass(slots=True, eq=False)
class _Watcher:
    interest: Interest
    for_replica: bool
    buffer: WatchBuffer[_Item]
    opened_at_s: float
    news: asyncio.Event = field(default_factory=asyncio.Event)
    lost_because: str = _BEHIND

    def put(self, news: Sequence[EntryEvents]) -> None:
        wanted = [each for each in news if each.wanted(self.interest)]
        if wanted:
            self.buffer.put(wanted, sum(len(each.wanted(self.interest)) for each in wanted))
            self.news.set()


class WatchService:
    """Serves watchers. Reads the log only while there are any."""

    def __init__(
        self,
        log: EventLog,
        nodes: NodeService,
        keyspaces: KeyspaceService,
        config: IndexConfig,
        metrics: IndexMetrics,
        clock: Clock,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """uniform: draws how long each watcher waits, when all have lost events at once."""
        self._uniform = uniform
        self._nodes = nodes
        self._keyspaces = keyspaces
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self.reader = LogReader(log, nodes, keyspaces, deliver=self._deliver, lose=self._lose)
        self._watchers: dict[_Watcher, None] = {}  # in the order in which they came
        self._by_peer: Counter[str] = Counter()  # watchers
        self._heartbeats: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def watch(
        self, tenant: str, after_position: str, keyspace: bytes, *, for_replica: bool = False, peer: str = ""
    ) -> AsyncGenerator[IndexEvent, None]:
        """Events after a position, or from now, until the iterator is closed. peer: the host that watches.

        Raises InvalidRequest, KeyspaceUnknown, Overloaded.
        """
        opened_at_s = self._clock.monotonic_s()
        if keyspace:
            await self._keyspaces.get(tenant, keyspace)
        wanted = Position.parse(after_position) if after_position else None
        buffer = WatchBuffer[_Item](self._config.watch_buffer_events)
        watcher = _Watcher(Interest(tenant, keyspace), for_replica, buffer, opened_at_s)
        async with self._starting:
            if len(self._watchers) >= self._config.max_watchers:
                raise Overloaded(f"{self._config.max_watchers} watchers are open already")
            if self._by_peer[peer] >= self._config.max_peer_watchers:
                raise Overloaded(f"{self._config.max_peer_watchers} watchers of {peer} are open already")
            await self.reader.start()
            self._by_peer[peer] += 1
            self._watchers[watcher] = None
            present = self.reader.position
        if for_replica and self._heartbeats is None:
            self._heartbeats = asyncio.create_task(self._beat(), name="watch-heartbeats")
        self._metrics.watchers.set(len(self._watchers))
        try:
            async with aclosing(self._events(watcher, wanted, present)) as events:
                async for event in events:
                    yield event
        finally:
            self._watchers.pop(watcher, None)
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
            self._metrics.watchers.set(len(self._watchers))
            if not self._watchers:
                self.reader.stop()
            if self._heartbeats is not None and not any(each.for_replica for each in self._watchers):
                self._heartbeats.cancel()
                self._heartbeats = None

    async def close(self) -> None:
        """End the readers and the heartbeats."""
        tasks = self.reader.stop()
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            tasks.append(self._heartbeats)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(
        self, watcher: _Watcher, wanted: Position | None, present: Position
    ) -> AsyncGenerator[IndexEvent, None]:
        if wanted is not None:
            async for news in self.reader.catch_up(wanted, present):
                if news is None:
                    yield await self._resync(watcher, present, _NOT_KEPT)
                    break
                for event in _events_of(watcher, [news]):
                    yield event
        elif watcher.for_replica:
            yield await self._resync(watcher, present, _BEGINS)
        while True:
            if not watcher.buffer.has_news:
                watcher.news.clear()
                await watcher.news.wait()
            lost, items = watcher.buffer.take()
            if lost:
                position = _before(items[0]) if items else self.reader.position
                cause, watcher.lost_because = watcher.lost_because, _BEHIND
                if cause == _LOG_GAP:  # of all watchers at once, whose questions then all come here
                    await asyncio.sleep(self._uniform(0.0, _GAP_SPREAD_S))
                yield await self._resync(watcher, position, cause)
            for group in _groups(watcher, items):
                if isinstance(group, CheckedEnd):
                    now_s = self._clock.monotonic_s()
                    heartbeat = HeartbeatEvent(
                        age_ms=max(0, round((now_s - group.checked_at_s) * 1e3)),
                        watch_age_ms=max(1, int((now_s - watcher.opened_at_s) * 1e3)),
                    )
                    yield IndexEvent(position=str(group.position), event=heartbeat)
                    continue
                for event in _events_of(watcher, group):
                    yield event

    async def _resync(self, watcher: _Watcher, position: Position, cause: str) -> IndexEvent:
        if cause != _BEGINS:
            self._metrics.watch_resyncs.inc()
        nodes = await self._nodes.registered_nodes() if watcher.for_replica else []
        return IndexEvent(position=str(position), event=ResyncEvent(cause=cause, nodes=tuple(nodes)))

    def _deliver(self, news: Sequence[EntryEvents]) -> None:
        for watcher in self._watchers:
            watcher.put(news)

    def _lose(self) -> None:
        for watcher in self._watchers:
            watcher.lost_because = _LOG_GAP
            watcher.buffer.lose()
            watcher.news.set()

    async def _beat(self) -> None:
        """Send replicas a heartbeat once a second, while the log's end is known and has been delivered."""
        while True:
            checked_at_s = self._clock.monotonic_s()
            try:
                read = await self.reader.reaches_end()
            except (StoreUnavailable, Overloaded):
                read = False  # its readers say so in the log
            if read:
                checked = CheckedEnd(checked_at_s, self.reader.position)
                for watcher in self._watchers:
                    if watcher.for_replica:
                        watcher.buffer.put([checked])
                        watcher.news.set()
            await asyncio.sleep(_HEARTBEAT_S if read else _NOT_READ_YET_S)


def _before(item: _Item) -> Position:
    return item.position if isinstance(item, CheckedEnd) else item.before


def _groups(watcher: _Watcher, items: Sequence[_Item]) -> Iterator[CheckedEnd | list[EntryEvents]]:
    """Items in their order; entries that go to a replica in one message are together."""
    together: list[EntryEvents] = []
    for item in items:
        if isinstance(item, EntryEvents) and watcher.for_replica and item.is_of_chunks(watcher.interest):
            if len(together) == _ENTRIES_TOGETHER:
                yield together
                together = []
            together.append(item)
            continue
        if together:
            yield together
            together = []
        yield item if isinstance(item, CheckedEnd) else [item]
    if together:
        yield together


def _events_of(watcher: _Watcher, news: Sequence[EntryEvents]) -> list[IndexEvent]:
    """What a watcher gets of an entry, or of several of chunks. Within it the position stays before it: a resumed watch
    gets all of it again."""
    last = news[-1]
    batch = news[0].batch(watcher.interest, news[1:]) if watcher.for_replica else None
    if batch is not None:
        return [IndexEvent(position=str(last.after), event=batch)]
    before, after = str(last.before), str(last.after)
    wanted = last.wanted(watcher.interest)
    return [
        IndexEvent(position=after if number == len(wanted) else before, event=event)
        for number, event in enumerate(wanted, start=1)
    ]
