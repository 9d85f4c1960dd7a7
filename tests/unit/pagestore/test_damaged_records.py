"""One damaged block of a table of records, and what is written and deleted beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvpool.core.errors import KvPoolError, PageCorrupt
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.adapters.records import RECORDS, PageRecord
from tests.fixtures.pagestore import metadata
from tests.unit.pagestore.rocks_pages import key, opened, page_write

PAGES = 400


@dataclass(frozen=True, slots=True)
class Damaged:
    store: RocksPageStore
    bad: int  # the number of a page whose record cannot be read
    good: tuple[int, int]

    def written(self, *numbers: int) -> list[KvPoolError | None]:
        results: list[KvPoolError | None] = []
        writes = [page_write(number, b"y" * 4096) for number in numbers]
        self.store.put_batch(writes, lambda _, failure: results.append(failure))
        return results

    def has_record(self, number: int) -> bool:
        try:
            return self.store._pages._encoded(key(number)) is not None
        except PageCorrupt:
            return True


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Damaged]:
    store = opened(tmp_path, 800 << 20)
    store.put_batch([page_write(number, b"x" * 4096) for number in range(PAGES)], lambda _, failure: None)
    database = store._pages.database
    database.family(RECORDS).flush(wait=True)
    database._cache.set_capacity(0)
    table = max(tmp_path.rglob("*.sst"), key=lambda path: path.stat().st_size)
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 3)
        block = file.read(64)
        file.seek(-len(block), 1)
        file.write(bytes(byte ^ 0xFF for byte in block))
    bad, good = list[int](), list[int]()
    for number in range(PAGES):
        try:
            store._pages._encoded(key(number))
            good.append(number)
        except PageCorrupt:
            bad.append(number)
    yield Damaged(store, bad[0], (good[0], good[1]))
    store.close()


def test_a_page_with_a_damaged_record_is_written_again_as_are_those_beside_it(damaged: Damaged) -> None:
    assert damaged.written(damaged.bad) == [None]
    assert damaged.written(damaged.good[0], damaged.bad, damaged.good[1]) == [None] * 3


def test_a_page_with_a_damaged_record_is_deleted_as_are_those_beside_it(damaged: Damaged) -> None:
    numbers = damaged.good[0], damaged.bad, damaged.good[1]
    damaged.store.delete_batch([key(number) for number in numbers])
    assert not any(damaged.has_record(number) for number in numbers)


def test_the_metadata_of_pages_beside_a_damaged_record_is_changed(damaged: Damaged) -> None:
    changed = replace(metadata(damaged.good[0]), priority=7)
    numbers = damaged.good[0], damaged.bad, damaged.good[1]
    damaged.store.set_metadata([(key(number), changed) for number in numbers])
    for number in damaged.good:
        encoded = damaged.store._pages._encoded(key(number))
        assert encoded is not None and PageRecord.decode(encoded).metadata == changed


def test_a_record_that_is_none_of_ours_keeps_no_metadata_from_the_pages_beside_it(tmp_path: Path) -> None:
    store = opened(tmp_path, 800 << 20)
    store.put_batch([page_write(number, b"x" * 4096) for number in range(3)], lambda _, failure: None)
    store._pages.database.family(RECORDS)[key(1).pack()] = b"no record"
    changed = replace(metadata(0), priority=7)
    store.set_metadata([(key(number), changed) for number in range(3)])
    for number in (0, 2):
        encoded = store._pages._encoded(key(number))
        assert encoded is not None and PageRecord.decode(encoded).metadata == changed
    assert store._pages._encoded(key(1)) == b"no record"
    store.close()
