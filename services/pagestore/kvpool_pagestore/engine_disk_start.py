"""Taking the pages that an earlier process left into the map of the disk tier, on a thread: the loop is free meanwhile.

The eviction policy learns of them at once, so that the first victim costs no more than any other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np

from kvpool.core.errors import KeyspaceUnknown, KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.keyspaces import KeyspaceBook, check_page
from kvpool_pagestore.core.stored_pages import PageKind, StoredPage, StoredPages
from kvpool_pagestore.ports import PageMetadata, PageStore, Workers

_log = logging.getLogger(__name__)


class FoundPages:
    """The scan of a start."""

    def __init__(self, store: PageStore, disk_map: DiskMap, keyspaces: KeyspaceBook, readers: Workers) -> None:
        self._store = store
        self._map = disk_map
        self._keyspaces = keyspaces
        self._readers = readers
        self._is_right: dict[PageKind, bool] = {}

    async def take(self, on_stored: Callable[[PageKey, PageMetadata], None]) -> list[PageKey]:
        """Bring all into the map; those that nobody could ever ask for are answered. Raises StoreFault.

        on_stored: told of pages whose pin or life ends some time.
        """
        chunks, useless, parts = FoundChunks(), list[PageKey](), self._store.scan()
        ending = list[StoredPage]()
        while (part := await self._readers.run(self._take, parts, chunks, useless)) is not None:
            ending += part
        await self._readers.run(self._map.restore, chunks)
        self._map.count_restored(chunks)
        for page in ending:  # only now: what has expired is given up at once, and looked for in the map
            on_stored(page.key, page.metadata)
        return useless

    def _take(
        self, parts: Iterator[StoredPages], chunks: FoundChunks, useless: list[PageKey]
    ) -> list[StoredPage] | None:
        """Take the next part: pages of it whose pin or life ends some time; None if there is none."""
        part = next(parts, None)
        if part is None:
            return None
        wrong = [pages for kind, pages in part.kinds() if not self._is_right_kind(kind)]
        if wrong:
            is_right = np.ones(len(part), bool)
            is_right[np.concatenate(wrong)] = False
            useless += [page.key for page in part.chosen(~is_right)]
            part = part.chosen(is_right)
        chunks.add(part)
        return list(part.chosen(part.have_an_end))

    def _is_right_kind(self, kind: PageKind) -> bool:
        """Whether pages of that keyspace and shard have that size."""
        known = self._is_right.get(kind)
        if known is None:
            known = self._is_right[kind] = self._checked(kind)
        return known

    def _checked(self, kind: PageKind) -> bool:
        keyspace = self._keyspaces.find(kind.keyspace)
        try:
            if keyspace is None:
                raise KeyspaceUnknown(f"keyspace {kind.keyspace.hex()} was not remembered")
            check_page(keyspace, PageKey(kind.keyspace, bytes(16), kind.shard), kind.page_bytes)
        except KvPoolError as error:
            _log.error("pages on disk like %s are dropped: %s", kind, error)
            return False
        return True
