"""Pages under leases as arrays, and what a device copies between them and an engine's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import Int64s
from kvpool.core.errors import KvPoolError
from kvpool.core.spans import Bytes, Int32s

Leases = npt.NDArray[Any]

FIRST_WINDOW_ORDER = 0  # of the first window of every load, and of stores; later ones have the number of their load


@dataclass(frozen=True, slots=True, eq=False)
class PageSlots:
    """Leased slots for M pages of a span. They belong to the owner of this object, until commit, abort or release.

    pages:     [M] int32, which page of the span.
    addresses: [M] int64, of the page's first byte (its header) in this process.
    sources:   [M] uint8, where the bytes of a page to be read were found: a kvpool.v1 Source number; 0 for writes.
    leases:    [M], what the pool knows them by.
    session:   the pool's session that granted all of them, if it has several: two may number their leases alike.
    """

    pages: Int32s
    addresses: Int64s
    sources: Bytes
    leases: Leases
    session: object = None

    @property
    def count(self) -> int:
        return int(self.pages.size)

    def where(self, chosen: npt.NDArray[np.bool_]) -> PageSlots:
        """The chosen ones. chosen: [M] bool."""
        return PageSlots(
            self.pages[chosen], self.addresses[chosen], self.sources[chosen], self.leases[chosen], self.session
        )


def no_slots() -> PageSlots:
    """Of no page."""
    return PageSlots(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class ReservedPages:
    """Answer of a reserve; each page of the span is in one part.

    exists, pending: [.] int32, pages that are there already, and those that another session is writing.
    failed:          page and why it is not admitted.
    """

    slots: PageSlots
    exists: Int32s
    pending: Int32s
    failed: tuple[tuple[int, KvPoolError], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AcquiredPages:
    """Pages of an acquire that were answered together. failed: page and why; None as the cause is a plain miss."""

    slots: PageSlots
    failed: tuple[tuple[int, KvPoolError | None], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Pages to move between their slots and an engine's cache.

    addresses:   [N] int64, of each page's first byte (its header; the payload follows it).
    shards:      [N] uint8.
    block_ids:   [N, chunk_tokens / block_tokens] int64, each in [0, block_count), checked before.
    skip_tokens: [N] int64: a scatter leaves so many leading tokens of the chunk untouched.
    order:       of batches that wait for the link, those with the lowest number go first, equal ones as they came; only
                 so many of FIRST_WINDOW_ORDER go before a waiting one.
    """

    addresses: Int64s
    shards: Bytes
    block_ids: Int64s
    skip_tokens: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    order: int = FIRST_WINDOW_ORDER

    @property
    def count(self) -> int:
        return int(self.addresses.size)

    def part(self, first: int, count: int) -> CopyBatch:
        """Pages [first, first + count)."""
        chosen = slice(first, first + count)
        return CopyBatch(self.addresses[chosen], self.shards[chosen], self.block_ids[chosen], self.skip_tokens[chosen])

    @classmethod
    def joined(cls, batches: Sequence[CopyBatch]) -> CopyBatch:
        """One after the other, at least one."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            np.concatenate([batch.addresses for batch in batches]),
            np.concatenate([batch.shards for batch in batches]),
            np.concatenate([batch.block_ids for batch in batches]),
            np.concatenate([batch.skip_tokens for batch in batches]),
        )
