"""Kernels that an agent asks an engine to launch in the engine's own process, and how they ended, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.page import HEADER_BYTES, PageFault, PageFaultKind, block_count, page_bytes
from kvpool.core.plane_table import PlaneTable

MOST_LAUNCH_PAGES = 1024
MOST_BLOCK_BYTES = 1 << 20  # of the block ids of one launch: messages stay small, whatever the layout
PAYLOAD_ALIGNMENT_BYTES = 16


def most_pages(blocks_per_chunk: int) -> int:
    """Pages of one launch, as far as its message is concerned."""
    return max(1, min(MOST_LAUNCH_PAGES, MOST_BLOCK_BYTES // (8 * blocks_per_chunk)))


class LaunchKind(IntEnum):
    """What is done with the pages. The numbers are those of the wire."""

    GATHER = 1  # from the cache into the scratch
    SCATTER = 2  # from the scratch into the cache


@dataclass(frozen=True, slots=True)
class LaunchPage:
    """One page. chunk: row of the launch's block ids; scratch_offset: of its payload."""

    shard: int
    chunk: int
    scratch_offset: int
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch. block_ids: [chunks, chunk_tokens / block_tokens] int64.

    sums: a gather writes sum tables behind the payloads, a scatter verifies against them and leaves out what fails.
    """

    ticket: int
    kind: LaunchKind
    pages: tuple[LaunchPage, ...]
    block_ids: npt.NDArray[np.int64]
    sums: bool

    def check(self, table: PlaneTable, scratch_bytes: int) -> None:
        """raises: InvalidRequest naming what kernels over this table and so much scratch must not be launched with."""
        if not 0 < len(self.pages) <= MOST_LAUNCH_PAGES:
            raise InvalidRequest(f"a launch has 1 to {MOST_LAUNCH_PAGES} pages, got {len(self.pages)}")
        blocks = self.block_ids
        if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= table.layout.block_count):
            raise InvalidRequest(f"a launch names blocks outside of the cache's {table.layout.block_count}")
        for number, page in enumerate(self.pages):
            self._check_page(f"pages[{number}]", page, table, scratch_bytes)

    def _check_page(self, name: str, page: LaunchPage, table: PlaneTable, scratch_bytes: int) -> None:
        body_bytes = page_bytes(table.of_shard(page.shard).payload_bytes) - HEADER_BYTES
        if not 0 <= page.chunk < len(self.block_ids):
            raise InvalidRequest(f"{name}.chunk must be one of {len(self.block_ids)}, got {page.chunk}")
        if page.scratch_offset % PAYLOAD_ALIGNMENT_BYTES:
            raise InvalidRequest(f"{name}.scratch_offset must be divisible by 16, got {page.scratch_offset}")
        if not 0 <= page.scratch_offset <= scratch_bytes - body_bytes:
            raise InvalidRequest(
                f"{name} has {body_bytes} bytes from {page.scratch_offset} on, but the scratch has {scratch_bytes}"
            )
        if not 0 <= page.skip_tokens < table.spec.chunk_tokens:
            raise InvalidRequest(
                f"{name}.skip_tokens must lie in [0, {table.spec.chunk_tokens}), got {page.skip_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Launched:
    """The end of a launch. faults: (page, block) of pages that a scatter left out; error: it failed as a whole."""

    ticket: int
    faults: tuple[tuple[int, int], ...] = ()
    error: KvPoolError | None = None

    def found(self, shards: Sequence[int], table: PlaneTable) -> list[PageFault | None]:
        """Per page, what verification found. shards: of the launch's pages.

        raises: InvalidRequest for faults of none of them.
        """
        found: list[PageFault | None] = [None] * len(shards)
        for page, block in self.faults:
            if not 0 <= page < len(shards) or not 0 <= block < block_count(table.shards[shards[page]].payload_bytes):
                raise InvalidRequest(f"launch {self.ticket} has no block {block} of a page {page}")
            found[page] = PageFault(PageFaultKind.BAD_SUM, block)
        return found
