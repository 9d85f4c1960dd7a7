"""Watch streams: one reader of each log stream a replica, fanned out to watchers with bounded buffers."""

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.cluster import ChunkEvent, IndexEvent, NodeEvent, ResyncEvent
from kvpool.core.errors import Overloaded, StoreUnavailable
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import decode_value
from kvpool_index.core.events import (
    ChunkState,
    LogEntry,
    Position,
    WatchBuffer,
    entry_order,
    unpack_chunks,
    unpack_node,
)
from kvpool_index.core.match import locations_of
from kvpool_index.engine_keyspaces import KeyspaceService
from kvpool_index.engine_nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import EventLog

_log = logging.getLogger(__name__)

_READ_WAIT_S: Final = 5.0
_READ_ENTRIES: Final = 64
_RETRY_S: Final = 1.0

_BEHIND: Final = "this receiver fell behind"
_NOT_KEPT: Final = "the position to resume from is no longer kept"
_LOG_GAP: Final = "the log of events has a gap"


@dataclass(frozen=True, slots=True)
class _Happening:
    """One event of one log entry. `last` marks the entry's last event: only then has the entry been received."""

    stream: int
    entry_id: str
    last: bool
    tenant: str | None  # None: for everybody
    event: ChunkEvent | NodeEvent


@dataclass(slots=True, eq=False)
class _Watcher:
    tenant: str
    keyspace: bytes
    buffer: WatchBuffer[_Happening]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    lost_because: str = _BEHIND

    def wants(self, happening: _Happening) -> bool:
        if happening.tenant is None:
            return True
        event = happening.event
        mine = happening.tenant == self.tenant
        return mine and not (self.keyspace and isinstance(event, ChunkEvent) and event.keyspace != self.keyspace)


