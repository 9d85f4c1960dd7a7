"""A pagestore's disk tier in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, PageCorrupt
from kvpool.core.page import PageKey

StoredT_co = TypeVar("StoredT_co", covariant=True)


class PageWriteLike(Protocol):
    """One page to be written; the pagestore's own type."""

    @property
    def key(self) -> PageKey: ...
    @property
    def page(self) -> memoryview: ...
    @property
    def metadata(self) -> PageMetadata: ...


class StoredPagesType(Protocol[StoredT_co]):
    """Makes what a scan yields of keys, page bytes and metadata, in any order."""

    def __call__(self, pages: Iterable[tuple[PageKey, int, PageMetadata]]) -> StoredT_co: ...


class MemoryPageStore(Generic[StoredT_co]):
    """Passes the contract of the pagestore's PageStore port. What was written survives `close` and `open`.

    Make it as `MemoryPageStore(StoredPages.of)`. Tests may set `fault` (what every write, read and deletion raises or
    reports from then on) and `gate` (what every write waits for before it is durable), and may damage pages.
    """

    def __init__(self, stored_pages: StoredPagesType[StoredT_co]) -> None:
        self._stored_pages = stored_pages
        self._lock = threading.Lock()
        self._pages: dict[PageKey, tuple[bytes, PageMetadata]] = {}
        self._keyspaces: list[bytes] = []
        self._values: dict[str, bytes] = {}
        self.fault: KvPoolError | None = None
        self.gate: threading.Event | None = None

    def damage(self, key: PageKey, offset: int) -> None:
        """Flip one bit of a stored page."""
        with self._lock:
            page, metadata = self._pages[key]
            flipped = page[:offset] + bytes([page[offset] ^ 1]) + page[offset + 1 :]
            self._pages[key] = flipped, metadata

    def open(self) -> None:
        if self.fault is not None:
            raise self.fault

    def keyspaces(self) -> Sequence[bytes]:
        with self._lock:
            return list(self._keyspaces)

    def remember_keyspace(self, encoding: bytes) -> None:
        self._raise_fault()
        with self._lock:
            if encoding not in self._keyspaces:
                self._keyspaces.append(encoding)

    def load_value(self, name: str) -> bytes | None:
        with self._lock:
            return self._values.get(name)

    def save_value(self, name: str, value: bytes) -> None:
        self._raise_fault()
        with self._lock:
            self._values[name] = value

    def take_found(self) -> None:
        """Nothing is found at the opening that `scan` would not find."""

    def scan(self) -> Iterator[StoredT_co]:
        with self._lock:
            pages = list(self._pages.items())
        yield self._stored_pages((key, len(page), metadata) for key, (page, metadata) in pages)

    def put_batch(
        self, pages: Sequence[PageWriteLike], on_durable: Callable[[PageKey, KvPoolError | None], None]
    ) -> None:
        copies = {page.key: (bytes(page.page), page.metadata) for page in pages}
        if self.gate is not None:
            self.gate.wait()
        fault = self.fault
        if fault is None:
            with self._lock:
                self._pages.update(copies)
        for page in pages:
            on_durable(page.key, fault)

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        self._raise_fault()
        with self._lock:
            found = self._pages.get(key)
        if found is None:
            return None
        page = found[0]
        if len(page) > len(destination):
            raise PageCorrupt(f"page {key} has {len(page)} bytes on disk, {len(destination)} were expected")
        destination[: len(page)] = page
        return len(page)

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
        self._raise_fault()
        with self._lock:
            for key, metadata in changes:
                if key in self._pages:
                    self._pages[key] = self._pages[key][0], metadata

    def delete_batch(self, keys: Sequence[PageKey]) -> None:
        self._raise_fault()
        with self._lock:
            for key in keys:
                self._pages.pop(key, None)

    def delete_keyspace(self, keyspace: bytes) -> None:
        self._raise_fault()
        with self._lock:
            self._pages = {key: page for key, page in self._pages.items() if key.keyspace != keyspace}

    def charged_bytes(self, page_bytes: int) -> int:
        return page_bytes

    def probe(self) -> None:
        self._raise_fault()

    def used_bytes(self) -> int:
        with self._lock:
            return sum(len(page) for page, _ in self._pages.values())

    def close(self) -> None:
        """Nothing to do: it is memory."""

    def _raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault
