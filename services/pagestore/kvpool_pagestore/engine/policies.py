"""Policies of keyspaces on this node, and quotas of tenants and keyspaces."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterable
from contextlib import closing
from weakref import WeakValueDictionary

from kvpool.core.errors import InvalidRequest, KvPoolError, QuotaExceeded
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_pagestore.core.admission import AdmissionRequest, QuotaBook, Shortfall, TenantQuotas
from kvpool_pagestore.core.events import BytesHeld, DiskChanged, PagesEvicted, PagesUsed, PolicyChanged
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.slots import Slot
from kvpool_pagestore.engine.context import EngineContext, Tiers
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.engine.inventory import staged_parts
from kvpool_pagestore.ports import IndexLink

_log = logging.getLogger(__name__)

_NAME = "keyspace-policies"
_ENTRY = struct.Struct("<16sQH")  # keyspace id, version, bytes of the policy that follows
_FETCHED_AT_ONCE = 256  # keyspaces
_PAGES_A_TURN = 128  # of the event loop, when a changed policy is applied: a page takes some 30 us


class Policies:
    """Keeps the PolicyBook up to date. The index is asked once for each keyspace that is new here, and for all of them
    whenever it says that policies have changed; without the index, what was learnt last holds, also after a restart."""

    def __init__(
        self,
        book: PolicyBook,
        keyspaces: KeyspaceBook,
        tiers: Tiers,
        index: IndexLink,
        context: EngineContext,
    ) -> None:
        self._book = book
        self._keyspaces = keyspaces
        self._table = tiers.staging.table
        self._disk = tiers.disk
        self._write_back = tiers.write_back
        self._index = index
        self._tasks = context.tasks
        self._events = context.events
        # Keyspaces of which the index was asked once, as long as they are known.
        self._asked: WeakValueDictionary[bytes, Keyspace] = WeakValueDictionary()
        self._version_seen = 0
        self._version_learnt = 0
        self._learning = False
        self._saving = asyncio.Lock()

    async def load(self) -> None:
        """What was learnt before the last restart. Raises StoreFault."""
        stored = await self._disk.load_value(_NAME) if self._disk is not None else None
        try:
            for learned in _unpacked(stored or b""):
                self._book.take(learned)
                self._events.publish(PolicyChanged(learned.keyspace, learned.policy))
        except (InvalidRequest, struct.error) as error:  # the index sends them again
            _log.error("the stored policies cannot be read, and are fetched from the index again: %s", error)

    def repeat(self) -> None:
        """Publish every policy that is known once more."""
        for learned in self._book.known():
            self._events.publish(PolicyChanged(learned.keyspace, learned.policy))

    async def learn(self, keyspaces: Iterable[bytes]) -> None:
        """Ask the index for the policies of keyspaces that it was never asked of; nothing if it cannot say now."""
        new = [keyspace for keyspace in keyspaces if keyspace not in self._asked]
        if new:
            try:
                await self._fetch(new)
            except KvPoolError as error:
                _log.warning("policies of %d keyspaces are not known yet: %s", len(new), error)

    def write_used(self, used: PagesUsed) -> None:
        """Take pages to disk whose keyspace says so of pages that are used so often."""
        for slot in used.slots:
            if self._book.plan(slot.page.key.keyspace).goes_by_use(slot.uses) and not self._is_safe(slot):
                self._write(slot)

    def version_seen(self, version: int) -> None:
        """The index has named the version of all policies, with a lease renewal."""
        self._version_seen = version
        if version != self._version_learnt and not self._learning:
            self._learning = True
            self._tasks.start(self._learn_all(), "learn-policies")

    # Inside

    def _reconsider(self, slot: Slot) -> None:
        """Do what a changed plan says of a visible page: to disk with it, or out of staging."""
        plan = self._book.plan(slot.page.key.keyspace)
        if not self._is_safe(slot):
            if plan.goes_to_disk(slot.uses, slot.page.metadata.prompt_tokens):
                self._write(slot)
        elif not slot.dirty and not plan.stays_in_staging:
            self._table.free_on_release(slot)

    def _is_safe(self, slot: Slot) -> bool:
        """The page is on disk or on its way there."""
        return slot.dirty or (self._disk is not None and slot.page.key in self._disk)

    def _write(self, slot: Slot) -> None:
        if self._write_back is not None:
            self._write_back.take(slot)

    async def _learn_all(self) -> None:
        try:
            while (version := self._version_seen) != self._version_learnt:
                known = {one.keyspace for one in self._book.known()}
                await self._fetch(sorted(known | {one.keyspace for one in self._keyspaces.all()}))
                self._version_learnt = version
        except KvPoolError as error:
            _log.warning("changed policies could not be fetched; the next renewal tries again: %s", error)
        finally:
            self._learning = False

    async def _fetch(self, keyspaces: list[bytes]) -> None:
        """Raises StoreUnavailable and the like."""
        is_any_new = False
        try:
            for start in range(0, len(keyspaces), _FETCHED_AT_ONCE):
                part = keyspaces[start : start + _FETCHED_AT_ONCE]
                known = [learned for one in part if (learned := self._book.versioned(one)) is not None]
                fetched = await self._index.fetch_policies(part, known)
                self._asked.update({one: found for one in part if (found := self._keyspaces.find(one)) is not None})
                for one in fetched:
                    is_any_new |= await self._apply(one)
        finally:
            if is_any_new:
                await self._save()

    async def _apply(self, learned: VersionedPolicy) -> bool:
        before = self._book.plan(learned.keyspace)
        if not self._book.take(learned):
            return False
        _log.info(
            "keyspace %s has policy %s of version %d now", learned.keyspace.hex(), learned.policy, learned.version
        )
        self._events.publish(PolicyChanged(learned.keyspace, learned.policy))
        if self._book.plan(learned.keyspace) != before:
            await self._apply_plan(learned.keyspace)
        return True

    async def _apply_plan(self, keyspace: bytes) -> None:
        """Do what a changed plan says of the pages that are visible now; those that come later follow it anyway."""
        for slots in staged_parts(self._table, keyspace, _PAGES_A_TURN):
            for slot in slots:
                self._table.reannounce(slot)
                self._reconsider(slot)
            await asyncio.sleep(0)

    async def _save(self) -> None:
        if self._disk is None:
            return
        async with self._saving:  # one after another, the last with everything
            try:
                await self._disk.save_value(_NAME, _packed(self._book.known()))
            except KvPoolError as error:
                _log.error("policies will be lost at a restart: %s", error)


def _packed(known: Iterable[VersionedPolicy]) -> bytes:
    parts = []
    for one in known:
        encoded = one.policy.encode()
        parts.append(_ENTRY.pack(one.keyspace, one.version, len(encoded)) + encoded)
    return b"".join(parts)


def _unpacked(packed: bytes) -> list[VersionedPolicy]:
    """Raises InvalidRequest, struct.error."""
    found, at = [], 0
    while at < len(packed):
        keyspace, version, size_bytes = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size + size_bytes
        policy = KeyspacePolicy.decode(packed[at - size_bytes : at])
        found.append(VersionedPolicy(keyspace=keyspace, policy=policy, version=version))
    return found


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

    def count(self, held: BytesHeld) -> None:
        """Bytes of a keyspace were taken, or came back."""
        self._know(held.keyspace)
        self._book.add(held.keyspace, held.size_bytes)

    def disk_changed(self, changed: DiskChanged) -> None:
        """Staged pages became copies of what is on disk, which go first, or are no longer copies."""
        for key, _ in changed.pages:
            slot = self._table.find(key)
            if slot is not None:
                self._table.space.mark_on_disk(slot, changed.present)

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

        has_copies = self._disk is not None and self._disk.is_readable
        if has_copies and self._give_up_staged(shortfall, aim_bytes, spare, most, only_on_disk=True):
            return
        if not self._give_up_stored(shortfall, aim_bytes, spare, most):
            self._give_up_staged(shortfall, aim_bytes, spare, most)

    def _give_up_staged(
        self, shortfall: Shortfall, aim_bytes: int, spare: PageKey | None, most: int, *, only_on_disk: bool = False
    ) -> bool:
        """Whether it were as many as may be."""
        walk = self._table.space.victims(
            shortfall.keyspaces, lambda slot: slot.page.key == spare, only_on_disk=only_on_disk
        )
        with closing(walk) as victims:
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
