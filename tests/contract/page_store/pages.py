"""Pages for the contract of page stores, and short words for writing and reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.ports import PageStore, PageWrite

Reopen = Callable[[], PageStore]

KEYSPACE = b"k" * 16
OTHER = b"\xff" * 16  # the last possible keyspace: nothing sorts after it


def key(number: int, keyspace: bytes = KEYSPACE) -> PageKey:
    return PageKey(keyspace, number.to_bytes(16, "big"), number % 3)


def metadata(number: int) -> PageMetadata:
    return PageMetadata(
        parent_hash=bytes([number % 251]) * 16,
        chunk_index=number,
        group_head_hash=bytes([number % 7]) * 16,
        ttl_ms=number * 10,
        priority=number % 200 - 100,
        pinned_until_us=number << 40,
        prompt_tokens=number * 3,
        expires_us=number << 41,
    )


def page_write(number: int, page: bytes, keyspace: bytes = KEYSPACE) -> PageWrite:
    return PageWrite(key=key(number, keyspace), page=memoryview(page), metadata=metadata(number))


class Durable:
    """Counts callbacks."""

    def __init__(self) -> None:
        self.calls: list[tuple[PageKey, KvPoolError | None]] = []

    def __call__(self, page_key: PageKey, failure: KvPoolError | None) -> None:
        self.calls.append((page_key, failure))


def get(store: PageStore, page_key: PageKey, size_bytes: int = 1 << 20) -> bytes | None:
    destination = bytearray(size_bytes)
    found = store.get_into(page_key, memoryview(destination))
    return None if found is None else bytes(destination[:found])


def now_and_after_restart(store: PageStore, reopen: Reopen) -> Iterator[PageStore]:
    yield store
    yield reopen()
