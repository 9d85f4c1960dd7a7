"""Matches without a call: a bounded replica of the index's locations, kept current by a watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from enum import Enum

from kvpool.client.index import IndexClient
from kvpool.client.retry import Backoff
from kvpool.core.clock import Clock, SystemClock
from kvpool.core.cluster import CHAIN_GROUP_CHUNKS, ChainMatch, ChainQuery, MatchRun, ResyncEvent
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool_server.node.replica import ReplicaTable

_log = logging.getLogger(__name__)

_HASH_BYTES = 16
_LIST_TIMEOUT_S = 60.0
_LIST_AGAIN_S, _LIST_AGAIN_MAX_S = 1.0, 30.0  # after a listing that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Bounds of a replica."""

    capacity_bytes: int = 64 << 20  # of the table; about 200,000 chunks
    max_lag_s: float = 3.0  # nothing in it is used when the index has not confirmed it for so long
    # What was stored longer ago is never called absent. Confirmations come once a second, and take a moment.
    max_absence_lag_s: float = 1.5
    list_every_s: float = 300.0  # what is stored is listed again, because groups go

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "max_lag_s", "max_absence_lag_s", "list_every_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


class MatchedBy(Enum):
    """Who answered a match."""

    REPLICA = "replica"  # without a call: all chunks are known
    ABSENT = "absent"  # without a call: the first chunk that is not known, if not all, is known to be stored nowhere
    BOTH = "both"  # its beginning was known; a call for the rest
    INDEX = "index"


