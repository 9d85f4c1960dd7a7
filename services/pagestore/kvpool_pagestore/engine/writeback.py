"""Background write-back: dirty pages become durable, batch by batch."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import Draining, KvPoolError, PageMissing, StoreFault
from kvpool.core.page import PageKey
from kvpool.core.tracing import BYTES, PAGES
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest, AdmissionRules
from kvpool_pagestore.core.events import BytesHeld, DiskHealthChanged
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.core.writeback import DirtyPage, WriteBackLimits, WriteQueue, WriteState
from kvpool_pagestore.engine.context import EngineContext, Staging
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.ports import PageWrite

T = TypeVar("T")
_log = logging.getLogger(__name__)

_FAILURES_LOGGED_EVERY_S = 10.0  # a full disk fails at every page that is stored: the log must not fill it too
_POSTPONED_A_TURN = 256  # of the event loop: a page takes some 10 us
_PAGES_A_TURN = 4096  # looked at, at less than a microsecond each
_WRITERS_PAUSE_S = 1.0
_FLUSHED_AT_LEAST = 16  # postponed pages, each time


class _Postponed:
    """Postponed pages as of now, the first one first. Two lists: a tuple for each page takes ten times as long."""

    def __init__(self, pages: OrderedDict[Slot, int]) -> None:
        self._slots, self._stays = list(reversed(pages)), list(reversed(pages.values()))

    def __bool__(self) -> bool:
        return bool(self._slots)

    @property
    def first(self) -> tuple[Slot, int]:
        """The slot, and the page's stay in it."""
        return self._slots[-1], self._stays[-1]

    def pop_first(self) -> None:
        del self._slots[-1], self._stays[-1]


