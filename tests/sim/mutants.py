"""Bugs planted at a seam, one at a time: each must be found by the simulation within a few histories.

They are tests of the tests. Each is a context manager that breaks one promise of the services.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import kvpool_index.engine.announce
import kvpool_pagestore.engine.disk_tier
import kvpool_pagestore.engine.pulls
from kvpool.core.errors import KeyspaceUnknown, KvPoolError
from kvpool_index.adapters.memory import MemoryLocationStore
from kvpool_index.adapters.memory_nodes import MemoryNodeDirectory
from kvpool_index.core.events import pack_entries
from kvpool_index.engine.keyspaces import KeyspaceService
from kvpool_pagestore.core.events import DiskChanged
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.segments import SegmentTable
from kvpool_pagestore.core.sessions import SessionTable
from kvpool_pagestore.core.slots import Slot
from kvpool_pagestore.engine.commits import Commits, Sealing
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.engine.drain import Drain
from kvpool_pagestore.engine.pulls import PagePull, Pulls
from kvpool_pagestore.engine.replication import ReplicationManager
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.store import PageStoreEngine
from kvpool_server.session_stream import SessionStream

Mutant = Callable[[], AbstractContextManager[object]]


def _skip_commit_checksum() -> AbstractContextManager[object]:
    """A commit believes its writer."""
    return mock.patch.object(Commits, "verify", lambda self, slot: None)


def _skip_disk_checksum() -> AbstractContextManager[object]:
    """What the disk gives is served as it is."""
    return mock.patch.object(kvpool_pagestore.engine.disk_tier, "verify", lambda *args: None)


def _skip_pull_checksum() -> AbstractContextManager[object]:
    """What a peer sends is served as it is."""
    return mock.patch.object(kvpool_pagestore.engine.pulls, "verify", lambda *args: None)


def _visible_before_verified() -> AbstractContextManager[object]:
    """Pages are visible from the begin of their commit, and taken back if they turn out to be incomplete."""

    async def finish(self: Commits, slots: Sequence[Slot], durable: bool) -> list[KvPoolError | None]:
        records = [slot.page for slot in slots]
        for slot in slots:
            self._table.finish_commit(slot, verified=True, dirty=False)
        await asyncio.sleep(0.005)
        errors = [
            self.verify(slot) if slot.record is record else None for slot, record in zip(slots, records, strict=True)
        ]
        for record, error in zip(records, errors, strict=True):
            if error is not None:
                self._table.drop(record.key)
        return errors

    return mock.patch.object(Commits, "finish", finish)


@contextmanager
def _reuse_leased_slots() -> Iterator[None]:
    """Read leases do not keep a slot from being evicted."""
    unused = property(lambda slot: not slot.orphaned_leases and not slot.pins)
    with (
        mock.patch.object(Slot, "unused", unused),
        mock.patch.object(SegmentTable, "hold", SegmentTable.update_evictable),
    ):
        yield


def _recycle_on_timeout() -> AbstractContextManager[object]:
    """The slots of a vanished peer come back after a while, whatever the kernel says of it."""
    true_resolvable = SessionTable.resolvable

    def resolvable(self: SessionTable, now_s: float) -> list[Any]:
        self.note_gone([one.session_id for one in self.ended], now_s)
        return true_resolvable(self, now_s)

    return mock.patch.object(SessionTable, "resolvable", resolvable)


def _forget_quarantine() -> AbstractContextManager[object]:
    """A session that broke is treated as one that was closed."""

    def end_session(self: PageTable, session: Any) -> None:
        self._give_back(session)
        self.sessions.close(session)

    return mock.patch.object(PageTable, "end_session", end_session)


def _serve_old_incarnations() -> AbstractContextManager[object]:
    """A caller that expects an earlier process of the node is served by this one."""
    return mock.patch.object(PageStoreEngine, "check_incarnation", lambda self, expected: None)


def _announce_before_durable() -> AbstractContextManager[object]:
    """The index hears of a page on disk when its write begins."""
    true_write = DiskTier.write

    async def write(self: DiskTier, pages: Sequence[Any]) -> Any:
        self._events.publish(DiskChanged([(page.key, page.metadata.group_head_hash) for page in pages], True))
        return await true_write(self, pages)

    return mock.patch.object(DiskTier, "write", write)


def _forget_dirty() -> AbstractContextManager[object]:
    """A committed page may be evicted before it is on disk."""
    true_finish = PageTable.finish_commit

    def finish_commit(self: PageTable, slot: Slot, *, verified: bool, dirty: bool, sealed: bool) -> bool:
        return true_finish(self, slot, verified=verified, dirty=False, sealed=sealed)

    return mock.patch.object(PageTable, "finish_commit", finish_commit)


def _forget_arena_budget() -> AbstractContextManager[object]:
    """Segments are made without counting those that an earlier process left."""
    return mock.patch.object(SegmentTable, "hold_old_bytes", lambda self, size_bytes: None)


def _leak_flights() -> AbstractContextManager[object]:
    """A page that could not be fetched stays on its way for ever."""
    true_start = Pulls.start

    def start(self: Pulls, page: PagePull) -> None:
        true_done = page.on_done

        def done(page: PagePull, slot: Slot | None, error: KvPoolError | None, hit: bool) -> None:
            if error is None:
                true_done(page, slot, error, hit)

        page.on_done = done
        true_start(self, page)

    return mock.patch.object(Pulls, "start", start)


def _leak_late_words() -> AbstractContextManager[object]:
    """Words of a session that has ended are still carried out: what was in the pipe frees what its peer touches."""
    return mock.patch.object(PeerSession, "live", property(lambda peer: True))


def _two_writers() -> AbstractContextManager[object]:
    """A key that is being written is granted to another writer too."""
    true_reserve = PageTable.reserve

    def reserve(self: PageTable, session: Any, record: Any) -> Any:
        self._writing.pop(record.key, None)
        return true_reserve(self, session, record)

    return mock.patch.object(PageTable, "reserve", reserve)


def _forget_attempts() -> AbstractContextManager[object]:
    """A registration that comes late or twice is taken for one of a new process."""
    true_register = MemoryNodeDirectory.register

    async def register(self: MemoryNodeDirectory, info: Any, *, attempt: Any, **how: Any) -> Any:
        try:
            return await true_register(self, info, **how)
        finally:
            if info.node_id in self._nodes:
                self._nodes[info.node_id].attempt = attempt

    return mock.patch.object(MemoryNodeDirectory, "register", register)


def _overlook_parts() -> AbstractContextManager[object]:
    """The index does not say which groups are split, so that what is wrong in their parts is never corrected."""

    async def split_groups(self: MemoryLocationStore, ordinal: int, number: int, after: bytes) -> Any:
        return [], b""

    return mock.patch.object(MemoryLocationStore, "split_groups", split_groups)


def _one_request_at_a_time() -> AbstractContextManager[object]:
    """The reader of a session waits for each request, and so for the disk, before it hears the next heartbeat."""
    true_serve = SessionStream.serve

    async def serve(self: Any, messages: AsyncIterator[Any], write: Any) -> None:
        async def one_at_a_time() -> AsyncIterator[Any]:
            async for message in messages:
                yield message
                if self._requests:
                    await asyncio.wait(set(self._requests))

        await true_serve(self, one_at_a_time(), write)

    return mock.patch.object(SessionStream, "serve", serve)


def _any_tenants_keyspace() -> AbstractContextManager[object]:
    """The index answers about a keyspace to any caller."""

    async def get(self: KeyspaceService, tenant: str, keyspace: bytes) -> Any:
        known = await self.find(keyspace)
        if known is None:
            raise KeyspaceUnknown("not known")
        return known

    return mock.patch.object(KeyspaceService, "get", get)


def _leave_what_is_alone() -> AbstractContextManager[object]:
    """A drain believes that all its pages are elsewhere."""

    async def look(self: Drain) -> int:
        return 0

    return mock.patch.object(Drain, "_pass", look)


def _forget_lost_copies() -> AbstractContextManager[object]:
    """Copies that were lost are not made again."""

    async def heal(self: ReplicationManager, *_: Any) -> None:
        return None

    return mock.patch.object(ReplicationManager, "_heal", heal)


def _forget_events() -> AbstractContextManager[object]:
    """Of the chunks of a batch only the first of each stream is sent to watchers."""
    true_pack = pack_entries
    return mock.patch.object(kvpool_index.engine.announce, "pack_entries", lambda states: true_pack(states[:1]))


def _pages_leave_unsealed() -> AbstractContextManager[object]:
    """What an agent committed leaves the host's memory without header and sums."""

    async def seal(self: Sealing, slots: Sequence[Slot]) -> list[KvPoolError | None]:
        return [None] * len(slots)

    return mock.patch.object(Sealing, "seal", seal)


MUTANTS: dict[str, Mutant] = {
    "forget-attempts": _forget_attempts,
    "skip-commit-checksum": _skip_commit_checksum,
    "skip-disk-checksum": _skip_disk_checksum,
    "skip-pull-checksum": _skip_pull_checksum,
    "visible-before-verified": _visible_before_verified,
    "reuse-leased-slots": _reuse_leased_slots,
    "recycle-on-timeout": _recycle_on_timeout,
    "forget-quarantine": _forget_quarantine,
    "serve-old-incarnations": _serve_old_incarnations,
    "announce-before-durable": _announce_before_durable,
    "forget-dirty": _forget_dirty,
    "forget-arena-budget": _forget_arena_budget,
    "leak-flights": _leak_flights,
    "leak-late-words": _leak_late_words,
    "two-writers": _two_writers,
    "overlook-parts": _overlook_parts,
    "any-tenants-keyspace": _any_tenants_keyspace,
    "leave-what-is-alone": _leave_what_is_alone,
    "forget-lost-copies": _forget_lost_copies,
    "forget-events": _forget_events,
    "pages-leave-unsealed": _pages_leave_unsealed,
    "one-request-at-a-time": _one_request_at_a_time,
}
"""By name; see the functions for what is broken."""
