"""One acquire by bulk streams: each page is asked of its first source, and what that does not have of the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvpool.client.transfer import PageToRead
from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey, verify
from kvpool_gpuagent.adapters.bounce import BounceBuffers, PeerClients

_log = logging.getLogger(__name__)

_VERIFY_TIMEOUT_S = 1.0  # for a source to verify pages that came corrupt from it: the load's next source waits for that


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWish:
    """One page to be read: its key and size, what is kept beside it, and where a match saw it, best first."""

    key: PageKey
    metadata: PageMetadata
    payload_bytes: int
    sources: tuple[RemoteSource, ...] = ()


ReportStale = Callable[[PageWish, RemoteSource], None]
Answer = memoryview | KvPoolError | None
"""A page that came and is true, why it did not, or None as no source has it."""


class PageReading:
    """`settled` gets every page once. A buffer belongs to whom its slot was handed out.

    Others go back when the page is a miss, or, once nobody waits any more (`abandon`), when their stream has ended: a
    thread cannot be cancelled, and goes on into buffers that stay taken until then.
    """

    def __init__(
        self,
        keyspace: tuple[bytes, KeyspaceSpec],
        wishes: Sequence[PageWish],
        pages: Sequence[memoryview],
        buffers: BounceBuffers,
        peers: PeerClients,
        report_stale: ReportStale,
        ends_at_s: float,
    ) -> None:
        """pages: a taken buffer per wish. ends_at_s: on the loop's clock."""
        self._keyspace, self._wishes = keyspace, wishes
        self._buffers, self._peers, self._report_stale = buffers, peers, report_stale
        self._loop = asyncio.get_running_loop()
        self._ends_at_s = ends_at_s
        self._pages = dict(enumerate(pages))  # not handed out
        self._unsettled = set(range(len(wishes)))
        self._errors: dict[int, KvPoolError] = {}
        self._abandoned = False
        self.settled: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()
        self._work = asyncio.ensure_future(self._run())
        self._work.add_done_callback(self._ended)

    def hand_out(self, position: int) -> memoryview:
        """The buffer of a settled page, which is the caller's now."""
        return self._pages.pop(position)

    def abandon(self) -> None:
        """Nobody waits any more: what is not handed out goes back when no thread writes into it."""
        self._abandoned = True
        if self._work.done():
            self._give_back_rest()

    def _ended(self, work: asyncio.Future[None]) -> None:
        failure = None if work.cancelled() else work.exception()
        fallback: KvPoolError | None = None
        if failure is not None:
            _log.error("reading pages by streams failed", exc_info=failure)
            fallback = KvPoolError(f"the page streams failed ({failure})")
        for position in sorted(self._unsettled):
            self._settle(position, self._errors.get(position, fallback))
        if self._abandoned:
            self._give_back_rest()

    def _give_back_rest(self) -> None:
        pages, self._pages = self._pages, {}
        self._buffers.give_back(list(pages.values()))

    def _settle(self, position: int, answer: Answer) -> None:
        if position in self._unsettled:
            self._unsettled.discard(position)
            self.settled.put_nowait((position, answer))

    async def _run(self) -> None:
        missing = list(range(len(self._wishes)))
        for round_number in range(max((len(wish.sources) for wish in self._wishes), default=0)):
            groups: dict[RemoteSource, list[int]] = {}
            for position in missing:
                sources = self._wishes[position].sources
                if round_number < len(sources):
                    groups.setdefault(sources[round_number], []).append(position)
            if not groups or self._abandoned:
                return
            # All of them have to end, however: a thread that still runs still writes into buffers.
            reads = (self._read(source, at) for source, at in groups.items())
            failures = [end for end in await asyncio.gather(*reads, return_exceptions=True) if end is not None]
            if failures:
                raise failures[0]
            missing = sorted(self._unsettled)

    async def _read(self, source: RemoteSource, positions: Sequence[int]) -> None:
        """Ask one source; what it has is settled."""
        pages = [PageToRead(key=self._wishes[at].key, destination=self._pages[at]) for at in positions]

        corrupt: list[PageKey] = []

        def on_page(item: int, error: KvPoolError | None, hit: bool) -> None:
            if hit:
                wish = self._wishes[positions[item]]
                fault = verify(pages[item].destination, wish.key, self._keyspace[1].codec, wish.payload_bytes)
                if fault is not None:
                    error, hit = PageCorrupt(f"page {wish.key} fails its check: {fault}"), False
                    corrupt.append(wish.key)
            self._loop.call_soon_threadsafe(self._answered, positions[item], source, error, hit)

        def read() -> None:
            # Other calls may have kept the threads busy until the time was up.
            remaining_s = self._ends_at_s - self._loop.time()
            if self._abandoned or remaining_s <= 0:
                late = DeadlineExceeded("the load's time is up")
                for item in range(len(pages)):
                    on_page(item, late, False)
                return
            client = self._peers.get(source.bulk_endpoint)
            client.read_pages(
                [self._keyspace], pages, on_page, timeout_s=remaining_s, expected_incarnation=source.incarnation
            )
            if corrupt:  # else the source would announce them again and again
                with suppress(KvPoolError):
                    client.verify_pages(
                        [self._keyspace], corrupt, timeout_s=_VERIFY_TIMEOUT_S, expected_incarnation=source.incarnation
                    )

        await self._peers.run(read)

    def _answered(self, position: int, source: RemoteSource, error: KvPoolError | None, hit: bool) -> None:
        wish = self._wishes[position]
        if hit:
            self._settle(position, self._pages[position])
        elif error is not None:
            self._errors[position] = error
            if isinstance(error, PageCorrupt):
                self._report_stale(wish, source)
        else:
            self._report_stale(wish, source)
