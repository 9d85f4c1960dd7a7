"""Chunks in the cluster, read and written in the arena of this host's pagestore by the engine's own process; by streams
where the host has none.

For engines whose KV passes through host memory of their own: no agent is needed. Whatever fails is a miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from kvpool.client.index import IndexClient
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.pagestore_link import PagestoreLink
from kvpool.client.segments import fill_segment
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_reading import CopyThreads, WindowRead, all_ended, read_window
from kvpool.client.store_streams import StreamTransport
from kvpool.client.store_values import (
    ChunkPlace,
    FoundChunk,
    KeyspaceShards,
    OpenedShards,
    PayloadCopy,
    StoreCounts,
    WantedPage,
    consecutive,
    wanted_pages,
)
from kvpool.client.store_writing import WindowWritten, write_window, write_with_retry
from kvpool.core.cluster import ChainMatch, NodeKind, RemoteSource
from kvpool.core.errors import DeadlineExceeded, KeyspaceUnknown, KvPoolError, ServiceUnavailable
from kvpool.core.grid import ShardGrid
from kvpool.core.match_sources import remote_sources, shards_to_read

_log = logging.getLogger(__name__)
_MATCH_CHUNKS_MAX = 1024  # of one query
_CALL_BYTES_MAX = 1 << 30


def arena_call_bytes(arena_bytes: int) -> int:
    """How much of an arena one call may hold, though always a page: a sixteenth, at most 1 GiB.

    An engine has `calls_in_flight` calls that read and as many that write: with two of each, a quarter of the arena.
    Twelve threads that copied pages of 16 MiB had nothing to copy for a quarter of the time with 512 MiB (16 virtual
    processors). arena_bytes: 0 if the pagestore does not say.
    """
    return min(arena_bytes // 16 or _CALL_BYTES_MAX, _CALL_BYTES_MAX)


class PageWindows(Protocol):
    """Windows of pages of one keyspace. A call returns (also when cancelled) only after its last copy."""

    reads_at_once: int  # windows of a call that are read beside each other, with `pages_max` pages together

    def pages_max(self, payload_bytes: int) -> int: ...  # of a call; payload_bytes: of its largest page

    async def read(
        self, pages: Sequence[WantedPage], sources: Sequence[tuple[RemoteSource, ...]], wait_s: float, take: PayloadCopy
    ) -> WindowRead: ...
    async def write(self, pages: Sequence[WantedPage], wait_s: float, fill: PayloadCopy) -> WindowWritten: ...


class PageTransport(Protocol):
    """How this process's pages come and go."""

    @property
    def node_id(self) -> bytes: ...  # 16 bytes: the pagestore of this host; else none
    @property
    def connected(self) -> bool: ...
    def prepare(self) -> None: ...  # begin what the first call would wait for
    def use(self, space: OpenedShards) -> AbstractAsyncContextManager[PageWindows]: ...
    async def close(self) -> None: ...


