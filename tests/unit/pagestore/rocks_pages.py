"""Pages for tests of the RocksDB tier, and short words for writing and reading them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.stored_pages import stored_pages

PAGE_BYTES = 200_000


def key(number: int) -> PageKey:
    return PageKey(b"k" * 16, number.to_bytes(16, "big"), 0)


def page(number: int, size_bytes: int = PAGE_BYTES) -> bytes:
    return (number.to_bytes(4, "big") * (size_bytes // 4 + 1))[:size_bytes]


def page_write(number: int, content: bytes | None = None) -> PageWrite:
    metadata = PageMetadata(parent_hash=b"p" * 16, chunk_index=number, group_head_hash=b"g" * 16)
    return PageWrite(key=key(number), page=memoryview(page(number) if content is None else content), metadata=metadata)


def opened(directory: Path, capacity_bytes: int = 200 << 20) -> RocksPageStore:
    store = RocksPageStore(directory, capacity_bytes)
    store.open()
    return store


def put(store: RocksPageStore, *numbers: int) -> None:
    failures: list[KvPoolError | None] = []
    store.put_batch([page_write(number) for number in numbers], lambda _, failure: failures.append(failure))
    assert failures == [None] * len(numbers)


def put_each(store: RocksPageStore, numbers: Iterable[int]) -> None:
    for number in numbers:
        put(store, number)


def get(store: RocksPageStore, number: int) -> bytes | None:
    destination = bytearray(PAGE_BYTES)
    found = store.get_into(key(number), memoryview(destination))
    return None if found is None else bytes(destination[:found])


def scanned(store: RocksPageStore) -> set[int]:
    return {found.metadata.chunk_index for found in stored_pages(store)}
