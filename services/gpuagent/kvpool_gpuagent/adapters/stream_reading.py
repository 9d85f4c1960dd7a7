"""Reading pages of other hosts by bulk streams: buffers, connections, and one acquire's rounds over its sources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvpool.client.transfer import PageToRead, PageTransferClient
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import ArenaFull, DeadlineExceeded, KvPoolError
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.core.bandwidth import LoadSource
from kvpool_gpuagent.ports import PageWish, ReadSlot

STREAM_THREADS = 4

ReportStale = Callable[[PageWish, RemoteSource], None]


class BounceBuffers:
    """A budget of bytes in flight, shared by all sessions. A buffer is the caller's until it is given back."""

    def __init__(self, capacity_bytes: int) -> None:
        self._free_bytes = self.capacity_bytes = capacity_bytes

    def take(self, size_bytes: int) -> memoryview | None:
        """An uninitialized buffer, or None if the budget is used up: nobody ever waits for one."""
        if size_bytes > self._free_bytes:
            return None
        self._free_bytes -= size_bytes
        return np.empty(size_bytes, dtype=np.uint8).data

    def give_back(self, size_bytes: int) -> None:
        """Return part of the budget."""
        self._free_bytes += size_bytes


class PeerClients:
    """One client per bulk endpoint, and the threads that run their calls."""

    def __init__(self) -> None:
        self._clients: dict[str, PageTransferClient] = {}
        self.threads = ThreadPoolExecutor(STREAM_THREADS, thread_name_prefix="stream")

    def get(self, endpoint: str) -> PageTransferClient:
        """The client of an endpoint; idle connections close themselves."""
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = PageTransferClient(endpoint)
        return client

    def close(self) -> None:
        """End all connections; running calls fail."""
        for client in self._clients.values():
            client.close()
        self.threads.shutdown(wait=True)


class PageReading:
    """One acquire: each page is asked of its first source, and what that does not have of the next one.

    `settled` gets every page once. A buffer belongs to whom it was handed out; the others go back by `give_back_rest`,
    which must be called after `run` has ended.
    """

    def __init__(
        self,
        keyspace: tuple[bytes, KeyspaceSpec],
        wishes: Sequence[PageWish],
        sizes_bytes: Sequence[int],
        buffers: BounceBuffers,
        peers: PeerClients,
        report_stale: ReportStale,
        wait_s: float,
    ) -> None:
        self._keyspace, self._wishes = keyspace, wishes
        self._buffers, self._peers, self._report_stale = buffers, peers, report_stale
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + wait_s
        self.settled: asyncio.Queue[tuple[int, ReadSlot | KvPoolError | None]] = asyncio.Queue()
        self.abandoned = False
        self._pages: dict[int, memoryview] = {}
        self._errors: dict[int, KvPoolError] = {}
        for position, wish in enumerate(wishes):
            page = buffers.take(sizes_bytes[wish.key.shard])
            if page is None:
                self.settled.put_nowait((position, ArenaFull("this agent's bounce buffers are all in flight")))
            else:
                self._pages[position] = page

    def hand_out(self, position: int) -> None:
        """The buffer of a settled page is the caller's now."""
        del self._pages[position]

    def give_back_rest(self) -> None:
        """Return what was not handed out."""
        for page in self._pages.values():
            self._buffers.give_back(len(page))
        self._pages.clear()

    async def run(self) -> None:
        """Settle every page. Never raises."""
        unsettled = sorted(self._pages)
        for round_number in range(max((len(wish.sources) for wish in self._wishes), default=0)):
            groups: dict[RemoteSource, list[int]] = {}
            for position in unsettled:
                sources = self._wishes[position].sources
                if round_number < len(sources):
                    groups.setdefault(sources[round_number], []).append(position)
            if not groups or self.abandoned:
                break
            missed = await asyncio.gather(*(self._read(source, at) for source, at in groups.items()))
            unsettled = sorted({*(at for part in missed for at in part), *self._without(unsettled, groups)})
        for position in unsettled:
            self.settled.put_nowait((position, self._errors.get(position)))

    @staticmethod
    def _without(unsettled: Sequence[int], groups: dict[RemoteSource, list[int]]) -> set[int]:
        return set(unsettled) - {position for part in groups.values() for position in part}

    async def _read(self, source: RemoteSource, positions: Sequence[int]) -> list[int]:
        """Ask one source; returns the positions that it did not have."""
        remaining_s = self._deadline_s - self._loop.time()
        if remaining_s <= 0:
            self._errors.update(dict.fromkeys(positions, DeadlineExceeded("the load's time is up")))
            return list(positions)
        missed: list[int] = []
        pages = [PageToRead(key=self._wishes[at].key, destination=self._pages[at]) for at in positions]

        def on_page(item: int, error: KvPoolError | None, hit: bool) -> None:
            self._loop.call_soon_threadsafe(settle, positions[item], error, hit)

        def settle(position: int, error: KvPoolError | None, hit: bool) -> None:
            wish = self._wishes[position]
            if hit:
                page, lease = self._pages[position], (wish, source)
                slot = ReadSlot(key=wish.key, page=page, source=int(LoadSource.REMOTE), lease=lease)
                self.settled.put_nowait((position, slot))
                return
            missed.append(position)
            if error is not None:
                self._errors[position] = error
            else:
                self._report_stale(wish, source)

        client = self._peers.get(source.bulk_endpoint)
        await self._loop.run_in_executor(
            self._peers.threads,
            lambda: client.read_pages(
                [self._keyspace], pages, on_page, timeout_s=remaining_s, expected_incarnation=source.incarnation
            ),
        )
        return missed