class ArenaTransport:
    """Through the arena of this host's pagestore."""

    def __init__(self, config: StoreConfig, peer_name: str, readers: Executor, writers: Executor) -> None:
        plan = SessionPlan(endpoint=config.pagestore, peer_name=peer_name, trusts_arena=config.trusts_arena)
        self.link = PagestoreLink(
            plan,
            config.client,
            on_map=fill_segment,
            retry_interval_s=config.retry_interval_s,
            share_bytes=1,  # what the tenant has, and no more: others may need the rest
        )
        self._config = config
        self._readers = CopyThreads(readers, config.copy_threads)
        self._writers = CopyThreads(writers, config.store_threads)
        self._preparing: asyncio.Task[None] | None = None

    @property
    def node_id(self) -> bytes:
        """None before it was ever reached."""
        return self.link.node_id

    @property
    def connected(self) -> bool:
        """Whether there is a session with the pagestore now."""
        return self.link.connected

    def prepare(self) -> None:
        """Begin to map what the tenant has of the arena, and to fill in its page tables: 0.1 s a GiB. Idempotent."""
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare(), name="kvpool arena")

    async def _prepare(self) -> None:
        try:
            await self.link.prepare()
        except (KvPoolError, OSError) as error:  # the link tries again
            _log.debug("the arena is not mapped yet: %s", error)

    @asynccontextmanager
    async def use(self, space: OpenedShards) -> AsyncGenerator[PageWindows]:
        """Windows of a keyspace in one session. raises: what opening one raises."""
        async with self.link.use(space.keyspace, space.space.spec) as session:
            leases_max = session.max_leases // self._config.calls_in_flight
            yield _ArenaWindows(session, space, self._readers, self._writers, leases_max)

    async def close(self) -> None:
        """End the session. Idempotent."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait((self._preparing,))
        await self.link.close()


class _ArenaWindows:
    reads_at_once = 4  # while one waits for its first answers or last copies, pages of the others are copied

    def __init__(
        self,
        session: PageStoreSession,
        space: OpenedShards,
        readers: CopyThreads,
        writers: CopyThreads,
        leases_max: int,
    ) -> None:
        self._session, self._space, self._leases_max = session, space, leases_max
        self._readers, self._writers = readers, writers

    def pages_max(self, payload_bytes: int) -> int:
        return max(1, min(self._leases_max, arena_call_bytes(self._session.arena_bytes) // payload_bytes))

    async def read(
        self, pages: Sequence[WantedPage], sources: Sequence[tuple[RemoteSource, ...]], wait_s: float, take: PayloadCopy
    ) -> WindowRead:
        return await read_window(self._session, self._space, pages, sources, wait_s, self._readers, take)

    async def write(self, pages: Sequence[WantedPage], wait_s: float, fill: PayloadCopy) -> WindowWritten:
        return await write_window(self._session, self._space, pages, wait_s, self._writers, fill)


class AsyncStorePages:
    """Belongs to one event loop. Every call takes bounded time and answers for each chunk; none raises for trouble."""

    def __init__(
        self,
        config: StoreConfig,
        peer_name: str,
        *,
        index: IndexClient | None = None,
        transport: PageTransport | None = None,
    ) -> None:
        """index, transport: in place of those that `config` names; closed with the pool."""
        self._config = config
        self._index = index if index is not None else IndexClient(config.client)
        self._readers = ThreadPoolExecutor(config.copy_threads, thread_name_prefix="kvpool-read")
        self._writers = ThreadPoolExecutor(config.store_threads, thread_name_prefix="kvpool-write")
        self._transport: PageTransport
        if transport is not None:
            self._transport = transport
        elif config.is_remote:
            window_bytes = config.stream_bytes_in_flight_max // (2 * config.calls_in_flight)  # reads and writes
            self._transport = StreamTransport(config.client, self._index, self._readers, window_bytes)
        else:
            self._transport = ArenaTransport(config, peer_name, self._readers, self._writers)
        self._reads, self._writes = (_CallLimiter(config.calls_in_flight) for _ in range(2))
        self._spaces: dict[KeyspaceShards, OpenedShards] = {}
        self._opening = asyncio.Lock()
        self._index_failed_s = float("-inf")
        self._found: OrderedDict[bytes, FoundChunk] = OrderedDict()
        self.counts = StoreCounts()

    def prepare(self) -> None:
        """Begin to map the pagestore's memory, so that the first call finds it in place."""
        self._transport.prepare()

    async def open(self, space: KeyspaceShards) -> OpenedShards:
        """The keyspace, opened once.

        raises: KeyspaceMismatch, GeometryUnsupported, NotServed, TenantDenied, Unauthenticated: what the configuration
        must change; ServiceUnavailable, DeadlineExceeded, StoreUnavailable: try again later.
        """
        known = self._spaces.get(space)
        if known is not None:
            return known
        async with self._opening:
            loop = asyncio.get_running_loop()
            if space in self._spaces:
                return self._spaces[space]
            if loop.time() - self._index_failed_s < self._config.retry_interval_s:
                raise ServiceUnavailable("the index did not answer a moment ago")
            try:
                opened = await self._index.open_keyspace(
                    space.name, space.spec, timeout_s=self._config.connect_timeout_s
                )
            except KvPoolError:
                self._index_failed_s = loop.time()
                raise
            found = OpenedShards(space=space, keyspace=opened.keyspace, hash_key=opened.hash_key)
            self._spaces[space] = found
            return found

    async def find(self, space: OpenedShards, chunks: Sequence[ChunkPlace]) -> list[bool]:
        """Which chunks are in the cluster with the KV of all shards of the space, as far as the index knows."""
        found = [False] * len(chunks)
        self.counts.looked_up_chunks += len(chunks)
        try:
            await self._look_up(space, chunks, found)
        except KvPoolError as error:
            self.note_failure("look-up", error)
        self.counts.found_chunks += sum(found)
        return found

    async def get(self, space: OpenedShards, chunks: Sequence[ChunkPlace], take: PayloadCopy) -> list[bool]:
        """Read chunks; True for those of which `take` has got the KV of every shard, verified.

        The pages that it gets may be of other splits, with more heads than the space's shards have, or fewer. When it
        returns nothing is copied any more. Of a chunk that is False some pages may have been taken.
        """
        ends_at_s = asyncio.get_running_loop().time() + self._config.load_timeout_s
        good: set[WantedPage] = set()
        if any(chunk.chunk_hash not in self._found for chunk in chunks):
            await self.find(space, chunks)  # what only another host has is found nowhere else
        unknown = FoundChunk(space.space.shards, ())  # this host may have it all the same
        found = [self._found.get(chunk.chunk_hash, unknown) for chunk in chunks]
        pages = wanted_pages(chunks, [one.shards for one in found])
        try:
            async with self._reads.acquire(ends_at_s), self._transport.use(space) as windows:
                pages_max = self._pages_in_flight(space, pages, windows)
                at_once = min(windows.reads_at_once, pages_max)
                waiting = self._windows(pages, pages_max, ends_at_s, at_once)

                async def read() -> None:
                    """One window after the other, while others are read beside it."""
                    for window, wait_s in waiting:
                        sources = [found[page.position].remote for page in window]
                        result = await windows.read(window, sources, wait_s, take)
                        good.update(result.good)
                        self.counts.corrupt_pages += result.corrupt_count
                        self.counts.loaded_bytes += sum(space.payload_bytes(page.shard) for page in result.good)
                        if result.error is not None:
                            waiting.close()  # no other window is begun
                            raise result.error

                reads = [asyncio.create_task(read(), name="kvpool windows") for _ in range(at_once)]
                await all_ended(reads, cancel=True)
        except KvPoolError as error:
            self.note_failure("load", error)
        answer = _whole(pages, good, len(chunks))
        for chunk, loaded in zip(chunks, answer, strict=True):
            if not loaded:
                self._found.pop(chunk.chunk_hash, None)  # it may have misled us: ask again next time
        self.counts.loaded_chunks += sum(answer)
        self.counts.missed_chunks += len(answer) - sum(answer)
        return answer

    async def put(self, space: OpenedShards, chunks: Sequence[ChunkPlace], fill: PayloadCopy) -> list[bool]:
        """Write chunks; True for those that are in the cluster now, or that another writer is just bringing there.

        It waits for room in staging while other pages become durable. When it returns nothing is copied any more. After
        a page was refused the chunks behind it are not tried.
        """
        ends_at_s = asyncio.get_running_loop().time() + self._config.store_timeout_s
        good: set[WantedPage] = set()
        pages = wanted_pages(chunks, [space.space.shards] * len(chunks))
        try:
            if self._config.is_remote:  # a pagestore knows its own pages only
                there = [False] * len(chunks)
                await self._look_up(space, chunks, there)
                good = {page for page in pages if there[page.position]}
            missing = [page for page in pages if page not in good]
            async with self._writes.acquire(ends_at_s), self._transport.use(space) as windows:

                async def write(window: Sequence[WantedPage], wait_s: float) -> WindowWritten:
                    return await windows.write(window, wait_s, fill)

                pages_max = self._pages_in_flight(space, missing, windows)
                for window, _ in self._windows(missing, pages_max, ends_at_s):
                    written = await write_with_retry(write, window, ends_at_s, self._config.room_wait_s)
                    good |= written.good
                    for page, source in written.sources.items():  # the index learns of it a moment later
                        self._remember(page.chunk.chunk_hash, FoundChunk(space.space.shards, (source,)))
                    self.counts.stored_bytes += written.written_bytes
                    if written.error is not None:
                        raise written.error
        except KvPoolError as error:
            self.note_failure("store", error)
        answer = _whole(pages, good, len(chunks))
        self.counts.stored_chunks += sum(answer)
        self.counts.refused_chunks += len(answer) - sum(answer)
        return answer

    async def clear(self, space: OpenedShards) -> bool:
        """Drop all pages of the keyspace on every pagestore; False if one of them could not be asked."""
        self._found.clear()

        async def clear_node(endpoint: str) -> bool:
            control = PageStoreControl(endpoint, self._config.client)
            try:
                await control.clear(space.keyspace, timeout_s=self._config.store_timeout_s)
            except KvPoolError as error:
                self.note_failure("clear", error)
                return False
            finally:
                await control.close()
            return True

        try:
            nodes = await self._index.list_nodes(NodeKind.PAGESTORE)
        except KvPoolError as error:
            self.note_failure("clear", error)
            return False
        return all(await asyncio.gather(*(clear_node(node.info.endpoint) for node in nodes)))

    @property
    def connected(self) -> bool:
        """Whether there is a session with the pagestore now, or the last stream was answered."""
        return self._transport.connected

    async def close(self) -> None:
        """End everything: calls in flight are cancelled, and have ended when this returns. Idempotent."""
        await asyncio.gather(self._reads.close(), self._writes.close())
        await self._transport.close()
        await self._index.match_stream.close()
        await self._index.endpoints.close()
        self._readers.shutdown(wait=False)
        self._writers.shutdown(wait=False)

    def _pages_in_flight(self, space: OpenedShards, pages: Sequence[WantedPage], windows: PageWindows) -> int:
        largest = max((space.payload_bytes(shard) for shard in {page.shard for page in pages}), default=1)
        return min(windows.pages_max(largest), self._config.pages_in_flight)

    def _windows(
        self, pages: Sequence[WantedPage], pages_max: int, ends_at_s: float, at_once: int = 1
    ) -> Generator[tuple[Sequence[WantedPage], float], None, None]:
        """Pages for one call each, with the seconds left when its turn comes; no more once there are none.

        at_once: how many are in flight, of as many pages together as one would have.
        """
        loop = asyncio.get_running_loop()
        size = max(1, pages_max // at_once)
        for start in range(0, len(pages), size):
            wait_s = ends_at_s - loop.time()
            if wait_s <= 0:
                return
            yield pages[start : start + size], wait_s

    async def _look_up(self, space: OpenedShards, chunks: Sequence[ChunkPlace], found: list[bool]) -> None:
        runs = list(consecutive(chunks, _MATCH_CHUNKS_MAX))
        try:
            matches = await self._match(space, chunks, runs)
        except KeyspaceUnknown:  # the index has lost it; opening it again makes the same one
            self._spaces.pop(space.space, None)
            matches = await self._match(await self.open(space.space), chunks, runs)
        places: dict[int, list[FoundChunk | None]] = {}  # by match: answers that are equal are the same object
        for run, match in zip(runs, matches, strict=True):
            if id(match) not in places:
                places[id(match)] = list(self._places(space, match))
            for position, place in zip(run, places[id(match)], strict=False):
                if place is not None:
                    found[position] = True
                    self._remember(chunks[position].chunk_hash, place)

    async def _match(
        self, space: OpenedShards, chunks: Sequence[ChunkPlace], runs: Sequence[range]
    ) -> Sequence[ChainMatch]:
        queries = [space.query(chunks[run.start : run.stop], self._config.host_id) for run in runs]
        answers = await self._index.match_stream.match_many(queries, timeout_s=self._config.match_timeout_s)
        for answer in answers:
            if isinstance(answer, KvPoolError):
                raise answer
        return [answer for answer in answers if isinstance(answer, ChainMatch)]

    def _places(self, space: OpenedShards, match: ChainMatch) -> Iterator[FoundChunk | None]:
        """For each matched chunk what to read of which nodes; None where some of the space's KV is nowhere."""
        grid = ShardGrid.of(space.space.spec)
        for run in match.runs:
            shards, _ = shards_to_read(run, grid, space.space.shards, self._transport.node_id)
            remote = remote_sources(run, match, shards, self._transport.node_id)
            place = FoundChunk(shards, remote) if shards else None
            yield from (place for _ in range(run.chunk_count))

    def _remember(self, chunk_hash: bytes, place: FoundChunk) -> None:
        self._found[chunk_hash] = place
        self._found.move_to_end(chunk_hash)
        while len(self._found) > self._config.remembered_chunks:
            self._found.popitem(last=False)

    def note_failure(self, what: str, error: KvPoolError) -> None:
        """Count it, and log it unless it is the same as the last one."""
        self.counts.failed_calls += 1
        message = f"{what}: {error}"
        level = logging.DEBUG if message == self.counts.last_failure else logging.WARNING
        _log.log(level, "kvpool: computing instead: %s", message)
        self.counts.last_failure = message


def _whole(pages: Sequence[WantedPage], good: set[WantedPage], chunk_count: int) -> list[bool]:
    """Per chunk, whether all its pages are good."""
    whole = [True] * chunk_count
    for page in pages:
        if page not in good:
            whole[page.position] = False
    return whole


class _CallLimiter:
    """Lets so many calls of a kind run at once; others wait for their turn. Belongs to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._calls: set[asyncio.Task[object]] = set()
        self._closed = False

    @asynccontextmanager
    async def acquire(self, ends_at_s: float) -> AsyncGenerator[None]:
        """Run the block when it is its turn. ends_at_s: by the loop's clock.

        raises: DeadlineExceeded if the calls before it took all of its time; ServiceUnavailable after `close`.
        """
        call = asyncio.current_task()
        if self._closed or call is None:
            raise ServiceUnavailable("the pool was closed")
        self._calls.add(call)
        try:
            try:
                async with asyncio.timeout_at(ends_at_s):
                    await self._free.acquire()
            except TimeoutError:
                raise DeadlineExceeded("the calls before this one took all of its time") from None
            try:
                yield
            finally:
                self._free.release()
        finally:
            self._calls.discard(call)

    async def close(self) -> None:
        """Cancel the calls that run or wait. When this returns they have ended, and so have their copies."""
        self._closed = True
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)
