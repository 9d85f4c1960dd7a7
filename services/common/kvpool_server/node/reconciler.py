"""Finds out in rounds where the index differs from what a node holds, and has just that replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from operator import xor
from typing import TypeVar

from kvpool.client.index import IndexClient
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.core.cluster import LocationChange, NodeLease
from kvpool.core.errors import (
    DeadlineExceeded,
    KvPoolError,
    LeaseLost,
    NotServed,
    StaleIncarnation,
    StoreUnavailable,
)
from kvpool.core.keyspace import keyspace_id
from kvpool.core.location_digest import RANGE_COUNT, PartSpan, range_of
from kvpool_server.node.announce_queue import AnnounceQueue
from kvpool_server.node.chunk_directory import Cell, ChunkDirectory, LocationTruth, range_of_cell

_log = logging.getLogger(__name__)

_SLICE_RANGES = 256  # compared by one call
_TRIES = 4  # of comparing what changes all the time; then it is replaced
_SMALL_CHUNKS = 512  # a range of so many is replaced as a whole, if need be
_CELLS_WAITING_MAX = 64  # to be replaced, before the round goes on
_IDLE_INTERVALS = 30  # between two rounds of a node that never held anything
_ENCODINGS_MAX = 4096
_PAUSE_S = 1.0  # after an unexpected failure
# Acknowledged ones of the same difference, after which it is left for a while, as the index cannot hold it. A few in
# vain mean nothing: they may be lost with a Redis.
_VAIN_REPAIRS = 8
_VAIN_ROUNDS = 64  # after which it is repaired again
_STEP_S = 0.0005  # of computing digests between two pauses
_LATER: tuple[type[KvPoolError], ...] = (
    *TRANSIENT,
    StoreUnavailable,
    DeadlineExceeded,
    LeaseLost,
    NotServed,
)


_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _VainRepairs:
    """A difference that repairs leave as it is."""

    difference: int  # exclusive or of both digests
    count: int
    last_round: int


class Reconciler:
    """Compares all ranges every `interval_s`, and at once when asked to.

    What the index lost, or kept although it is gone, before a round began is as it should be when the round is
    complete: everything was then seen to be equal, or was replaced and acknowledged. One case takes two rounds: entries
    of a group that the index has split, in a small range.

    A large range that differs, or changes all the time, is compared part by part in the groups that the index has
    split, so that what is announced does not grow with the number of chunks.

    The index names 64 nodes of a chunk at most. A node that it leaves out sees a difference that no repair mends: one
    that eight acknowledged repairs leave as it was is taken for that, and is repaired again after 64 rounds.

    A node that never held anything compares in one call, and seldom: the index can only have what an earlier process
    left, and drops that when this one registers.
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
        self._touched_cells: set[Cell] = set()  # the same
        self._differed: set[int] = set()  # ranges, in the last complete round
        self._vain: dict[int, _VainRepairs] = {}  # by range that still differs
        self._repaired: dict[int, int] = {}  # ranges in this round, by what they differed
        self._round_number = 0
        self._idle_intervals = 0  # since the last complete round
        self._asked = asyncio.Event()
        self._progress = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._covered_s = self._loop.time()  # start of the last complete round
        self.round_count = 0  # complete ones
        self.replaced_count = 0  # ranges, and parts of groups, that were replaced because they differed
        self.last_round_s = 0.0  # how long the last complete round took

    @property
    def age_s(self) -> float:
        """What the index lost longer ago than this has been restored. May be asked from any thread."""
        return self._loop.time() - self._covered_s

    async def load(self) -> None:
        """Learn what is held at the start: before the first announcement."""
        for _ in self._directory.load():
            await asyncio.sleep(0)

    def note(self, changes: Iterable[LocationChange]) -> None:
        """Learn what is announced; to be called before it is queued."""
        cells = set(map(self._directory.note, changes))
        self._touched_cells |= cells
        self._touched.update(map(range_of_cell, cells))

    def drop_keyspace(self, keyspace: bytes) -> None:
        """A keyspace was cleared, without announcing each of its chunks."""
        self._directory.mark_changed(keyspace)

    def start_round(self, *, unsure: bool) -> None:
        """Begin a round now. unsure: until it has replaced all that differs, nothing counts as acknowledged."""
        self._queue.unsure = self._queue.unsure or unsure
        self._vain.clear()
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
                if self._stay_idle():
                    continue
            self._asked.clear()
            try:
                await self._round()
            except StaleIncarnation:
                raise
            except Exception as error:
                _log.exception("a comparison with the index failed and starts afresh: %s", error)
                await asyncio.sleep(min(_PAUSE_S, self._interval_s))
                self._asked.set()

    def _stay_idle(self) -> bool:
        """Whether there is nothing to compare in this interval."""
        is_idle = not self._directory.was_used and bool(self.round_count) and not self._differed
        if not is_idle or self._idle_intervals >= _IDLE_INTERVALS:
            return False
        self._idle_intervals += 1
        self._covered_s = self._loop.time()
        return True

    async def _round(self) -> None:
        began_s = self._loop.time()
        self._repaired.clear()
        unsure = self._queue.unsure
        self._replace_if_waiting(self._directory.keep_large_apart())
        slice_ranges = RANGE_COUNT if self._directory.is_empty else _SLICE_RANGES
        differed: set[int] = set()
        undecided: list[int] = []
        for first in range(0, RANGE_COUNT, slice_ranges):
            ranges: Sequence[int] = range(first, first + slice_ranges)
            if unsure and not self._directory.is_empty:  # the index may know nothing
                missing = await self._replace_missing(ranges)
                differed |= missing
                ranges = [number for number in ranges if number not in missing]
            for number in ranges:
                self._directory.recheck(number, self._round_number)
            differing, left = await self._compare(ranges) if ranges else ({}, [])
            differed.update(differing)
            undecided += left
            await self._repair(differing)
            if self._asked.is_set():
                return  # the node registered again: what was compared may be lost
            await self._wait_for_room()
        for _ in range(_TRIES - 1):
            if undecided:
                await self._wait_sent()
                differing, undecided = await self._compare(undecided)
                differed.update(differing)
                await self._repair(differing)
        for number in undecided:
            await self._repair_range(number)
            await self._wait_for_room()
        discards = -1
        while discards != self._queue.discard_count:  # else what was refused is on its way again
            discards = self._queue.discard_count
            await self._until(lambda: not self._queue.waiting_count)
            await self._wait_acknowledged()
            if self._asked.is_set():
                return
        self._count_repairs()
        if unsure:
            self._queue.unsure = False
            self._wake()
        self._differed, self._idle_intervals = differed, 0
        self._round_number += 1
        self._covered_s, self.last_round_s = began_s, self._loop.time() - began_s
        self.round_count += 1

    async def _replace_missing(self, ranges: Sequence[int]) -> set[int]:
        """Have consecutive ranges replaced of which the index has nothing, without own digests; which they are."""
        busy = self._queue.busy_ranges()
        theirs = await self._ask(ranges[0], len(ranges))
        missing = {
            number
            for number, digest in zip(ranges, theirs, strict=True)
            if not digest and number not in busy and self._directory.chunk_count(number)
        }
        for number in sorted(missing):
            self._replace(self._directory.cells(number))
        return missing

    async def _compare(self, ranges: Sequence[int]) -> tuple[dict[int, int], list[int]]:
        """Compare ranges (ascending): the index's digests of those that differ, and ranges that changed meanwhile."""
        await self._refresh(ranges)
        self._touched.clear()
        self._touched_cells.clear()
        busy = self._queue.busy_ranges()
        await self._refresh(ranges)  # what changed since: that takes no time in which much changes
        still = [number for number in ranges if number not in busy and number not in self._touched]
        own = {number: self._directory.digest(number) for number in still}
        if not own:
            return {}, list(ranges)
        theirs = await self._ask(ranges[0], ranges[-1] - ranges[0] + 1)
        settled = {number: theirs[number - ranges[0]] for number in still if number not in self._touched}
        differing = {
            number: digest for number, digest in settled.items() if self._is_to_repair(number, digest ^ own[number])
        }
        return differing, [number for number in ranges if number not in settled]

    def _is_to_repair(self, number: int, difference: int) -> bool:
        """Whether a range differs, by something that repairs may mend."""
        if not difference:
            self._vain.pop(number, None)
            return False
        known = self._vain.get(number)
        is_vain = known is not None and known.difference == difference and known.count >= _VAIN_REPAIRS
        if known is not None and is_vain and self._round_number - known.last_round < _VAIN_ROUNDS:
            return False
        self._repaired[number] = difference
        return True

    def _count_repairs(self) -> None:
        """Count the repairs of this round, all of which are acknowledged."""
        for number, difference in self._repaired.items():
            known = self._vain.get(number)
            if known is None or known.difference != difference:
                known = self._vain[number] = _VainRepairs(difference, count=0, last_round=0)
            known.count, known.last_round = known.count + 1, self._round_number

    async def _repair(self, differing: Mapping[int, int]) -> None:
        """Repair ranges, by the digests that the index has of them."""
        for number, digest in differing.items():
            if not digest:  # it has nothing, and so nothing that is stale
                self._replace(self._directory.cells(number))
            elif number in self._differed:
                await self._repair_by_cells(number)
            else:
                await self._repair_range(number)

    async def _repair_range(self, number: int) -> None:
        """Have a range replaced that differs or changes all the time: all of it if it is small, else what differs."""
        is_small = self._directory.chunk_count(number) <= _SMALL_CHUNKS and not self._directory.groups(number)
        if is_small:
            self._replace([number])
        else:
            await self._repair_by_cells(number)

    async def _repair_by_cells(self, number: int) -> None:
        """Have those parts of split groups replaced that differ, and all else in the range if that differs."""
        undecided: set[Cell] | None = None  # all
        for attempt in range(_TRIES):
            if attempt:
                await self._wait_sent()
            split = await self._ask_split(number)
            self._replace_if_waiting(self._directory.keep_apart(number, split))
            if not self._directory.groups(number):
                self._replace([number])
                return
            undecided = await self._compare_cells(number, undecided)
            if undecided == set() or self._asked.is_set():
                return
        self._replace(sorted(undecided or self._directory.cells(number), key=_order))

    async def _compare_cells(self, number: int, chosen: set[Cell] | None) -> set[Cell] | None:
        """Compare cells of a range (None: all) and have replaced what differs; those that changed meanwhile."""
        await self._refresh([number])
        self._touched_cells.clear()
        busy = self._queue.busy_cells(number)
        await self._refresh([number])
        self._directory.digest(number)
        own_rest = self._directory.rest_digest(number)
        own: dict[tuple[bytes, bytes], list[int]] = {}
        for group in self._directory.groups(number):
            self._directory.digest(number)
            own[group] = self._directory.part_digests(*group)
            await asyncio.sleep(0)
        (digest,) = await self._ask(number, 1)
        theirs = await self._ask_split(number)
        if not theirs.keys() <= own.keys():
            return chosen  # another one was split
        changed = busy.union(cell for cell in self._touched_cells if range_of_cell(cell) == number)
        differing = [number] if own_rest != reduce(xor, map(_total, theirs.values()), digest) else []
        cells: list[Cell] = [*differing, *_differing_parts(own, theirs)]
        self._replace(cell for cell in cells if cell not in changed and (chosen is None or cell in chosen))
        return changed if chosen is None else changed & chosen

    async def _refresh(self, ranges: Iterable[int]) -> None:
        """Bring own digests up to date; others have their turn in between."""
        began_s = time.thread_time()  # what it takes of the loop: a process that stood still took nothing of it
        for number in ranges:
            for _ in chain(self._directory.refresh(number), (None,)):
                taken_s = time.thread_time() - began_s
                if taken_s > _STEP_S:
                    await asyncio.sleep(taken_s / self._share - taken_s)
                    began_s = time.thread_time()

    async def _ask(self, first: int, count: int) -> list[int]:
        """The index's digests of consecutive ranges."""
        encodings = self._held_encodings() if first == 0 else []
        return await self._call(
            partial(self._index.reconcile_digests, first_range=first, range_count=count, encodings=encodings)
        )

    def _held_encodings(self) -> list[bytes]:
        """Encodings of keyspaces in which something is held; the index forgets others that are not used."""
        encodings = self._truth.keyspace_encodings()
        return [each for each in encodings if self._directory.may_hold(keyspace_id(each))][:_ENCODINGS_MAX]

    async def _ask_split(self, number: int) -> dict[tuple[bytes, bytes], list[int]]:
        """Groups of a range that the index has split, by keyspace and head: its digests of their parts."""
        groups = await self._call(partial(self._index.reconcile_split_groups, range_number=number))
        return {(group.keyspace, group.group_head): group.digests for group in groups}

    async def _call(self, method: Callable[[bytes, int], Awaitable[_Answer]]) -> _Answer:
        """Ask the index until it answers."""
        config = self._index.endpoints.config
        backoff = Backoff(config.backoff_initial_s, config.backoff_max_s)
        while True:
            try:
                return await method(self._node_id, self._lease().incarnation)
            except _LATER as error:
                _log.info("the index does not answer with its digests, next try soon: %s", error)
                await asyncio.sleep(backoff.next_s())

    def _replace(self, cells: Iterable[Cell]) -> None:
        differing = list(cells)
        if differing:
            self.replaced_count += len(differing)
            self._queue.replace(differing)
            self._wake()

    def _replace_if_waiting(self, parts: Iterable[PartSpan]) -> None:
        """Groups are kept apart from now on: if their range was to be replaced, they are still to be."""
        self._replace(part for part in parts if self._queue.is_waiting(range_of(part.group_head)))

    async def _wait_for_room(self) -> None:
        await self._until(lambda: self._queue.waiting_count < _CELLS_WAITING_MAX)

    async def _wait_sent(self) -> None:
        """Wait until the index has what was announced so far: until then, that cannot be compared."""
        offered = self._queue.offered
        await self._until(lambda: self._queue.is_batched(offered))
        await self._wait_acknowledged()

    async def _wait_acknowledged(self) -> None:
        """Wait until the index has every batch so far, or refuses one."""
        last = self._queue.last_sequence
        await self._until(lambda: self._queue.is_acknowledged(last))

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


def _differing_parts(
    own: Mapping[tuple[bytes, bytes], list[int]], theirs: Mapping[tuple[bytes, bytes], list[int]]
) -> Iterator[PartSpan]:
    """Parts that differ; of a group that the index has not split, all in which something is held."""
    for group, digests in own.items():
        known = theirs.get(group)
        if known == digests:
            continue
        for part, digest in enumerate(digests):
            if digest != known[part] if known is not None else digest:
                yield PartSpan(*group, part)


def _total(digests: Sequence[int]) -> int:
    return reduce(xor, digests, 0)


def _order(cell: Cell) -> int:
    """What is not kept apart comes first, for the index may not know yet that groups are."""
    return 0 if isinstance(cell, int) else 1
