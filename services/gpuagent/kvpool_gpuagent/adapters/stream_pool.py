"""Pages without a local pagestore: bulk streams to other hosts, through bounded bounce buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

from kvpool.client.index import IndexClient
from kvpool.client.transfer import PageToWrite
from kvpool.core.cluster import ChainQuery, Location, PageMetadata, RemoteSource, StaleLocation
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Overloaded, ServiceUnavailable
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.adapters.bounce import BounceBuffers, PeerClients
from kvpool_gpuagent.adapters.stream_reading import PageReading
from kvpool_gpuagent.ports import PageWish, ReadSlot, WriteSlot

WRITE_TIMEOUT_S = 60.0
RESERVE_WAIT_S = 5.0  # for other stores of this agent to end
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
    """Where a reserved page will be written."""

    endpoint: str
    incarnation: int
    metadata: PageMetadata


class StreamPool:
    """See ports.PagePool."""

    kind = "remote"
    local_node_id = b""

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
        self._sizes_bytes = [page_bytes(payload_bytes(spec, grid, shard)) for shard in range(grid.shard_count)]
        self._index, self._buffers, self._peers, self._host_id = index, buffers, peers, host_id
        self._reports: set[asyncio.Task[None]] = set()
        fitting = buffers.writes.capacity_bytes // max(self._sizes_bytes)
        self.window_pages = max(1, min(_WINDOW_PAGES_MAX, fitting))

    async def connect(self) -> None:
        """There is no session to open."""

    async def reserve(
        self, wishes: Sequence[PageWish], sizes_bytes: Sequence[int]
    ) -> Sequence[WriteSlot | int | KvPoolError]:
        """See ports.PagePool. What the index knows already is not written again."""
        if not wishes:
            return []
        nodes = await self._index.place(self._keyspace, wishes[0].chain_head_hash, host_id=self._host_id)
        if not nodes:
            raise ServiceUnavailable("no pagestore is alive to take pages")
        present = await self._present(wishes)
        answers: list[WriteSlot | int | KvPoolError] = [int(Admission.EXISTS)] * len(wishes)
        missing = [at for at, wish in enumerate(wishes) if wish.key.chunk_hash not in present]
        pages = await self._take([sizes_bytes[at] for at in missing])
        # Nothing is awaited from here on: a cancelled caller loses no buffer.
        for at, page in zip(missing, pages, strict=True):
            wish = wishes[at]
            target = _Target(nodes[0].bulk_endpoint, nodes[0].incarnation, wish.metadata)
            answers[at] = WriteSlot(key=wish.key, page=page, lease=target)
        return answers

    async def _take(self, sizes_bytes: Sequence[int]) -> list[memoryview]:
        try:
            async with asyncio.timeout(RESERVE_WAIT_S):
                return await self._buffers.writes.take(sizes_bytes)
        except TimeoutError:
            raise Overloaded("other stores keep this agent's memory for pages in flight busy") from None

    async def commit(self, slots: Sequence[WriteSlot]) -> Sequence[KvPoolError | None]:
        """See ports.PagePool. Returns when the pagestores have verified the pages."""
        results: list[KvPoolError | None] = [ServiceUnavailable(f"page {slot.key} was not written") for slot in slots]
        groups: dict[tuple[str, int], list[int]] = {}
        for position, slot in enumerate(slots):
            groups.setdefault((_target(slot).endpoint, _target(slot).incarnation), []).append(position)
        jobs = [
            self._peers.run(partial(self._write, endpoint, incarnation, slots, positions, results))
            for (endpoint, incarnation), positions in groups.items()
        ]
        # Only when every thread has ended do the buffers have no other user.
        failures = await asyncio.gather(*jobs, return_exceptions=True)
        await self.abort(slots)
        for failure in failures:
            if isinstance(failure, BaseException) and not isinstance(failure, KvPoolError):
                raise failure
        return results

    def _write(
        self,
        endpoint: str,
        incarnation: int,
        slots: Sequence[WriteSlot],
        positions: Sequence[int],
        results: list[KvPoolError | None],
    ) -> None:
        """Runs on a thread of the peers."""

        def on_page(item: int, admission: Admission, error: KvPoolError | None) -> None:
            results[positions[item]] = error if admission is Admission.REJECTED else None

        pages = [
            PageToWrite(key=slots[at].key, page=slots[at].page, metadata=_target(slots[at]).metadata)
            for at in positions
        ]
        self._peers.get(endpoint).write_pages(
            [(self._keyspace, self._spec)],
            pages,
            on_page,
            timeout_s=WRITE_TIMEOUT_S,
            expected_incarnation=incarnation,
        )

    async def abort(self, slots: Sequence[WriteSlot]) -> None:
        """See ports.PagePool."""
        self._buffers.writes.give_back([slot.page for slot in slots])

    async def acquire(
        self, wishes: Sequence[PageWish], wait_s: float
    ) -> AsyncGenerator[tuple[int, ReadSlot | KvPoolError | None], None]:
        """See ports.PagePool. Each page is asked of its sources in turn."""
        ends_at_s = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(ends_at_s):
                pages = await self._buffers.reads.take([self._sizes_bytes[wish.key.shard] for wish in wishes])
        except TimeoutError:
            raise DeadlineExceeded("other loads keep this agent's memory for pages in flight busy") from None
        reading = PageReading(
            (self._keyspace, self._spec), wishes, pages, self._buffers.reads, self._peers, self.report_stale, ends_at_s
        )
        try:
            for _ in wishes:
                position, answer = await reading.settled.get()
                if isinstance(answer, ReadSlot):
                    reading.hand_out(position)
                yield position, answer
        finally:
            reading.abandon()

    async def release(self, slots: Sequence[ReadSlot], corrupt: Sequence[ReadSlot] = ()) -> None:
        """See ports.PagePool."""
        self._buffers.reads.give_back([slot.page for slot in (*slots, *corrupt)])
        for slot in corrupt:
            assert isinstance(slot.lease, tuple)
            self.report_stale(*slot.lease)

    async def close(self) -> None:
        """See ports.PagePool."""
        for report in self._reports:
            report.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)

    def report_stale(self, wish: PageWish, source: RemoteSource) -> None:
        """Tell the index, in the background, that a source did not hold what it was said to hold."""
        locations = [
            StaleLocation(
                keyspace=self._keyspace,
                chunk_hash=wish.key.chunk_hash,
                group_head_hash=wish.metadata.group_head_hash,
                location=Location(
                    node_id=source.node_id, incarnation=source.incarnation, tier=tier, shards=1 << wish.key.shard
                ),
            )
            for tier in (Tier.STAGING, Tier.DISK)
        ]

        async def report() -> None:
            try:
                await self._index.report_stale(locations)
            except KvPoolError:
                return  # a hint: the next reader will find out too

        task = asyncio.ensure_future(report())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _present(self, wishes: Sequence[PageWish]) -> set[bytes]:
        """Hashes of leading chunks of which the cluster holds every shard asked for."""
        chunks = list({wish.key.chunk_hash: wish for wish in wishes}.values())
        shards = 0
        for wish in wishes:
            shards |= 1 << wish.key.shard
        query = ChainQuery(
            keyspace=self._keyspace,
            chunk_hashes=b"".join(wish.key.chunk_hash for wish in chunks),
            first_chunk_index=chunks[0].metadata.chunk_index,
            group_head_hash=chunks[0].metadata.group_head_hash,
            shards=shards,
        )
        match = await self._index.match_stream.match(query)
        return {wish.key.chunk_hash for wish in chunks[: match.matched_chunks]}


def _target(slot: WriteSlot) -> _Target:
    assert isinstance(slot.lease, _Target)
    return slot.lease
