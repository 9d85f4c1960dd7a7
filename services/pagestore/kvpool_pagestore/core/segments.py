"""The arena's space: a hard budget cut into segments, and segments into slots.

Slab-like: a segment belongs to one tenant and one slot size (together: a class). Inside a class, the page that has been
out of use for longest makes room. Between classes, whole segments move, and only when nothing in them is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from kvpool.core.eviction import DEFAULT_POLICY, EvictionPolicy, PolicyName, make_policy
from kvpool_pagestore.core.retained import retention_of
from kvpool_pagestore.core.slots import Segment, SegmentState, Slot, SlotState, SpaceNeed
from kvpool_pagestore.core.victims import walk


@dataclass(slots=True)
class _SizeClass:
    """The slots of one tenant and size. `pages` has the visible pages in them, and `slots` where each is."""

    pages: EvictionPolicy[bytes]
    slots: dict[bytes, Slot] = field(default_factory=dict)
    open: dict[int, Segment] = field(default_factory=dict)  # segments with a free slot, by id


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
        policy: PolicyName = DEFAULT_POLICY,
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
        self._policy = policy
        self.now_us: Callable[[], int] = lambda: 0  # wall time, for pins and ends of life; set by the owner
        self._segments: dict[int, Segment] = {}
        self._classes: dict[tuple[str, int], _SizeClass] = {}
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
        empty = self._idlest(lambda one: one.tenant == tenant and one.idle_count == 0 and one.size_bytes >= slot_bytes)
        if empty is not None:
            return self._reformat(empty, slot_bytes)
        if self._new_segment_bytes(slot_bytes):
            return SpaceNeed.SEGMENT
        victim = self._victim(size_class)
        if victim is not None:
            self._evict(victim)
            return self._pop_free(size_class)
        own = self._idlest(lambda one: one.tenant == tenant and one.size_bytes >= slot_bytes)
        if own is not None:
            return self._reformat(own, slot_bytes)
        return self._retire_for(tenant, slot_bytes)

    def occupy(self, slot: Slot, state: SlotState) -> None:
        """Take a FREE slot into use."""
        assert slot.state is SlotState.FREE
        slot.state = state
        self.used_bytes += slot.size_bytes

    def free(self, slot: Slot) -> None:
        """Give a slot back. Only when nobody can touch its bytes any more."""
        assert slot.state is not SlotState.FREE and slot.unused
        self._leave(slot)
        slot.state, slot.record, slot.dirty, slot.doomed = SlotState.FREE, None, False, False
        self.used_bytes -= slot.size_bytes
        segment = slot.segment
        segment.free.append(slot.index)
        self._class(segment.tenant, segment.slot_bytes).open[segment.segment_id] = segment

    def touch(self, slot: Slot) -> None:
        """The page was used just now."""
        self._tick += 1
        slot.segment.last_used = self._tick
        if slot.name:
            self._class(slot.segment.tenant, slot.segment.slot_bytes).pages.touch(slot.name)

    def settle(self, slot: Slot) -> None:
        """Tell the policy of the page and whether it may go, as its state says. Call after every change of it."""
        if slot.state is not SlotState.READY or slot.doomed:
            self._leave(slot)
            return
        evictable = slot.evictable
        if not slot.name:
            self._enter(slot, evictable)
        elif evictable != slot.idle:
            slot.idle = evictable
            slot.segment.idle_count += 1 if evictable else -1
            pages = self._class_of(slot).pages
            if evictable:
                pages.release(slot.name)
            else:
                pages.hold(slot.name)

    def hold(self, slot: Slot) -> None:
        """A visible page has come into use: what `settle` would do, in less time."""
        if slot.idle:
            slot.idle = False
            slot.segment.idle_count -= 1
            self._class_of(slot).pages.hold(slot.name)

    def retain(self, slot: Slot) -> None:
        """The page's metadata says something else about how long it is to stay."""
        if slot.name:
            self._class_of(slot).pages.retain(slot.name, retention_of(slot.page.metadata))

    def victims(self, keyspaces: Collection[bytes], spare: Callable[[Slot], bool]) -> Generator[Slot]:
        """Pages of these keyspaces to give up, sizes in turn, none that is spared. Free each, then ask for the next."""
        now_us = self.now_us()
        with ExitStack() as ending:
            left = [
                ending.enter_context(closing(walk(one.pages, one.slots, keyspaces, spare, now_us)))
                for one in self._classes.values()
            ]
            while left:
                for one in list(left):
                    slot = next(one, None)
                    if slot is None:
                        left.remove(one)
                    else:
                        yield slot

    def add_ghost(self, slot: Slot) -> None:
        """A session that held this slot ended abnormally."""
        if not slot.ghosts:
            self.quarantined_bytes += slot.size_bytes
        slot.ghosts += 1

    def remove_ghost(self, slot: Slot) -> None:
        """That session can touch the slot no more."""
        slot.ghosts -= 1
        if not slot.ghosts:
            self.quarantined_bytes -= slot.size_bytes

    # Segments

    def runs_short(self, tenant: str, slot_bytes: int) -> bool:
        """Whether it is time to make the next segment of a class, so that nobody has to wait for it."""
        if not self._new_segment_bytes(slot_bytes) or any(
            one.state is SegmentState.PLANNED and one.tenant == tenant for one in self._segments.values()
        ):
            return False
        free_count = sum(len(one.free) for one in self._class(tenant, slot_bytes).open.values())
        return 2 * free_count * slot_bytes < self._segment_bytes

    def plan_segment(self, tenant: str, slot_bytes: int) -> Segment | None:
        """Book the bytes of a new segment that the caller is about to make; None if the budget has no room for it."""
        size_bytes = self._new_segment_bytes(slot_bytes)
        if not size_bytes:
            return None
        segment = Segment(self._next_segment_id, tenant, size_bytes, slot_bytes)
        self._next_segment_id += 1
        self._segments[segment.segment_id] = segment
        self.segment_total_bytes += size_bytes
        return segment

    def segment_made(self, segment: Segment) -> None:
        """Its file is there: its slots can be handed out."""
        segment.state = SegmentState.LIVE
        segment.format(segment.slot_bytes)
        self._class(segment.tenant, segment.slot_bytes).open[segment.segment_id] = segment

    def segment_gone(self, segment: Segment) -> None:
        """It could not be made, or was destroyed: its bytes come back."""
        assert segment.state is not SegmentState.LIVE
        del self._segments[segment.segment_id]
        self.segment_total_bytes -= segment.size_bytes

    def reapable(self) -> list[Segment]:
        """Segments out of service that no peer maps any more: destroy them, then call `segment_gone`."""
        return [one for one in self._segments.values() if one.state is SegmentState.DYING and not one.mappers]

    def forget_mapper(self, session_id: bytes) -> None:
        """The session's peer maps nothing any more."""
        for segment in self._segments.values():
            segment.mappers.discard(session_id)

    # Inside

    def _class(self, tenant: str, slot_bytes: int) -> _SizeClass:
        found = self._classes.get((tenant, slot_bytes))
        if found is None:
            found = self._classes[tenant, slot_bytes] = _SizeClass(make_policy(self._policy))
        return found

    def _new_segment_bytes(self, slot_bytes: int) -> int:
        """Size of the segment that could be made now: the usual one, what is left, or one large slot; 0 for none."""
        left_bytes = self.capacity_bytes - self.segment_total_bytes if self.growth_allowed else 0
        size_bytes = min(max(self._segment_bytes, slot_bytes), left_bytes)
        return size_bytes if size_bytes >= slot_bytes else 0

    def _pop_free(self, size_class: _SizeClass) -> Slot:
        segment = next(iter(size_class.open.values()))
        slot = segment.slots[segment.free.pop()]
        if not segment.free:
            del size_class.open[segment.segment_id]
        return slot

    def _class_of(self, slot: Slot) -> _SizeClass:
        return self._class(slot.segment.tenant, slot.segment.slot_bytes)

    def _enter(self, slot: Slot, evictable: bool) -> None:
        size_class = self._class_of(slot)
        key, metadata = slot.page.key, slot.page.metadata
        shard = bytes([key.shard])
        slot.name = key.keyspace + key.chunk_hash + shard
        size_class.slots[slot.name] = slot
        parent = key.keyspace + metadata.parent_hash + shard if metadata.chunk_index else None
        size_class.pages.insert(slot.name, parent, domain=key.keyspace, retention=retention_of(metadata))
        if evictable:
            slot.idle = True
            slot.segment.idle_count += 1
        else:
            size_class.pages.hold(slot.name)

    def _leave(self, slot: Slot) -> None:
        if not slot.name:
            return
        size_class = self._class_of(slot)
        size_class.pages.remove(slot.name)
        del size_class.slots[slot.name]
        slot.segment.idle_count -= slot.idle
        slot.name, slot.idle = b"", False

    def _victim(self, size_class: _SizeClass) -> Slot | None:
        now_us, slots = self.now_us(), size_class.slots
        name = size_class.pages.evict(now_us)
        if name is not None:
            return slots[name]
        # Every end of a chain is in use, as where one chain fills the arena: a gap in a chain that is on disk too is
        # better than no slot for anybody.
        idle = (slot for slot in slots.values() if slot.idle)
        return next((slot for slot in idle if slot.page.metadata.pinned_until_us <= now_us), None)

    def _evict(self, slot: Slot) -> None:
        self._on_evict(slot)
        self.free(slot)

    def _idlest(self, wanted: Callable[[Segment], bool]) -> Segment | None:
        """Of the wanted segments with nothing in use or pinned, the one whose pages have been unused for longest."""
        now_us = self.now_us()
        idle = [
            one
            for one in self._segments.values()
            if one.all_idle and wanted(one) and (not one.idle_count or not _is_pinned(one, now_us))
        ]
        return min(idle, key=lambda one: one.last_used, default=None)

    def _empty(self, segment: Segment) -> None:
        for slot in segment.slots:
            if slot.state is not SlotState.FREE:
                self._evict(slot)
        self._class(segment.tenant, segment.slot_bytes).open.pop(segment.segment_id, None)

    def _reformat(self, segment: Segment, slot_bytes: int) -> Slot:
        self._empty(segment)
        segment.format(slot_bytes)
        size_class = self._class(segment.tenant, slot_bytes)
        size_class.open[segment.segment_id] = segment
        return self._pop_free(size_class)

    def _retire_for(self, tenant: str, slot_bytes: int) -> SpaceNeed:
        """Take another tenant's idle segment out of service; a segment never changes tenant."""
        if any(one.state is SegmentState.DYING and not one.mappers for one in self._segments.values()):
            return SpaceNeed.RETIREMENT  # one is on its way out already
        victim = self._idlest(lambda one: one.tenant != tenant and one.size_bytes >= slot_bytes and not one.mappers)
        if victim is None:
            return SpaceNeed.FULL
        self._empty(victim)
        victim.state = SegmentState.DYING
        victim.slots, victim.free = [], []
        return SpaceNeed.RETIREMENT


def _is_pinned(segment: Segment, now_us: int) -> bool:
    return any(slot.record is not None and slot.record.metadata.pinned_until_us > now_us for slot in segment.slots)
