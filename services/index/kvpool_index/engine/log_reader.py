"""The one reader of the event log in a replica, and what log entries mean to watchers."""

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from operator import ge
from typing import Final, TypeVar

from kvpool.core.cluster import ChunkEvent, Location, NodeEvent
from kvpool.core.coverage import Coverage
from kvpool.core.errors import InvalidRequest, Overloaded, StoreUnavailable
from kvpool_index.core.entries import ordinals_in
from kvpool_index.core.events import (
    ChunkState,
    EntryEvents,
    LogEntry,
    NodeState,
    OwnedEvent,
    Position,
    entry_order,
    events_of_entries,
    unpack_chunks,
    unpack_node,
)
from kvpool_index.core.match import locations_of
from kvpool_index.engine.keyspaces import KeyspaceService, KnownKeyspace
from kvpool_index.engine.nodes import NodeService
from kvpool_index.ports import EventLog

T = TypeVar("T")

_log = logging.getLogger(__name__)

_READ_WAIT_S: Final = 5.0
_READ_ENTRIES: Final = 64
_RETRY_S: Final = 1.0
_END_TRIES: Final = 50
_END_WAIT_S: Final = 0.02


class LogReader:
    """Reads each stream of the log once, for all watchers of this replica, while it is started."""

    def __init__(
        self,
        log: EventLog,
        nodes: NodeService,
        keyspaces: KeyspaceService,
        *,
        deliver: Callable[[Sequence[EntryEvents]], None],
        lose: Callable[[], None],
    ) -> None:
        """deliver: takes news in the order of their stream. lose: the log has a gap; what follows comes after it."""
        self._event_log = log
        self._nodes = nodes
        self._keyspaces = keyspaces
        self._deliver = deliver
        self._lose = lose
        self._readers: list[asyncio.Task[None]] = []
        self._read_up_to = Position(())
        self._interrupted: set[int] = set()  # streams whose latest read failed

    @property
    def position(self) -> Position:
        """Where the readers are; everything before it has been delivered."""
        return self._read_up_to

    async def start(self) -> None:
        """Read from now on; nothing if it is started."""
        if self._readers:
            return
        self._read_up_to = Position(await self._event_log.tails())
        self._readers = [
            asyncio.create_task(self._read_stream(stream), name=f"watch-{stream}")
            for stream in range(self._event_log.stream_count)
        ]

    def stop(self) -> list[asyncio.Task[None]]:
        """Stop reading; returns the tasks that are ending."""
        readers, self._readers = self._readers, []
        self._interrupted.clear()
        for reader in readers:
            reader.cancel()
        return readers

    async def reaches_end(self) -> bool:
        """Whether everything that is in the log now is delivered within a second. Raises StoreUnavailable."""
        before = self._read_up_to.entry_ids
        tails = [entry_order(tail) for tail in await self._event_log.tails()]
        # A log that ends before where we were was wiped or rolled back: its reader will find the gap.
        if any(tail < entry_order(was) for tail, was in zip(tails, before, strict=True)):
            return False
        for _ in range(_END_TRIES):
            if all(map(ge, map(entry_order, self._read_up_to.entry_ids), tails)):
                return True
            await asyncio.sleep(_END_WAIT_S)
        return False

    async def catch_up(self, wanted: Position, present: Position) -> AsyncGenerator[EntryEvents | None, None]:
        """What happened between two positions, the streams one after the other; None and the end where some is gone."""
        if len(wanted.entry_ids) != len(present.entry_ids):
            yield None  # of a log with other partitions
            return
        position = wanted
        for stream, until in enumerate(present.entry_ids):
            while (after := position.entry_ids[stream]) != until:
                entries = await self._event_log.read(stream, after, limit=_READ_ENTRIES, wait_s=0)
                if not await self._event_log.is_kept(stream, after):
                    yield None
                    return
                entries = [entry for entry in entries if entry_order(entry.entry_id) <= entry_order(until)]
                if not entries:
                    break
                owned = await self._decoded_or_none(stream, after, entries)
                if owned is None:
                    yield None
                    return
                for news in events_of_entries(entries, stream, position, owned):
                    yield news
                position = position.advanced(stream, entries[-1].entry_id)

    async def _read_stream(self, stream: int) -> None:
        while True:
            after = self._read_up_to.entry_ids[stream]
            try:
                entries = await self._event_log.read(stream, after, limit=_READ_ENTRIES, wait_s=_READ_WAIT_S)
                # A log that came back empty or rolled back, or that outran this reader, has a gap after our position.
                is_kept = await self._event_log.is_kept(stream, after)
                if not is_kept:
                    self._advance(stream, (await self._event_log.tails())[stream])
                    self._lose()
                owned = await self._decoded_or_none(stream, after, entries) if is_kept and entries else None
            except Exception as error:
                self._interrupt(stream, error)
                await asyncio.sleep(_RETRY_S)
                continue
            self._resume(stream)
            if not is_kept or not entries:
                continue
            # Without an await in between: the other streams' readers move the position too.
            news = events_of_entries(entries, stream, self._read_up_to, owned) if owned is not None else None
            self._advance(stream, entries[-1].entry_id)
            if news is not None:
                self._deliver(news)
            else:
                self._lose()

    def _interrupt(self, stream: int, error: Exception) -> None:
        """Say that the log cannot be read: once, until all streams can be read again."""
        if not self._interrupted:
            foreseen = isinstance(error, StoreUnavailable | Overloaded)
            _log.warning("watching is interrupted: %s", error, exc_info=None if foreseen else error)
        self._interrupted.add(stream)

    def _resume(self, stream: int) -> None:
        if self._interrupted:
            self._interrupted.discard(stream)
            if not self._interrupted:
                _log.info("watching goes on")

    def _advance(self, stream: int, entry_id: str) -> None:
        self._read_up_to = self._read_up_to.advanced(stream, entry_id)

    async def _decoded_or_none(
        self, stream: int, after: str, entries: Sequence[LogEntry]
    ) -> dict[str, list[OwnedEvent]] | None:
        """`_owned`; None also for entries that cannot be decoded. Raises StoreUnavailable and Overloaded."""
        try:
            return await self._owned(stream, entries)
        except (StoreUnavailable, Overloaded):
            raise
        except Exception:
            _log.exception("an entry after %s of event stream %d cannot be read; watchers resynchronize", after, stream)
            return None

    async def _owned(self, stream: int, entries: Sequence[LogEntry]) -> dict[str, list[OwnedEvent]] | None:
        """By entry id, the events and whose they are; None where watchers have to resynchronize instead.

        A malformed entry of chunks is skipped. Receivers expect that: an index may also die between a change and its
        entry, and what they miss ends with the next change, or when a load that it misled drops it. Nothing says once
        more that a node has registered or died: without that entry all of its chunks would be taken wrongly until the
        next RESYNC, so that a malformed one of nodes makes one.
        """
        if stream == self._event_log.stream_count - 1:
            nodes = {entry.entry_id: self._unpacked(entry, unpack_node) for entry in entries}
            if None in nodes.values():
                _log.warning("an entry of the nodes' events is malformed; watchers resynchronize")
                return None
            return {each: [_node_event(node)] for each, node in nodes.items() if node is not None}
        states = {entry.entry_id: self._unpacked(entry, unpack_chunks) or () for entry in entries}
        values = {state.value for found in states.values() for state in found}
        await self._nodes.learn({ordinal for value in values for ordinal in ordinals_in(value)})
        keyspaces = {
            each: await self._keyspace(each) for each in {s.keyspace for found in states.values() for s in found}
        }
        owned: dict[str, list[OwnedEvent]] = {}
        for entry_id, found in states.items():
            owned[entry_id] = self._chunk_events(found, keyspaces)
            await asyncio.sleep(0)  # matches have their turn: all entries together take tens of milliseconds
        return owned

    def _unpacked(self, entry: LogEntry, unpack: Callable[[bytes], T]) -> T | None:
        """None for an entry that no index wrote."""
        try:
            return unpack(entry.payload)
        except (ValueError, struct.error, InvalidRequest, RecursionError) as error:
            self._event_log.count_malformed()
            _log.debug("entry %s of an event stream is malformed: %s", entry.entry_id, error)
            return None

    async def _keyspace(self, keyspace: bytes) -> KnownKeyspace | None:
        try:
            return await self._keyspaces.find(keyspace)
        except InvalidRequest as error:  # opened through an index of a later version, and of no use to watchers of ours
            _log.debug("keyspace %s cannot be read: %s", keyspace.hex(), error)
            return None

    def _chunk_events(
        self, states: Sequence[ChunkState], keyspaces: Mapping[bytes, KnownKeyspace | None]
    ) -> list[OwnedEvent]:
        found: list[OwnedEvent] = []
        live_node = self._nodes.table.registered_by_ordinal
        places: dict[tuple[bytes, bytes], tuple[Location, ...]] = {}  # most chunks are at one
        for keyspace_id, group_head, chunk_hash, value, version in states:
            keyspace = keyspaces[keyspace_id]
            if keyspace is None:
                continue  # it was never opened, so no watcher may see it
            locations = places.get((keyspace_id, value))
            if locations is None:
                locations = locations_of(value, whole=Coverage.of(keyspace.grid, 0), live_node=live_node)
                places[keyspace_id, value] = locations
            event = ChunkEvent(
                keyspace=keyspace_id,
                chunk_hash=chunk_hash,
                group_head_hash=group_head,
                locations=locations,
                version=version,
            )
            found.append((keyspace.tenant, event))
        return found


def _node_event(state: NodeState) -> OwnedEvent:
    return None, NodeEvent(node=state.info, alive=state.alive)
