"""The page table against a naive model: plain dicts of who holds what, which know nothing of segments or lists."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvpool.core.errors import ArenaFull, LeaseLost, SessionBusy
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.sessions import SessionState
from kvpool_pagestore.core.slots import PageRecord, Slot, SpaceNeed
from tests.stateful.page_table_model import (
    KEYS,
    METADATA,
    SIZES,
    TENANTS,
    WINDOW,
    WRITER_BYTES,
    Held,
    PageTableModel,
    Peer,
)


class PageTableMachine(PageTableModel):
    @rule(tenant=st.sampled_from(["a", "b"]))
    @precondition(lambda self: sum(not peer.ended for peer in self.peers) < 4)
    def open_session(self, tenant: str) -> None:
        self.add_session(tenant)

    @rule(choice=st.integers(0, 9), key=st.sampled_from(KEYS))
    def reserve(self, choice: int, key: PageKey) -> None:
        peer = self.live(choice, TENANTS[key.keyspace])
        if peer is None:
            return
        record = PageRecord(key, SIZES[key.shard], METADATA)

        def ask() -> object:
            answer = self.table.reserve(peer.session, record)
            return (peer.tenant, SIZES[key.shard]) if answer is SpaceNeed.SEGMENT else answer

        answer = self.allocate(ask)
        over_cap = self.writer_bytes() + SIZES[key.shard] > WRITER_BYTES
        if key in self.visible:
            assert answer is Admission.EXISTS
        elif key in self.writing() or key in self.filling:
            assert answer is Admission.PENDING
        elif len(peer.writes) >= WINDOW:
            assert isinstance(answer, SessionBusy)
        elif over_cap:
            assert isinstance(answer, ArenaFull)
        elif isinstance(answer, Grant):
            peer.writes[answer.lease_id] = Held(key, answer.slot, record)
        else:
            self.check_full(answer, key)
        self.absorb_evictions()

    @rule(choice=st.integers(0, 9))
    def begin_commit(self, choice: int) -> None:
        peer = self.live(choice)
        if peer is not None and peer.writes:
            self.begin_commit_of(peer)

    def begin_commit_of(self, peer: Peer) -> None:
        lease_id, held = next(iter(peer.writes.items()))
        assert self.table.begin_commit(peer.session, lease_id) is held.slot
        del peer.writes[lease_id]
        self.committing.append(held)
        assert isinstance(self.table.begin_commit(peer.session, lease_id), LeaseLost)

    @rule(verified=st.booleans(), dirty=st.booleans())
    def finish_commit(self, verified: bool, dirty: bool) -> None:
        if self.committing:
            self.finish_last_commit(verified, dirty)

    def finish_last_commit(self, verified: bool, dirty: bool) -> None:
        held = self.committing.pop()
        expected = verified and held.key not in self.visible
        assert self.table.finish_commit(held.slot, verified=verified, dirty=dirty) is expected
        if expected:
            self.appeared(held.key, dirty)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=3, max_size=8), dirty=st.booleans())
    def store_several(self, keys: list[PageKey], dirty: bool) -> None:
        """What engines do most; without it the arena would hardly ever be full."""
        for key in keys:
            self.reserve(0, key)
            peer = self.live(0, TENANTS[key.keyspace])
            if peer is not None and peer.writes:
                self.begin_commit_of(peer)
                self.finish_last_commit(verified=True, dirty=dirty)

    @rule(choice=st.integers(0, 9))
    def abort(self, choice: int) -> None:
        peer = self.live(choice)
        if peer is not None and peer.writes:
            lease_id = next(iter(peer.writes))
            assert self.table.abort(peer.session, lease_id)
            del peer.writes[lease_id]
            assert not self.table.abort(peer.session, lease_id)

    @rule(choice=st.integers(0, 9), picks=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def acquire_visible(self, choice: int, picks: list[int]) -> None:
        """Several of the pages that are there."""
        for pick in picks:
            if self.visible:
                self.acquire(choice, sorted(self.visible)[pick % len(self.visible)])

    @rule(choice=st.integers(0, 9), key=st.sampled_from(KEYS))
    def acquire(self, choice: int, key: PageKey) -> None:
        peer = self.live(choice, TENANTS[key.keyspace])
        if peer is None:
            return
        answer = self.table.acquire(peer.session, key)
        if key not in self.visible:
            assert answer is None
        elif len(peer.reads) >= WINDOW:
            assert isinstance(answer, SessionBusy)
        else:
            assert isinstance(answer, Grant) and answer.slot.page.key == key
            peer.reads[answer.lease_id] = Held(key, answer.slot, answer.slot.page)

    @rule(choice=st.integers(0, 9), which=st.integers(0, 9))
    def release(self, choice: int, which: int) -> None:
        peer = self.live(choice)
        if peer is not None and peer.reads:
            lease_id = list(peer.reads)[which % len(peer.reads)]
            assert self.table.release(peer.session, lease_id) is peer.reads.pop(lease_id).slot
            assert self.table.release(peer.session, lease_id) is None

    @rule(key=st.sampled_from(KEYS))
    def begin_fill(self, key: PageKey) -> None:
        if key in self.filling or key in self.visible:
            return
        record, tenant = PageRecord(key, SIZES[key.shard], METADATA), TENANTS[key.keyspace]

        def ask() -> object:
            answer = self.table.begin_fill(tenant, record)
            return (tenant, SIZES[key.shard]) if answer is SpaceNeed.SEGMENT else answer

        answer = self.allocate(ask)
        if isinstance(answer, Slot):
            self.filling[key] = Held(key, answer, record)
        else:
            self.check_full(answer, key)
        self.absorb_evictions()

    @rule(verified=st.booleans())
    @precondition(lambda self: self.writing())
    def fill_what_is_being_written(self, verified: bool) -> None:
        """A peer had the page: whichever comes second must find the first one's and give its own slot back."""
        self.begin_fill(min(self.writing()))
        self.finish_fill(verified)

    @rule(verified=st.booleans())
    def finish_fill(self, verified: bool) -> None:
        if not self.filling:
            return
        key, held = self.filling.popitem()
        doomed = held.slot.deleted
        was_visible = key in self.visible
        ready = self.table.finish_fill(held.slot, verified=verified)
        if was_visible or (verified and not doomed):
            assert ready is not None and ready.page.key == key
            self.pinned.append(Held(key, ready, ready.page))
            if not was_visible:
                self.appeared(key, dirty=False)
        else:
            assert ready is None

    @rule()
    @precondition(lambda self: self.pinned)
    def unpin(self) -> None:
        self.table.unpin(self.pinned.pop(0).slot)

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.visible)
    def pin_for_write_back(self, pick: int) -> None:
        key = sorted(self.visible)[pick % len(self.visible)]
        slot = self.table.find(key)
        assert slot is not None
        self.table.pin(slot)
        self.pinned.append(Held(key, slot, slot.page))

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def make_clean(self, picks: list[int]) -> None:
        for pick in picks:
            if self.visible:
                key = sorted(self.visible)[pick % len(self.visible)]
                slot = self.table.find(key)
                assert slot is not None
                self.table.make_clean(slot)
                self.visible[key] = False

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: PageKey) -> None:
        assert self.table.drop(key) is (key in self.visible)
        if key in self.visible:
            del self.visible[key]
            assert self.events.pop() == (key, False)

    @rule(choice=st.integers(0, 9))
    def close_session(self, choice: int) -> None:
        peer = self.live(choice)
        if peer is not None:
            self.table.close_session(peer.session)
            self.peers.remove(peer)

    @rule(choice=st.integers(0, 9))
    def end_session(self, choice: int) -> None:
        peer = self.live(choice)
        if peer is not None:
            self.table.end_session(peer.session)
            peer.ended = True

    @rule()
    def resolve_session(self) -> None:
        ended = [peer for peer in self.peers if peer.ended]
        if ended:
            self.table.resolve_session(ended[0].session)
            assert ended[0].session.state is SessionState.CLOSED
            self.peers.remove(ended[0])


PageTableMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, report_multiple_bugs=False)
TestPageTable = PageTableMachine.TestCase
