"""The arena's ledger: which page is where, who may touch it, and what becomes of it when a session ends.

Every method is one atomic change. Nothing here waits: whoever cannot have a slot now is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.core.errors import ArenaFull, KvPoolError, LeaseLost, SessionBusy
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRules
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.sessions import Session, SessionState, SessionTable
from kvpool_pagestore.core.slots import PageRecord, Slot, SlotState, SpaceNeed, slot_bytes_for
from kvpool_pagestore.core.staged_pages import LedgerLimits as LedgerLimits
from kvpool_pagestore.core.staged_pages import StagedPages


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease on a slot, write or read."""

    lease_id: int
    slot: Slot


@dataclass(slots=True)
class ReadLeases:
    """Which of some pages were leased. Pages are named by their position."""

    pages: list[int] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)  # not in staging, or not sealed for a session that wants that
    refused: list[int] = field(default_factory=list)
    refusal: SessionBusy | None = None  # why


class Ledger(StagedPages):
    """Pages in the arena, their slots, sessions and leases. Use from one thread only."""

    def __init__(
        self,
        limits: LedgerLimits,
        events: PageEvents,
        admission: AdmissionRules,
        now_us: Callable[[], int],
        staging_is_tier: Callable[[bytes], bool] = lambda keyspace: True,
    ) -> None:
        super().__init__(limits, events, admission, now_us, staging_is_tier)
        self.sessions = SessionTable(grace_s=limits.grace_s)

    # Writing

    def reserve(self, session: Session, record: PageRecord) -> Grant | Admission | KvPoolError | SpaceNeed:
        """Ask to be the one writer of a page that is not on disk (the caller has looked there)."""
        answer = self.reserve_slot(session, record, slot_bytes_for(record.page_bytes))
        return Grant(session.last_lease_id, answer) if isinstance(answer, Slot) else answer

    def reserve_slot(
        self, session: Session, record: PageRecord, slot_bytes: int
    ) -> Slot | Admission | KvPoolError | SpaceNeed:
        """The same. The lease on a slot has the session's last lease id."""
        ready = self.find(record.key)
        if ready is not None:
            self._use((ready,))
            return Admission.EXISTS
        if record.key in self._writing or record.key in self._filling:
            return Admission.PENDING
        if len(session.writes) >= session.max_leases:
            return SessionBusy(f"the session holds {session.max_leases} write leases, its window")
        if self.writer_bytes + slot_bytes > self._limits.writer_bytes:
            return ArenaFull(f"{self.writer_bytes} bytes are being written or not yet durable, the cap")
        refused = self._refusal(AdmissionPurpose.STORE, record, slot_bytes)
        if refused is not None:
            return refused
        slot = self.space.allocate(session.tenant, slot_bytes)
        if isinstance(slot, SpaceNeed):
            return slot
        self._take(slot, SlotState.RESERVED, record)
        self.writer_bytes += slot.size_bytes
        self._writing[record.key] = slot
        session.writes[session.next_lease_id()] = slot
        return slot

    def begin_commit(self, session: Session, lease_id: int) -> Slot | LeaseLost:
        """The session has finished writing; the caller verifies the bytes, then calls `finish_commit`."""
        slot = session.writes.pop(lease_id, None)
        if slot is None:
            return LeaseLost(f"lease {lease_id} is no write lease of this session")
        slot.state = SlotState.COMMITTING
        return slot

    def finish_commit(self, slot: Slot, *, verified: bool, dirty: bool, sealed: bool = True) -> bool:
        """Make the page visible, or free its slot. True if the page of this very slot is visible now.

        sealed: False if its header and sum table are still to be written, which the caller does when they are needed.
        """
        assert slot.state is SlotState.COMMITTING
        self.writer_bytes -= slot.size_bytes
        del self._writing[slot.page.key]
        if not verified or self.find(slot.page.key) is not None:  # pulled from a peer meanwhile: the same bytes
            self._free(slot)
            return False
        if dirty:
            self._soil(slot)
        slot.sealed = sealed
        self._publish(slot)
        return True

    def abort(self, session: Session, lease_id: int) -> bool:
        """Give a slot back unwritten. False if there is no such lease."""
        slot = session.writes.pop(lease_id, None)
        if slot is None:
            return False
        self._drop_writer(slot)
        self._free(slot)
        return True

    # Reading

    def read_window(self, session: Session) -> SessionBusy | None:
        """None while the session may have one more page to read, or to wait for."""
        if len(session.reads) + session.waiting < session.max_leases:
            return None
        return SessionBusy(f"the session holds or waits for {session.max_leases} read leases, its window")

    def acquire(self, session: Session, key: PageKey) -> Grant | SessionBusy | None:
        """A read lease on a visible page; None if it is not in staging, or not sealed for a session that wants that."""
        slot = self.find(key)
        if slot is None or not (slot.sealed or session.trusts_arena):
            return None
        busy = self.read_window(session)
        if busy is not None:
            return busy
        lease_id = self._lease(session, slot)
        self._use((slot,))
        return Grant(lease_id, slot)

    def acquire_ready(self, session: Session, keys: Sequence[PageKey]) -> ReadLeases:
        """Read leases on those of the pages that are visible, as far as the session's window goes."""
        leases = ReadLeases()
        left = session.max_leases - len(session.reads) - session.waiting
        for page, slot in enumerate(map(self.find, keys)):
            if slot is None or not (slot.sealed or session.trusts_arena):
                leases.absent.append(page)
            elif left <= 0:
                leases.refused.append(page)
            else:
                left -= 1
                leases.pages.append(page)
                leases.lease_ids.append(self._lease(session, slot))
                leases.slots.append(slot)
        if leases.slots:
            self._use(leases.slots)
        if leases.refused:
            leases.refusal = self.read_window(session)
        return leases

    def release(self, session: Session, lease_id: int) -> Slot | None:
        """End a read lease; None if there is no such lease. The slot may be FREE afterwards."""
        slot = session.reads.pop(lease_id, None)
        if slot is None:
            return None
        slot.readers -= 1
        self.space.touch(slot)
        self._free_or_settle(slot)
        return slot

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

    def _lease(self, session: Session, slot: Slot) -> int:
        slot.readers += 1
        self.space.hold(slot)
        lease_id = session.next_lease_id()
        session.reads[lease_id] = slot
        return lease_id

    def _drop_writer(self, slot: Slot) -> None:
        self.writer_bytes -= slot.size_bytes
        if slot.state is SlotState.RESERVED:
            del self._writing[slot.page.key]

    def _give_back(self, session: Session) -> None:
        for slot in session.writes.values():
            self._drop_writer(slot)
            self._free(slot)
        for lease_id in list(session.reads):
            self.release(session, lease_id)
        session.writes.clear()
