"""The disk tier's files stay within their budget: while many write, with pages of any size, and when it has shrunk."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from kvpool.core.errors import KvPoolError, QuotaExceeded, StartupFailed
from kvpool_pagestore.adapters.page_store import RocksPageStore, largest_batch_bytes, live_page_bytes, open_disk_tier
from kvpool_pagestore.core.extents import BLOCK_BYTES, ExtentBudget
from tests.unit.pagestore.rocks_pages import PAGE_BYTES, get, key, opened, page, page_write, put, scanned

CAPACITY_BYTES = 64 << 20


class Watch:
    """Measures a store without a pause while others use it."""

    def __init__(self, store: RocksPageStore) -> None:
        self._store = store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure)
        self.highest_bytes = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._stop.wait(0.001):
            self._look()
        self._look()

    def _look(self) -> None:
        self.highest_bytes = max(self.highest_bytes, self._store.used_bytes())


def test_the_files_never_outgrow_the_capacity_while_several_write_and_delete(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=CAPACITY_BYTES)
    each_pages = store.live_limit_bytes // store.charged_bytes(PAGE_BYTES) // 2

    def churn(first: int) -> None:
        dice, live = random.Random(first), list[int]()
        for start in range(first, first + 2 * each_pages, 4):
            if len(live) + 4 > each_pages:
                dice.shuffle(live)
                store.delete_batch([key(live.pop()) for _ in range(4)])
            store.put_batch([page_write(number) for number in range(start, start + 4)], lambda _, __: None)
            live += range(start, start + 4)

    with Watch(store) as watch:
        threads = [threading.Thread(target=churn, args=(first,)) for first in (0, 10_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert CAPACITY_BYTES // 3 < watch.highest_bytes <= CAPACITY_BYTES
    store.close()


@pytest.mark.slow
def test_small_pages_are_charged_for_their_records(tmp_path: Path) -> None:
    """Records, logs and tables of as many of the smallest pages as may be, written again and again, fit beside them."""
    store = opened(tmp_path, capacity_bytes=CAPACITY_BYTES)
    count, reported = store.live_limit_bytes // store.charged_bytes(1), list[KvPoolError | None]()
    with Watch(store) as watch:
        for first in range(0, 6 * count, count):
            store.delete_batch([key(number) for number in range(first - count, first)] if first else [])
            for start in range(first, first + count, 200):
                batch = [page_write(number, b"x") for number in range(start, min(start + 200, first + count))]
                store.put_batch(batch, lambda _, failure: reported.append(failure))
    assert reported == [None] * 6 * count
    assert watch.highest_bytes <= CAPACITY_BYTES
    assert len(scanned(store)) == count > 1000
    store.close()


@pytest.mark.parametrize("capacity_bytes", [64 << 20, 1 << 30, 16 << 30, 1 << 40, 100 << 40])
def test_most_of_any_budget_is_for_pages(capacity_bytes: int) -> None:
    budget = ExtentBudget(capacity_bytes)
    share = 0.55 if capacity_bytes < 1 << 30 else 0.92
    assert capacity_bytes > budget.block_count * BLOCK_BYTES > live_page_bytes(capacity_bytes) > share * capacity_bytes
    assert budget.file_block_count <= 2 << 20
    assert 16 * 2 * largest_batch_bytes(capacity_bytes, 2) <= live_page_bytes(capacity_bytes)


def test_a_budget_without_room_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match="64 MiB or more"):
        open_disk_tier(tmp_path, 20 << 20)


@pytest.mark.parametrize("smaller_bytes", [100 << 20, 40 << 20])
def test_a_smaller_budget_shrinks_the_tier_before_it_serves(tmp_path: Path, smaller_bytes: int) -> None:
    store = opened(tmp_path, capacity_bytes=200 << 20)
    for start in range(0, 600, 20):
        put(store, *range(start, start + 20))
    store.close()
    store = opened(tmp_path, capacity_bytes=smaller_bytes)
    assert store.used_bytes() <= smaller_bytes
    kept = scanned(store)
    assert len(kept) * PAGE_BYTES > 0.8 * ExtentBudget(smaller_bytes).block_count * BLOCK_BYTES
    assert all(get(store, number) == page(number) for number in kept)
    assert all(get(store, number) is None for number in set(range(600)) - kept)
    store.delete_batch([key(number) for number in list(kept)[:20]])
    put(store, *range(700, 715))
    assert store.used_bytes() <= smaller_bytes
    store.close()


def test_a_larger_budget_is_used(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=40 << 20)
    put(store, *range(40))
    store.close()
    store = opened(tmp_path, capacity_bytes=100 << 20)
    for start in range(40, 200, 20):
        put(store, *range(start, start + 20))
    assert scanned(store) == set(range(200))
    assert all(get(store, number) == page(number) for number in (0, 39, 40, 199))
    store.close()


def test_pages_beyond_the_budget_are_refused_and_the_tier_is_well(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=40 << 20)
    put(store, *range(60))
    failures: list[KvPoolError | None] = []
    store.put_batch([page_write(number) for number in range(60, 90)], lambda _, failure: failures.append(failure))
    assert {type(failure) for failure in failures} == {QuotaExceeded}
    store.delete_batch([key(number) for number in range(40)])
    put(store, *range(60, 90))
    assert scanned(store) == set(range(40, 90))
    assert all(get(store, number) == page(number) for number in range(40, 90))
    store.close()


def test_a_new_tier_opens_and_is_small(tmp_path: Path) -> None:
    store = open_disk_tier(tmp_path, 1 << 40)
    assert store.used_bytes() < 16 << 20
    store.close()
