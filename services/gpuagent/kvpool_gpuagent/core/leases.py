"""How much of this host's staging memory leases of waiting requests may hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import Overloaded

WINDOW_BYTES = 32 << 20  # of a lease are asked for at once: it must not be in the way of loads


@dataclass(frozen=True, slots=True)
class PageNeed:
    """Pages of one chunk, or of several."""

    page_count: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, sizes_bytes: npt.NDArray[np.int64]) -> PageNeed:
        """One page of each size."""
        return cls(int(sizes_bytes.size), int(sizes_bytes.sum()))

    def __add__(self, other: PageNeed) -> PageNeed:
        return PageNeed(self.page_count + other.page_count, self.size_bytes + other.size_bytes)

    def __sub__(self, other: PageNeed) -> PageNeed:
        return PageNeed(self.page_count - other.page_count, self.size_bytes - other.size_bytes)

    def fits(self, most: PageNeed) -> bool:
        return self.page_count <= most.page_count and self.size_bytes <= most.size_bytes

    def part(self, share: float) -> PageNeed:
        return PageNeed(int(self.page_count * share), int(self.size_bytes * share))


@dataclass(slots=True)
class LeaseShare:
    """What one lease may hold at once. It takes windows of chunks: leading ones are held, those after them are staged
    window by window and let go again.

    held_chunks: leading ones. staged_chunks: leading ones, >= held_chunks. window_chunks: > 0.
    """

    held_chunks: int
    staged_chunks: int
    window_chunks: int
    _budget: LeaseBudget
    _session: Hashable
    _needs: Sequence[PageNeed]  # of each chunk
    _need: PageNeed

    def keep_only(self, chunk_count: int) -> None:
        """So many leading chunks are held, and none is staged any more: give back what they do not need."""
        need = sum(self._needs[:chunk_count], PageNeed())
        given_back, self._need = self._need - need, need
        self._budget.give_back(self._session, given_back)

    def end(self) -> None:
        """Give the share back. Idempotent."""
        self.keep_only(0)


class LeaseBudget:
    """The budget of all leases of one agent: a part of the pages that its pool gives out at once, and of the arena's
    bytes. The rest is always left to loads. One session has half of that at most."""

    def __init__(self, share: float) -> None:
        """share: of pages and of bytes, 0 to 1."""
        self._share = share
        self._used = PageNeed()
        self._used_by: dict[Hashable, PageNeed] = {}

    @property
    def page_count(self) -> int:
        """Pages that leases may hold now."""
        return self._used.page_count

    def share(
        self,
        session: Hashable,
        needs: Sequence[PageNeed],
        *,
        window_pages: int,
        arena_bytes: int,
        hold_only: bool = False,
    ) -> LeaseShare:
        """A share for a lease on chunks that need so much, each. hold_only: none is staged that is not held. Raises
        Overloaded if none of them fits."""
        all_leases = PageNeed(window_pages, arena_bytes).part(self._share)
        own = self._used_by.get(session, PageNeed())
        need, count = PageNeed(), 0
        for one in needs:
            wanted = need + one
            if not ((self._used + wanted).fits(all_leases) and (own + wanted).fits(all_leases.part(0.5))):
                break
            need, count = wanted, count + 1
        if not count:
            raise Overloaded("leases of this agent, or of this session, hold as much staging memory as they may")
        largest = PageNeed(max(one.page_count for one in needs), max(one.size_bytes for one in needs))
        window = min(need.page_count // largest.page_count, min(need.size_bytes, WINDOW_BYTES) // largest.size_bytes)
        window = max(1, min(window, count // 4))
        staged = count
        passes = count < len(needs) and largest.fits(need) and not hold_only
        if passes:  # the others pass through the last window of the share
            count -= max(1, window)
            staged_bytes = need.size_bytes
            while staged < len(needs) and staged_bytes + needs[staged].size_bytes <= all_leases.size_bytes:
                staged_bytes += needs[staged].size_bytes
                staged += 1
        self._used, self._used_by[session] = self._used + need, own + need
        return LeaseShare(count, staged, window, self, session, needs, need)

    def give_back(self, session: Hashable, need: PageNeed) -> None:
        """See LeaseShare.end."""
        self._used -= need
        left = self._used_by.get(session, PageNeed()) - need
        if left.page_count:
            self._used_by[session] = left
        else:
            self._used_by.pop(session, None)
