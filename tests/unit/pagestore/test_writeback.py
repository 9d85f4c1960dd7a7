"""When dirty pages are written, and which together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.core.errors import StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.core.slots import PageRecord, Segment, Slot
from kvpool_pagestore.core.writeback import DirtyPage, WriteBackLimits, WriteQueue, WriteState
from tests.fixtures.pagestore import KEYSPACE, metadata, page_key

LIMITS = WriteBackLimits(
    batch_pages=4, batch_bytes=1000, linger_s=1.0, max_batches=2, retry_first_s=1.0, retry_last_s=4.0
)


def slot(number: int, size_bytes: int = 100, keyspace: bytes = KEYSPACE) -> Slot:
    record = PageRecord(page_key(number, keyspace=keyspace), size_bytes, metadata(number))
    return Slot(Segment(1, "tenant", 4096, 4096), 0, record=record)


def numbers(batch: list[DirtyPage]) -> list[int]:
    return [int.from_bytes(page.record.key.chunk_hash[:8], "big") for page in batch]


def queue(*slots: Slot, now_s: float = 0.0, bytes_per_s: int = 0) -> WriteQueue:
    made = WriteQueue(replace(LIMITS, bytes_per_s=bytes_per_s))
    for one in slots:
        made.add(one, now_s)
    return made


def test_a_page_lingers_for_company_and_not_longer() -> None:
    waiting = queue(slot(1))
    assert waiting.next_due_s(0.0) == 1.0
    assert waiting.next_batch(0.99) == []
    assert numbers(waiting.next_batch(1.0)) == [1]
    assert waiting.next_due_s(1.0) is None


def test_a_full_batch_does_not_wait() -> None:
    assert numbers(queue(*(slot(number) for number in range(5))).next_batch(0.0)) == [0, 1, 2, 3]
    assert numbers(queue(slot(1, 600), slot(2, 600)).next_batch(0.0)) == [1]


def test_a_page_larger_than_a_batch_is_written_alone() -> None:
    assert numbers(queue(slot(1, 5000), slot(2)).next_batch(0.0)) == [1]


def test_pages_of_one_chain_group_go_together() -> None:
    waiting = queue(slot(0), slot(16), slot(1), slot(17), slot(2))
    assert numbers(waiting.next_batch(0.0)) == [0, 1, 2, 16]


def test_only_so_many_batches_are_in_flight() -> None:
    waiting = queue(*(slot(number) for number in range(12)))
    assert waiting.next_batch(0.0) and waiting.next_batch(0.0)
    assert waiting.next_batch(99.0) == [] and waiting.next_due_s(99.0) is None
    waiting.batch_ended()
    assert waiting.next_batch(0.0)


def test_a_failed_page_is_tried_again_later_and_later() -> None:
    waiting = queue(slot(1))
    now_s, gaps = 1.0, []
    for _ in range(4):
        (page,) = waiting.next_batch(now_s)
        waiting.failed(page, StoreFault("no"), now_s)
        waiting.batch_ended()
        due_s = waiting.next_due_s(now_s)
        assert due_s is not None
        assert waiting.next_batch(due_s - 0.01) == []
        gaps.append(due_s - now_s)
        now_s = due_s
    assert gaps == [1.0, 2.0, 4.0, 4.0]
    waiting.hurry(now_s - 2)
    assert numbers(waiting.next_batch(now_s - 2)) == [1]


def test_pages_that_were_dropped_are_not_written() -> None:
    gone, cleared, kept = slot(1), slot(2), slot(3)
    waiting = queue(gone, cleared, kept)
    gone.record, cleared.deleted = None, True
    assert numbers(waiting.next_batch(1.0)) == [3]
    assert [page.state for page in waiting.pending] == [WriteState.WRITING]


def test_a_keyspace_can_be_held_back() -> None:
    other = b"o" * 16
    waiting = queue(slot(1), slot(2, keyspace=other))
    waiting.hold(KEYSPACE)
    batch = waiting.next_batch(1.0)
    assert [page.record.key.keyspace for page in batch] == [other]
    assert waiting.next_batch(9.0) == [] and waiting.next_due_s(9.0) is None
    waiting.unhold(KEYSPACE)
    assert numbers(waiting.next_batch(9.0)) == [1]


def test_everything_is_pending_until_it_is_durable() -> None:
    waiting = queue(slot(1), slot(2))
    (one, two) = waiting.next_batch(1.0)
    waiting.written(one)
    waiting.failed(two, StoreFault("no"), 1.0)
    waiting.batch_ended()
    assert waiting.pending == [two] and waiting.oldest_s(5.0) == 5.0
    assert (one.durable, two.durable) == (True, False)
    assert isinstance(one.record.key, PageKey)


def counted_looks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Grows by one for each page that is looked at."""
    looks = list[bytes]()
    wanted = DirtyPage.wanted.fget  # type: ignore[attr-defined]  # a property

    def counted(page: DirtyPage) -> bool:
        looks.append(page.record.key.chunk_hash)
        return bool(wanted(page))

    monkeypatch.setattr(DirtyPage, "wanted", property(counted))
    return looks


def test_pages_of_a_held_keyspace_are_looked_at_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = queue(*(slot(number) for number in range(64)))  # four groups
    waiting.hold(KEYSPACE)
    looks = counted_looks(monkeypatch)
    assert waiting.next_batch(2.0) == []
    assert waiting.next_batch(3.0) == []
    assert len(looks) == 64, "each commit during a clear would cost the square of what waits"
    waiting.unhold(KEYSPACE)
    assert numbers(waiting.next_batch(3.0)) == [0, 1, 2, 3]


