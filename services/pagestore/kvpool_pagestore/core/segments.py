"""The arena's space: a hard budget cut into segments, and segments into slots.

Slab-like: a segment belongs to one tenant and one slot size (together: a class). Inside a class, the page that has been
out of use for longest makes room. Between classes, whole segments move, and only when nothing in them is in use.

Segments that were prepared, their memory in place before anything needs it, belong to no tenant until a class takes one
or until they are assigned to a tenant ahead of use. A class of that tenant that takes one cuts it into slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing

from kvpool.core.page import SLOT_ALIGNMENT_BYTES, PageKey
from kvpool_pagestore.core.chain_links import ALL_IN_CHAINS, ChainLinks
from kvpool_pagestore.core.key_rows import NO_ROW
from kvpool_pagestore.core.retained import retention_of
from kvpool_pagestore.core.size_class import SizeClass
from kvpool_pagestore.core.slots import Segment, SegmentState, Slot, SlotState, SpaceNeed

_LEAST_PREPARED_BYTES = 2 << 20  # a smaller rest of the budget is left to whatever needs it


class _IdleSegments:
    """Segments with nothing in use, the one whose pages have been unused for longest first.

    What has changed since a segment was added is seen when it comes up: one that was used since goes back to its
    place, one that does not fit any more leaves.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # last use when it was put there, and id
        self._segments: dict[int, Segment] = {}

    def add(self, segment: Segment) -> None:
        if segment.segment_id not in self._segments:
            self._segments[segment.segment_id] = segment
            heapq.heappush(self._heap, (segment.last_used, segment.segment_id))

    def first(self, fits: Callable[[Segment], bool]) -> Segment | None:
        """The first one that fits."""
        while self._heap:
            used, segment_id = self._heap[0]
            segment = self._segments[segment_id]
            if not fits(segment):
                heapq.heappop(self._heap)
                del self._segments[segment_id]
                segment.is_queued = False
            elif used != segment.last_used:
                heapq.heapreplace(self._heap, (segment.last_used, segment_id))
            else:
                return segment
        return None


