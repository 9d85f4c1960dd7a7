"""A simulated disk tier: what was synced survives a power loss, what was written survives a killed process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, PageCorrupt, QuotaExceeded, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.stored_pages import StoredPages
from kvpool_pagestore.ports import OnDurable, PageWrite

_Pages = dict[PageKey, tuple[bytes, PageMetadata]]


class SimDisk:
    """The medium, with a cap that holds by construction. It outlives the processes that use it."""

    def __init__(self, budget_bytes: int = 1 << 40) -> None:
        self.budget_bytes = budget_bytes
        self.written: _Pages = {}  # as a process sees it after the last one was killed
        self.synced: _Pages = {}  # as it is after the power was lost
        self.keyspaces: list[bytes] = []
        self.values: dict[str, bytes] = {}
        self.damaged: set[PageKey] = set()
        self.fault_share = 0.0  # of calls that fail
        self.sync_s = 0.0  # that a sync takes, at most
        self.ever_failed = False
        self.deleted: set[PageKey] = set()  # ever, on the owner's wish

    def lose_power(self) -> None:
        """Deletions that were not synced are undone."""
        self.written = dict(self.synced)

    def lose_everything(self) -> None:
        """It breaks, and an empty one takes its place."""
        self.deleted.update(self.written)
        self.written, self.synced = {}, {}
        self.keyspaces, self.values = [], {}
        self.damaged.clear()

    def damage(self, key: PageKey, rng: Random) -> None:
        """Flip one bit of a page for good."""
        page, metadata = self.written[key]
        at = rng.randrange(len(page))
        flipped = page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]
        self.written[key] = flipped, metadata
        if key in self.synced:
            self.synced[key] = flipped, metadata
        self.damaged.add(key)

    @property
    def used_bytes(self) -> int:
        return sum(len(page) for page, _ in self.written.values())


class SimPageStore:
    """A ports.PageStore over a SimDisk, for one process. `pause` may take time in the middle of a call.

    sync: takes the time of one on a slow disk.
    check: called with every page that is about to become durable.
    """

    def __init__(
        self,
        disk: SimDisk,
        *,
        rng: Random | None = None,
        pause: Callable[[], None] = lambda: None,
        sync: Callable[[float], None] = lambda duration_s: None,
        alive: Callable[[], bool] = lambda: True,
        check: Callable[[PageKey, bytes], None] = lambda key, page: None,
    ) -> None:
        self._disk = disk
        self._rng = rng or Random(0)
        self._pause = pause
        self._wait = sync
        self._alive = alive
        self._check = check

    def open(self) -> None:
        pass

    def keyspaces(self) -> Sequence[bytes]:
        return list(self._disk.keyspaces)

    def remember_keyspace(self, encoding: bytes) -> None:
        self._sync()
        self._may_fail()
        if encoding not in self._disk.keyspaces:
            self._disk.keyspaces.append(encoding)

    def load_value(self, name: str) -> bytes | None:
        return self._disk.values.get(name)

    def save_value(self, name: str, value: bytes) -> None:
        self._pause()
        self._sync()
        self._may_fail()
        self._disk.values[name] = value

    def take_found(self) -> FoundChunks | None:
        return None

    def scan(self) -> Iterator[StoredPages]:
        yield StoredPages.of((key, len(page), metadata) for key, (page, metadata) in self._disk.written.items())

    def put_batch(self, pages: Sequence[PageWrite], on_durable: OnDurable) -> None:
        failure: KvPoolError | None = None
        copies: _Pages = {}
        try:
            for page in pages:
                copies[page.key] = self._copied(page.page), page.metadata
            self._may_fail()
            reach("pagestore.write.synced")
            self._pause()
            self._sync()
            self._record(copies)
            reach("pagestore.write.recorded")
        except KvPoolError as error:
            failure = error
        for page in pages:
            self._pause()
            on_durable(page.key, failure)

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        self._pause()
        self._may_fail()
        found = self._disk.written.get(key)
        if found is None:
            return None
        page = found[0]
        if len(page) > len(destination):
            raise PageCorrupt(f"page {key} has {len(page)} bytes on disk, {len(destination)} were expected")
        half = len(page) // 2
        destination[:half] = page[:half]
        self._pause()
        if not self._alive():
            return None
        destination[half : len(page)] = page[half:]
        return len(page)

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
        self._sync()
        self._may_fail()
        for pages in (self._disk.written, self._disk.synced):
            for key, metadata in changes:
                if key in pages:
                    pages[key] = pages[key][0], metadata

    def delete_batch(self, keys: Sequence[PageKey]) -> None:
        self._pause()
        self._sync()
        self._may_fail()
        for key in keys:
            self._disk.written.pop(key, None)
            self._disk.deleted.add(key)
            if self._rng.random() < 0.5:  # synced by and by
                self._disk.synced.pop(key, None)

    def delete_keyspace(self, keyspace: bytes) -> None:
        self._pause()
        self._may_fail()
        disk = self._disk
        disk.deleted.update(key for key in disk.written if key.keyspace == keyspace)
        disk.written = {key: value for key, value in disk.written.items() if key.keyspace != keyspace}
        disk.synced = {key: value for key, value in disk.synced.items() if key.keyspace != keyspace}

    def charged_bytes(self, page_bytes: int) -> int:
        return page_bytes

    def probe(self) -> None:
        self._pause()
        self._may_fail()

    def used_bytes(self) -> int:
        return self._disk.used_bytes

    def close(self) -> None:
        pass

    def _copied(self, view: memoryview) -> bytes:
        half = len(view) // 2
        first = bytes(view[:half])
        self._pause()
        return first + bytes(view[half:])

    def _record(self, copies: _Pages) -> None:
        if not self._alive():
            return
        disk = self._disk
        after = disk.written | copies
        if sum(len(page) for page, _ in after.values()) > disk.budget_bytes:
            disk.ever_failed = True
            raise QuotaExceeded("no room on disk: pages that were given up are still being deleted")
        for key, (page, _) in copies.items():
            self._check(key, page)
            disk.damaged.discard(key)
            disk.deleted.discard(key)
        disk.written.update(copies)
        disk.synced.update(copies)

    def _sync(self) -> None:
        if self._disk.sync_s:
            self._wait((0.5 + self._rng.random() / 2) * self._disk.sync_s)

    def _may_fail(self) -> None:
        if self._disk.fault_share and self._rng.random() < self._disk.fault_share:
            self._disk.ever_failed = True
            raise StoreFault("planted: the disk failed")