def test_figures_of_a_deep_queue_look_at_its_oldest_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = queue(*(slot(number) for number in range(640)))
    looks = counted_looks(monkeypatch)
    assert waiting.oldest_s(7.0) == 7.0 and waiting.waiting_bytes() == 64_000
    assert len(looks) == 1


def test_a_page_that_waits_to_be_tried_again_is_found_by_its_slot() -> None:
    one, other = slot(1), slot(1)
    waiting = queue(one)
    (page,) = waiting.next_batch(1.0)
    waiting.failed(page, StoreFault("gone"), 1.0)
    assert waiting.find(one) is page and waiting.find(other) is None
    one.stay += 1
    assert waiting.find(one) is None, "the slot has another stay now"


def test_batches_keep_to_the_budget_and_save_none_of_it_up() -> None:
    waiting = queue(*(slot(number) for number in range(12)), bytes_per_s=100)
    assert numbers(waiting.next_batch(10.0)) == [0, 1, 2, 3]
    assert waiting.next_batch(10.0) == [] and waiting.next_due_s(10.0) == 14.0
    assert waiting.next_batch(13.9) == [] and waiting.next_due_s(13.9) == 14.0
    assert numbers(waiting.next_batch(20.0)) == [4, 5, 6, 7]
    waiting.batch_ended()
    assert waiting.next_batch(20.0) == [] and waiting.next_due_s(20.0) == 24.0
    assert numbers(waiting.next_batch(24.0)) == [8, 9, 10, 11]


def test_batches_outside_the_budget_wait_for_none_and_cost_none() -> None:
    waiting = queue(*(slot(number) for number in range(16)), bytes_per_s=100)
    assert numbers(waiting.next_batch(10.0)) == [0, 1, 2, 3]
    assert waiting.next_due_s(10.0, in_budget=False) is None, "all is due already"
    assert numbers(waiting.next_batch(10.0, in_budget=False)) == [4, 5, 6, 7]
    waiting.batch_ended()
    assert numbers(waiting.next_batch(13.0, in_budget=False)) == [8, 9, 10, 11]
    waiting.batch_ended()
    assert waiting.next_batch(13.0) == [] and waiting.next_due_s(13.0) == 14.0
    assert numbers(waiting.next_batch(14.0)) == [12, 13, 14, 15]


def test_a_page_that_lingers_beyond_the_pause_is_not_asked_for_earlier() -> None:
    waiting = queue(slot(1), bytes_per_s=1000)
    assert waiting.next_batch(1.0)
    waiting.add(slot(2), 1.0)
    assert waiting.next_due_s(1.0) == 2.0
    waiting.add(slot(3), 1.05)
    assert waiting.next_batch(1.05) == [] and waiting.next_due_s(1.05) == 2.0


def test_urgent_pages_go_first_and_outside_the_budget() -> None:
    waiting = queue(*(slot(number) for number in range(5)), slot(20), bytes_per_s=1)
    urgent = waiting.add(slot(21), 0.0)
    assert numbers(waiting.next_batch(0.0)) == [0, 1, 2, 3]
    waiting.urge([urgent], 0.0)
    assert numbers(waiting.next_batch(0.0)) == [20, 21], "with its group, which one sync makes durable"
    waiting.batch_ended()
    assert waiting.next_batch(1.0) == [] and waiting.next_due_s(1.0) == 400.0
    assert numbers(waiting.next_batch(400.0)) == [4]


def test_an_urgent_page_does_not_wait_after_a_failure() -> None:
    waiting = queue(slot(1), slot(20))
    (one, two) = waiting.next_batch(1.0)
    waiting.failed(one, StoreFault("no"), 1.0)
    waiting.failed(two, StoreFault("no"), 1.0)
    waiting.batch_ended()
    waiting.urge([two], 1.5)
    assert numbers(waiting.next_batch(1.5)) == [20]
    waiting.failed(two, StoreFault("no"), 1.5)
    waiting.batch_ended()
    assert waiting.next_batch(1.5) == [] and waiting.next_due_s(1.5) == 2.0
    assert numbers(waiting.next_batch(2.0)) == [1], "who waited for it has its error"


def test_pages_that_left_cost_no_budget() -> None:
    gone, kept = slot(1), slot(2)
    waiting = queue(gone, kept, bytes_per_s=100)
    assert waiting.waiting_bytes() == 200
    gone.record = None
    assert numbers(waiting.next_batch(1.0)) == [2]
    assert waiting.next_batch(2.0) == []
    assert waiting.waiting_bytes() == 100


def test_a_deep_queue_is_not_walked_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = queue(*(slot(number) for number in range(6400)), bytes_per_s=1000)
    may_start, looks = WriteQueue._may_start, list[PageKey]()

    def counted(self: WriteQueue, key: PageKey, busy: set[PageKey]) -> bool:
        looks.append(key)
        return may_start(self, key, busy)

    monkeypatch.setattr(WriteQueue, "_may_start", counted)
    for now_s in range(100):
        assert len(waiting.next_batch(float(now_s))) == 4
        waiting.batch_ended()
    assert len(looks) == 400


def test_a_page_that_failed_on_a_disk_out_of_service_is_tried_when_the_disk_is_back_or_a_caller_waits() -> None:
    waiting = queue(slot(1), slot(16))
    for page in waiting.next_batch(1.0):
        waiting.failed(page, StoreFault("gone"), 1.0, is_disk_out=True)
    waiting.batch_ended()
    assert waiting.next_batch(1e9) == [] and waiting.next_due_s(1e9) is None
    waiting.urge([page for page in waiting.pending if numbers([page]) == [1]], 1e9)
    (page,) = waiting.next_batch(1e9)
    waiting.failed(page, StoreFault("gone"), 1e9, is_disk_out=True)
    waiting.batch_ended()
    waiting.hurry(2e9)
    assert numbers(waiting.next_batch(2e9)) == [1, 16]