class WatchService:
    """Serves watchers. Reads the log only while there are any."""

    def __init__(
        self,
        log: EventLog,
        nodes: NodeService,
        keyspaces: KeyspaceService,
        config: IndexConfig,
        metrics: IndexMetrics,
    ) -> None:
        self._event_log = log
        self._nodes = nodes
        self._keyspaces = keyspaces
        self._config = config
        self._metrics = metrics
        self._watchers: set[_Watcher] = set()
        self._readers: list[asyncio.Task[None]] = []
        self._read_up_to: list[str] = []
        self._starting = asyncio.Lock()

    async def watch(self, tenant: str, after_position: str, keyspace: bytes) -> AsyncGenerator[IndexEvent, None]:
        """Events after a position, or from now. Raises InvalidRequest, KeyspaceUnknown, Overloaded."""
        if keyspace:
            await self._keyspaces.get(tenant, keyspace)
        wanted = Position.parse(after_position) if after_position else None
        if len(self._watchers) >= self._config.max_watchers:
            raise Overloaded(f"{self._config.max_watchers} watchers are open already")
        watcher = _Watcher(tenant, keyspace, WatchBuffer(self._config.watch_buffer_events))
        async with self._starting:
            await self._start_readers()
            self._watchers.add(watcher)
            present = Position(tuple(self._read_up_to))
        self._metrics.watchers.set(len(self._watchers))
        try:
            async with aclosing(self._events(watcher, wanted, present)) as events:
                async for event in events:
                    yield event
        finally:
            self._watchers.discard(watcher)
            self._metrics.watchers.set(len(self._watchers))
            if not self._watchers:
                self._stop_readers()

    async def _events(
        self, watcher: _Watcher, wanted: Position | None, present: Position
    ) -> AsyncGenerator[IndexEvent, None]:
        position = present
        if wanted is not None:
            position = wanted if len(wanted.entry_ids) == len(present.entry_ids) else present
            async for happening in self._catch_up(wanted, present):
                if happening is None:
                    position = present
                    yield self._resync(position, _NOT_KEPT)
                elif watcher.wants(happening):
                    position, event = _step(position, happening)
                    yield event
            position = present
        while True:
            if not watcher.buffer.has_news:
                watcher.news.clear()
                await watcher.news.wait()
            lost, happenings = watcher.buffer.take()
            if lost:
                if not happenings:
                    position = Position(tuple(self._read_up_to))
                yield self._resync(position, watcher.lost_because)
                watcher.lost_because = _BEHIND
            for happening in happenings:
                position, event = _step(position, happening)
                yield event

    def _resync(self, position: Position, cause: str) -> IndexEvent:
        self._metrics.watch_resyncs.inc()
        return IndexEvent(position=str(position), event=ResyncEvent(cause=cause))

    async def _catch_up(self, wanted: Position, present: Position) -> AsyncGenerator[_Happening | None, None]:
        """What happened between two positions, the streams one after the other; None and the end where some is gone."""
        if len(wanted.entry_ids) != len(present.entry_ids):
            yield None  # of a log with other partitions
            return
        for stream, (after, until) in enumerate(zip(wanted.entry_ids, present.entry_ids, strict=True)):
            while after != until:
                entries = await self._event_log.read(stream, after, limit=_READ_ENTRIES, wait_s=0)
                if not await self._event_log.is_kept(stream, after):
                    yield None
                    return
                entries = [entry for entry in entries if entry_order(entry.entry_id) <= entry_order(until)]
                if not entries:
                    break
                for happening in await self._happenings(stream, entries):
                    yield happening
                after = entries[-1].entry_id

    async def _start_readers(self) -> None:
        if self._readers:
            return
        self._read_up_to = list(await self._event_log.tails())
        self._readers = [
            asyncio.create_task(self._read_stream(stream), name=f"watch-{stream}")
            for stream in range(self._event_log.stream_count)
        ]

    def _stop_readers(self) -> None:
        for reader in self._readers:
            reader.cancel()
        self._readers = []

    async def close(self) -> None:
        """End the readers; watchers get nothing any more."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _read_stream(self, stream: int) -> None:
        while True:
            after = self._read_up_to[stream]
            try:
                entries = await self._event_log.read(stream, after, limit=_READ_ENTRIES, wait_s=_READ_WAIT_S)
                # A log that came back empty or rolled back, or that outran this reader, has a gap after our position.
                if not await self._event_log.is_kept(stream, after):
                    self._read_up_to[stream] = (await self._event_log.tails())[stream]
                    self._lose()
                    continue
                happenings = await self._happenings(stream, entries) if entries else []
            except (StoreUnavailable, Overloaded) as error:
                _log.warning("watching is interrupted: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            except (struct.error, ValueError, KeyError):
                _log.exception(
                    "an entry after %s of event stream %d cannot be read; watchers start afresh", after, stream
                )
                self._read_up_to[stream] = entries[-1].entry_id
                self._lose()
                continue
            if entries:
                self._read_up_to[stream] = entries[-1].entry_id
                self._deliver(happenings)

    def _deliver(self, happenings: Sequence[_Happening]) -> None:
        for watcher in self._watchers:
            watcher.buffer.put([happening for happening in happenings if watcher.wants(happening)])
            if watcher.buffer.has_news:
                watcher.news.set()

    def _lose(self) -> None:
        for watcher in self._watchers:
            watcher.lost_because = _LOG_GAP
            watcher.buffer.lose()
            watcher.news.set()

    async def _happenings(self, stream: int, entries: Sequence[LogEntry]) -> list[_Happening]:
        if stream == self._event_log.stream_count - 1:
            return [self._node_happening(stream, entry) for entry in entries]
        states = [(entry, list(unpack_chunks(entry.payload))) for entry in entries]
        ordinals = {each.ordinal for _, found in states for state in found for each in decode_value(state.value)}
        await self._nodes.learn(ordinals)
        happenings: list[_Happening] = []
        for entry, found in states:
            for number, state in enumerate(found, start=1):
                happening = await self._chunk_happening(stream, entry, state, number == len(found))
                if happening is not None:
                    happenings.append(happening)
        return happenings

    async def _chunk_happening(self, stream: int, entry: LogEntry, state: ChunkState, last: bool) -> _Happening | None:
        keyspace = await self._keyspaces.find(state.keyspace)
        if keyspace is None:
            return None  # nobody has opened it, so nobody may see it
        locations = locations_of(state.value, grid=keyspace.all_shards, live_node=self._nodes.live_node_now())
        event = ChunkEvent(
            keyspace=state.keyspace,
            chunk_hash=state.chunk_hash,
            group_head_hash=state.group_head,
            locations=locations,
            version=state.version,
        )
        return _Happening(stream, entry.entry_id, last, keyspace.tenant, event)

    def _node_happening(self, stream: int, entry: LogEntry) -> _Happening:
        state = unpack_node(entry.payload)
        return _Happening(stream, entry.entry_id, True, None, NodeEvent(node=state.info, alive=state.alive))


def _step(position: Position, happening: _Happening) -> tuple[Position, IndexEvent]:
    """The position after an event. Within an entry it stays before it, so that a resumed watch gets the whole entry."""
    if happening.last:
        position = position.advanced(happening.stream, happening.entry_id)
    return position, IndexEvent(position=str(position), event=happening.event)
