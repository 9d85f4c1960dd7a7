"""Finds out in rounds where the index differs from what a node holds, and has those ranges told as a whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvpool.client.announce_queue import AnnounceQueue
from kvpool.client.chunk_directory import ChunkDirectory, LocationTruth
from kvpool.client.index import IndexClient
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.core.cluster import LocationChange, NodeLease
from kvpool.core.errors import (
    DeadlineExceeded,
    KvPoolError,
    LeaseLost,
    NodeUnknown,
    NotServed,
    StaleIncarnation,
    StoreUnavailable,
)
from kvpool.core.location_digest import RANGE_COUNT

_log = logging.getLogger(__name__)

_SLICE_RANGES = 256  # compared by one call
_TRIES = 4  # of comparing a range that changes all the time; then it is told as a whole
_RANGES_WAITING_MAX = 64  # that wait to be told as a whole, before the round goes on
_ENCODINGS_MAX = 4096
_PAUSE_S = 1.0  # after a failure that nobody expected
_STEP_S = 0.0005  # of computing digests between two pauses; one range may take longer
_LATER: tuple[type[KvPoolError], ...] = (
    *TRANSIENT,
    StoreUnavailable,
    DeadlineExceeded,
    LeaseLost,
    NodeUnknown,
    NotServed,
)


class Reconciler:
    """Compares all ranges every `interval_s`, and at once when asked to.

    What the index lost, or kept although it is gone, before a round began is as it should be when the round is
    complete: every range was then seen to be equal, or was told as a whole and acknowledged.
    """

    def __init__(
        self,
        index: IndexClient,
        node_id: bytes,
        queue: AnnounceQueue,
        directory: ChunkDirectory,
        truth: LocationTruth,
        *,
        lease: Callable[[], NodeLease],
        wake: Callable[[], None],
        interval_s: float,
        share: float,
    ) -> None:
        """wake: ranges were added to the queue. share: part of the event loop's time that comparing may take."""
        self._index = index
        self._node_id = node_id
        self._queue = queue
        self._directory = directory
        self._truth = truth
        self._lease = lease
        self._wake = wake
        self._interval_s = interval_s
        self._share = share
        self._touched: set[int] = set()  # ranges of changes since a slice was begun
        self._asked = asyncio.Event()
        self._progress = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._covered_s = self._loop.time()  # start of the last complete round
        self.round_count = 0  # complete ones
        self.replaced_count = 0  # ranges told as a whole because they differed
        self.last_round_s = 0.0  # how long the last complete round took

    @property
    def age_s(self) -> float:
        """What the index lost longer ago than this has been restored. May be asked from any thread."""
        return self._loop.time() - self._covered_s

    def note(self, changes: Iterable[LocationChange]) -> None:
        """Learn what is announced; to be called before it is queued."""
        for change in changes:
            self._touched.add(self._directory.note(change))

    def start_round(self, *, unsure: bool) -> None:
        """Begin a round now. unsure: until it has told all ranges that differ, nothing counts as acknowledged."""
        self._queue.unsure = self._queue.unsure or unsure
        self._asked.set()

    def acknowledged(self) -> None:
        """The index acknowledged something."""
        self._progress.set()

    async def run(self) -> None:
        """Make rounds until cancelled. Raises StaleIncarnation when a newer process of the node is registered."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            try:
                await self._round()
            except StaleIncarnation:
                raise
            except Exception as error:
                _log.exception("a comparison with the index failed and starts afresh: %s", error)
                await asyncio.sleep(min(_PAUSE_S, self._interval_s))
                self._asked.set()

    async def _round(self) -> None:
        began_s = self._loop.time()
        unsure = self._queue.unsure
        undecided: list[int] = []
        for first in range(0, RANGE_COUNT, _SLICE_RANGES):
            undecided += await self._compare(range(first, first + _SLICE_RANGES))
            if self._asked.is_set():
                return  # the node registered again: what was compared may be lost
            await self._wait_for_room()
        for _ in range(_TRIES - 1):
            if undecided:
                undecided = await self._compare(undecided)
        self._tell(undecided)
        await self._until(lambda: not self._queue.range_count)
        last = self._queue.last_sequence
        await self._until(lambda: self._queue.is_acknowledged(last))
        if self._asked.is_set():
            return
        if unsure:
            self._queue.unsure = False
            self._wake()
        self._covered_s, self.last_round_s = began_s, self._loop.time() - began_s
        self.round_count += 1

    async def _compare(self, ranges: Sequence[int]) -> list[int]:
        """Compare ranges (ascending) and have told as a whole what differs; those that changed meanwhile."""
        self._touched.clear()
        busy = self._queue.busy_ranges()
        own = await self._own_digests(number for number in ranges if number not in busy)
        if not own:
            return [number for number in ranges if number not in own]
        theirs = await self._ask(ranges[0], ranges[-1] - ranges[0] + 1)
        settled = own.keys() - self._touched
        self._tell(number for number in own if number in settled and theirs[number - ranges[0]] != own[number])
        return [number for number in ranges if number not in settled]

    async def _own_digests(self, ranges: Iterable[int]) -> dict[int, int]:
        """Each as it is at one moment; others have their turn in between."""
        own: dict[int, int] = {}
        began_s = time.thread_time()  # what it takes of the loop: a process that stood still took nothing of it
        for number in ranges:
            own[number] = self._directory.digest(number)
            taken_s = time.thread_time() - began_s
            if taken_s > _STEP_S:
                await asyncio.sleep(taken_s / self._share - taken_s)
                began_s = time.thread_time()
        return own

    async def _ask(self, first: int, count: int) -> list[int]:
        config = self._index.endpoints.config
        backoff = Backoff(config.backoff_initial_s, config.backoff_max_s)
        encodings = list(self._truth.keyspace_encodings())[:_ENCODINGS_MAX] if first == 0 else []
        while True:
            try:
                return await self._index.reconcile_digests(
                    self._node_id, self._lease().incarnation, first_range=first, range_count=count, encodings=encodings
                )
            except _LATER as error:
                _log.info("the index does not tell its digests, next try soon: %s", error)
                await asyncio.sleep(backoff.next_s())

    def _tell(self, ranges: Iterable[int]) -> None:
        differing = list(ranges)
        if differing:
            self.replaced_count += len(differing)
            self._queue.tell_ranges(differing)
            self._wake()

    async def _wait_for_room(self) -> None:
        await self._until(lambda: self._queue.range_count < _RANGES_WAITING_MAX)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, or another round was asked for."""
        while not is_so() and not self._asked.is_set():
            self._progress.clear()
            waits = [asyncio.ensure_future(event.wait()) for event in (self._progress, self._asked)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
