"""What the naive model of the page table keeps: who holds which slot, and which page was in it then."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import PageKey
from kvpool_pagestore.core.admission import AdmissionRules
from kvpool_pagestore.core.events import PageEvents, StagingChanged, Subscription
from kvpool_pagestore.core.page_table import ArenaLimits, PageTable
from kvpool_pagestore.core.sessions import Session
from kvpool_pagestore.core.slots import PageRecord, SegmentState, Slot, SlotState, SpaceNeed

KIB = 1024
# Two tenants; pages of 4 and 12 KiB in segments of 32 KiB: 8 small slots or 2 large ones.
TENANTS = {b"a" * 16: "a", b"b" * 16: "b"}
SIZES = {0: 4 * KIB, 1: 12 * KIB}  # by shard
SEGMENT_BYTES, ARENA_BYTES, WRITER_BYTES, WINDOW = 32 * KIB, 128 * KIB, 72 * KIB, 6
METADATA = PageMetadata(parent_hash=b"p" * 16, chunk_index=0, group_head_hash=b"g" * 16)
KEYS = [
    PageKey(keyspace, bytes([number] * 16), shard) for keyspace in TENANTS for number in range(7) for shard in SIZES
]


@dataclass
class Held:
    """One lease of the model."""

    key: PageKey
    slot: Slot
    record: PageRecord


@dataclass
class Peer:
    """One session of the model."""

    session: Session
    tenant: str
    ended: bool = False
    writes: dict[int, Held] = field(default_factory=dict)
    reads: dict[int, Held] = field(default_factory=dict)

    def held(self) -> list[Held]:
        return [*self.writes.values(), *self.reads.values()]


class PageTableModel(RuleBasedStateMachine):
    """The model beside the page table, and what must always hold of the two; the rules are the test's."""

    @initialize()
    def start(self) -> None:
        self.visible: dict[PageKey, bool] = {}  # key: whether it is dirty
        self.records: dict[PageKey, PageRecord] = {}  # of the visible pages
        self.peers: list[Peer] = []
        self.session_count = 0
        self.committing: list[Held] = []
        self.filling: dict[PageKey, Held] = {}
        self.pinned: list[Held] = []
        self.events: list[tuple[PageKey, bool]] = []
        limits = ArenaLimits(
            arena_bytes=ARENA_BYTES,
            segment_bytes=SEGMENT_BYTES,
            first_segment_id=1,
            writer_bytes=WRITER_BYTES,
            grace_s=1.0,
        )
        events = PageEvents()
        events.subscribe([Subscription(StagingChanged, self.note)])
        self.table = PageTable(limits, events, AdmissionRules(), lambda: 0)
        for tenant in TENANTS.values():
            self.add_session(tenant)

    def note(self, changed: StagingChanged) -> None:
        self.events += [(record.key, changed.present) for record in changed.records]

    # What the model knows

    def held(self) -> list[Held]:
        """All slots whose bytes a peer or the owner may touch."""
        leases = [held for peer in self.peers for held in peer.held()]
        return [*leases, *self.committing, *self.filling.values(), *self.pinned]

    def writing(self) -> set[PageKey]:
        return {held.key for peer in self.peers if not peer.ended for held in peer.writes.values()} | {
            held.key for held in self.committing
        }

    def writer_bytes(self) -> int:
        in_writing = [held for peer in self.peers for held in peer.writes.values()] + self.committing
        dirty = sum(SIZES[key.shard] for key, is_dirty in self.visible.items() if is_dirty)
        return sum(SIZES[held.key.shard] for held in in_writing) + dirty

    def absorb_evictions(self) -> None:
        """Pages may leave staging unasked only if they are clean and not held."""
        for key, present in self.events:
            assert not present, f"{key} appeared unasked"
            assert not self.visible.pop(key), f"dirty {key} was thrown out"
            record = self.records.pop(key)
            assert not any(held.record is record for held in self.held()), f"{key} was thrown out while in use"
        self.events.clear()

    def appeared(self, key: PageKey, dirty: bool) -> None:
        """The page table has just made a page visible."""
        assert self.events.pop() == (key, True)
        slot = self.table.find(key)
        assert slot is not None
        self.visible[key], self.records[key] = dirty, slot.page

    def allocate(self, ask: object) -> object:
        """Repeat a request as the engine does: make or destroy segments until it is answered."""
        assert callable(ask)
        for _ in range(8):
            answer = ask()
            if answer is SpaceNeed.RETIREMENT:
                for dying in self.table.space.reapable():
                    self.table.space.segment_gone(dying)
            elif not isinstance(answer, tuple):
                return answer
            else:
                planned = self.table.space.plan_segment(*answer)
                assert planned is not None
                self.table.space.segment_made(planned)
        raise AssertionError("no answer after eight segments")

    def add_session(self, tenant: str) -> None:
        self.session_count += 1
        session = Session(self.session_count.to_bytes(16, "big"), tenant, "peer", WINDOW)
        self.table.sessions.add(session)
        self.peers.append(Peer(session, tenant))

    def live(self, choice: int, tenant: str | None = None) -> Peer | None:
        """One of the live sessions (of a tenant)."""
        live = [peer for peer in self.peers if not peer.ended and tenant in (None, peer.tenant)]
        return live[choice % len(live)] if live else None

    def check_full(self, answer: object, key: PageKey) -> None:
        """FULL is right only if no page of the tenant and size could have made room."""
        assert answer is SpaceNeed.FULL
        in_use = {id(held.slot) for held in self.held()}
        for other, is_dirty in self.visible.items():
            same_class = other.keyspace == key.keyspace and other.shard == key.shard
            slot = self.table.find(other)
            assert slot is not None
            assert not same_class or is_dirty or id(slot) in in_use, f"{other} could have gone"

    # Invariants

    @invariant()
    def no_page_loses_or_shares_bytes(self) -> None:
        """A held slot still holds the page it was granted for, and no two pages overlap."""
        if not hasattr(self, "table"):
            return
        for held in self.held():
            assert held.slot.record is held.record, "a slot was reused while it was held"
        slots = {id(held.slot): held.slot for held in self.held()}
        for key in self.visible:
            slot = self.table.find(key)
            assert slot is not None and slot.page.key == key
            slots[id(slot)] = slot
        ranges = sorted((one.segment.segment_id, one.offset, one.offset + one.size_bytes) for one in slots.values())
        for (segment, _, end), (next_segment, begin, _) in itertools.pairwise(ranges):
            assert segment != next_segment or end <= begin, "two pages share bytes"

    @invariant()
    def visible_is_what_was_committed(self) -> None:
        if hasattr(self, "table"):
            assert {record.key for record in self.table.ready_pages()} == set(self.visible)
            assert not self.events

    @invariant()
    def sums_are_right(self) -> None:
        if not hasattr(self, "table"):
            return
        space = self.table.space
        slots = [slot for segment in space.segments for slot in segment.slots]
        ended = {
            id(held.slot) for peer in self.peers if peer.ended for held in (*peer.writes.values(), *peer.reads.values())
        }
        assert space.segment_total_bytes == sum(segment.size_bytes for segment in space.segments) <= ARENA_BYTES
        assert space.used_bytes == sum(slot.size_bytes for slot in slots if slot.state is not SlotState.FREE)
        assert space.quarantined_bytes == sum(slot.size_bytes for slot in slots if id(slot) in ended)
        assert self.table.dirty_bytes == sum(SIZES[key.shard] for key, dirty in self.visible.items() if dirty)
        assert self.table.writer_bytes == self.writer_bytes() <= WRITER_BYTES
        for segment in space.segments:
            if segment.state is SegmentState.LIVE:
                assert segment.idle_count == sum(slot.evictable for slot in segment.slots)
                free = [slot.index for slot in segment.slots if slot.state is SlotState.FREE]
                assert sorted(segment.free) == free

    def teardown(self) -> None:
        """When everybody has let go, nothing is counted any more."""
        if not hasattr(self, "table"):
            return
        for peer in self.peers:
            (self.table.resolve_session if peer.ended else self.table.close_session)(peer.session)
        for held in self.committing:
            self.table.finish_commit(held.slot, verified=False, dirty=False)
        for held in self.filling.values():
            present = self.table.finish_fill(held.slot, verified=False)
            if present is not None:
                self.table.unpin(present)
        for held in self.pinned:
            self.table.unpin(held.slot)
        for key in list(self.visible):
            self.table.drop(key)
        space = self.table.space
        assert self.table.writer_bytes == self.table.dirty_bytes == space.quarantined_bytes == space.used_bytes == 0
