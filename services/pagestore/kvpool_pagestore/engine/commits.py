"""Commits: written pages are verified, made visible, and sent to disk as the plan of their keyspace says.

Pages that are committed unsealed are not looked at then: they get header and sums before they leave this host's memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from kvpool.core.errors import ArenaFull, InvalidRequest, KvPoolError, PageCorrupt, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.page import PageFault, seal, verify
from kvpool_pagestore.core.events import PagesArrived
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.retention import extended
from kvpool_pagestore.core.slots import PageRecord, Slot, SlotState
from kvpool_pagestore.core.writeback import DirtyPage
from kvpool_pagestore.engine.arena import ArenaSpace
from kvpool_pagestore.engine.context import EngineContext, Tiers
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import Workers

_log = logging.getLogger(__name__)

_VERIFIED_AT_ONCE = 2  # pages: a hand-over to a thread costs about as much as one

Committed = KvPoolError | DirtyPage | None
"""None: done. An error: not visible, or not durable though it should be. Else the disk write that an answer awaits."""


class Commits:
    """The end of a page's writing. Bytes are looked at on threads."""

    def __init__(
        self,
        tiers: Tiers,
        policies: PolicyBook,
        keyspaces: KeyspaceBook,
        verifiers: Workers,
        context: EngineContext,
    ) -> None:
        self._table = tiers.staging.table
        self._space = tiers.staging.space
        self._disk = tiers.disk
        self._write_back = tiers.write_back
        self._policies = policies
        self._events = context.events
        self._keyspaces = keyspaces
        self._verifiers = verifiers
        self._metrics = context.metrics

    async def finish(self, slots: Sequence[Slot], durable: bool) -> list[Committed]:
        """Verify and publish COMMITTING slots; return a result for each.

        durable: as if all of their keyspaces were under write-through.
        """
        # A window of one engine is one commit: all threads have a share of it.
        share = max(_VERIFIED_AT_ONCE, -(-len(slots) // self._verifiers.threads))
        parts = [slots[start : start + share] for start in range(0, len(slots), share)]
        errors = [error for part in await asyncio.gather(*map(self._verify_part, parts)) for error in part]
        return self.finish_verified(slots, errors, durable)

    def finish_verified(
        self, slots: Sequence[Slot], errors: Sequence[KvPoolError | None], durable: bool
    ) -> list[Committed]:
        """The same for pages that were verified; errors: what `verify` has said of each."""
        reach("pagestore.commit.verified")
        return self._finish_all(slots, errors, durable, sealed=True)

    def finish_unsealed(self, slots: Sequence[Slot]) -> list[Committed]:
        """Publish COMMITTING slots that hold only a payload: nothing is verified, and sealing is left for later."""
        return self._finish_all(slots, [None] * len(slots), False, sealed=False)

    async def durable(self, committed: Sequence[Committed]) -> list[KvPoolError | None]:
        """The answers of a commit, once the pages among them are durable or could not be made so."""
        waiting = [one for one in committed if isinstance(one, DirtyPage)]
        verdicts = iter(
            await self._write_back.wait_durable(waiting) if self._write_back is not None and waiting else ()
        )
        return [next(verdicts) if isinstance(one, DirtyPage) else one for one in committed]

    def verify(self, slot: Slot) -> KvPoolError | None:
        """Why a page that was written must not become visible. Looks at all of its bytes: call it on a thread."""
        key, view = slot.page.key, self._space.view(slot)
        keyspace = self._keyspaces.find(key.keyspace)
        assert keyspace is not None  # a page got here through a session that named it
        payload_bytes = keyspace.payload_bytes(key.shard)
        fault = verify(view, key, keyspace.spec.codec, payload_bytes)
        if fault is None:
            return None
        if fault is PageFault.WRONG_CODEC and verify(view, key, None, payload_bytes) is None:
            # Whole as it was sealed, so that no byte was lost: the writer means another codec.
            return InvalidRequest(f"page {key} is of another codec than its keyspace's {keyspace.spec.codec.name}")
        return PageCorrupt(f"page {key}: {fault}")

    # Inside

    def _finish_all(
        self, slots: Sequence[Slot], errors: Sequence[KvPoolError | None], durable: bool, *, sealed: bool
    ) -> list[Committed]:
        visible: list[PageRecord] = []
        with self._events.merged():
            answers = [
                self._finish_one(slot, error, durable, sealed, visible)
                for slot, error in zip(slots, errors, strict=True)
            ]
        if visible:
            self._events.publish(PagesArrived(visible))
        if self._write_back is not None:
            self._write_back.start_due()
        self._metrics.committed_pages.inc(len(visible))
        self._metrics.committed_bytes.inc(sum(record.page_bytes for record in visible))
        reach("pagestore.commit.visible")
        return answers

    def _finish_one(
        self, slot: Slot, error: KvPoolError | None, durable: bool, sealed: bool, visible: list[PageRecord]
    ) -> Committed:
        record = slot.page
        if isinstance(error, PageCorrupt):
            self._metrics.verification_failures.labels("commit").inc()
            _log.error("page %s fails verification at its commit and is not stored", record.key)
        plan = self._policies.plan(record.key.keyspace)
        waits = durable or plan.commit_waits
        dirty = self._write_back is not None and (durable or plan.goes_to_disk(0, record.metadata.prompt_tokens))
        late = dirty and not waits and plan.stays_in_staging and self._table.is_disk_behind
        dirty = dirty and not late
        if not self._table.finish_commit(slot, verified=error is None, dirty=dirty, sealed=sealed):
            return error if error is not None else self._other_copy(record, dirty, waits, late)
        visible.append(record)
        if late and self._write_back is not None:
            self._write_back.postpone(slot)
        if dirty and self._write_back is not None:
            page = self._write_back.enqueue(slot, urgent=waits)
            return page if waits else None
        return _no_disk(record) if waits else None

    def _other_copy(self, record: PageRecord, dirty: bool, waits: bool, late: bool) -> Committed:
        """The same page came from a peer while it was written: that copy stays, and takes the place of this one."""
        slot = self._table.find(record.key)
        assert slot is not None  # it is what stood in the way
        metadata = extended(slot.page.metadata, record.metadata)
        if metadata != slot.page.metadata:
            self._table.set_metadata(slot, metadata)
            self._events.publish(PagesArrived((slot.page,)))
        if late and self._write_back is not None:
            self._write_back.postpone(slot)
            return None
        if not dirty or self._write_back is None:
            return _no_disk(record) if waits else None
        if self._disk is not None and record.key in self._disk:
            return None
        page = self._write_back.take(slot)
        if page is None and waits:
            return ArenaFull(f"page {record.key} is staged, but too much waits for the disk already")
        return page if waits else None

    async def _verify_part(self, slots: Sequence[Slot]) -> Sequence[KvPoolError | None]:
        try:
            return await self._verifiers.run(self._verify_all, slots)
        except KvPoolError as refused:  # no room in the queue, or shutting down: the pages are simply not stored
            return [refused] * len(slots)

    def _verify_all(self, slots: Sequence[Slot]) -> list[KvPoolError | None]:
        return [self.verify(slot) for slot in slots]


def _no_disk(record: PageRecord) -> StoreFault:
    return StoreFault(f"page {record.key} is staged, but this node has no disk tier for it")


_SEALED_AT_ONCE = 2  # pages: a hand-over to a thread costs about as much as one


class Sealing:
    """Seals each page once in its stay in a slot, on threads. Use from one event loop."""

    def __init__(self, space: ArenaSpace, keyspaces: KeyspaceBook, workers: Workers, metrics: PageStoreMetrics) -> None:
        self._space = space
        self._keyspaces = keyspaces
        self._workers = workers
        self._metrics = metrics
        # By slot: one thread only writes a header.
        self._running: dict[Slot, asyncio.Future[KvPoolError | None]] = {}

    async def seal(self, slots: Sequence[Slot]) -> list[KvPoolError | None]:
        """Seal pages; return, per slot, None once its page verifies, or why it was not sealed.

        The slots are READY, and pinned by the caller, who must not be cancelled meanwhile.
        """
        assert all(slot.state is SlotState.READY and slot.pins for slot in slots)
        own = list(dict.fromkeys(slot for slot in slots if not slot.sealed and slot not in self._running))
        share = max(_SEALED_AT_ONCE, -(-len(own) // self._workers.threads))
        ends = {slot: self._running[slot] for slot in slots if slot in self._running}
        for start in range(0, len(own), share):
            part = own[start : start + share]
            end = asyncio.ensure_future(self._seal(part))
            ends.update(dict.fromkeys(part, end))
            self._running.update(dict.fromkeys(part, end))
        return [await ends[slot] if slot in ends else None for slot in slots]

    async def verify(self, slot: Slot) -> KvPoolError | None:
        """Return why the sealed page in a slot is not good, or was not verified. The slot is READY, and pinned."""
        if not slot.sealed or slot in self._running:
            return None  # its header is written, from what is there, before it leaves this host's memory
        try:
            return await self._workers.run(self._verify, slot)
        except KvPoolError as refused:  # no room in the queue, or closing
            return refused

    # Inside

    async def _seal(self, slots: Sequence[Slot]) -> KvPoolError | None:
        try:
            took_s = await self._workers.run(self._seal_all, slots)
        except KvPoolError as refused:  # no room in the queue, or closing
            return refused
        except Exception:  # those who wait must go on
            _log.exception("%d pages were not sealed", len(slots))
            return StoreFault("the page could not be sealed; the log says more")
        finally:
            for slot in slots:
                del self._running[slot]
        for slot in slots:
            slot.sealed = True
        self._metrics.sealed_pages.inc(len(slots))
        self._metrics.sealed_bytes.inc(sum(slot.page.page_bytes for slot in slots))
        self._metrics.seal_seconds.inc(took_s)
        return None

    def _verify(self, slot: Slot) -> PageCorrupt | None:
        key = slot.page.key
        keyspace = self._keyspaces.find(key.keyspace)
        assert keyspace is not None  # a page got here through a session that named it
        with self._space.view(slot) as view:
            fault = verify(view, key, keyspace.spec.codec, keyspace.payload_bytes(key.shard))
        return None if fault is None else PageCorrupt(f"page {key} in staging: {fault}")

    def _seal_all(self, slots: Sequence[Slot]) -> float:
        began_s = time.perf_counter()
        for slot in slots:
            key = slot.page.key
            keyspace = self._keyspaces.find(key.keyspace)
            assert keyspace is not None  # a page got here through a session that named it
            with self._space.view(slot) as view:
                seal(view, key, keyspace.spec.codec, keyspace.payload_bytes(key.shard))
        return time.perf_counter() - began_s
