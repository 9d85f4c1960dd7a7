"""Which pages are on this node: in which slot of the arena, who may touch it, and which are on disk.

Every method is one atomic change. Nothing here waits: who cannot have a slot now gets the reason as the answer. What
others must learn is published as events before the method returns; see core/events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, replace

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ArenaFull, KvPoolError, LeaseLost, SessionBusy
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import PageKey
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest, AdmissionRules
from kvpool_pagestore.core.chain_links import ALL_IN_CHAINS, ChainLinks
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import BytesHeld, PageEvents, PagesEvicted, PagesLeft, PagesUsed, StagingChanged
from kvpool_pagestore.core.keyspaces import chunk_pages
from kvpool_pagestore.core.segments import SegmentTable
from kvpool_pagestore.core.sessions import ReadLeases, Session, SessionState, SessionTable
from kvpool_pagestore.core.slots import PageRecord, Slot, SlotState, SpaceNeed, slot_bytes_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLimits:
    """Budgets and times of the arena."""

    arena_bytes: int
    segment_bytes: int
    first_segment_id: int
    # Slots being written, dirty, or left in quarantine by a writer. What is beyond it is for promotion and reading.
    writer_bytes: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease on a slot, write or read."""

    lease_id: int
    slot: Slot


_NO_CHUNKS: dict[bytes, Slot | tuple[Slot, ...]] = {}


