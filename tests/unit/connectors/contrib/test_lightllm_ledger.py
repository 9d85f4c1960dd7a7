"""Pages of lightllm's CPU cache: the ledger against a naive model, and what must never be true of it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.connectors.contrib.lightllm.ledger import NO_PAGE, PageLedger
from kvpool.core.errors import InvalidRequest

KEYS = st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True)


def test_pages_are_given_to_the_first_chunks_and_missing_ones_are_named() -> None:
    ledger = PageLedger(2, 8)
    assert ledger.allocate_pages([10, 11, 12]) == ([0, 1, NO_PAGE], [False, False, False])
    assert ledger.query_one_page(10) is None  # not ready yet
    ledger.update_ready([0, 1, NO_PAGE], deref=True, offload=True)
    assert ledger.allocate_pages([10, 11]) == ([0, 1], [True, True])
    [group] = ledger.take_groups()
    assert (group.pages, group.hash_keys) == ((0, 1), (10, 11))
    ledger.deref([0, 1])
    assert ledger.allocate_pages([13]) == ([NO_PAGE], [False])  # the group still holds both
    ledger.deref(group.pages)
    assert ledger.allocate_pages([13]) == ([0], [False])  # the least recently used
    assert ledger.query_one_page(10) is None
    assert ledger.query_one_page(11) == 1


def test_groups_are_never_mixed_and_end_before_a_missing_page() -> None:
    ledger = PageLedger(6, 2)
    for keys in ([1, 2], [3, 4, 5], [6]):
        pages, _ = ledger.allocate_pages(keys)
        ledger.update_ready([*pages[:2], NO_PAGE, *pages[2:]], deref=True, offload=True)
    assert [group.hash_keys for group in ledger.take_groups()] == [(1, 2), (3, 4)]
    assert ledger.users == 4  # page 6 has none: its group was dropped
    assert ledger.take_groups() == []


def test_a_load_that_failed_empties_its_pages_unless_others_wait() -> None:
    ledger = PageLedger(3, 8)
    pages, _ = ledger.allocate_pages([1, 2])
    ledger.allocate_pages([2])
    ledger.recycle([*pages, NO_PAGE])
    assert ledger.allocate_pages([1, 2, 3])[0] == [0, 1, 2]  # 1 has an empty page again, 2 is still on its way
    ledger.recycle([2, 2])  # a second time does no harm
    assert ledger.users == 3


def test_misuse_is_refused() -> None:
    ledger = PageLedger(1, 1)
    for call in (lambda: ledger.deref([0]), lambda: ledger.deref([1]), lambda: PageLedger(0, 1)):
        with pytest.raises(InvalidRequest):
            call()


def test_a_late_word_about_pages_that_were_taken_away_changes_nothing() -> None:
    ledger = PageLedger(2, 8)
    pages, _ = ledger.allocate_pages([1, 2])
    ledger.recycle(pages)  # the one who filled them is gone
    with pytest.raises(InvalidRequest, match="no user"):
        ledger.update_ready(pages, deref=True, offload=True)
    assert not ledger.take_groups() and ledger.users == 0
    assert ledger.allocate_pages([3, 4]) == ([0, 1], [False, False]) or ledger.users == 2
    ledger.update_ready([0], deref=False, offload=False)
    with pytest.raises(InvalidRequest, match="no user"):
        ledger.deref([0, 1, 1])
    assert ledger.users == 2 and ledger.check_ready([0]) and not ledger.check_ready([1])


@pytest.mark.parametrize("hash_key", [-1, 1 << 128])
def test_what_is_no_chunk_hash_is_refused_before_a_page_is_taken(hash_key: int) -> None:
    ledger = PageLedger(2, 8)
    with pytest.raises(InvalidRequest, match="128 bits"):
        ledger.allocate_pages([1, hash_key])
    assert ledger.users == 0


class LedgerMachine(RuleBasedStateMachine):
    """A naive model: users as a list of who holds which chunk; the ledger must not give a held page away."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(4, 100)
        self.held: list[tuple[int, int]] = []  # (page, hash key), once for each user
        self.offered: list[tuple[int, int]] = []  # likewise, for each group that waits to be stored
        self.ready: set[int] = set()

    @rule(keys=KEYS)
    def allocate(self, keys: list[int]) -> None:
        before = dict(self.held + self.offered)
        pages, ready = self.ledger.allocate_pages(keys)
        for key, page, is_ready in zip(keys, pages, ready, strict=True):
            if page == NO_PAGE:
                continue
            assert before.get(page, key) == key, "a page in use was given to another chunk"
            if not is_ready:
                self.ready.discard(page)
            self.held.append((page, key))
        if NO_PAGE in pages:
            assert set(pages[pages.index(NO_PAGE) :]) == {NO_PAGE}
            assert len({page for page, _ in self.held + self.offered}) == 4

    @rule(data=st.data(), offload=st.booleans())
    def fill(self, data: st.DataObject, offload: bool) -> None:
        if self.held:
            page, key = data.draw(st.sampled_from(self.held))
            self.ledger.update_ready([page], deref=True, offload=offload)
            self.held.remove((page, key))
            self.ready.add(page)
            if offload:
                self.offered.append((page, key))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if self.held:
            page, key = data.draw(st.sampled_from(self.held))
            self.ledger.recycle([page])
            self.held.remove((page, key))

    @rule(key=st.integers(1, 9))
    def query(self, key: int) -> None:
        page = self.ledger.query_one_page(key)
        if page is not None:
            assert page in self.ready
            self.held.append((page, key))

    @rule()
    def store(self) -> None:
        for group in self.ledger.take_groups():
            self.ledger.deref(group.pages)
            for offered in zip(group.pages, group.hash_keys, strict=True):
                assert offered in self.offered, "a page to be stored was given to another chunk"
                self.offered.remove(offered)

    @invariant()
    def counts_users(self) -> None:
        assert self.ledger.users == len(self.held) + len(self.offered)


TestLedger = LedgerMachine.TestCase
