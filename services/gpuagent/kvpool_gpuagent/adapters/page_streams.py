"""One acquire by bulk streams: each page is asked of its first source, and what that does not have of the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass

import numpy as np

from kvpool.client.tls import TlsCredentials
from kvpool.client.transfer import PageToRead, PageTransferClients
from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import ArenaFull, DeadlineExceeded, KvPoolError, PageCorrupt
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey, verify
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_gpuagent.adapters.budget import Budget

_log = logging.getLogger(__name__)

STREAM_THREADS = 4
_VERIFY_TIMEOUT_S = 1.0  # for a source to verify pages that came corrupt from it: the load's next source waits for that


class BounceBuffers:
    """Uninitialized buffers within a hard budget, shared by all sessions of an agent.

    A buffer is its taker's until it is given back; its view is dead from then on.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._budget = Budget(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes out at most."""
        return self._budget.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes out now."""
        return self._budget.used

    async def take(self, sizes_bytes: Sequence[int]) -> list[memoryview]:
        """All buffers at once, when there is room. Raises ArenaFull for more than can ever be."""
        total_bytes = sum(sizes_bytes)
        if total_bytes > self.capacity_bytes:
            raise ArenaFull(f"{total_bytes} bytes at once are more than the agent's {self.capacity_bytes} for pages")
        await self._budget.take(total_bytes)
        try:
            return [np.empty(size_bytes, dtype=np.uint8).data for size_bytes in sizes_bytes]
        except MemoryError:
            self._budget.give(total_bytes)
            raise ArenaFull(f"this machine has no {total_bytes} bytes for pages in flight") from None

    def give_back(self, pages: Sequence[memoryview]) -> None:
        """Return buffers."""
        size_bytes = sum(len(page) for page in pages)
        for page in pages:
            try:
                page.release()
            except BufferError:
                _log.error("an array outlives the bounce buffer that it was made of")
        self._budget.give(size_bytes)


class PeerClients(PageTransferClients):
    """One client per bulk endpoint, and the threads that run their calls."""

    def __init__(self, tls: TlsCredentials | None = None, tracer: Tracer = NO_TRACER) -> None:
        super().__init__(tls=tls, tracer=tracer)
        self._threads = ThreadPoolExecutor(STREAM_THREADS, thread_name_prefix="stream")

    async def run(self, job: Callable[[], None]) -> None:
        """Run a call on a thread. It goes on when its caller is cancelled: see BounceBuffers for the ownership then."""
        # With the caller's context: the call belongs to its trace.
        await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, job)

    def close(self) -> None:
        """End all connections; running calls fail, and are waited for."""
        super().close()
        self._threads.shutdown(wait=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One page to be read: its key and size, what is kept beside it, and where a match saw it, best first."""

    key: PageKey
    metadata: PageMetadata
    payload_bytes: int
    sources: tuple[RemoteSource, ...] = ()


ReportStale = Callable[[PageRequest, RemoteSource], None]
Answer = memoryview | KvPoolError | None
"""A page that came and is true, why it did not, or None as no source has it."""


