"""What is kept longer or shorter than eviction would: extension, expiry, pins within their bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import PageKey
from kvpool.core.retention import Retention
from kvpool_pagestore.core.retention import ExpiryQueue, PinBook, extended, is_expired, with_defaults
from tests.fixtures.many_pages import steps_of

HASH = b"h" * 16


def kept(**fields: int) -> PageMetadata:
    return PageMetadata(parent_hash=HASH, chunk_index=0, group_head_hash=HASH, **fields)


def key(number: int) -> PageKey:
    return PageKey(HASH, number.to_bytes(16, "big"), 0)


def test_a_page_that_says_nothing_takes_the_default_of_its_keyspace() -> None:
    default = Retention(ttl_ms=2, priority=7)
    assert with_defaults(kept(), default, 1000) == kept(ttl_ms=2, priority=7, expires_us=3000)
    assert with_defaults(kept(priority=1), default, 1000) == kept(priority=1), "it said something"
    assert with_defaults(kept(ttl_ms=1), default, 1000) == kept(ttl_ms=1, expires_us=2000)


def test_a_page_that_another_node_kept_before_lives_no_longer_here() -> None:
    assert with_defaults(kept(ttl_ms=5, expires_us=44), Retention(), 1000).expires_us == 44


metadata = st.builds(
    kept,
    ttl_ms=st.integers(0, 3),
    expires_us=st.integers(0, 9),
    priority=st.integers(-2, 2),
    pinned_until_us=st.integers(0, 9),
)


@given(metadata, metadata)
def test_nothing_is_ever_kept_shorter_because_it_was_stored_again(before: PageMetadata, wanted: PageMetadata) -> None:
    after = extended(before, wanted)
    for one in (before, wanted):
        assert not after.expires_us or 0 < one.expires_us <= after.expires_us
        assert after.priority >= one.priority
        assert after.pinned_until_us >= one.pinned_until_us
    assert extended(after, wanted) == after


def test_an_expired_page_is_one_whose_time_has_come() -> None:
    assert [is_expired(kept(expires_us=at), 5) for at in (0, 4, 5, 6)] == [False, True, True, False]


def test_chunks_come_due_in_order_once_and_a_bounded_part_at_a_time() -> None:
    queue = ExpiryQueue()
    for name, at in ((b"c", 30), (b"a", 10), (b"b", 20), (b"never", 0)):
        queue.add(name, at)
    assert (len(queue), queue.next_us) == (3, 10)
    assert queue.take_due(25, most=1) == [b"a"]
    assert queue.take_due(25, most=9) == [b"b"]
    assert queue.take_due(25, most=9) == []
    queue.add(b"c", 90)
    assert queue.take_due(80, most=9) == [], "it was extended"
    assert queue.take_due(90, most=9) == [b"c"]
    assert len(queue) == 0


def test_pins_are_bounded_all_or_none_and_end() -> None:
    book = PinBook(100)
    assert book.pin({key(0): 40, key(1): 40}, until_us=50, now_us=0) is None
    refused = book.pin({key(2): 10, key(3): 20}, until_us=90, now_us=0)
    assert refused is not None and "80 bytes are pinned and 30 more" in refused.message
    assert book.pinned_bytes(0) == 80
    assert book.pin({key(0): 40, key(2): 20}, until_us=90, now_us=0) is None, "a longer pin costs nothing again"
    assert book.pin({key(3): 40}, until_us=90, now_us=60) is None, "the pin of 1 has ended"
    assert book.pinned_bytes(60) == 100
    book.unpin([key(3), key(8)])
    assert book.pinned_bytes(60) == 60
    book.unpin([key(0)])
    assert book.pinned_bytes(60) == 20 and key(0) not in book and key(2) in book
    assert book.pinned_bytes(90) == 0


def test_what_was_granted_before_a_restart_counts_even_beyond_the_bound() -> None:
    book = PinBook(10)
    assert book.pin({key(1): 40}, until_us=50, now_us=0, force=True) is None
    assert book.pin({key(2): 1}, until_us=50, now_us=0) is not None


def test_what_is_put_off_or_forgotten_again_and_again_takes_no_room() -> None:
    queue, book = ExpiryQueue(), PinBook(100)
    for at in range(1, 5000):
        queue.add(b"hot", at)
        queue.add(b"%d" % at, 9999)
        queue.forget(b"%d" % at)
        assert book.pin({key(1): 40}, until_us=10_000 + at, now_us=0) is None
    assert len(queue) == 1 and book.pinned_bytes(0) == 40
    assert len(queue._heap) < 200 and len(book._ends._heap) < 200
    assert queue.take_due(5000, most=9) == [b"hot"]
    assert book.pinned_bytes(14_999) == 0


@pytest.mark.parametrize("is_together", [True, False])
def test_pins_that_end_cost_as_many_steps_however_many_there_are(is_together: bool) -> None:
    def steps(page_count: int) -> int:
        book = PinBook(page_count)
        for number in range(page_count):
            assert book.pin({key(number): 1}, until_us=50 if is_together else 50 + number % 8, now_us=0) is None
        count = steps_of(lambda: book.pinned_bytes(60))
        assert book.pinned_bytes(60) == 0 and key(page_count - 1) not in book
        assert book.pin({key(page_count - 1): 1}, until_us=90, now_us=60) is None
        assert book.pinned_bytes(60) == 1 and key(page_count - 1) in book
        for _ in range(page_count):
            book.pinned_bytes(60)
        assert len(book) == 1, "those that have ended are forgotten by and by"
        return count

    assert steps(4000) < 1.2 * steps(1000)


def test_a_page_that_is_pinned_again_as_it_is_costs_as_many_steps_however_many_are_pinned() -> None:
    """As where a store asks for a slot several times: the third time, each pin rebuilt the queue of all of them."""

    def steps(page_count: int) -> int:
        book = PinBook(page_count)
        for _ in range(3):
            for number in range(page_count):
                book.pin({key(number): 1}, until_us=50, now_us=0)

        def pin_again() -> None:
            for number in range(100):
                book.pin({key(number): 1}, until_us=50, now_us=0)

        return steps_of(pin_again)

    assert steps(2000) < 1.2 * steps(500)