class LocationReplica:
    """Answers matches of opened keyspaces from memory as far as they are known, and asks the index for the rest, unless
    that begins with a chain group of which nothing is stored anywhere.

    Belongs to one event loop. What it says was so no longer than max_lag_s ago, and no longer than max_absence_lag_s if
    it says that chunks are absent; never after `note_stored` of them.
    """

    def __init__(
        self,
        index: IndexClient,
        config: ReplicaConfig,
        *,
        clock: Clock | None = None,
        on_match: Callable[[MatchedBy], None] = lambda matched_by: None,
        on_event: Callable[[LocationReplica], None] = lambda replica: None,
    ) -> None:
        """on_match and on_event: called after each match and each event, for metrics; must not block."""
        self._index = index
        self._clock = clock or SystemClock()
        self._on_match, self._on_event = on_match, on_event
        self._table = ReplicaTable(
            capacity_bytes=config.capacity_bytes,
            max_lag_s=config.max_lag_s,
            max_absence_lag_s=config.max_absence_lag_s,
        )
        self._list_every_s = config.list_every_s
        self._to_be_listed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.resync_count = 0  # fresh starts, the first one included
        self.listing_count = 0  # of what is stored; nothing is known to be absent before the first after a fresh start

    @property
    def used_bytes(self) -> int:
        """What the table takes."""
        return self._table.used_bytes

    @property
    def group_count(self) -> int:
        """Chain groups of 16 chunks that are known in part or whole."""
        return self._table.group_count

    @property
    def is_current(self) -> bool:
        """Whether what is known may be used now."""
        return self._table.is_current(self._clock.monotonic_s())

    def open_keyspace(self, keyspace: bytes, grid: ShardGrid) -> None:
        """Keep locations of this keyspace from now on; begins to watch."""
        if self._table.open_keyspace(keyspace, grid):
            self._to_be_listed.set()
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._follow(), name="location replica"),
                asyncio.create_task(self._list_at_times(), name="groups of the location replica"),
            ]

    async def match(self, query: ChainQuery, *, timeout_s: float | None = None) -> ChainMatch:
        """The longest covered prefix. Raises as MatchStream.match, though not where a beginning is known."""
        known, matched_by = self.known(query)
        self._on_match(matched_by)
        if matched_by in (MatchedBy.REPLICA, MatchedBy.ABSENT):
            return known
        rest = _rest(query, known.matched_chunks)
        asked = self._table.begin()
        try:
            found = await self._index.match_stream.match(rest, timeout_s=timeout_s)
            self._table.learn(asked, rest, found)
        except KvPoolError as error:
            if not known.matched_chunks:
                raise
            _log.debug("the rest of a chain could not be asked for: %s", error)
            return known
        finally:
            self._table.end()
        return _joined(known, found)

    def known(self, query: ChainQuery) -> tuple[ChainMatch, MatchedBy]:
        """What can be said of a chain now without the index, and what a match of it is answered by.

        REPLICA and ABSENT: this is the whole answer. BOTH and INDEX: the index is to be asked about the rest.
        """
        now_s = self._clock.monotonic_s()
        known = self._table.match(query, now_s)
        if known.matched_chunks == query.chunk_count:
            return known, MatchedBy.REPLICA
        if self._table.is_absent(_rest(query, known.matched_chunks), now_s):
            return known, MatchedBy.ABSENT
        return known, MatchedBy.BOTH if known.matched_chunks else MatchedBy.INDEX

    def forget(self, query: ChainQuery) -> None:
        """What was said about these chunks proved wrong: the next match of them is the index's."""
        self._table.forget(query)

    def note_stored(self, query: ChainQuery) -> None:
        """Some of these chunks have just been stored from here: the next match of them is the index's."""
        self._table.note_stored(query)

    async def close(self) -> None:
        """Watch no more. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        config = self._index.endpoints.config
        backoff = Backoff(config.backoff_initial_s, config.backoff_max_s)
        while True:
            try:
                watch = self._index.watch(for_replica=True, now_s=self._clock.monotonic_s)
                async with aclosing(watch) as events:
                    async for event in events:
                        self._table.apply(event, self._clock.monotonic_s())
                        if isinstance(event.event, ResyncEvent):
                            self.resync_count += 1
                            self._to_be_listed.set()
                        self._on_event(self)
                        backoff.reset()
            except KvPoolError as error:  # what reconnecting does not cure; until then the index answers all
                pause_s = backoff.next_s()
                _log.warning("the replica of the index is not kept, next try in %.2f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)

    async def _list_at_times(self) -> None:
        config = self._index.endpoints.config
        backoff = Backoff(max(config.backoff_initial_s, _LIST_AGAIN_S), max(config.backoff_max_s, _LIST_AGAIN_MAX_S))
        pause_s = self._list_every_s
        while True:
            # Not asyncio.wait_for: before Python 3.12 it drops a cancellation that comes when the wait has just ended.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._to_be_listed.wait()
            self._to_be_listed.clear()
            try:
                await self._list()
                backoff.reset()
                pause_s = self._list_every_s
            except KvPoolError as error:  # the index answers what may be absent, as it does without a listing
                pause_s = backoff.next_s()
                _log.info("what the index has stored is not listed, next try in %.2f s: %s", pause_s, error)

    async def _list(self) -> None:
        """List the groups of all open keyspaces. After a RESYNC meanwhile it does not count, and another is due."""
        listing = self._table.begin_listing()
        if listing is None:  # its RESYNC will have it done
            return
        for keyspace in listing.keyspaces:
            async with aclosing(self._index.list_chain_groups(keyspace, timeout_s=_LIST_TIMEOUT_S)) as groups:
                async for heads in groups:
                    listing.filter.add_all(heads)
        self.listing_count += self._table.finish_listing(listing)


def _rest(query: ChainQuery, known: int) -> ChainQuery:
    """The question about the chunks after the first `known` ones."""
    if not known:
        return query
    first = query.first_chunk_index + known
    head = first - first % CHAIN_GROUP_CHUNKS - query.first_chunk_index  # within the query; below 0: before it
    return replace(
        query,
        chunk_hashes=query.chunk_hashes[known * _HASH_BYTES :],
        first_chunk_index=first,
        group_head_hash=query.chunk_hashes[head * _HASH_BYTES : (head + 1) * _HASH_BYTES]
        if head >= 0
        else query.group_head_hash,
    )


def _joined(known: ChainMatch, found: ChainMatch) -> ChainMatch:
    if not known.runs or not found.runs:
        return known if known.runs else found
    runs = [*known.runs, *found.runs]
    last, first = known.runs[-1], found.runs[0]
    if last.locations == first.locations:
        both = MatchRun(chunk_count=last.chunk_count + first.chunk_count, locations=last.locations)
        runs = [*known.runs[:-1], both, *found.runs[1:]]
    return ChainMatch(
        matched_chunks=known.matched_chunks + found.matched_chunks,
        runs=tuple(runs),
        nodes={**known.nodes, **found.nodes},
    )
