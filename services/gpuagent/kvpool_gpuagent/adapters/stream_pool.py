"""Pages without a local pagestore: bulk streams to other hosts, through bounded bounce buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvpool.client.index import IndexClient
from kvpool.client.transfer import PageToWrite
from kvpool.core.cluster import ChainQuery, Location, PageMetadata, RemoteSource, StaleLocation
from kvpool.core.errors import ArenaFull, KvPoolError, ServiceUnavailable
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.adapters.stream_reading import BounceBuffers, PageReading, PeerClients
from kvpool_gpuagent.ports import PageWish, ReadSlot, WriteSlot

WRITE_TIMEOUT_S = 60.0


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
        buffers: BounceBuffers,
        peers: PeerClients,
        host_id: str,
    ) -> None:
        self._keyspace, self._spec = keyspace, spec
        grid = ShardGrid.of(spec)
        self._sizes_bytes = [page_bytes(payload_bytes(spec, grid, shard)) for shard in range(grid.shard_count)]
        self._index, self._buffers, self._peers, self._host_id = index, buffers, peers, host_id
        self._reports: set[asyncio.Task[None]] = set()
        # Half for reads and half for writes: neither can starve the other.
        self.window_pages = max(1, min(256, buffers.capacity_bytes // 2 // max(self._sizes_bytes)))

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
        answers: list[WriteSlot | int | KvPoolError] = []
        for wish, size_bytes in zip(wishes, sizes_bytes, strict=True):
            if present.get(wish.key.chunk_hash, 0) >> wish.key.shard & 1:
                answers.append(int(Admission.EXISTS))
                continue
            page = self._buffers.take(size_bytes)
            if page is None:
                answers.append(ArenaFull("this agent's bounce buffers are all in flight"))
                continue
            metadata = PageMetadata(
                parent_hash=wish.parent_hash, chunk_index=wish.chunk_index, group_head_hash=wish.group_head_hash
            )
            target = _Target(nodes[0].bulk_endpoint, nodes[0].incarnation, metadata)
            answers.append(WriteSlot(key=wish.key, page=page, lease=target))
        return answers

    async def commit(self, slots: Sequence[WriteSlot]) -> Sequence[KvPoolError | None]:
        """See ports.PagePool. Returns when the pagestores have verified the pages."""
        results: list[KvPoolError | None] = [None] * len(slots)
        groups: dict[tuple[str, int], list[int]] = {}
        for position, slot in enumerate(slots):
            target = _target(slot)
            groups.setdefault((target.endpoint, target.incarnation), []).append(position)

        def write(endpoint: str, incarnation: int, positions: Sequence[int]) -> None:
            pages = [
                PageToWrite(key=slots[at].key, page=slots[at].page, metadata=_target(slots[at]).metadata)
                for at in positions
            ]

            def on_page(item: int, admission: Admission, error: KvPoolError | None) -> None:
                results[positions[item]] = error if admission is Admission.REJECTED else None

            self._peers.get(endpoint).write_pages(
                [(self._keyspace, self._spec)],
                pages,
                on_page,
                timeout_s=WRITE_TIMEOUT_S,
                expected_incarnation=incarnation,
            )

        try:
            jobs = [self._run(partial(write, *key, positions)) for key, positions in groups.items()]
            await asyncio.gather(*jobs)
        finally:
            await self.abort(slots)
        return results

    async def abort(self, slots: Sequence[WriteSlot]) -> None:
        """See ports.PagePool."""
        self._buffers.give_back(sum(len(slot.page) for slot in slots))

    async def acquire(
        self, wishes: Sequence[PageWish], wait_s: float
    ) -> AsyncGenerator[tuple[int, ReadSlot | KvPoolError | None], None]:
        """See ports.PagePool. Each page is asked of its sources in turn."""
        reading = PageReading(
            (self._keyspace, self._spec),
            wishes,
            self._sizes_bytes,
            self._buffers,
            self._peers,
            self.report_stale,
            wait_s,
        )
        worker = asyncio.ensure_future(reading.run())
        try:
            for _ in wishes:
                position, answer = await reading.settled.get()
                if answer is not None and not isinstance(answer, KvPoolError):
                    reading.hand_out(position)
                yield position, answer
        finally:
            # A thread cannot be cancelled: it goes on into buffers that stay taken until it has ended.
            reading.abandoned = True
            worker.add_done_callback(lambda done: reading.give_back_rest())

    async def release(self, slots: Sequence[ReadSlot], corrupt: Sequence[ReadSlot] = ()) -> None:
        """See ports.PagePool."""
        self._buffers.give_back(sum(len(slot.page) for slot in (*slots, *corrupt)))
        for slot in corrupt:
            assert isinstance(slot.lease, tuple)
            self.report_stale(*slot.lease)

    async def close(self) -> None:
        """See ports.PagePool."""
        for report in self._reports:
            report.cancel()

    def report_stale(self, wish: PageWish, source: RemoteSource) -> None:
        """Tell the index, in the background, that a source did not hold what it was said to hold."""
        locations = [
            StaleLocation(
                keyspace=self._keyspace,
                chunk_hash=wish.key.chunk_hash,
                group_head_hash=wish.group_head_hash,
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

    async def _run(self, job: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._peers.threads, job)

    async def _present(self, wishes: Sequence[PageWish]) -> dict[bytes, int]:
        """Shards of leading chunks that the cluster holds."""
        chunks = list({wish.key.chunk_hash: wish for wish in wishes}.values())
        shards = 0
        for wish in wishes:
            shards |= 1 << wish.key.shard
        query = ChainQuery(
            keyspace=self._keyspace,
            chunk_hashes=b"".join(wish.key.chunk_hash for wish in chunks),
            first_chunk_index=chunks[0].chunk_index,
            group_head_hash=chunks[0].group_head_hash,
            shards=shards,
        )
        match = await self._index.match_stream.match(query)
        return {wish.key.chunk_hash: shards for wish in chunks[: match.matched_chunks]}


def _target(slot: WriteSlot) -> _Target:
    assert isinstance(slot.lease, _Target)
    return slot.lease
