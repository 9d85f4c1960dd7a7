"""The arena's ledger: which page is where, who may touch it, and what becomes of it when a session ends.

Every method is one atomic change. Nothing here waits: whoever cannot have a slot now is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.core.errors import ArenaFull, LeaseLost, SessionBusy
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.core.segments import SegmentTable
from kvpool_pagestore.core.sessions import Session, SessionState, SessionTable
from kvpool_pagestore.core.slots import PageRecord, Slot, SlotState, SpaceNeed, slot_bytes_for

OnStaging = Callable[[PageRecord, bool], None]
"""Told of every page that becomes visible in staging (True) or leaves it (False)."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease on a slot, write or read."""

    lease_id: int
    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """Budgets and times of the ledger."""

    arena_bytes: int
    segment_bytes: int
    first_segment_id: int
    # Slots being written, dirty, or left in quarantine by a writer. What is beyond it is for promotion and reading.
    writer_bytes: int
    silence_limit_s: float
    grace_s: float


class Ledger:
    """Pages in the arena, their slots, sessions and leases. Use from one thread only."""

    def __init__(self, limits: LedgerLimits, on_staging: OnStaging) -> None:
        self._limits = limits
        self._on_staging = on_staging
        self.on_evicted: Callable[[], None] = lambda: None  # a page was thrown out to make room
        self.space = SegmentTable(
            capacity_bytes=limits.arena_bytes,
            segment_bytes=limits.segment_bytes,
            first_segment_id=limits.first_segment_id,
            on_evict=self._evicted,
        )
        self.sessions = SessionTable(silence_limit_s=limits.silence_limit_s, grace_s=limits.grace_s)
        self.dirty_bytes = 0
        self.writer_bytes = 0  # RESERVED, COMMITTING, dirty, and QUARANTINED slots
        self._ready: dict[PageKey, Slot] = {}
        self._writing: dict[PageKey, Slot] = {}
        self._filling: dict[PageKey, list[Slot]] = {}  # more than one: the page is asked of two sources at once

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    def find(self, key: PageKey) -> Slot | None:
        """The slot of a visible page."""
        return self._ready.get(key)

    def ready_pages(self) -> list[PageRecord]:
        """All visible pages."""
        return [slot.page for slot in self._ready.values()]

    # Writing

    def reserve(self, session: Session, record: PageRecord) -> Grant | Admission | SessionBusy | ArenaFull | SpaceNeed:
        """Ask to be the one writer of a page that is not on disk (the caller has looked there)."""
        ready = self._ready.get(record.key)
        if ready is not None:
            self.space.touch(ready)
            return Admission.EXISTS
        if record.key in self._writing or record.key in self._filling:
            return Admission.PENDING
        if len(session.writes) >= session.max_leases:
            return SessionBusy(f"the session holds {session.max_leases} write leases, its window")
        slot_bytes = slot_bytes_for(record.page_bytes)
        if self.writer_bytes + slot_bytes > self._limits.writer_bytes:
            return ArenaFull(f"{self.writer_bytes} bytes are being written or not yet durable, the cap")
        slot = self.space.allocate(session.tenant, slot_bytes)
        if isinstance(slot, SpaceNeed):
            return slot
        self._take(slot, SlotState.RESERVED, record)
        self.writer_bytes += slot.size_bytes
        self._writing[record.key] = slot
        lease_id = session.next_lease_id()
        session.writes[lease_id] = slot
        return Grant(lease_id, slot)

    def begin_commit(self, session: Session, lease_id: int) -> Slot | LeaseLost:
        """The session has finished writing; the caller verifies the bytes, then calls `finish_commit`."""
        slot = session.writes.pop(lease_id, None)
        if slot is None:
            return LeaseLost(f"lease {lease_id} is no write lease of this session")
        slot.state = SlotState.COMMITTING
        return slot

    def finish_commit(self, slot: Slot, *, verified: bool, dirty: bool) -> bool:
        """Make the page visible, or free its slot. True if the page of this very slot is visible now."""
        assert slot.state is SlotState.COMMITTING
        self.writer_bytes -= slot.size_bytes
        del self._writing[slot.page.key]
        if not verified or slot.page.key in self._ready:  # pulled from a peer meanwhile: the same bytes
            self.space.free(slot)
            return False
        if dirty:
            slot.dirty = True
            self.dirty_bytes += slot.size_bytes
            self.writer_bytes += slot.size_bytes
        self._publish(slot)
        return True

    def abort(self, session: Session, lease_id: int) -> bool:
        """Give a slot back unwritten. False if there is no such lease."""
        slot = session.writes.pop(lease_id, None)
        if slot is None:
            return False
        self._drop_writer(slot)
        self.space.free(slot)
        return True

    # Promotion and pulls

    def begin_fill(self, tenant: str, record: PageRecord) -> Slot | SpaceNeed:
        """A slot that the owner fills from disk or a peer. Several of one page may be filled; the first one counts."""
        slot = self.space.allocate(tenant, slot_bytes_for(record.page_bytes))
        if isinstance(slot, SpaceNeed):
            return slot
        self._take(slot, SlotState.FILLING, record)
        self._filling.setdefault(record.key, []).append(slot)
        return slot

    def finish_fill(self, slot: Slot, *, verified: bool) -> Slot | None:
        """Make the page visible and clean; the slot to read from (another one if a writer was faster), or None.

        The answer is pinned: lease it, then `unpin`, so that it cannot be evicted before its first reader.
        """
        assert slot.state is SlotState.FILLING
        filling = self._filling[slot.page.key]
        filling.remove(slot)
        if not filling:
            del self._filling[slot.page.key]
        present = self._ready.get(slot.page.key)
        if verified and not slot.doomed and present is None:
            slot.pins = 1
            self._publish(slot)
            return slot
        self.space.free(slot)
        if present is not None:
            self.pin(present)
        return present

    # Reading

    def read_window(self, session: Session) -> SessionBusy | None:
        """None while the session may have one more page to read, or to wait for."""
        if len(session.reads) + session.waiting < session.max_leases:
            return None
        return SessionBusy(f"the session holds or waits for {session.max_leases} read leases, its window")

    def acquire(self, session: Session, key: PageKey) -> Grant | SessionBusy | None:
        """A read lease on a visible page; None if it is not in staging."""
        slot = self._ready.get(key)
        if slot is None:
            return None
        busy = self.read_window(session)
        if busy is not None:
            return busy
        slot.readers += 1
        self.space.settle(slot)
        self.space.touch(slot)
        lease_id = session.next_lease_id()
        session.reads[lease_id] = slot
        return Grant(lease_id, slot)

    def release(self, session: Session, lease_id: int) -> Slot | None:
        """End a read lease; None if there is no such lease. The slot may be FREE afterwards."""
        slot = session.reads.pop(lease_id, None)
        if slot is None:
            return None
        slot.readers -= 1
        self.space.touch(slot)
        self._free_or_settle(slot)
        return slot

    def pin(self, slot: Slot) -> None:
        """Hold a READY slot for the owner's own use."""
        assert slot.state is SlotState.READY
        slot.pins += 1
        self.space.settle(slot)

    def unpin(self, slot: Slot) -> None:
        """End one of the owner's uses. The slot may be FREE afterwards."""
        slot.pins -= 1
        self._free_or_settle(slot)

    # Write-back and dropping

    def make_clean(self, slot: Slot) -> None:
        """The page is durable, or writing it was given up for now: it no longer stands in the way of eviction."""
        if slot.dirty:
            slot.dirty = False
            self.dirty_bytes -= slot.size_bytes
            self.writer_bytes -= slot.size_bytes
        self.space.settle(slot)

    def drop(self, key: PageKey) -> bool:
        """Make a page invisible at once; its slot comes back after its last use. False if it is not in staging."""
        for filling in self._filling.get(key, ()):
            filling.doomed = True  # what is on its way here is not wanted any more
        slot = self._ready.get(key)
        if slot is None:
            return False
        del self._ready[key]
        self._on_staging(slot.page, False)
        slot.doomed = True
        self.make_clean(slot)
        self._free_or_settle(slot)
        return True

    def keys_of(self, keyspace: bytes) -> list[PageKey]:
        """Visible pages of a keyspace, and those on their way from disk or a peer."""
        return [key for pages in (self._ready, self._filling) for key in pages if key.keyspace == keyspace]

    # Sessions

    def close_session(self, session: Session) -> None:
        """A normal end: the peer touches nothing of this session any more."""
        self._give_back(session)
        self.sessions.close(session)

    def end_session(self, session: Session) -> None:
        """Any other end. What the session held is quarantined; pages it was reading stay visible."""
        self.sessions.end(session)
        for slot in session.writes.values():
            del self._writing[slot.page.key]
            slot.state = SlotState.QUARANTINED
            self.space.add_ghost(slot)
        for slot in session.reads.values():
            self.space.add_ghost(slot)

    def resolve_session(self, session: Session) -> None:
        """The peer of an ended session has drained, or is gone: nothing of it is held back any more."""
        assert session.state is SessionState.ENDED
        for slot in (*session.writes.values(), *session.reads.values()):
            self.space.remove_ghost(slot)
        self._give_back(session)
        self.space.forget_mapper(session.session_id)
        self.sessions.forget(session)

    # Inside

    def _take(self, slot: Slot, state: SlotState, record: PageRecord) -> None:
        self.space.occupy(slot, state)
        slot.record = record

    def _publish(self, slot: Slot) -> None:
        slot.state = SlotState.READY
        self._ready[slot.page.key] = slot
        self.space.settle(slot)
        self.space.touch(slot)
        self._on_staging(slot.page, True)

    def _evicted(self, slot: Slot) -> None:
        self.on_evicted()
        del self._ready[slot.page.key]
        self._on_staging(slot.page, False)

    def _free_or_settle(self, slot: Slot) -> None:
        if slot.doomed and slot.unused:
            self.space.free(slot)
        else:
            self.space.settle(slot)

    def _drop_writer(self, slot: Slot) -> None:
        self.writer_bytes -= slot.size_bytes
        if slot.state is SlotState.RESERVED:
            del self._writing[slot.page.key]

    def _give_back(self, session: Session) -> None:
        for slot in session.writes.values():
            self._drop_writer(slot)
            self.space.free(slot)
        for lease_id in list(session.reads):
            self.release(session, lease_id)
        session.writes.clear()
