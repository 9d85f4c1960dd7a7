"""Slots and segments of the arena: what there is, in which state. `segments` decides who gets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import SLOT_ALIGNMENT_BYTES, PageKey
from kvpool_pagestore.core.key_rows import NO_ROW


def slot_bytes_for(page_bytes: int) -> int:
    """Bytes of the slot that holds a page: rounded up to whole memory pages."""
    return -(-page_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


class SlotState(Enum):
    """Who may touch a slot's bytes."""

    FREE = "free"  # neither owner nor peers
    RESERVED = "reserved"  # one session writes
    COMMITTING = "committing"  # the writer has finished; the owner verifies
    FILLING = "filling"  # the owner reads from disk or a peer
    READY = "ready"  # readers under leases, and the owner's write-back
    QUARANTINED = "quarantined"  # a session that ended abnormally may still be writing


class SegmentState(Enum):
    """Life of a segment."""

    PLANNED = "planned"  # its bytes are booked, its file is being made
    PREPARED = "prepared"  # its memory is in place; it belongs to no tenant yet
    LIVE = "live"
    DYING = "dying"  # empty and out of service; its bytes come back when no peer maps it


class SpaceNeed(Enum):
    """Why no slot was handed out, and what the owner can do about it."""

    SEGMENT = "segment"  # the budget has room: make a segment and ask again
    RETIREMENT = "retirement"  # a segment was taken out of service: destroy it and ask again
    QUOTA = "quota"  # nothing: its owner's quota is used up by pages that are in use
    FULL = "full"  # nothing: everything is leased, dirty or quarantined


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What the page table knows of a page besides its bytes."""

    key: PageKey
    page_bytes: int
    metadata: PageMetadata

    def sharing(self, other: PageRecord) -> PageRecord:
        """Return an equal record with the other's objects where both are equal: there may be a million in staging."""
        keyspace, chunk_hash, shard = self.key
        if keyspace == other.key.keyspace:
            keyspace = other.key.keyspace
        if chunk_hash == other.key.chunk_hash:
            chunk_hash = other.key.chunk_hash
        return PageRecord(
            PageKey(keyspace, chunk_hash, shard),
            other.page_bytes if self.page_bytes == other.page_bytes else self.page_bytes,
            other.metadata if self.metadata == other.metadata else self.metadata,
        )


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one page. Changed only by the core; the engine reads it.

    readers counts read leases, those of ended sessions included; orphaned_leases those of ended sessions, of any kind;
    pins counts the owner's own uses (write-back, a page on its way from promotion to its first lease).
    """

    segment: Segment
    index: int
    state: SlotState = SlotState.FREE
    record: PageRecord | None = None
    readers: int = 0
    orphaned_leases: int = 0
    pins: int = 0
    dirty: bool = False
    sealed: bool = False  # the header is in place and has the digest of the payload: the page verifies
    # READY, but no longer to be found by its key: dropped while in use, free after the last use.
    deleted: bool = False
    # Nothing is lost when the page goes, and it is not kept for later: free after the last use.
    free_on_release: bool = False
    is_announced: bool = False  # others may know that the page is in staging
    row: int = NO_ROW  # of the page in the eviction policy of its size class, while that knows it
    idle: bool = False  # counted among its segment's evictable slots
    uses: int = 0  # of the page since it came here: leases, and stores that found it
    stay: int = 0  # counts the pages that have been here: distinguishes one page's stay from the next one's

    @property
    def offset(self) -> int:
        """Byte offset in the segment."""
        return self.index * self.segment.slot_bytes

    @property
    def size_bytes(self) -> int:
        return self.segment.slot_bytes

    @property
    def page(self) -> PageRecord:
        """The record; only for slots that are not FREE."""
        assert self.record is not None
        return self.record

    @property
    def unused(self) -> bool:
        """Whether there is neither a lease nor a pin."""
        return not self.readers and not self.orphaned_leases and not self.pins

    @property
    def evictable(self) -> bool:
        return self.state is SlotState.READY and not self.dirty and not self.deleted and self.unused


@dataclass(slots=True, eq=False)
class Segment:
    """One piece of shared memory, cut into equal slots. Once it belongs to a tenant, it does so for all its life.

    tenant is empty while it is PREPARED. slot_bytes is 0 until it is used for the first time. `slots` has those that
    were handed out at least once, so that cutting a large segment takes no time.
    """

    segment_id: int
    tenant: str
    size_bytes: int
    slot_bytes: int
    state: SegmentState = SegmentState.PLANNED
    slots: list[Slot] = field(default_factory=list)
    free: list[int] = field(default_factory=list)  # indexes of `slots`; the last is handed out next
    idle_count: int = 0  # evictable slots
    is_queued: bool = False  # among the segments that could be emptied
    pinned_until_us: int = 0  # it is passed over until then; 0: it is not known to hold pinned pages
    last_used: int = 0  # tick of the last touch of any of its pages
    mappers: set[bytes] = field(default_factory=set)  # sessions whose peer may map it

    @property
    def slot_count(self) -> int:
        return self.size_bytes // self.slot_bytes if self.slot_bytes else 0

    @property
    def free_count(self) -> int:
        """FREE slots."""
        return len(self.free) + self.slot_count - len(self.slots)

    @property
    def vacant(self) -> bool:
        """Every slot is FREE."""
        return len(self.free) == len(self.slots)

    @property
    def all_idle(self) -> bool:
        """No slot is in use: every one is free or evictable."""
        return self.state is SegmentState.LIVE and len(self.free) + self.idle_count == len(self.slots)

    def format(self, slot_bytes: int) -> None:
        """Cut into slots of another size. Only while no slot is in use; older Slot objects become meaningless."""
        self.slot_bytes = slot_bytes
        self.slots = []
        self.free = []
        self.idle_count = 0

    def take_free(self) -> Slot:
        """A FREE slot, to be given a state at once; only while there is one."""
        if self.free:
            return self.slots[self.free.pop()]
        assert len(self.slots) < self.slot_count
        slot = Slot(self, len(self.slots))
        self.slots.append(slot)
        return slot