class PageReading:
    """`answers` gets every page once. A buffer belongs to whom its slot was handed out.

    Others go back when the page is a miss, or, once its reader has left (`abandon`), when their stream has ended: a
    thread cannot be cancelled, and goes on into buffers that stay taken until then.
    """

    def __init__(
        self,
        keyspace: tuple[bytes, KeyspaceSpec],
        requests: Sequence[PageRequest],
        pages: Sequence[memoryview],
        buffers: BounceBuffers,
        peers: PeerClients,
        report_stale: ReportStale,
        ends_at_s: float,
    ) -> None:
        """pages: a taken buffer per request. ends_at_s: on the loop's clock."""
        self._keyspace, self._requests = keyspace, requests
        self._buffers, self._peers, self._report_stale = buffers, peers, report_stale
        self._loop = asyncio.get_running_loop()
        self._ends_at_s = ends_at_s
        self._pages = dict(enumerate(pages))  # not handed out
        self._unanswered = set(range(len(requests)))
        self._errors: dict[int, KvPoolError] = {}
        self._abandoned = False
        self.answers: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()
        self._work = asyncio.ensure_future(self._run())
        self._work.add_done_callback(self._ended)

    def hand_out(self, position: int) -> memoryview:
        """The buffer of a page that has come, which is the caller's now."""
        return self._pages.pop(position)

    def abandon(self) -> None:
        """The reader has left: what is not handed out goes back when no thread writes into it."""
        self._abandoned = True
        if self._work.done():
            self._give_back_rest()

    def _ended(self, work: asyncio.Future[None]) -> None:
        failure = None if work.cancelled() else work.exception()
        fallback: KvPoolError | None = None
        if failure is not None:
            _log.error("reading pages by streams failed", exc_info=failure)
            fallback = KvPoolError(f"the page streams failed ({failure})")
        for position in sorted(self._unanswered):
            self._put(position, self._errors.get(position, fallback))
        if self._abandoned:
            self._give_back_rest()

    def _give_back_rest(self) -> None:
        pages, self._pages = self._pages, {}
        self._buffers.give_back(list(pages.values()))

    def _put(self, position: int, answer: Answer) -> None:
        if position in self._unanswered:
            self._unanswered.discard(position)
            self.answers.put_nowait((position, answer))

    async def _run(self) -> None:
        missing = list(range(len(self._requests)))
        for round_number in range(max((len(request.sources) for request in self._requests), default=0)):
            groups: dict[RemoteSource, list[int]] = {}
            for position in missing:
                sources = self._requests[position].sources
                if round_number < len(sources):
                    groups.setdefault(sources[round_number], []).append(position)
            if not groups or self._abandoned:
                return
            # All of them have to end, however: a thread that still runs still writes into buffers.
            reads = (self._read(source, at) for source, at in groups.items())
            failures = [end for end in await asyncio.gather(*reads, return_exceptions=True) if end is not None]
            if failures:
                raise failures[0]
            missing = sorted(self._unanswered)

    async def _read(self, source: RemoteSource, positions: Sequence[int]) -> None:
        """Ask one source; what it has is answered."""
        pages = [PageToRead(key=self._requests[at].key, destination=self._pages[at]) for at in positions]
        corrupt: list[PageKey] = []

        def on_page(item: int, error: KvPoolError | None, hit: bool) -> None:
            if hit:
                request = self._requests[positions[item]]
                fault = verify(pages[item].destination, request.key, self._keyspace[1].codec, request.payload_bytes)
                if fault is not None:
                    error, hit = PageCorrupt(f"page {request.key} fails its check: {fault}"), False
                    corrupt.append(request.key)
            self._loop.call_soon_threadsafe(self._answered, positions[item], source, error, hit)

        def read() -> None:
            # Other calls may have kept the threads busy until the time was up.
            remaining_s = self._ends_at_s - self._loop.time()
            if self._abandoned or remaining_s <= 0:
                late = DeadlineExceeded("the load's time is up")
                for item in range(len(pages)):
                    on_page(item, late, False)
                return
            incarnation = source.incarnation
            with self._peers.client(source.bulk_endpoint) as client:
                client.read_pages(
                    [self._keyspace], pages, on_page, timeout_s=remaining_s, expected_incarnation=incarnation
                )
                if corrupt:  # else the source would announce them again and again
                    with suppress(KvPoolError):
                        client.verify_pages(
                            [self._keyspace], corrupt, timeout_s=_VERIFY_TIMEOUT_S, expected_incarnation=incarnation
                        )

        await self._peers.run(read)

    def _answered(self, position: int, source: RemoteSource, error: KvPoolError | None, hit: bool) -> None:
        request = self._requests[position]
        if hit:
            self._put(position, self._pages[position])
        elif error is not None:
            self._errors[position] = error
            if isinstance(error, PageCorrupt):
                self._report_stale(request, source)
        else:
            self._report_stale(request, source)