class PageTable:
    """All that is known of each page by chunk and shard. Use from one thread only.

    A page is in one of these states here; on disk or not is apart from them.

    | state | where it is found | leaves it by |
    |---|---|---|
    | being written | `_writing` | finish_commit, abort, the session's end |
    | on its way from disk or a peer | `_filling` | finish_fill |
    | visible: clean or dirty, sealed or not, pinned or not | `_staged` | eviction, drop, free_on_release |
    | deleted while in use | its slot alone | the last release or unpin |

    disk_map: what is on disk; None without a disk tier. now_us: wall time. staging_is_tier: whether others may know
    what a keyspace has in staging.
    """

    def __init__(
        self,
        limits: ArenaLimits,
        events: PageEvents,
        admission: AdmissionRules,
        now_us: Callable[[], int],
        disk_map: DiskMap | None = None,
        staging_is_tier: Callable[[bytes], bool] = lambda keyspace: True,
        links: ChainLinks = ALL_IN_CHAINS,
    ) -> None:
        self._limits, self._events, self._admission = limits, events, admission
        self._staging_is_tier, self.disk_map = staging_is_tier, disk_map
        self.space = SegmentTable(
            capacity_bytes=limits.arena_bytes,
            segment_bytes=limits.segment_bytes,
            first_segment_id=limits.first_segment_id,
            on_evict=self._evicted,
            now_us=now_us,
            links=links,
            is_on_disk=disk_map.__contains__ if disk_map is not None else lambda key: False,
        )
        self.sessions = SessionTable(grace_s=limits.grace_s)
        self.dirty_bytes = 0
        self.writer_bytes = 0  # RESERVED, COMMITTING, dirty, and QUARANTINED slots
        self.ready_count = 0  # visible pages
        # Visible pages by keyspace and chunk hash: the slot itself of a chunk that has one (a tuple would be a tenth of
        # a page's memory), or several in the order of their shards.
        self._staged: dict[bytes, dict[bytes, Slot | tuple[Slot, ...]]] = {}
        self._writing: dict[PageKey, Slot] = {}
        self._gone: list[tuple[PageRecord, int, bool]] = []  # evicted; bytes of the slot, was it announced
        self._filling: dict[PageKey, list[Slot]] = {}  # more than one: the page is asked of two sources at once

    # Looking

    @property
    def is_half_dirty(self) -> bool:
        """Whether the pages that are not yet durable take more than half of what writers may have."""
        return 2 * self.dirty_bytes > self._limits.writer_bytes

    @property
    def is_disk_behind(self) -> bool:
        """Whether they take more than three quarters of that: the rest is for pages that are being written now."""
        return 4 * self.dirty_bytes > 3 * self._limits.writer_bytes

    def find(self, key: PageKey) -> Slot | None:
        """Return the slot of a visible page."""
        keyspace, chunk_hash, shard = key
        found = self._staged.get(keyspace, _NO_CHUNKS).get(chunk_hash)
        if found is None:
            return None
        if isinstance(found, tuple):
            at = bisect_left(found, shard, key=_shard)
            if at == len(found):
                return None
            found = found[at]
        return found if _shard(found) == shard else None

    def metadata(self, key: PageKey) -> PageMetadata | None:
        """Return what is kept beside a page that is here; staging knows the latest."""
        if (slot := self.find(key)) is not None:
            return slot.page.metadata
        return self.disk_map.metadata(key) if self.disk_map is not None else None

    def keys(self, keyspace: bytes, chunk_hash: bytes) -> list[PageKey]:
        """Return the pages of a chunk that are visible in staging or on disk, in the order of their shards."""
        shards = self.staged_shards(keyspace, chunk_hash)
        location = self.disk_map.location(keyspace, chunk_hash) if self.disk_map is not None else None
        if location is not None:
            shards |= location[0]
        return chunk_pages(keyspace, chunk_hash, shards)

    def is_coming(self, key: PageKey) -> bool:
        """Whether a session writes the page, or it is on its way from disk or a peer."""
        return key in self._writing or key in self._filling

    def ready_pages(self) -> list[PageRecord]:
        """Return all visible pages."""
        return [slot.page for keyspace in self._staged for slot in self.ready_slots(keyspace)]

    def ready_keyspaces(self) -> list[bytes]:
        """Return the keyspaces that have visible pages."""
        return list(self._staged)

    def ready_slots(self, keyspace: bytes) -> list[Slot]:
        """Return the slots of the visible pages of a keyspace."""
        found = self._staged.get(keyspace, _NO_CHUNKS).values()
        return [slot for one in found for slot in (one if isinstance(one, tuple) else (one,))]

    def ready_chunks(self, keyspace: bytes) -> list[bytes]:
        """Return the hashes of the chunks of a keyspace that have visible pages. Takes some 10 ns for each."""
        return list(self._staged.get(keyspace, _NO_CHUNKS))

    def staged_names(self, keyspace: bytes) -> KeysView[bytes]:
        """The chunk hashes of a keyspace with visible pages, as of now and later."""
        return self._staged.get(keyspace, _NO_CHUNKS).keys()

    def chunk_slots(self, keyspace: bytes, chunk_hash: bytes) -> tuple[Slot, ...]:
        """Return the slots of a chunk's visible pages, in the order of their shards."""
        found = self._staged.get(keyspace, _NO_CHUNKS).get(chunk_hash, ())
        return found if isinstance(found, tuple) else (found,)

    def staged_shards(self, keyspace: bytes, chunk_hash: bytes) -> int:
        """Return the bitmap of a chunk's visible pages."""
        return sum(1 << _shard(slot) for slot in self.chunk_slots(keyspace, chunk_hash))

    def announced(self, keyspace: bytes, chunk_hash: bytes) -> tuple[int, bytes] | None:
        """Return the bitmap of a chunk's pages that others may know are in staging, and its group's head, or None."""
        slots = self.chunk_slots(keyspace, chunk_hash)
        if not slots:  # as of nearly all chunks of a large disk
            return None
        shards = sum(1 << _shard(slot) for slot in slots if slot.is_announced)
        return (shards, slots[0].page.metadata.group_head_hash) if shards else None

    def coming_keys(self, keyspace: bytes) -> list[PageKey]:
        """Return the pages of a keyspace that are on their way from disk or a peer."""
        return [key for key in self._filling if key.keyspace == keyspace]

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
        if self.is_coming(record.key):
            return Admission.PENDING
        if len(session.writes) >= session.max_leases:
            return SessionBusy(f"the session holds {session.max_leases} write leases, its window")
        if self.writer_bytes + slot_bytes > self._limits.writer_bytes:
            return ArenaFull(f"{self.writer_bytes} bytes are being written or not yet durable, the cap")
        refused = self._refusal(AdmissionPurpose.STORE, record, slot_bytes)
        if refused is not None:
            return refused
        slot = self.space.allocate(session.tenant, slot_bytes)
        self._publish_evicted()
        if isinstance(slot, SpaceNeed):
            return slot
        self._events.publish(BytesHeld(record.key.keyspace, slot_bytes))
        self._lease_write(session, record, slot)
        return slot

    def reserve_all(
        self, session: Session, records: Sequence[PageRecord], slot_bytes: int
    ) -> list[Slot | Admission | None] | None:
        """`reserve_slot` for different pages of one keyspace with slots of one size, in far less time than one by one.

        Slots have the session's last lease ids, in order. None for a page for which room must be made first. None in
        all, and nothing reserved, where a window, budget or rule stands in the way, or others could replace some.
        """
        answers: list[Slot | Admission | None] = []
        used: list[Slot] = []
        for record in records:
            ready = self.find(record.key)
            if ready is not None:
                used.append(ready)
                answers.append(Admission.EXISTS)
            else:
                answers.append(Admission.PENDING if self.is_coming(record.key) else None)
        lacking = [at for at, answer in enumerate(answers) if answer is None]
        size_bytes = len(lacking) * slot_bytes
        if (
            (used and lacking)
            or len(session.writes) + len(lacking) > session.max_leases
            or self.writer_bytes + size_bytes > self._limits.writer_bytes
            or any(records[at].metadata.pinned_until_us for at in lacking)  # a rule counts each pin by itself
            or (lacking and self._refusal(AdmissionPurpose.STORE, records[lacking[0]], size_bytes) is not None)
        ):
            return None
        if used:
            self._use(used)
        slots = self.space.allocate_all(session.tenant, slot_bytes, len(lacking))
        self._publish_evicted()
        if slots:
            self._events.publish(BytesHeld(records[lacking[0]].key.keyspace, len(slots) * slot_bytes))
        for at, slot in zip(lacking, slots, strict=False):
            self._lease_write(session, records[at], slot)
            answers[at] = slot
        return answers

    def begin_commit(self, session: Session, lease_id: int) -> Slot | LeaseLost:
        """The session has finished writing; the caller verifies the bytes, then calls `finish_commit`."""
        slot = session.writes.pop(lease_id, None)
        if slot is None:
            return LeaseLost(f"lease {lease_id} is not a write lease of this session")
        slot.state = SlotState.COMMITTING
        return slot

    def finish_commit(self, slot: Slot, *, verified: bool, dirty: bool, sealed: bool = True) -> bool:
        """Make the page visible, or free its slot. True if the page of this very slot is visible now.

        sealed: False if its header is still to be written, which the caller does when they are needed.
        """
        assert slot.state is SlotState.COMMITTING
        self.writer_bytes -= slot.size_bytes
        del self._writing[slot.page.key]
        if not verified or self.find(slot.page.key) is not None:  # pulled from a peer meanwhile: the same bytes
            self._free(slot)
            return False
        if dirty:
            self._mark_dirty(slot)
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

    # Promotion and pulls

    def begin_fill(self, tenant: str, record: PageRecord) -> Slot | SpaceNeed:
        """Return a slot to fill from disk or a peer. Several of one page may be filled; the first one counts."""
        slot_bytes = slot_bytes_for(record.page_bytes)
        if self._refusal(AdmissionPurpose.FILL, record, slot_bytes) is not None:
            return SpaceNeed.QUOTA
        slot = self.space.allocate(tenant, slot_bytes)
        self._publish_evicted()
        if isinstance(slot, SpaceNeed):
            return slot
        self._events.publish(BytesHeld(record.key.keyspace, slot_bytes))
        self._take(slot, SlotState.FILLING, record)
        self._filling.setdefault(record.key, []).append(slot)
        return slot

    def describe_fill(self, slot: Slot, metadata: PageMetadata) -> None:
        """Set what is kept beside a page that has just come, before it is made visible."""
        assert slot.state is SlotState.FILLING
        slot.record = replace(slot.page, metadata=metadata)

    def finish_fill(self, slot: Slot, *, verified: bool) -> Slot | None:
        """Make the page visible and clean; the slot to read from (another one if a writer was faster), or None.

        The answer is pinned: lease it, then `unpin`, so that it cannot be evicted before its first reader.
        """
        assert slot.state is SlotState.FILLING
        filling = self._filling[slot.page.key]
        filling.remove(slot)
        if not filling:
            del self._filling[slot.page.key]
        present = self.find(slot.page.key)
        if verified and not slot.deleted and present is None:
            slot.pins = 1
            slot.sealed = True  # as it came: its sums were verified on the way
            self._publish(slot)
            return slot
        self._free(slot)
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
        """Lease a visible page; None if it is not in staging, or not sealed for a session that wants that."""
        leases = self.acquire_ready(session, (key,))
        return Grant(leases.lease_ids[0], leases.slots[0]) if leases.slots else leases.refusal

    def acquire_ready(self, session: Session, keys: Sequence[PageKey]) -> ReadLeases:
        """Lease those of the pages that are visible, as far as the session's window goes."""
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
        self._update_use(slot)
        return slot

    def pin(self, slot: Slot) -> None:
        """Hold a READY slot for the owner's own use."""
        assert slot.state is SlotState.READY
        slot.pins += 1
        self.space.hold(slot)

    def unpin(self, slot: Slot) -> None:
        """End one of the owner's uses. The slot may be FREE afterwards."""
        slot.pins -= 1
        self._update_use(slot)

    # Durability and leaving

    def make_clean(self, slot: Slot) -> None:
        """The page is durable, or writing it was given up for now: it no longer stands in the way of eviction."""
        if slot.dirty:
            slot.dirty = False
            self.dirty_bytes -= slot.size_bytes
            self.writer_bytes -= slot.size_bytes
        self.space.update_evictable(slot)

    def make_dirty(self, slot: Slot) -> bool:
        """A clean page is to go to disk after all. False if too much is on its way already: ask at its next use."""
        assert slot.state is SlotState.READY and not slot.dirty
        if self.writer_bytes + slot.size_bytes > self._limits.writer_bytes:
            return False
        self._mark_dirty(slot)
        self.space.update_evictable(slot)
        return True

    def free_on_release(self, slot: Slot) -> None:
        """The page is safe elsewhere and not to be kept: its slot comes back after its last use, at once if unused."""
        slot.free_on_release = True
        self._update_use(slot)

    def set_metadata(self, slot: Slot, metadata: PageMetadata) -> None:
        """Change how long a visible page is to be kept."""
        slot.record = replace(slot.page, metadata=metadata)
        self.space.retain(slot)

    def reannounce(self, slot: Slot) -> None:
        """Announce a visible page, or take that back, as the policy of its keyspace says now."""
        if self._staging_is_tier(slot.page.key.keyspace) != slot.is_announced:
            slot.is_announced = not slot.is_announced
            self._events.publish(StagingChanged((slot.page,), slot.is_announced))

    def give_up(self, slot: Slot) -> None:
        """Evict a page that is not in use and not dirty."""
        assert slot.evictable
        self._evicted(slot)
        self.space.free(slot)
        self._publish_evicted()

    def drop(self, key: PageKey) -> bool:
        """Make a page invisible at once; its slot comes back after its last use. False if it is not in staging."""
        for filling in self._filling.get(key, ()):
            filling.deleted = True  # what is on its way here is not wanted any more
        slot = self.find(key)
        if slot is None:
            return False
        self._hide(slot)
        slot.deleted = True
        self.make_clean(slot)
        self._update_use(slot)
        return True

    def drop_chunks(self, keyspace: bytes, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Drop those pages of many chunks that are in staging or on their way there: usually few are.

        chunks: hashes, and the bitmaps of the shards that are meant.
        """
        staged, filling = self._staged.get(keyspace, _NO_CHUNKS), self._filling
        for chunk_hash, shards in chunks:
            if chunk_hash in staged or filling:
                for key in chunk_pages(keyspace, chunk_hash, shards):
                    self.drop(key)

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
            self.space.add_orphaned_lease(slot)
        for slot in session.reads.values():
            self.space.add_orphaned_lease(slot)

    def resolve_session(self, session: Session) -> None:
        """The peer of an ended session has drained, or is gone: nothing of it is held back any more."""
        assert session.state is SessionState.ENDED
        for slot in (*session.writes.values(), *session.reads.values()):
            self.space.remove_orphaned_lease(slot)
        self._give_back(session)
        self.space.forget_mapper(session.session_id)
        self.sessions.forget(session)

    # Inside

    def _refusal(self, purpose: AdmissionPurpose, record: PageRecord, slot_bytes: int) -> KvPoolError | None:
        return self._admission.refusal(AdmissionRequest(purpose, record, slot_bytes))

    def _take(self, slot: Slot, state: SlotState, record: PageRecord) -> None:
        self.space.occupy(slot, state)
        slot.record, slot.uses, slot.free_on_release = record, 0, False
        slot.stay += 1

    def _lease_write(self, session: Session, record: PageRecord, slot: Slot) -> None:
        self._take(slot, SlotState.RESERVED, record)
        self.writer_bytes += slot.size_bytes
        self._writing[record.key] = slot
        session.writes[session.next_lease_id()] = slot

    def _free(self, slot: Slot) -> None:
        key = slot.page.key
        self.space.free(slot)
        self._left(key, slot.size_bytes)

    def _left(self, key: PageKey, size_bytes: int) -> None:
        self._events.publish(BytesHeld(key.keyspace, -size_bytes))
        self._events.publish(PagesLeft((key,)))

    def _mark_dirty(self, slot: Slot) -> None:
        slot.dirty = True
        self.dirty_bytes += slot.size_bytes
        self.writer_bytes += slot.size_bytes

    def _lease(self, session: Session, slot: Slot) -> int:
        slot.readers += 1
        self.space.hold(slot)
        lease_id = session.next_lease_id()
        session.reads[lease_id] = slot
        return lease_id

    def _use(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.uses += 1
            self.space.touch(slot)
        self._events.publish(PagesUsed(slots))

    def _publish(self, slot: Slot) -> None:
        slot.state = SlotState.READY
        keyspace, chunk_hash, shard = (record := slot.page).key
        chunks = self._staged.setdefault(keyspace, {})
        slots = self.chunk_slots(keyspace, chunk_hash)
        at = bisect_left(slots, shard, key=_shard)
        chunks[chunk_hash] = (*slots[:at], slot, *slots[at:]) if slots else slot
        self.ready_count += 1
        self.space.touch(slot)  # its segment: the policy takes the arrival itself for a use
        self.space.update_evictable(slot)
        if self._staging_is_tier(keyspace):
            slot.is_announced = True
            self._events.publish(StagingChanged((record,), True))

    def _hide(self, slot: Slot) -> None:
        """Make a page invisible. Only what was announced is taken back, whatever its keyspace's policy says by now."""
        if self._unlist(slot):
            self._events.publish(StagingChanged((slot.page,), False))

    def _unlist(self, slot: Slot) -> bool:
        """Make a page invisible, without an event; whether it was announced."""
        keyspace, chunk_hash, _ = slot.page.key
        chunks = self._staged[keyspace]
        slots = chunks[chunk_hash]
        if isinstance(slots, tuple):
            at = slots.index(slot)
            left = slots[:at] + slots[at + 1 :]
            chunks[chunk_hash] = left if len(left) > 1 else left[0]
        else:
            del chunks[chunk_hash]
            if not chunks:
                del self._staged[keyspace]
        self.ready_count -= 1
        was_announced, slot.is_announced = slot.is_announced, False
        return was_announced

    def _evicted(self, slot: Slot) -> None:
        """The page makes room for another; `_publish_evicted` follows at the end of the call."""
        self._gone.append((slot.page, slot.size_bytes, self._unlist(slot)))

    def _publish_evicted(self) -> None:
        if not self._gone:
            return
        gone, self._gone = self._gone, []
        held_bytes: dict[bytes, int] = {}
        for record, size_bytes, _ in gone:
            held_bytes[record.key.keyspace] = held_bytes.get(record.key.keyspace, 0) + size_bytes
        if hidden := [record for record, _, was_announced in gone if was_announced]:
            self._events.publish(StagingChanged(hidden, False))
        for keyspace, size_bytes in held_bytes.items():
            self._events.publish(BytesHeld(keyspace, -size_bytes))
        self._events.publish(PagesLeft([record.key for record, _, _ in gone]))
        self._events.publish(PagesEvicted(Tier.STAGING, len(gone)))

    def _update_use(self, slot: Slot) -> None:
        """A use has ended: free the slot if it was to come back then, else say whether its page may be evicted."""
        if slot.readers or slot.pins:
            return  # said when it came into use
        if slot.free_on_release and slot.evictable:
            self._hide(slot)
            self._free(slot)
        elif slot.deleted and not slot.orphaned_leases:
            self._free(slot)
        else:
            self.space.update_evictable(slot)

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


def _shard(slot: Slot) -> int:
    return slot.page.key.shard
