"""Pages read and written by bulk streams, for a process whose host has no pagestore.

A page is copied twice on its way: between the network and a buffer of this module, and between that buffer and the
caller's memory. It is sealed before it is sent, and verified before a byte of it is handed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.store_reading import WindowRead, all_ended, in_thread
from kvpool.client.store_values import OpenedShards, PayloadCopy, WantedPage
from kvpool.client.store_writing import WindowWritten
from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient, PageTransferClients
from kvpool.core.cancel import CancelToken
from kvpool.core.cluster import NodeInfo, RemoteSource, stale_locations
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, ServiceUnavailable
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, page_bytes, payload_view, seal, verify

_log = logging.getLogger(__name__)
_VERIFY_TIMEOUT_S = 1.0  # for a source to verify pages that came corrupt from it
_LATE = DeadlineExceeded("other streams took all of its time")


class StreamTransport:
    """Pages of other hosts' pagestores. Belongs to one event loop; a stream takes a thread of `threads` until it ends.

    A window's pages have buffers while it lasts, at most `window_bytes`, or one page if that is larger.
    """

    node_id = b""  # none is local

    def __init__(self, config: ClientConfig, index: IndexClient, threads: Executor, window_bytes: int) -> None:
        self._config, self._index, self._threads, self._window_bytes = config, index, threads, window_bytes
        self._peers = PageTransferClients(metadata=config.metadata, tls=config.tls, tracer=config.tracer)
        self._buffered_bytes = 0
        self.buffered_bytes_max = 0  # at once, so far
        self.connected = True  # whether the last stream was answered

    def prepare(self) -> None:
        """There is nothing to map."""

    @contextlib.asynccontextmanager
    async def use(self, space: OpenedShards) -> AsyncGenerator[StreamWindows]:
        """Windows of a keyspace, for as long as the block lasts."""
        yield StreamWindows(self, space)

    async def close(self) -> None:
        """End all connections. Idempotent."""
        self._peers.close()

    def pages_max(self, payload_bytes: int) -> int:
        """How many pages of so many bytes may be in flight at once in one call."""
        return max(1, self._window_bytes // page_bytes(payload_bytes))

    def client(self, endpoint: str) -> contextlib.AbstractContextManager[PageTransferClient]:
        """The client of an endpoint, for one call."""
        return self._peers.client(endpoint)

    async def run(self, work: Callable[[CancelToken, float], None], ends_at_s: float) -> None:
        """Run `work(stop, seconds left)` in a thread. A caller that is cancelled stops it, and waits for its end."""
        loop, stop = asyncio.get_running_loop(), CancelToken()

        def timed() -> None:
            left_s = ends_at_s - loop.time()  # other streams may have kept the threads busy
            if not stop.cancelled and left_s > 0:
                work(stop, left_s)

        running = asyncio.ensure_future(in_thread(self._threads, timed))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.cancel()
            with contextlib.suppress(Exception):
                await all_ended([running])
            raise

    @contextlib.contextmanager
    def buffers(self, sizes_bytes: Sequence[int]) -> Iterator[list[memoryview]]:
        """A buffer for each page of a window, for as long as the block lasts; threads are out of them by then."""
        total_bytes = sum(sizes_bytes)
        self._buffered_bytes += total_bytes
        self.buffered_bytes_max = max(self.buffered_bytes_max, self._buffered_bytes)
        try:
            yield [np.empty(size_bytes, np.uint8).data for size_bytes in sizes_bytes]
        finally:
            self._buffered_bytes -= total_bytes

    async def targets(self, space: OpenedShards, heads: Sequence[bytes]) -> dict[bytes, NodeInfo]:
        """For each chain's head the pagestore that takes its chunks. raises: ServiceUnavailable if there is none."""

        async def place(head: bytes) -> list[NodeInfo]:
            return await self._index.place(space.keyspace, head, host_id=self._config.host_id)

        distinct = list(dict.fromkeys(heads))
        placed = await asyncio.gather(*(place(head) for head in distinct))
        if not all(nodes and nodes[0].bulk_endpoint for nodes in placed):
            raise ServiceUnavailable("no pagestore is alive to take pages")
        return {head: nodes[0] for head, nodes in zip(distinct, placed, strict=True)}

    async def report_stale(self, space: OpenedShards, stale: Sequence[tuple[WantedPage, RemoteSource]]) -> None:
        """Tell the index that sources did not have what it had of them: a hint, which may fail."""
        locations = [
            location
            for page, source in stale
            for location in stale_locations(space.page_key(page.chunk, page.shard), page.chunk.group_head_hash, source)
        ]
        try:
            await self._index.report_stale(locations, timeout_s=self._config.call_timeout_s)
        except KvPoolError as error:
            _log.debug("kvpool: stale locations could not be reported: %s", error)


