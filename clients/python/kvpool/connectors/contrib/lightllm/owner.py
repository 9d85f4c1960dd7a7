"""The process that owns lightllm's CPU cache: the ledger, and the way between its pages and the pool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.client.store_sync import StorePages
from kvpool.client.store_values import ChunkPlace, OpenedShards
from kvpool.connectors.contrib.lightllm.calls import CallServer
from kvpool.connectors.contrib.lightllm.ledger import NO_PAGE, OffloadGroup, PageLedger
from kvpool.connectors.contrib.lightllm.peers import Peers
from kvpool.connectors.contrib.lightllm.settings import LightLlmSettings
from kvpool.core.chunks import HASH_BYTES
from kvpool.core.errors import InvalidRequest

_log = logging.getLogger(__name__)
_GROUPS_MAX = 1024  # that wait to be stored


class CacheOwner:
    """Thread-safe; lightllm's other processes call it through its socket."""

    def __init__(self, settings: LightLlmSettings, tensor: Any) -> None:
        """tensor: the cache's pages. raises: what the configuration must change, see AsyncStorePages.open."""
        self._settings = settings
        self._pages = settings.pages(tensor)
        self._ledger = PageLedger(settings.meta.page_num, _GROUPS_MAX)
        self._lock = threading.Lock()
        self._offered = threading.Condition(self._lock)
        self._pool = StorePages(settings.pool, "lightllm")
        self._space: OpenedShards | None = None
        self._closed = False
        self.opened()
        self._peers = Peers(self._recycle_pages)
        self._server = CallServer(settings.socket, self._connect)

    def opened(self) -> OpenedShards | None:
        """The keyspace; None as long as the index was never reached."""
        if self._space is None:
            self._space = self._pool.open(self._settings.space())
        return self._space

    def call(self, name: str, *arguments: Any) -> Any:
        """One call of CACHE_CALLS. raises: InvalidRequest for another one, and for pages that do not exist."""
        if name not in CACHE_CALLS:
            raise InvalidRequest(f"{name} is no call of the CPU cache")
        return getattr(self, f"_{name}")(*arguments)

    def take_groups(self, timeout_s: float) -> list[OffloadGroup]:
        """Wait for groups to be stored."""
        with self._offered:
            groups = self._ledger.take_groups()
            if not groups and not self._closed:
                self._offered.wait(timeout_s)
                groups = self._ledger.take_groups()
            return groups

    def store(self, group: OffloadGroup) -> int:
        """Store a group and let go of its pages; how many leading ones are in the pool now."""
        try:
            space = self.opened()
            if space is None:
                return 0
            chunks = ChunkPlace.chain([_hash_bytes(one) for one in group.hash_keys])

            def fill(position: int, shard: int, payload: memoryview) -> None:
                self._pages.gather(group.pages[position], shard, payload)

            stored = self._pool.put(space, chunks, fill)
            return stored.index(False) if False in stored else len(stored)
        finally:
            self.call("deref_pages", group.pages)

    def loadable(self, hash_keys: Sequence[int], first: int) -> int:
        """Chunks of a chain from `first` on that the pool has, without a gap."""
        space = self.opened()
        chunks = ChunkPlace.chain([_hash_bytes(one) for one in hash_keys], first)
        if space is None or not chunks:
            return 0
        found = self._pool.find(space, chunks)
        return found.index(False) if False in found else len(found)

    def load(self, hash_keys: Sequence[int], pages: Sequence[int], first: int) -> int:
        """Load chunks of a chain from `first` on into their pages; how many leading ones are there."""
        space = self.opened()
        chunks = ChunkPlace.chain([_hash_bytes(one) for one in hash_keys], first)
        if space is None or not chunks:
            return 0

        def take(position: int, shard: int, payload: memoryview) -> None:
            self._pages.scatter(pages[first + position], shard, payload)

        got = self._pool.get(space, chunks, take)
        return got.index(False) if False in got else len(got)

    @property
    def users(self) -> int:
        """Of all pages: 0 when nothing runs and nothing leaks."""
        with self._lock:
            return self._ledger.users

    def close(self) -> None:
        """End everything. Idempotent."""
        with self._offered:
            self._closed = True
            self._offered.notify_all()
        self._server.close()
        self._peers.close()
        self._pool.close()

    def _connect(self, pid: int) -> Callable[[str, list[Any]], Any] | None:
        """A process that ends in the middle of an offload leaves pages that will never be filled: they are freed."""
        peer = self._peers.connected(pid)
        if peer is None:
            return None

        def handle(name: str, arguments: list[Any]) -> Any:
            result = self.call(name, *arguments)
            if name == "allocate_pages":
                pages = [page for page in result[0] if page != NO_PAGE]
                if not self._peers.hold(peer, pages):
                    self._recycle_pages(pages)
            elif name in ("recycle_pages", "update_pages_status_to_ready"):
                self._peers.let_go(peer, arguments[0])
            return result

        return handle

    def _hash_key(self) -> str:
        space = self.opened()
        return space.hash_key.hex() if space is not None else ""

    def _allocate_pages(self, hash_keys: Sequence[int]) -> tuple[list[int], list[bool]]:
        with self._lock:
            return self._ledger.allocate_pages(hash_keys)

    def _query_one_page(self, hash_key: int) -> int | None:
        with self._lock:
            return self._ledger.query_one_page(hash_key)

    def _update_pages_status_to_ready(self, pages: Sequence[int], deref: bool, offload: bool) -> None:
        with self._offered:
            self._ledger.update_ready(list(pages), deref=deref, offload=offload)
            self._offered.notify_all()

    def _check_allpages_ready(self, pages: Sequence[int]) -> bool:
        with self._lock:
            return self._ledger.check_ready(pages)

    def _deref_pages(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._ledger.deref(pages)

    def _recycle_pages(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._ledger.recycle(pages)


CACHE_CALLS = frozenset(
    {
        "hash_key",
        "allocate_pages",
        "query_one_page",
        "update_pages_status_to_ready",
        "check_allpages_ready",
        "deref_pages",
        "recycle_pages",
    }
)


def _hash_bytes(hash_key: int) -> bytes:
    return hash_key.to_bytes(HASH_BYTES, "big")
