"""Taking the pages that an earlier process left into the map of the disk tier, a part of them in each turn of the loop.

The eviction policy learns of them at once, so that the first victim costs no more than any other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvpool.core.errors import KeyspaceUnknown, KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.kept_metadata import StoredPage, has_an_end
from kvpool_pagestore.core.keyspaces import KeyspaceBook, check_page
from kvpool_pagestore.ports import PageMetadata, PageStore, Workers

_log = logging.getLogger(__name__)

_SCAN_PAGES = 2048  # entries taken into the map between two turns of the loop: 2 to 12 ms


class FoundPages:
    """The scan of a start."""

    def __init__(self, store: PageStore, disk_map: DiskMap, keyspaces: KeyspaceBook, readers: Workers) -> None:
        self._store = store
        self._map = disk_map
        self._keyspaces = keyspaces
        self._readers = readers
        self._right_sizes: set[tuple[bytes, bytes, int]] = set()  # keyspace, packed shard, page bytes

    async def take(self, on_stored: Callable[[PageKey, PageMetadata], None]) -> list[PageKey]:
        """Bring all into the map; those that nobody could ever ask for are answered. Raises StoreFault.

        on_stored: told of pages whose pin or life ends some time.
        """
        pages, useless = self._store.scan(), list[PageKey]()
        while found := await self._readers.run(_take, pages, _SCAN_PAGES):
            if not {(key[:16], key[32:], page_bytes) for key, page_bytes, _ in found} <= self._right_sizes:
                found, wrong = self._sorted_out(found)
                useless += wrong
            for page in found:
                if has_an_end(page[2]):
                    on_stored(page.key, page.metadata)
            self._map.add_found(found)
        return useless

    def _sorted_out(self, found: Sequence[StoredPage]) -> tuple[list[StoredPage], list[PageKey]]:
        """Those of a size that pages of their keyspace and shard have, and the keys of all others."""
        right, wrong = list[StoredPage](), list[PageKey]()
        for page in found:
            size = page.packed_key[:16], page.packed_key[32:], page.page_bytes
            if size in self._right_sizes or self._is_right_size(page):
                self._right_sizes.add(size)
                right.append(page)
            else:
                wrong.append(page.key)
        return right, wrong

    def _is_right_size(self, page: StoredPage) -> bool:
        key = page.key
        keyspace = self._keyspaces.find(key.keyspace)
        try:
            if keyspace is None:
                raise KeyspaceUnknown(f"keyspace {key.keyspace.hex()} was not remembered")
            check_page(keyspace, key, page.page_bytes)
        except KvPoolError as error:
            _log.error("page %s on disk is dropped: %s", key, error)
            return False
        return True


def _take(pages: Iterator[StoredPage], count: int) -> list[StoredPage]:
    return list(islice(pages, count))