class WriteBack:
    """Takes committed pages to disk. Without work it does not run at all."""

    def __init__(
        self,
        limits: WriteBackLimits,
        staging: Staging,
        disk: DiskTier,
        policies: PolicyBook,
        admission: AdmissionRules,
        context: EngineContext,
    ) -> None:
        self._tracer = context.tracer
        self._policies = policies
        self._queue = WriteQueue(limits)
        self._table = staging.table
        self._space = staging.space
        self._sealing = staging.sealing
        self._events = context.events
        self._admission = admission
        self._disk = disk
        self._tasks = context.tasks
        self._metrics = context.metrics
        self._clock = context.clock
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._unlogged_failures = 0
        self._log_failures_at_s = float("-inf")
        self._progress: asyncio.Future[None] | None = None  # set at the end of each batch
        # Pages to be written once the disk has caught up, with their stay, in the order of their commits. They are
        # clean until then, so that they can be evicted: what is not wanted any more is skipped when its turn comes.
        self._postponed: OrderedDict[Slot, int] = OrderedDict()

    @property
    def oldest_s(self) -> float:
        """Age of the page that has waited longest; 0 if none does."""
        return self._queue.oldest_s(self._clock.monotonic_s())

    @property
    def waiting_bytes(self) -> int:
        """Bytes of pages that are to become durable."""
        return self._queue.waiting_bytes()

    @property
    def dirty_count(self) -> int:
        """Pages that are to become durable."""
        return sum(1 for page in self._queue.pending if page.wanted)

    @property
    def has_postponed(self) -> bool:
        """Whether there are pages to be written once the disk has caught up. Looks at all that there were."""
        return any(self._is_postponed(slot, stay) for slot, stay in self._postponed.items())

    def enqueue(self, slot: Slot, *, urgent: bool = False) -> DirtyPage:
        """A dirty page is to become durable. urgent: a caller waits for that. Call `start_due` after the last one."""
        now_s = self._clock.monotonic_s()
        self._postponed.pop(slot, None)  # it waits in one place only: a flush counts it once
        page = self._queue.add(slot, now_s)
        if urgent:
            self._queue.urge([page], now_s)
        page.cause = self._tracer.here()
        return page

    def postpone(self, slot: Slot) -> None:
        """A page is to become durable once the disk has caught up, if it is still here then, and not sooner anyway."""
        if self._queue.find(slot) is not None or slot.page.key in self._disk:
            return
        self._postponed.pop(slot, None)
        self._postponed[slot] = slot.stay
        self._metrics.postponed_pages.inc()

    def take(self, slot: Slot) -> DirtyPage | None:
        """A visible page that is not on disk is to go there, if it does not wait for that already.

        None if too much is on its way: ask at its next use.
        """
        waiting = self._queue.find(slot)
        if waiting is not None:
            return waiting
        if not self._table.make_dirty(slot):
            return None
        page = self.enqueue(slot)
        self.start_due()
        return page

    async def wait_durable(self, pages: Sequence[DirtyPage], *, failures_before: int = 0) -> list[KvPoolError | None]:
        """Wait until each page is durable (None) or could not be made so at one more try than these, without lingering.

        A page that failed stays visible in staging and is tried again as long as it is not evicted.
        """
        self._queue.urge(pages, self._clock.monotonic_s())
        self.start_due()
        for page in pages:  # what is decided stays so: each page is looked at until it is, and then no more
            while not self._stopped and _undecided(page, failures_before):
                await self._next_progress()
        return [_verdict(page) for page in pages]

    async def flush(self, keyspaces: set[bytes]) -> tuple[int, int]:
        """Wait until the pages of these keyspaces that are dirty or postponed now are durable, those that are evicted
        before their turn left out: how many are, how many failed.

        Raises StoreFault if the disk tier is out of service.
        """
        postponed = _Postponed(self._postponed)
        durable_count = failed_count = 0
        wanted = await self._urged(self._queue.pending, keyspaces)
        while wanted or postponed:
            self._pump()
            for part in _parts(wanted):
                for page, failures_before in part:
                    while not self._stopped and _undecided(page, failures_before):
                        await self._next_progress()
                await _let_others(part)
            while wanted:  # a part at a time: nothing else refers to what was written, and to free it all takes long
                part = wanted[-_PAGES_A_TURN:]
                del wanted[-_PAGES_A_TURN:]
                failed_count += sum(1 for page, _ in part if page.state is not WriteState.DONE and page.wanted)
                durable_count += sum(1 for page, _ in part if page.durable)
                await _let_others(part)
            taken, written_count = await self._next_postponed(postponed, keyspaces)
            wanted = await self._urged(taken, keyspaces)
            durable_count += written_count
            if self._stopped:
                break
        if failed_count and self._disk.fault:
            raise StoreFault(f"{failed_count} pages are not durable: {self._disk.fault}")
        return durable_count, failed_count

    def retry_failed(self, changed: DiskHealthChanged) -> None:
        """Write at once what waits for the disk, if it works again; let those who wait look again in any case."""
        if not changed.fault:
            self._queue.hurry(self._clock.monotonic_s())
        self._pump()

    def stop(self) -> None:
        """Begin no more writes; those under way end by themselves."""
        self._stopped = True
        self._pump()

    async def hold(self, keyspace: bytes) -> None:
        """Start no write of a keyspace any more, and wait until those under way have ended."""
        self._queue.hold(keyspace)
        while self._queue.is_writing(keyspace):
            await self._next_progress()

    def unhold(self, keyspace: bytes) -> None:
        self._queue.unhold(keyspace)
        self._pump()

    # Inside

    def _pump(self) -> None:
        """Start what is due, and have those who wait look again: also pages that are no longer wanted are progress."""
        self.start_due()
        self._wake()

    def start_due(self) -> None:
        """Start what is due now, and come back when the next page is. Wakes no waiter: a page that is added settles no
        other one, and waking all who wait for each page costs more than the page."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopped:
            return
        pause_s = self._start_postponed()
        now_s = self._clock.monotonic_s()
        in_budget = not self._table.is_half_dirty
        while batch := self._queue.next_batch(now_s, in_budget=in_budget):
            for page in batch:  # at once: before the task has begun, its slot could be cleared and handed on
                self._table.pin(page.slot)
            self._tasks.start(self._write(batch), "write-back")
        due_s = self._queue.next_due_s(now_s, in_budget=in_budget)
        if pause_s is not None:
            due_s = now_s + pause_s if due_s is None else min(due_s, now_s + pause_s)
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - now_s), self._pump)

    def _start_postponed(self) -> float | None:
        """Queue postponed pages while few are dirty; when to go on if no write that ends leads here."""
        for _ in range(_POSTPONED_A_TURN):
            if not self._postponed or self._table.is_half_dirty:
                return None
            slot, stay = next(iter(self._postponed.items()))
            if self._take_postponed(slot, stay) is None and self._is_postponed(slot, stay):
                return _WRITERS_PAUSE_S  # pages that are being written take the room
            self._postponed.pop(slot, None)
        return 0.0

    async def _urged(self, pages: Sequence[DirtyPage], keyspaces: set[bytes]) -> list[tuple[DirtyPage, int]]:
        """Have those pages of these keyspaces written next that are wanted; with how often each has failed so far."""
        urged: list[tuple[DirtyPage, int]] = []
        for part in _parts(pages):
            # One that was written while others had their turn may be evicted by now.
            wanted = [page for page in part if page.record.key.keyspace in keyspaces and (page.wanted or page.durable)]
            self._queue.urge(wanted, self._clock.monotonic_s())
            urged += [(page, page.failures) for page in wanted]
            await _let_others(part)
        return urged

    async def _next_postponed(self, postponed: _Postponed, keyspaces: set[bytes]) -> tuple[list[DirtyPage], int]:
        """Take as many pages of these keyspaces off the front as may be dirty at once, and some in any case: whatever
        others have dirty or write, a flush goes on. Also how many are on disk."""
        taken: list[DirtyPage] = []
        written_count = looked_count = 0
        while postponed:
            slot, stay = postponed.first
            if slot.stay == stay and slot.record is not None and slot.page.key.keyspace in keyspaces:
                is_enough = len(taken) >= _FLUSHED_AT_LEAST and self._table.is_disk_behind
                page = None if is_enough else self._take_postponed(slot, stay)
                if page is None and self._is_postponed(slot, stay):
                    if len(taken) >= _FLUSHED_AT_LEAST:
                        break
                    page = self.enqueue(slot)  # clean, as pages are that are tried again after a failure
                taken += [page] if page is not None else []
                written_count += page is None and slot.page.key in self._disk
            postponed.pop_first()
            looked_count += 1
            if looked_count % _POSTPONED_A_TURN == 0:
                await asyncio.sleep(0)
        return taken, written_count

    def _take_postponed(self, slot: Slot, stay: int) -> DirtyPage | None:
        """Queue a postponed page, or find it queued; None if it is gone, durable, or too much is on its way."""
        if slot.stay != stay or slot.record is None:
            return None
        waiting = self._queue.find(slot)  # one that failed is clean, and waits to be tried again
        if waiting is not None:
            return waiting
        if not self._is_postponed(slot, stay) or not self._table.make_dirty(slot):
            return None
        return self.enqueue(slot)

    def _is_postponed(self, slot: Slot, stay: int) -> bool:
        """Whether a page is still to be written: it is here, clean, not on disk, and its keyspace's pages go there."""
        if slot.stay != stay or slot.record is None or slot.deleted or slot.dirty:
            return False
        page = slot.page
        plan = self._policies.plan(page.key.keyspace)
        return plan.goes_to_disk(slot.uses, page.metadata.prompt_tokens) and page.key not in self._disk

    async def _write(self, batch: list[DirtyPage]) -> None:
        unsealed = await self._sealing.seal([page.slot for page in batch])
        writes = [
            PageWrite(
                key=page.record.key,
                page=self._space.view(page.slot),
                metadata=page.metadata,
                is_used=page.slot.uses > 0,
            )
            for page in batch
        ]
        written = {write.key: write.metadata for write in writes}
        refused = {
            page.record.key: error or self._refusal(page.record) for page, error in zip(batch, unsealed, strict=True)
        }
        admitted = [write for write in writes if refused[write.key] is None]
        results: dict[PageKey, KvPoolError | None] = {key: error for key, error in refused.items() if error is not None}
        try:
            with self._tracer.linked("pagestore.write_back", [page.cause for page in batch]) as span:
                if span.recording:
                    span.set({PAGES: len(admitted), BYTES: sum(len(write.page) for write in admitted)})
                try:
                    results |= await self._disk.write(admitted) if admitted else {}
                finally:
                    for write in admitted:  # by now the disk's map has counted those that are there
                        self._hold_bytes(write.key, -self._disk.map.page_bytes(write.key))
                await self._keep_changes(batch, written, results)
                if (error := next(filter(None, results.values()), None)) is not None:
                    span.fail(error)
        finally:  # whatever went wrong, slots come back and waiters go on
            for page in batch:
                self._end_write(page, results.get(page.record.key, _unforeseen()))
            self._queue.batch_ended()
            self._pump()

    def _refusal(self, record: PageRecord) -> KvPoolError | None:
        """Why a page may not take bytes on disk; if it may, they are counted until its write has ended."""
        size_bytes = self._disk.map.page_bytes(record.key)
        refused = self._admission.refusal(AdmissionRequest(AdmissionPurpose.WRITE_BACK, record, size_bytes))
        if refused is None:
            self._hold_bytes(record.key, size_bytes)
        return refused

    def _hold_bytes(self, key: PageKey, size_bytes: int) -> None:
        self._events.publish(BytesHeld(key.keyspace, size_bytes))

    async def _keep_changes(
        self,
        batch: Sequence[DirtyPage],
        written: dict[PageKey, PageMetadata],
        results: dict[PageKey, KvPoolError | None],
    ) -> None:
        """Have the disk say what changed in the retention of pages while they were written.

        The caller that changed it was answered that it will be on disk: before it does, the page is not durable.
        """
        changed = {
            page.record.key: page.metadata
            for page in batch
            if results[page.record.key] is None and page.wanted and page.metadata != written[page.record.key]
        }
        if not changed:
            return
        results |= dict.fromkeys(changed, _unforeseen())
        try:
            await self._disk.set_metadata(list(changed.items()))
            results |= dict.fromkeys(changed)
        except KvPoolError as error:
            results |= dict.fromkeys(changed, error)

    def _end_write(self, page: DirtyPage, error: KvPoolError | None) -> None:
        now_s, key = self._clock.monotonic_s(), page.record.key
        dropped = page.slot.deleted
        # Also a page that could not be written may be evicted: the cache can be lost, serving must go on.
        self._table.make_clean(page.slot)
        if error is None and not dropped and not self._policies.plan(key.keyspace).stays_in_staging:
            self._table.free_on_release(page.slot)
        self._table.unpin(page.slot)
        self._metrics.written_pages.labels("written" if error is None else "failed").inc()
        if error is not None:
            self._log_failure(key, error, now_s)
            self._queue.failed(page, error, now_s, is_disk_out=bool(self._disk.fault))
            return
        self._queue.written(page)
        self._metrics.write_back_lag.observe(now_s - page.committed_s)
        if dropped:  # cleared or found corrupt while it was written
            self._disk.discard([key])

    def _log_failure(self, key: PageKey, error: KvPoolError, now_s: float) -> None:
        self._unlogged_failures += 1
        if now_s >= self._log_failures_at_s:
            _log.warning("%d writes failed, pages are not durable yet: %s: %s", self._unlogged_failures, key, error)
            self._unlogged_failures, self._log_failures_at_s = 0, now_s + _FAILURES_LOGGED_EVERY_S

    async def _next_progress(self) -> None:
        if self._progress is None:
            self._progress = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._progress)

    def _wake(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.set_result(None)


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """What one turn of the event loop looks at, and what the next one does."""
    return (items[start : start + _PAGES_A_TURN] for start in range(0, len(items), _PAGES_A_TURN))


async def _let_others(part: Sequence[object]) -> None:
    """Have other work run after a part, unless it was short."""
    if len(part) == _PAGES_A_TURN:
        await asyncio.sleep(0)


def _unforeseen() -> StoreFault:
    return StoreFault("the write ended in an unforeseen way; the log says more")


def _verdict(page: DirtyPage) -> KvPoolError | None:
    if page.durable:
        return None
    if page.error is not None:
        return page.error
    if not page.wanted:
        return PageMissing(f"page {page.record.key} was dropped before it was durable")
    return Draining("the pagestore is shutting down")


def _undecided(page: DirtyPage, failures_before: int) -> bool:
    """Whether a flush must go on waiting for the page."""
    return page.state is not WriteState.DONE and page.wanted and page.failures <= failures_before
