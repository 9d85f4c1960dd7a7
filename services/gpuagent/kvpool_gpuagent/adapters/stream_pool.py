"""Pages without a local pagestore: bulk streams to other hosts, through bounded bounce buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvpool.client.index import IndexClient
from kvpool.client.transfer import PageToWrite
from kvpool.core.cluster import ChainQuery, RemoteSource, stale_locations
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Overloaded, ServiceUnavailable
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, page_bytes, seal
from kvpool.core.payload import payload_bytes
from kvpool.core.spans import NO_PAGES, Bytes, Int32s, PageSpan
from kvpool_gpuagent.adapters.page_streams import BounceBuffers, PageReading, PageRequest, PeerClients
from kvpool_gpuagent.core.pages import AcquiredPages, PageSlots, ReservedPages, no_slots
from kvpool_gpuagent.core.sources import LoadSource

WRITE_TIMEOUT_S = 60.0
RESERVE_WAIT_S = 3.0  # of a store, for the index and for other stores of this agent to end
_WINDOW_PAGES_MAX = 256


@dataclass(frozen=True, slots=True)
class StreamBuffers:
    """Halves of the agent's memory for pages in flight: neither loads nor stores can starve the others."""

    reads: BounceBuffers
    writes: BounceBuffers

    @classmethod
    def of(cls, capacity_bytes: int) -> StreamBuffers:
        """Both halves of a budget."""
        return cls(BounceBuffers(capacity_bytes // 2), BounceBuffers(capacity_bytes // 2))


@dataclass(frozen=True, slots=True)
class _Target:
    """Where reserved pages will be written."""

    endpoint: str
    incarnation: int


@dataclass(frozen=True, slots=True, eq=False)
class _PageBuffer:
    """A buffer that a page is in, and where it will be written to."""

    buffer: memoryview
    target: _Target | None = None


class StreamPool:
    """See ports.PagePool."""

    local_node_id = b""
    arena_bytes = 0  # what is read into a buffer is read again by the load

    def __init__(
        self,
        keyspace: bytes,
        spec: KeyspaceSpec,
        index: IndexClient,
        buffers: StreamBuffers,
        peers: PeerClients,
        host_id: str,
    ) -> None:
        self._keyspace, self._spec = keyspace, spec
        grid = ShardGrid.of(spec)
        self._payload_bytes = [payload_bytes(spec, grid, shard) for shard in range(grid.shard_count)]
        self._sizes_bytes = [page_bytes(size_bytes) for size_bytes in self._payload_bytes]
        self._index, self._buffers, self._peers, self._host_id = index, buffers, peers, host_id
        self._reports: set[asyncio.Task[None]] = set()
        self.broken = asyncio.Event()  # never set: streams are opened as they are needed
        fitting = buffers.writes.capacity_bytes // max(self._sizes_bytes)
        self.window_pages = max(1, min(_WINDOW_PAGES_MAX, fitting))

    async def connect(self) -> None:
        """See ports.PagePool. Streams need no session."""

    async def reserve(self, span: PageSpan, chain_head_hash: bytes) -> ReservedPages:
        """See ports.PagePool. What the index knows already is not written again."""
        if not span.page_count:
            return ReservedPages(no_slots(), NO_PAGES, NO_PAGES)
        try:
            async with asyncio.timeout(RESERVE_WAIT_S):
                return await self._reserve(span, chain_head_hash)
        except TimeoutError:
            raise Overloaded("the index, or this agent's memory for pages in flight, is too busy") from None

    async def _reserve(self, span: PageSpan, chain_head_hash: bytes) -> ReservedPages:
        nodes = await self._index.place(self._keyspace, chain_head_hash, host_id=self._host_id)
        if not nodes:
            raise ServiceUnavailable("no pagestore is alive to take pages")
        present = span.positions < await self._present_chunks(span)
        missing = np.flatnonzero(~present).astype(np.int32)
        sizes_bytes = [self._sizes_bytes[shard] for shard in span.shards[missing].tolist()]
        buffers = await self._buffers.writes.take(sizes_bytes)
        # Nothing is awaited from here on: a cancelled caller loses no buffer.
        target = _Target(nodes[0].bulk_endpoint, nodes[0].incarnation)
        leases = [_PageBuffer(buffer, target) for buffer in buffers]
        slots = _slots(missing, leases, np.zeros(missing.size, dtype=np.uint8))
        return ReservedPages(slots, np.flatnonzero(present).astype(np.int32), NO_PAGES)

    async def commit(self, span: PageSpan, slots: PageSlots) -> Sequence[tuple[int, KvPoolError]]:
        """See ports.PagePool. Returns when the pagestores have verified the pages."""
        keys = [span.page_key(page) for page in slots.pages.tolist()]
        results: dict[int, KvPoolError] = {
            index: ServiceUnavailable(f"page {key} was not written") for index, key in enumerate(keys)
        }
        groups: dict[_Target, list[int]] = {}
        for index, lease in enumerate(slots.leases):
            groups.setdefault(_target(lease), []).append(index)
        jobs = [
            self._peers.run(partial(self._write, target, span, slots, keys, indexes, results))
            for target, indexes in groups.items()
        ]
        # Only when every thread has ended do the buffers have no other user.
        failures = await asyncio.gather(*jobs, return_exceptions=True)
        await self.abort(slots)
        for failure in failures:
            if isinstance(failure, BaseException) and not isinstance(failure, KvPoolError):
                raise failure
        return sorted(results.items())

    def _write(
        self,
        target: _Target,
        span: PageSpan,
        slots: PageSlots,
        keys: Sequence[PageKey],
        indexes: Sequence[int],
        results: dict[int, KvPoolError],
    ) -> None:
        """Seal pages and send them, on a thread of the peers. Takes what was written out of results."""

        def on_page(item: int, admission: Admission, error: KvPoolError | None) -> None:
            if admission is not Admission.REJECTED or error is None:
                results.pop(indexes[item], None)
            else:
                results[indexes[item]] = error

        pages = []
        for index in indexes:
            key, page = keys[index], slots.leases[index].buffer
            seal(page, key, self._spec.codec, self._payload_bytes[key.shard])
            metadata = span.metadata[int(span.positions[slots.pages[index]])]
            pages.append(PageToWrite(key=key, page=page, metadata=metadata))
        with self._peers.client(target.endpoint) as client:
            client.write_pages(
                [(self._keyspace, self._spec)],
                pages,
                on_page,
                timeout_s=WRITE_TIMEOUT_S,
                expected_incarnation=target.incarnation,
            )

    async def abort(self, slots: PageSlots) -> None:
        """See ports.PagePool."""
        self._buffers.writes.give_back([lease.buffer for lease in slots.leases])

    async def acquire(self, span: PageSpan, wait_s: float) -> AsyncGenerator[AcquiredPages, None]:
        """See ports.PagePool. Each page is asked of its sources in turn, and verified as it came over a network."""
        ends_at_s = asyncio.get_running_loop().time() + wait_s
        requests = [
            PageRequest(
                key=span.page_key(page),
                metadata=span.metadata[position],
                payload_bytes=self._payload_bytes[int(span.shards[page])],
                sources=span.chunk_sources[position],
            )
            for page, position in enumerate(span.positions.tolist())
        ]
        try:
            async with asyncio.timeout_at(ends_at_s):
                pages = await self._buffers.reads.take([self._sizes_bytes[request.key.shard] for request in requests])
        except TimeoutError:
            raise DeadlineExceeded("other loads keep this agent's memory for pages in flight busy") from None
        reading = PageReading(
            (self._keyspace, self._spec),
            requests,
            pages,
            self._buffers.reads,
            self._peers,
            self.report_stale,
            ends_at_s,
        )
        left = len(requests)
        try:
            while left:
                answers = [await reading.answers.get()]
                while not reading.answers.empty():
                    answers.append(reading.answers.get_nowait())
                left -= len(answers)
                came = [position for position, answer in answers if isinstance(answer, memoryview)]
                leases = [_PageBuffer(reading.hand_out(position)) for position in came]
                remote = np.full(len(came), int(LoadSource.REMOTE), dtype=np.uint8)
                failed = tuple((position, answer) for position, answer in answers if not isinstance(answer, memoryview))
                yield AcquiredPages(_slots(np.array(came, dtype=np.int32), leases, remote), failed)
        finally:
            reading.abandon()

    async def release(self, slots: PageSlots) -> None:
        """See ports.PagePool."""
        self._buffers.reads.give_back([lease.buffer for lease in slots.leases])

    async def close(self) -> None:
        """See ports.PagePool."""
        for report in self._reports:
            report.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)

    def report_stale(self, request: PageRequest, source: RemoteSource) -> None:
        """Report to the index, in the background, that a source did not hold what its location says."""
        locations = stale_locations(request.key, request.metadata.group_head_hash, source)

        async def report() -> None:
            try:
                await self._index.report_stale(locations)
            except KvPoolError:
                return  # a hint: the next reader will find out too

        task = asyncio.ensure_future(report())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _present_chunks(self, span: PageSpan) -> int:
        """Leading chunks of which the cluster holds every shard asked for."""
        shards = 0
        for shard in np.unique(span.shards).tolist():
            shards |= 1 << shard
        query = ChainQuery(
            keyspace=self._keyspace,
            chunk_hashes=span.chunk_hashes,
            first_chunk_index=span.first_chunk_index,
            group_head_hash=span.metadata[0].group_head_hash,
            shards=shards,
        )
        # A store may wait: the time of a match is that of an engine that waits for one.
        return (await self._index.match_stream.match(query, timeout_s=RESERVE_WAIT_S)).matched_chunks


def _slots(pages: Int32s, leases: Sequence[_PageBuffer], sources: Bytes) -> PageSlots:
    held = np.empty(len(leases), dtype=object)
    held[:] = leases
    addresses = [address_of(lease.buffer) for lease in leases]
    return PageSlots(pages, np.array(addresses, dtype=np.int64), sources, held)


def _target(lease: _PageBuffer) -> _Target:
    assert lease.target is not None
    return lease.target


def address_of(buffer: memoryview) -> int:
    """Of its first byte."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
