"""Pages in the arena and their slots, whoever holds them: coming from disk or peers, becoming durable, going.

Every method is one atomic change. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest, AdmissionRules
from kvpool_pagestore.core.events import BytesHeld, PageEvents, PagesEvicted, PagesLeft, PagesUsed, StagingChanged
from kvpool_pagestore.core.segments import SegmentTable
from kvpool_pagestore.core.slots import PageRecord, Slot, SlotState, SpaceNeed, slot_bytes_for

_NO_PAGES: dict[PageKey, Slot] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """Budgets and times of the ledger."""

    arena_bytes: int
    segment_bytes: int
    first_segment_id: int
    # Slots being written, dirty, or left in quarantine by a writer. What is beyond it is for promotion and reading.
    writer_bytes: int
    grace_s: float


class StagedPages:
    """The part of the ledger that knows no sessions. Use from one thread only."""

    def __init__(
        self,
        limits: LedgerLimits,
        events: PageEvents,
        admission: AdmissionRules,
        now_us: Callable[[], int],
        staging_is_tier: Callable[[bytes], bool] = lambda keyspace: True,
    ) -> None:
        """staging_is_tier: whether others may know what a keyspace has in staging. now_us: wall time."""
        self._limits = limits
        self._events = events
        self._admission = admission
        self._staging_is_tier = staging_is_tier
        self.space = SegmentTable(
            capacity_bytes=limits.arena_bytes,
            segment_bytes=limits.segment_bytes,
            first_segment_id=limits.first_segment_id,
            on_evict=self._evicted,
            now_us=now_us,
        )
        self.dirty_bytes = 0
        self.writer_bytes = 0  # RESERVED, COMMITTING, dirty, and QUARANTINED slots
        self._tick = 0
        self.ready_count = 0  # visible pages
        self._ready: dict[bytes, dict[PageKey, Slot]] = {}  # visible pages by keyspace; none is empty
        self._writing: dict[PageKey, Slot] = {}
        self._filling: dict[PageKey, list[Slot]] = {}  # more than one: the page is asked of two sources at once

    @property
    def is_half_dirty(self) -> bool:
        """Whether the pages that are not yet durable take more than half of what writers may have."""
        return 2 * self.dirty_bytes > self._limits.writer_bytes

    def find(self, key: PageKey) -> Slot | None:
        """The slot of a visible page."""
        pages = self._ready.get(key.keyspace)
        return None if pages is None else pages.get(key)

    def ready_pages(self) -> list[PageRecord]:
        """All visible pages."""
        return [slot.page for pages in self._ready.values() for slot in pages.values()]

    def ready_keyspaces(self) -> list[bytes]:
        """Keyspaces that have visible pages."""
        return list(self._ready)

    def is_coming(self, key: PageKey) -> bool:
        """Somebody writes the page, or it is on its way from disk or a peer."""
        return key in self._writing or key in self._filling

    def ready_slots(self, keyspace: bytes) -> list[Slot]:
        """Visible pages of a keyspace."""
        return list(self._ready.get(keyspace, _NO_PAGES).values())

    # Promotion and pulls

    def begin_fill(self, tenant: str, record: PageRecord) -> Slot | SpaceNeed:
        """A slot that the owner fills from disk or a peer. Several of one page may be filled; the first one counts."""
        slot_bytes = slot_bytes_for(record.page_bytes)
        if self._refusal(AdmissionPurpose.FILL, record, slot_bytes) is not None:
            return SpaceNeed.QUOTA
        slot = self.space.allocate(tenant, slot_bytes)
        if isinstance(slot, SpaceNeed):
            return slot
        self._take(slot, SlotState.FILLING, record)
        self._filling.setdefault(record.key, []).append(slot)
        return slot

    def describe_fill(self, slot: Slot, metadata: PageMetadata) -> None:
        """What is kept beside a page that has just come, before it is made visible."""
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
        if verified and not slot.doomed and present is None:
            slot.pins = 1
            slot.sealed = True  # as it came: its sums were verified on the way
            self._publish(slot)
            return slot
        self._free(slot)
        if present is not None:
            self.pin(present)
        return present

    # Pins

    def pin(self, slot: Slot) -> None:
        """Hold a READY slot for the owner's own use."""
        assert slot.state is SlotState.READY
        slot.pins += 1
        self.space.hold(slot)

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

    def make_dirty(self, slot: Slot) -> bool:
        """A clean page is to go to disk after all. False if too much is on its way already: ask at its next use."""
        assert slot.state is SlotState.READY and not slot.dirty
        if self.writer_bytes + slot.size_bytes > self._limits.writer_bytes:
            return False
        self._soil(slot)
        self.space.settle(slot)
        return True

    def make_fleeting(self, slot: Slot) -> None:
        """The page is safe elsewhere and not to be kept: its slot comes back after its last use, at once if unused."""
        slot.fleeting = True
        self._free_or_settle(slot)

    def set_metadata(self, slot: Slot, metadata: PageMetadata) -> None:
        """Other retention for a visible page."""
        slot.record = replace(slot.page, metadata=metadata)
        self.space.retain(slot)

    def reannounce(self, slot: Slot) -> None:
        """Announce a visible page, or take that back, as the policy of its keyspace says now."""
        if self._staging_is_tier(slot.page.key.keyspace) != slot.is_announced:
            slot.is_announced = not slot.is_announced
            self._events.publish(StagingChanged(slot.page, slot.is_announced))

    def give_up(self, slot: Slot) -> None:
        """Throw a page out that nobody uses and that is not dirty."""
        assert slot.evictable
        self._evicted(slot)
        self.space.free(slot)

    def drop(self, key: PageKey) -> bool:
        """Make a page invisible at once; its slot comes back after its last use. False if it is not in staging."""
        for filling in self._filling.get(key, ()):
            filling.doomed = True  # what is on its way here is not wanted any more
        slot = self.find(key)
        if slot is None:
            return False
        self._hide(key)
        self._withdraw(slot)
        slot.doomed = True
        self.make_clean(slot)
        self._free_or_settle(slot)
        return True

    def keys_of(self, keyspace: bytes) -> list[PageKey]:
        """Visible pages of a keyspace, and those on their way from disk or a peer."""
        return [*self._ready.get(keyspace, _NO_PAGES), *(key for key in self._filling if key.keyspace == keyspace)]

    # Inside

    def _take(self, slot: Slot, state: SlotState, record: PageRecord) -> None:
        self.space.occupy(slot, state)
        slot.record, slot.uses, slot.fleeting = record, 0, False
        slot.stay += 1
        self._events.publish(BytesHeld(record.key.keyspace, slot.size_bytes))

    def _free(self, slot: Slot) -> None:
        key = slot.page.key
        self.space.free(slot)
        self._left(key, slot.size_bytes)

    def _left(self, key: PageKey, size_bytes: int) -> None:
        self._events.publish(BytesHeld(key.keyspace, -size_bytes))
        self._events.publish(PagesLeft((key,)))

    def _refusal(self, purpose: AdmissionPurpose, record: PageRecord, slot_bytes: int) -> KvPoolError | None:
        return self._admission.refusal(AdmissionRequest(purpose, record, slot_bytes))

    def _soil(self, slot: Slot) -> None:
        slot.dirty = True
        self.dirty_bytes += slot.size_bytes
        self.writer_bytes += slot.size_bytes

    def _use(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.uses += 1
            self._touch(slot)
        self._events.publish(PagesUsed(slots))

    def _touch(self, slot: Slot) -> None:
        self._tick += 1
        slot.used_at = self._tick
        self.space.touch(slot)

    def _publish(self, slot: Slot) -> None:
        slot.state = SlotState.READY
        self._ready.setdefault(slot.page.key.keyspace, {})[slot.page.key] = slot
        self.ready_count += 1
        self.space.settle(slot)
        self._touch(slot)
        self.reannounce(slot)

    def _hide(self, key: PageKey) -> None:
        pages = self._ready[key.keyspace]
        del pages[key]
        self.ready_count -= 1
        if not pages:
            del self._ready[key.keyspace]

    def _evicted(self, slot: Slot) -> None:
        self._hide(slot.page.key)
        self._withdraw(slot)
        self._left(slot.page.key, slot.size_bytes)
        self._events.publish(PagesEvicted(Tier.STAGING, 1))

    def _withdraw(self, slot: Slot) -> None:
        """The page leaves: only what was announced is taken back, whatever the keyspace's policy says by now."""
        if slot.is_announced:
            slot.is_announced = False
            self._events.publish(StagingChanged(slot.page, False))

    def _free_or_settle(self, slot: Slot) -> None:
        if slot.readers or slot.pins:
            return  # settled when it came into use
        if slot.fleeting and slot.evictable:
            self._hide(slot.page.key)
            self._withdraw(slot)
            self._free(slot)
        elif slot.doomed and not slot.ghosts:
            self._free(slot)
        else:
            self.space.settle(slot)
