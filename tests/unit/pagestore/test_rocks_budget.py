"""The disk tier's files stay within their budget, however many write at once and however slowly space comes back."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool_pagestore.adapters.disk_tier import largest_batch_bytes, live_page_bytes, open_disk_tier
from kvpool_pagestore.adapters.rocks_volumes import live_limit_bytes
from tests.unit.pagestore.rocks_pages import PAGE_BYTES, key, opened, put


def test_who_writes_while_space_is_given_back_stays_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_bytes, capacity_bytes = 4 << 20, 60 << 20
    store = opened(tmp_path, "files", volume_bytes=volume_bytes)
    batch_count, batch = live_limit_bytes(capacity_bytes, volume_bytes) // PAGE_BYTES // 10, 10
    for start in range(0, batch_count * batch, batch):
        put(store, *range(start, start + batch))
    moving, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow_read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        moving.set()
        assert go_on.wait(10)
        return preadv(descriptor, buffers, offset)

    def churn(first: int, live: list[int]) -> None:
        dice = random.Random(first)
        for start in range(first, first + 20 * batch, batch):
            dice.shuffle(live)
            store.delete_batch([key(live.pop()) for _ in range(batch)])
            put(store, *range(start, start + batch))
            live += range(start, start + batch)

    monkeypatch.setattr(os, "preadv", slow_read)
    halves = [list(range(half, batch_count * batch, 2)) for half in (0, 1)]
    one, other = (threading.Thread(target=churn, args=(1000 + 1000 * half, halves[half])) for half in (0, 1))
    one.start()
    assert moving.wait(10)
    other.start()
    other.join(0.5)  # ends only if it does not wait for the space
    highest_bytes = store.used_bytes()
    go_on.set()
    one.join()
    other.join()
    assert max(highest_bytes, store.used_bytes()) <= capacity_bytes
    store.close()


@pytest.mark.parametrize("capacity_bytes", [64 << 20, 1 << 30, 16 << 30, 1 << 40, 100 << 40])
def test_any_budget_is_cut_into_a_few_hundred_volumes_of_which_most_is_for_pages(capacity_bytes: int) -> None:
    volume_bytes = largest_batch_bytes(capacity_bytes, 1)
    assert 32 <= capacity_bytes // volume_bytes <= 256
    assert live_page_bytes(capacity_bytes) >= (0.45 if capacity_bytes < 1 << 30 else 0.75) * capacity_bytes
    assert 2 * largest_batch_bytes(capacity_bytes, 2) <= volume_bytes


def test_a_new_tier_opens_and_is_small(tmp_path: Path) -> None:
    store = open_disk_tier(tmp_path, 1 << 40)
    put(store, 1)
    assert store.used_bytes() < 16 << 20
    store.close()
