"""Quotas enforced: whoever is over one gives up pages of its own, never those of others, or is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing

from kvpool.core.errors import QuotaExceeded
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool_pagestore.core.admission import AdmissionRequest
from kvpool_pagestore.core.events import BytesHeld, PagesEvicted, PolicyChanged
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.quota import QuotaBook, Shortfall, TenantQuotas
from kvpool_pagestore.engine_context import EngineContext
from kvpool_pagestore.engine_disk import DiskTier

_SPARE_PART = 64  # looking for victims costs a walk: one part in this many of what is used is given up on top,
_SPARE_BYTES = 4 << 20  # but no more than this
_AT_ONCE = 64  # pages in staging or chunks on disk given up between two turns of the loop: each takes 20 to 150 us


class Quotas:
    """Counts what keyspaces use, in staging and on disk, and admits what is to come."""

    def __init__(
        self,
        tenants: TenantQuotas,
        keyspaces: KeyspaceBook,
        table: PageTable,
        disk: DiskTier | None,
        context: EngineContext,
    ) -> None:
        self._book = QuotaBook(tenants)
        self._keyspaces = keyspaces
        self._table = table
        self._disk = disk
        self._tasks = context.tasks
        self._events = context.events
        self._lowered: set[bytes] = set()  # keyspaces of which a quota is being met

    def used_bytes(self, keyspace: bytes) -> int:
        """What a keyspace takes in staging and on disk."""
        return self._book.used_bytes(keyspace)

    def count(self, held: BytesHeld) -> None:
        """Bytes of a keyspace were taken, or came back."""
        self._know(held.keyspace)
        self._book.add(held.keyspace, held.size_bytes)

    def refusal(self, request: AdmissionRequest) -> QuotaExceeded | None:
        """An AdmissionRule: make room among pages of the same owner, or say which quota is used up."""
        keyspace, more_bytes = request.record.key.keyspace, request.size_bytes
        self._know(keyspace)
        if not self._book.knows(keyspace):
            return None
        shortfalls = self._book.shortfalls(keyspace, more_bytes)
        if not shortfalls:
            return None
        for shortfall in shortfalls:
            # After a quota was lowered, more goes in steps of its own.
            self._give_up(shortfall, request.record.key, _AT_ONCE)
        left = self._book.shortfalls(keyspace, more_bytes)
        if left:
            return QuotaExceeded(f"{left[0].owner} is used up by pages that are in use, pinned or not yet durable")
        return None

    def take_policy(self, changed: PolicyChanged) -> None:
        """A keyspace's own quota may have changed; what is too much is given up soon, as far as it is not in use."""
        keyspace = changed.keyspace
        self._know(keyspace)
        self._book.limit(keyspace, changed.policy.quota_bytes)
        if self._book.knows(keyspace) and self._book.shortfalls(keyspace, 0):
            self._lowered.add(keyspace)
            if len(self._lowered) == 1:
                self._tasks.start(self._lower(), "lower-quotas")

    async def enforce(self) -> None:
        """Give up whatever is beyond a quota."""
        tenants = set[str]()
        for one in self._keyspaces.all():
            self._know(one.keyspace)
            for shortfall in self._book.shortfalls(one.keyspace, 0):
                if shortfall.tenant not in tenants:  # once for all of its keyspaces, also where it cannot be met
                    tenants.update(filter(None, (shortfall.tenant,)))
                    await self._give_up_in_steps(one.keyspace, shortfall.tenant)

    # Inside

    def _know(self, keyspace: bytes) -> None:
        if not self._book.knows(keyspace):
            known = self._keyspaces.find(keyspace)
            # A policy may come before the keyspace itself: nothing of it is here then, nor counted.
            if known is not None:
                self._book.know(keyspace, known.tenant)

    async def _lower(self) -> None:
        try:
            while self._lowered:
                keyspace = next(iter(self._lowered))
                for shortfall in self._book.shortfalls(keyspace, 0):
                    await self._give_up_in_steps(keyspace, shortfall.tenant)
                self._lowered.discard(keyspace)
        finally:
            self._lowered.clear()

    async def _give_up_in_steps(self, keyspace: bytes, tenant: str) -> None:
        """Meet the keyspace's own quota, or its tenant's: any number of pages may have to go."""
        while left := [one for one in self._book.shortfalls(keyspace, 0) if one.tenant == tenant]:
            used_bytes = self._book.used_for(left[0])
            self._give_up(left[0], None, _AT_ONCE)
            if self._book.used_for(left[0]) >= used_bytes:
                return  # all of it is in use
            if self._disk is not None:
                await self._disk.deleted()
            await asyncio.sleep(0)

    def _give_up(self, shortfall: Shortfall, spare: PageKey | None, most: int) -> None:
        """Pages of the shortfall's keyspaces, by the eviction policies of the tiers held to them: copies in staging of
        what is on disk, which lose nothing; then pages on disk; then pages that are in staging alone.

        most: pages in staging, or chunks on disk; call again then.
        """
        used_bytes = self._book.used_for(shortfall)
        aim_bytes = used_bytes - shortfall.size_bytes - min(used_bytes // _SPARE_PART, _SPARE_BYTES)

        disk = self._disk
        if disk is not None and self._give_up_staged(
            shortfall, aim_bytes, lambda key: key == spare or key not in disk, most
        ):
            return
        if not self._give_up_stored(shortfall, aim_bytes, spare, most):
            self._give_up_staged(shortfall, aim_bytes, lambda key: key == spare, most)

    def _give_up_staged(
        self, shortfall: Shortfall, aim_bytes: int, spared: Callable[[PageKey], bool], most: int
    ) -> bool:
        """Whether it were as many as may be."""
        with closing(self._table.space.victims(shortfall.keyspaces, lambda slot: spared(slot.page.key))) as victims:
            for _ in range(most):
                slot = next(victims, None) if self._book.used_for(shortfall) > aim_bytes else None
                if slot is None:
                    return False
                self._table.give_up(slot)
        return True

    def _give_up_stored(self, shortfall: Shortfall, aim_bytes: int, spare: PageKey | None, most: int) -> bool:
        """Pages on disk, by the disk's eviction policy held to these keyspaces; whether it were as many as may be."""
        disk = self._disk
        over_bytes = self._book.used_for(shortfall) - aim_bytes
        if disk is None or disk.fault or over_bytes <= 0:
            return False
        chunks = disk.map.oldest(
            over_bytes, lambda key: key == spare or disk.is_read(key), shortfall.keyspaces, max_chunks=most
        )
        keys = [key for chunk in chunks for key in chunk.keys]
        if keys:
            self._events.publish(PagesEvicted(Tier.DISK, len(keys)))
            disk.discard(keys)
        return len(chunks) >= most