class SegmentTable:
    """Hands out slots and takes them back; counts every byte against the budget.

    `on_evict` is called with each READY slot whose page is thrown out, before the slot is emptied.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        segment_bytes: int,
        first_segment_id: int,
        on_evict: Callable[[Slot], None],
        now_us: Callable[[], int],
        links: ChainLinks = ALL_IN_CHAINS,
        is_on_disk: Callable[[PageKey], bool] = lambda key: False,
    ) -> None:
        if not 0 < segment_bytes <= capacity_bytes:
            raise ValueError(f"need 0 < segment_bytes <= capacity_bytes, got {segment_bytes} and {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.segment_total_bytes = 0  # of all segments that exist or are being made, and of old ones
        self.used_bytes = 0  # of slots that are not FREE
        self.quarantined_bytes = 0  # of slots held by ended sessions, and of old segments
        self.growth_allowed = True  # False: the file system has no room for a segment now, whatever the budget says
        self._segment_bytes = segment_bytes
        self._next_segment_id = first_segment_id
        self._on_evict = on_evict
        self._links, self._now_us = links, now_us  # now_us: wall time, for pins and ends of life
        self._is_on_disk = is_on_disk
        self._segments: dict[int, Segment] = {}
        self._classes: dict[tuple[str, int], SizeClass] = {}
        self._unmade: dict[int, Segment] = {}
        self._dying: dict[int, Segment] = {}
        self._own_idle: dict[str, dict[int, _IdleSegments]] = {}  # by tenant and size
        self._unmapped_idle: dict[int, _IdleSegments] = {}  # of all tenants, those that no peer maps, by size
        self._pinned_idle: list[tuple[int, int]] = []  # left out of these: a heap of the ends of pins, and ids
        self._vacant: dict[str, dict[int, Segment]] = {}  # all slots FREE, by tenant and id; tenant "": PREPARED
        self._tick = 0

    @property
    def segments(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def segment(self, segment_id: int) -> Segment | None:
        return self._segments.get(segment_id)

    def hold_old_bytes(self, size_bytes: int) -> None:
        """Count (or, negative, no longer count) segments of an earlier process: quarantined as a whole."""
        self.segment_total_bytes += size_bytes
        self.quarantined_bytes += size_bytes

    # Slots

    def allocate(self, tenant: str, slot_bytes: int) -> Slot | SpaceNeed:
        """A FREE slot (the caller gives it a state at once), or what would have to happen first."""
        size_class = self._class(tenant, slot_bytes)
        if size_class.open:
            return self._pop_free(size_class)
        vacant = self._vacant_for(tenant, slot_bytes)
        if vacant is not None:
            return self._reformat(vacant, slot_bytes, tenant)
        if self._may_grow(tenant, slot_bytes):
            return SpaceNeed.SEGMENT
        victim = self._victim(size_class, self._now_us())
        if victim is not None:
            return self._cleared(victim)
        own = self._idlest(self._own_idle.get(tenant, {}), slot_bytes)
        if own is not None:
            return self._reformat(own, slot_bytes, tenant)
        return self._retire_for(slot_bytes)

    def allocate_all(self, tenant: str, slot_bytes: int, count: int) -> list[Slot]:
        """So many slots, or fewer: what `allocate` would return one after the other up to the first SpaceNeed."""
        slots: list[Slot] = []
        size_class, now_us = self._class(tenant, slot_bytes), self._now_us()
        while len(slots) < count and not isinstance(slot := self.allocate(tenant, slot_bytes), SpaceNeed):
            slots.append(slot)
            has_room = size_class.open or self._vacant_for(tenant, slot_bytes) or self._may_grow(tenant, slot_bytes)
            while not has_room and len(slots) < count and (victim := self._victim(size_class, now_us)) is not None:
                slots.append(self._cleared(victim))
        return slots

    def occupy(self, slot: Slot, state: SlotState) -> None:
        """Take a FREE slot into use."""
        assert slot.state is SlotState.FREE
        slot.state = state
        self.used_bytes += slot.size_bytes

    def free(self, slot: Slot) -> None:
        """Give a slot back. Only when its bytes cannot be touched any more."""
        self._vacate(slot)
        segment = slot.segment
        segment.free.append(slot.index)
        if segment.vacant:
            self._vacant.setdefault(segment.tenant, {})[segment.segment_id] = segment
        self._class(segment.tenant, segment.slot_bytes).open[segment.segment_id] = segment
        self._queue_idle(segment)

    def touch(self, slot: Slot) -> None:
        """The page was used just now."""
        self._tick += 1
        slot.segment.last_used = self._tick
        if slot.row >= 0:
            self._class_of(slot).pages.touch_row(slot.row)

    def update_evictable(self, slot: Slot) -> None:
        """Have the policy know the page and whether it may go, as its state says. Call after every change of it."""
        if slot.state is not SlotState.READY or slot.deleted:
            self._leave(slot)
            return
        evictable = slot.evictable
        if slot.row < 0:
            self._enter(slot, evictable)
        elif evictable != slot.idle:
            size_class = self._class_of(slot)
            self._set_idle(slot, size_class, evictable)
            if evictable:
                size_class.pages.release_row(slot.row)
            else:
                size_class.pages.hold_row(slot.row)

    def hold(self, slot: Slot) -> None:
        """A visible page has come into use: what `update_evictable` would do, in less time."""
        if slot.idle:
            size_class = self._class_of(slot)
            self._set_idle(slot, size_class, False)
            size_class.pages.hold_row(slot.row)

    def retain(self, slot: Slot) -> None:
        """The page's metadata says something else about how long it is to stay."""
        if slot.row >= 0:
            size_class = self._class_of(slot)
            size_class.pages.retain(size_class.rows.key(slot.row), retention_of(slot.page.metadata))
            self._pins_changed(slot, size_class)

    def mark_on_disk(self, slot: Slot, is_on_disk: bool) -> None:
        """The page of a slot became durable, or is on disk no more. One that comes in is looked up."""
        if slot.row >= 0:
            self._class_of(slot).pages.mark_row(slot.row, is_copy=is_on_disk)

    def victims(
        self, keyspaces: Collection[bytes], spare: Callable[[Slot], bool], *, only_on_disk: bool = False
    ) -> Generator[Slot]:
        """Pages of these keyspaces to give up, sizes in turn, none that is spared. Free each, then ask for the next.

        only_on_disk: copies of what is on disk. Takes time for each victim and each spared page, but not for others.
        """
        now_us = self._now_us()
        with ExitStack() as ending:
            walks = (one.victims(keyspaces, spare, now_us, only_copies=only_on_disk) for one in self._classes.values())
            left = [ending.enter_context(closing(walk)) for walk in walks]
            while left:
                for one in list(left):
                    slot = next(one, None)
                    if slot is None:
                        left.remove(one)
                    else:
                        yield slot

    def add_orphaned_lease(self, slot: Slot) -> None:
        """A session that held this slot ended abnormally."""
        if not slot.orphaned_leases:
            self.quarantined_bytes += slot.size_bytes
        slot.orphaned_leases += 1

    def remove_orphaned_lease(self, slot: Slot) -> None:
        """That session can touch the slot no more."""
        slot.orphaned_leases -= 1
        if not slot.orphaned_leases:
            self.quarantined_bytes -= slot.size_bytes

    # Segments

    def runs_short(self, tenant: str, slot_bytes: int) -> bool:
        """Whether it is time to make the next segment of a class, so that no request has to wait for it."""
        if not self._new_segment_bytes(slot_bytes):
            return False
        free_count = 0
        for one in self._class(tenant, slot_bytes).open.values():
            free_count += one.free_count
            if 2 * free_count * slot_bytes >= self._segment_bytes:
                return False
        if self._vacant_for(tenant, slot_bytes) is not None:
            return False
        return not any(one.tenant == tenant for one in self._unmade.values())

    def _may_grow(self, tenant: str, slot_bytes: int) -> bool:
        """Whether a segment of a class may be made, or is being made: there is room soon, and no page need go."""
        if self._new_segment_bytes(slot_bytes):
            return True
        return any(one.tenant == tenant and one.slot_bytes == slot_bytes for one in self._unmade.values())

    def plan_segment(self, tenant: str, slot_bytes: int) -> Segment | None:
        """Book the bytes of a new segment that the caller is about to make; None if the budget has no room for it."""
        size_bytes = self._new_segment_bytes(slot_bytes)
        return self._planned(tenant, size_bytes, slot_bytes) if size_bytes else None

    def segment_made(self, segment: Segment) -> None:
        """Its file is there: its slots can be handed out."""
        del self._unmade[segment.segment_id]
        segment.state = SegmentState.LIVE
        segment.format(segment.slot_bytes)
        self._class(segment.tenant, segment.slot_bytes).open[segment.segment_id] = segment
        self._vacant.setdefault(segment.tenant, {})[segment.segment_id] = segment
        self._queue_idle(segment)

    def plan_prepared(self, size_bytes: int) -> Segment | None:
        """Book the bytes of a segment that is made before anything needs it; None if the budget has no room for it.

        The last one takes what is left of the budget, unless that is too little to be of use.
        """
        left_bytes = (self.capacity_bytes - self.segment_total_bytes) // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
        if left_bytes < min(size_bytes, _LEAST_PREPARED_BYTES):
            return None
        return self._planned("", min(size_bytes, left_bytes), 0)

    def segment_prepared(self, segment: Segment) -> None:
        """Its memory is in place: it is for the first tenant that needs one."""
        del self._unmade[segment.segment_id]
        segment.state = SegmentState.PREPARED
        self._vacant.setdefault("", {})[segment.segment_id] = segment

    def assign(self, tenant: str, share_bytes: int, *, alone: bool) -> list[Segment]:
        """Give prepared segments to a tenant ahead of use; returns all of its segments.

        share_bytes: what the tenant is to have in all, rounded up to whole segments; 0: everything. If it is not
        `alone`, it may have at most half of what no page was ever in, counting what it was assigned before.
        """
        own = [one for one in self._segments.values() if one.state is SegmentState.LIVE and one.tenant == tenant]
        own_bytes = sum(one.size_bytes for one in own)
        prepared = self._vacant.get("", {})
        most_bytes = prepared_bytes = sum(one.size_bytes for one in prepared.values())
        if not alone:
            unused_bytes = sum(one.size_bytes for one in own if not one.slot_bytes)
            most_bytes = (prepared_bytes + unused_bytes) // 2 - unused_bytes
        wanted_bytes = share_bytes - own_bytes if share_bytes else prepared_bytes
        for segment in list(prepared.values()):
            if wanted_bytes <= 0:
                break
            if segment.size_bytes <= most_bytes:
                self._adopt(segment, tenant)
                own.append(segment)
                most_bytes -= segment.size_bytes
                wanted_bytes -= segment.size_bytes
        return own

    def segment_gone(self, segment: Segment) -> None:
        """It could not be made, or was destroyed: its bytes come back."""
        assert segment.state is not SegmentState.LIVE
        del self._segments[segment.segment_id]
        self._unmade.pop(segment.segment_id, None)
        self._dying.pop(segment.segment_id, None)
        self.segment_total_bytes -= segment.size_bytes

    @property
    def prepared_bytes(self) -> int:
        """Bytes of segments that belong to no tenant yet."""
        return sum(one.size_bytes for one in self._vacant.get("", {}).values())

    def reapable(self) -> list[Segment]:
        """Segments out of service that no peer maps any more: destroy them, then call `segment_gone`."""
        return [one for one in self._dying.values() if not one.mappers]

    def forget_mapper(self, session_id: bytes) -> None:
        """The session's peer maps nothing any more."""
        for segment in self._segments.values():
            if session_id in segment.mappers:
                segment.mappers.discard(session_id)
                segment.is_queued = False  # as one that no peer maps
                self._queue_idle(segment)

    # Inside

    def _class(self, tenant: str, slot_bytes: int) -> SizeClass:
        found = self._classes.get((tenant, slot_bytes))
        if found is None:
            found = self._classes[tenant, slot_bytes] = SizeClass()
        return found

    def _planned(self, tenant: str, size_bytes: int, slot_bytes: int) -> Segment:
        segment = Segment(self._next_segment_id, tenant, size_bytes, slot_bytes)
        self._next_segment_id += 1
        self._segments[segment.segment_id] = self._unmade[segment.segment_id] = segment
        self.segment_total_bytes += size_bytes
        return segment

    def _adopt(self, segment: Segment, tenant: str) -> None:
        """A prepared segment belongs to a tenant from now on."""
        del self._vacant[""][segment.segment_id]
        segment.state, segment.tenant = SegmentState.LIVE, tenant
        self._vacant.setdefault(tenant, {})[segment.segment_id] = segment
        self._queue_idle(segment)

    def _vacant_for(self, tenant: str, slot_bytes: int) -> Segment | None:
        """A segment with nothing in it: of the tenant, first one that was never used; else a prepared one."""
        own = [one for one in self._vacant.get(tenant, {}).values() if one.size_bytes >= slot_bytes]
        if own:
            return min(own, key=lambda one: (one.slot_bytes > 0, one.last_used))
        prepared = self._vacant.get("", {}).values()
        return next((one for one in prepared if one.size_bytes >= slot_bytes), None)

    def _new_segment_bytes(self, slot_bytes: int) -> int:
        """Size of the segment that could be made now: the usual one, what is left, or one large slot; 0 for none."""
        left_bytes = self.capacity_bytes - self.segment_total_bytes if self.growth_allowed else 0
        size_bytes = min(max(self._segment_bytes, slot_bytes), left_bytes)
        return size_bytes if size_bytes >= slot_bytes else 0

    def _pop_free(self, size_class: SizeClass) -> Slot:
        segment = next(iter(size_class.open.values()))
        if segment.vacant:
            del self._vacant[segment.tenant][segment.segment_id]
        slot = segment.take_free()
        if not segment.free_count:
            del size_class.open[segment.segment_id]
        return slot

    def _class_of(self, slot: Slot) -> SizeClass:
        return self._class(slot.segment.tenant, slot.segment.slot_bytes)

    def _enter(self, slot: Slot, evictable: bool) -> None:
        size_class, record = self._class_of(slot), slot.page
        (keyspace, chunk_hash, shard), metadata = record.key, record.metadata
        parent, is_passed = self._links.find(keyspace, metadata)
        end = shard.to_bytes(2, "little")  # of a page's name to the policy: as many bytes for each page
        name = keyspace + chunk_hash + end
        size_class.pages.insert(
            name,
            keyspace + parent + end if parent is not None else None,
            position=metadata.chunk_index,
            domain=keyspace,
            retention=retention_of(metadata),
            is_unlikely=is_passed and not slot.pins,  # a page with a pin has a reader that waits
        )
        slot.row = size_class.rows.find(name)
        size_class.rows.slots[slot.row] = slot
        if self._is_on_disk(record.key):
            size_class.pages.mark_row(slot.row, is_copy=True)
        if evictable:
            self._set_idle(slot, size_class, True)
        else:
            size_class.pages.hold_row(slot.row)

    def _leave(self, slot: Slot) -> None:
        if slot.row < 0:
            return
        size_class = self._class_of(slot)
        size_class.rows.slots[slot.row] = None
        size_class.pages.remove_row(slot.row)
        slot.row = NO_ROW
        if slot.idle:
            self._set_idle(slot, size_class, False)
        self._pins_changed(slot, size_class)

    def _cleared(self, victim: Slot) -> Slot:
        """A slot whose page makes room for another, FREE to be given a state at once."""
        self._on_evict(victim)
        self._vacate(victim)
        return victim

    def _vacate(self, slot: Slot) -> None:
        """The slot holds nothing any more; to be handed out, or put among the free ones."""
        assert slot.state is not SlotState.FREE and slot.unused
        self._leave(slot)
        slot.state, slot.record, slot.dirty, slot.deleted, slot.sealed = SlotState.FREE, None, False, False, False
        self.used_bytes -= slot.size_bytes

    def _set_idle(self, slot: Slot, size_class: SizeClass, idle: bool) -> None:
        segment = slot.segment
        slot.idle = idle
        if idle:
            segment.idle_count += 1
            size_class.idle[segment.segment_id] = segment
            size_class.pinned_until_us = 0
            if not segment.is_queued:
                self._queue_idle(segment)
        else:
            segment.idle_count -= 1
            if not segment.idle_count:
                del size_class.idle[segment.segment_id]

    def _pins_changed(self, slot: Slot, size_class: SizeClass) -> None:
        """A page leaves, or is pinned otherwise: what was passed over because of pins is looked at again."""
        size_class.pinned_until_us = 0
        segment = slot.segment
        if segment.pinned_until_us:
            segment.pinned_until_us = 0
            segment.is_queued = False
            self._queue_idle(segment)

    def _victim(self, size_class: SizeClass, now_us: int) -> Slot | None:
        row = size_class.pages.evict_row(now_us)
        if row >= 0:
            return size_class.rows.slot(row)
        # Every end of a chain is in use, as where one chain fills the arena: a gap in a chain that is on disk too is
        # better than no slot at all.
        if size_class.pinned_until_us > now_us:
            return None
        ends_us: list[int] = []
        for slot in (slot for segment in size_class.idle.values() for slot in segment.slots if slot.idle):
            if slot.page.metadata.pinned_until_us <= now_us:
                return slot
            ends_us.append(slot.page.metadata.pinned_until_us)
        size_class.pinned_until_us = min(ends_us, default=0)
        return None

    def _idlest(
        self, by_size: Mapping[int, _IdleSegments], slot_bytes: int, *, unmapped: bool = False
    ) -> Segment | None:
        """Of segments that hold such a slot, with nothing in use or pinned, the one whose pages have been unused for
        longest."""
        now_us = self._now_us()
        while self._pinned_idle and self._pinned_idle[0][0] <= now_us:
            segment = self._segments.get(heapq.heappop(self._pinned_idle)[1])
            if segment is not None and segment.pinned_until_us <= now_us:
                segment.pinned_until_us, segment.is_queued = 0, False
                self._queue_idle(segment)

        def fits(segment: Segment) -> bool:
            if not segment.all_idle or (unmapped and segment.mappers) or segment.pinned_until_us:
                return False
            until_us = _pinned_until_us(segment) if segment.idle_count else 0
            if until_us > now_us:
                segment.pinned_until_us = until_us
                heapq.heappush(self._pinned_idle, (until_us, segment.segment_id))
                if len(self._pinned_idle) > 2 * len(self._segments) + 64:  # pins that ended early
                    ends = ((one.pinned_until_us, one.segment_id) for one in self._segments.values())
                    self._pinned_idle[:] = sorted(end for end in ends if end[0])
            return until_us <= now_us

        found = [one.first(fits) for size_bytes, one in by_size.items() if size_bytes >= slot_bytes]
        return min((one for one in found if one is not None), key=lambda one: one.last_used, default=None)

    def _queue_idle(self, segment: Segment) -> None:
        """Have a segment found by `_idlest` if nothing in it is in use."""
        if segment.is_queued or segment.pinned_until_us or not segment.all_idle:
            return
        segment.is_queued = True
        size_bytes = segment.size_bytes
        self._own_idle.setdefault(segment.tenant, {}).setdefault(size_bytes, _IdleSegments()).add(segment)
        if not segment.mappers:
            self._unmapped_idle.setdefault(size_bytes, _IdleSegments()).add(segment)

    def _empty(self, segment: Segment) -> None:
        for slot in segment.slots:
            if slot.state is not SlotState.FREE:
                self._on_evict(slot)
                self.free(slot)
        if segment.slot_bytes:
            self._class(segment.tenant, segment.slot_bytes).open.pop(segment.segment_id, None)

    def _reformat(self, segment: Segment, slot_bytes: int, tenant: str) -> Slot:
        """Cut a segment of the tenant, or a prepared one, into slots of another size."""
        if segment.state is SegmentState.PREPARED:
            self._adopt(segment, tenant)
        self._empty(segment)
        segment.format(slot_bytes)
        size_class = self._class(tenant, slot_bytes)
        size_class.open[segment.segment_id] = segment
        return self._pop_free(size_class)

    def _retire_for(self, slot_bytes: int) -> SpaceNeed:
        """Take another tenant's idle segment out of service; a segment never changes tenant."""
        if any(not one.mappers for one in self._dying.values()):
            return SpaceNeed.RETIREMENT  # one is on its way out already
        if self._retire_prepared(slot_bytes):
            return SpaceNeed.RETIREMENT
        # None of the tenant's own: they are in use or pinned, or `allocate` would have taken one.
        victim = self._idlest(self._unmapped_idle, slot_bytes, unmapped=True)
        if victim is None:
            return SpaceNeed.FULL
        self._empty(victim)
        del self._vacant[victim.tenant][victim.segment_id]
        victim.state = SegmentState.DYING
        self._dying[victim.segment_id] = victim
        victim.slots, victim.free = [], []
        return SpaceNeed.RETIREMENT

    def _retire_prepared(self, slot_bytes: int) -> bool:
        """Take prepared segments, all smaller than such a slot, out of service if one that holds it fits then."""
        left_bytes = self.capacity_bytes - self.segment_total_bytes
        if not self.growth_allowed or left_bytes + self.prepared_bytes < slot_bytes:
            return False
        for segment in list(self._vacant.get("", {}).values()):
            if left_bytes >= slot_bytes:
                break
            del self._vacant[""][segment.segment_id]
            segment.state = SegmentState.DYING
            self._dying[segment.segment_id] = segment
            left_bytes += segment.size_bytes
        return True


def _pinned_until_us(segment: Segment) -> int:
    return max((slot.record.metadata.pinned_until_us for slot in segment.slots if slot.record is not None), default=0)
