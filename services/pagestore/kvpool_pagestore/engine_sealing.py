"""Pages that were committed without header and sums get them here, before their bytes leave this host's memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from kvpool.core.errors import KvPoolError, PageCorrupt, StoreFault
from kvpool.core.page import seal, verify
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.slots import Slot, SlotState
from kvpool_pagestore.engine_space import ArenaSpace
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import Workers

_log = logging.getLogger(__name__)

_SEALED_AT_ONCE = 2  # pages: a hand-over to a thread costs about as much as one


class Sealing:
    """Seals each page once in its stay in a slot, on threads. Use from one event loop."""

    def __init__(self, space: ArenaSpace, keyspaces: KeyspaceBook, workers: Workers, metrics: PageStoreMetrics) -> None:
        self._space = space
        self._keyspaces = keyspaces
        self._workers = workers
        self._metrics = metrics
        # By slot: one thread only writes a sum table, which is not whole while it is being written.
        self._running: dict[Slot, asyncio.Future[KvPoolError | None]] = {}

    async def seal(self, slots: Sequence[Slot]) -> list[KvPoolError | None]:
        """Per slot None once its page verifies, or why it was not sealed.

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
            return None  # its sums are written, from what is there, before it leaves this host's memory
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