class StreamWindows:
    """Windows of pages of one keyspace, each by a stream to each node that has some of them, or takes some."""

    reads_at_once = 1  # a stream brings one page after the other anyway

    def __init__(self, transport: StreamTransport, space: OpenedShards) -> None:
        self._transport, self._space = transport, space
        self._keyspaces = [(space.keyspace, space.space.spec)]

    def pages_max(self, payload_bytes: int) -> int:
        return self._transport.pages_max(payload_bytes)

    async def read(
        self,
        pages: Sequence[WantedPage],
        sources: Sequence[tuple[RemoteSource, ...]],
        wait_s: float,
        take: PayloadCopy,
    ) -> WindowRead:
        """Take what can be had within wait_s: each page of its first source, then of the next. Returns (also when
        cancelled) only after the last copy."""
        window, ends_at_s = WindowRead(), asyncio.get_running_loop().time() + wait_s
        stale: list[tuple[WantedPage, RemoteSource]] = []
        with self._transport.buffers([self._page_bytes(page) for page in pages]) as buffers:
            for turn in range(max(map(len, sources), default=0)):
                groups: dict[RemoteSource, list[int]] = {}
                for at, page in enumerate(pages):
                    if page not in window.good and turn < len(sources[at]):
                        groups.setdefault(sources[at][turn], []).append(at)
                if not groups:
                    break
                window.error = None  # of the sources before
                await _all(
                    self._read(source, {at: (pages[at], buffers[at]) for at in group}, ends_at_s, take, window, stale)
                    for source, group in groups.items()
                )
        if stale:
            await self._transport.report_stale(self._space, stale)
        return window

    async def _read(
        self,
        source: RemoteSource,
        wanted: Mapping[int, tuple[WantedPage, memoryview]],
        ends_at_s: float,
        take: PayloadCopy,
        window: WindowRead,
        stale: list[tuple[WantedPage, RemoteSource]],
    ) -> None:
        """What one source has."""
        pages = [page for page, _ in wanted.values()]
        items = [PageToRead(key=self._key(page), destination=buffer) for page, buffer in wanted.values()]
        answers: dict[WantedPage, bool | KvPoolError] = {}  # False: it does not have the page
        failures: list[Exception] = []  # of the caller's copies, which must not fail

        def on_page(item: int, error: KvPoolError | None, hit: bool) -> None:
            answers[pages[item]] = error or hit
            if hit and not failures:
                try:
                    answers[pages[item]] = self._take(pages[item], items[item].destination, take)
                except Exception as failure:  # it is the caller's, and says nothing about the connection
                    failures.append(failure)

        def read(stop: CancelToken, left_s: float) -> None:
            client.read_pages(
                self._keyspaces, items, on_page, timeout_s=left_s, expected_incarnation=source.incarnation, stop=stop
            )
            if failures:
                raise failures[0]
            corrupt = [self._key(page) for page, answer in answers.items() if isinstance(answer, PageCorrupt)]
            if corrupt and not stop.cancelled:  # else the source would announce them again
                with contextlib.suppress(KvPoolError):
                    client.verify_pages(
                        self._keyspaces,
                        corrupt,
                        timeout_s=min(left_s, _VERIFY_TIMEOUT_S),
                        expected_incarnation=source.incarnation,
                    )

        with self._transport.client(source.bulk_endpoint) as client:
            await self._transport.run(read, ends_at_s)
        for page in pages:
            answer = answers.get(page, _LATE)
            if answer is True:
                window.good.add(page)
            elif answer is False or isinstance(answer, PageCorrupt):
                window.corrupt_count += answer is not False
                stale.append((page, source))
            else:
                window.error = window.error or answer
        self._transport.connected = not isinstance(window.error, ServiceUnavailable)

    def _take(self, page: WantedPage, buffer: memoryview, take: PayloadCopy) -> bool | KvPoolError:
        """True if it was verified and taken, else what is wrong."""
        size_bytes, key = self._space.payload_bytes(page.shard), self._key(page)
        fault = verify(buffer, key, int(self._space.space.spec.codec), size_bytes)
        if fault is not None:
            _log.error("kvpool: page %s must not be used: %s", key, fault)
            return PageCorrupt(f"page {key} fails its check: {fault}")
        try:
            with payload_view(buffer, size_bytes) as payload:
                take(page.position, page.shard, payload)
        except KvPoolError as error:
            return error
        return True

    async def write(self, pages: Sequence[WantedPage], wait_s: float, fill: PayloadCopy) -> WindowWritten:
        """Write what is admitted. Returns (also when cancelled) only after the last copy."""
        written, ends_at_s = WindowWritten(), asyncio.get_running_loop().time() + wait_s
        targets = await self._transport.targets(self._space, [page.chunk.group_head_hash for page in pages])
        groups: dict[NodeInfo, list[int]] = {}
        for at, page in enumerate(pages):
            groups.setdefault(targets[page.chunk.group_head_hash], []).append(at)
        with self._transport.buffers([self._page_bytes(page) for page in pages]) as buffers:
            await _all(
                self._write(node, {at: (pages[at], buffers[at]) for at in group}, ends_at_s, fill, written)
                for node, group in groups.items()
            )
        return written

    async def _write(
        self,
        node: NodeInfo,
        filled: Mapping[int, tuple[WantedPage, memoryview]],
        ends_at_s: float,
        fill: PayloadCopy,
        written: WindowWritten,
    ) -> None:
        """What one node takes."""
        pages = [page for page, _ in filled.values()]
        answers: dict[WantedPage, Admission | KvPoolError] = {}

        def on_page(item: int, admission: Admission, error: KvPoolError | None) -> None:
            answers[pages[item]] = error or admission

        def write(stop: CancelToken, left_s: float) -> None:
            items = []
            for page, buffer in filled.values():
                size_bytes, key = self._space.payload_bytes(page.shard), self._key(page)
                with payload_view(buffer, size_bytes) as payload:
                    fill(page.position, page.shard, payload)
                seal(buffer, key, int(self._space.space.spec.codec), size_bytes)
                items.append(PageToWrite(key=key, page=buffer, metadata=page.chunk.metadata))
            client.write_pages(
                self._keyspaces, items, on_page, timeout_s=left_s, expected_incarnation=node.incarnation, stop=stop
            )

        with self._transport.client(node.bulk_endpoint) as client:
            await self._transport.run(write, ends_at_s)
        source = RemoteSource(node_id=node.node_id, incarnation=node.incarnation, bulk_endpoint=node.bulk_endpoint)
        for page in pages:
            answer = answers.get(page, _LATE)
            if isinstance(answer, KvPoolError):
                written.error = written.error or answer
                continue
            written.good.add(page)
            written.sources[page] = source
            if answer is Admission.RESERVED:
                written.written_bytes += self._space.payload_bytes(page.shard)
        self._transport.connected = not isinstance(written.error, ServiceUnavailable)

    def _key(self, page: WantedPage) -> PageKey:
        return self._space.page_key(page.chunk, page.shard)

    def _page_bytes(self, page: WantedPage) -> int:
        return page_bytes(self._space.payload_bytes(page.shard))


async def _all(streams: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once; ends, cancelled or not, when all have."""
    await all_ended([asyncio.create_task(one, name="kvpool stream") for one in streams], cancel=True)
