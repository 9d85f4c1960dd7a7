"""Which chunk is in which page of lightllm's CPU cache, who uses it, and what waits to be stored. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvpool.core.errors import InvalidRequest

NO_PAGE = -1  # in lists of pages: none, which every call passes over


class PageStatus(IntEnum):
    """The numbers are lightllm's."""

    EMPTY = 0
    LOADING = 1  # its bytes are on their way, from a GPU or from the pool
    READY = 2


@dataclass(slots=True)
class _Page:
    status: PageStatus = PageStatus.EMPTY
    users: int = 0
    hash_key: int = 0


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """Ready pages of one prompt, from its first chunk on, each held for the one who stores them."""

    pages: tuple[int, ...]
    hash_keys: tuple[int, ...]


class PageLedger:
    """Pages without users are given to other chunks, the least recently used first. Not thread-safe."""

    def __init__(self, page_count: int, groups_max: int) -> None:
        """groups_max: groups that may wait to be stored; later ones are dropped, which only costs a store."""
        if page_count <= 0 or groups_max <= 0:
            raise InvalidRequest(f"page_count and groups_max must be > 0, got {page_count} and {groups_max}")
        self._pages = [_Page() for _ in range(page_count)]
        self._by_hash: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(page_count))
        self._groups: list[OffloadGroup] = []
        self._groups_max = groups_max

    @property
    def users(self) -> int:
        """Of all pages."""
        return sum(page.users for page in self._pages)

    def allocate_pages(self, hash_keys: Sequence[int]) -> tuple[list[int], list[bool]]:
        """A page for each chunk, and whether its bytes are there; each page has one user more.

        From the first chunk on for which no page is free the answer is NO_PAGE.
        raises: InvalidRequest for what is no number of 128 bits.
        """
        for hash_key in hash_keys:
            if not 0 <= hash_key < 1 << 128:
                raise InvalidRequest(f"{hash_key} is no chunk hash of 128 bits")
        pages: list[int] = []
        ready: list[bool] = []
        for hash_key in hash_keys:
            page = self._by_hash.get(hash_key)
            if page is None:
                page = self._take(hash_key)
                if page is None:
                    break
            self._use(page)
            pages.append(page)
            ready.append(self._pages[page].status is PageStatus.READY)
        missing = len(hash_keys) - len(pages)
        return pages + [NO_PAGE] * missing, ready + [False] * missing

    def query_one_page(self, hash_key: int) -> int | None:
        """The page of a chunk whose bytes are there, with one user more."""
        page = self._by_hash.get(hash_key)
        if page is None or self._pages[page].status is not PageStatus.READY:
            return None
        self._use(page)
        return page

    def update_ready(self, pages: Sequence[int], *, deref: bool, offload: bool) -> None:
        """The bytes of pages are in place. deref: one user less. offload: the leading ones are to be stored.

        raises: InvalidRequest for a page without users, which may be another chunk's by now; then nothing has changed.
        """
        self._used(pages)
        for page in self._known(pages):
            self._pages[page].status = PageStatus.READY
        group = pages[: pages.index(NO_PAGE)] if NO_PAGE in pages else pages
        if offload and group:
            self._offload(group)
        if deref:
            self.deref(pages)

    def check_ready(self, pages: Sequence[int]) -> bool:
        """Whether the bytes of all pages are there."""
        return all(self._pages[page].status is PageStatus.READY for page in self._known(pages))

    def deref(self, pages: Iterable[int]) -> None:
        """One user less for each page. raises: InvalidRequest for a page without users; then nothing has changed."""
        pages = list(pages)
        self._used(pages)
        for page in self._known(pages):
            one = self._pages[page]
            one.users -= 1
            if not one.users:
                self._unused[page] = None

    def recycle(self, pages: Iterable[int]) -> None:
        """Loading has failed: one user less, and pages without other waiters are empty again."""
        for page in self._known(pages):
            one = self._pages[page]
            if not one.users:
                continue
            self.deref([page])
            if not one.users and one.status is PageStatus.LOADING:
                del self._by_hash[one.hash_key]
                one.status, one.hash_key = PageStatus.EMPTY, 0
                self._unused.move_to_end(page, last=False)

    def take_groups(self) -> list[OffloadGroup]:
        """Groups to be stored, in order. Their pages stay in use until `deref`."""
        groups, self._groups = self._groups, []
        return groups

    def _offload(self, pages: Sequence[int]) -> None:
        if len(self._groups) >= self._groups_max:
            return
        for page in pages:
            self._use(page)
        self._groups.append(OffloadGroup(tuple(pages), tuple(self._pages[page].hash_key for page in pages)))

    def _take(self, hash_key: int) -> int | None:
        page = next(iter(self._unused), None)
        if page is None:
            return None
        one = self._pages[page]
        if one.status is not PageStatus.EMPTY:
            del self._by_hash[one.hash_key]
        one.status, one.hash_key = PageStatus.LOADING, hash_key
        self._by_hash[hash_key] = page
        return page

    def _use(self, page: int) -> None:
        self._pages[page].users += 1
        self._unused.pop(page, None)

    def _used(self, pages: Iterable[int]) -> None:
        for page, times in Counter(self._known(pages)).items():
            if self._pages[page].users < times:
                raise InvalidRequest(f"page {page} has no user who could let go of it")

    def _known(self, pages: Iterable[int]) -> list[int]:
        known = [page for page in pages if page != NO_PAGE]
        for page in known:
            if not 0 <= page < len(self._pages):
                raise InvalidRequest(f"page {page} is not one of {len(self._pages)}")
        return known
