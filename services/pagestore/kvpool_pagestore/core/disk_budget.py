"""How the disk tier's capacity is divided between page bytes and all else that lies beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpool_pagestore.core.extents import BLOCK_BYTES, blocks_of

TRAILER_BYTES: Final = 256  # behind each page, for finding it again without RocksDB

_FIXED_BYTES: Final = 24 << 20  # logs, write buffers on their way into tables, the manifest
_RECORD_SHARE: Final = 64  # one part in this many of the rest is for records
_RECORD_BYTES: Final = 400  # of one page: 140 and what compaction has beside them at its worst, with room
_SLACK_SHARE: Final = 32  # one part in this many of the blocks is of pages just being deleted
_FILES: Final = 16  # about so many; a large tier has larger files, within bounds
_FILE_BYTES_MIN: Final = 64 << 20
_FILE_BYTES_MAX: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class ExtentBudget:
    """The files of page bytes within a capacity."""

    capacity_bytes: int

    @property
    def block_count(self) -> int:
        """Blocks of all files together, at most."""
        beside_bytes = _FIXED_BYTES + max(0, self.capacity_bytes - _FIXED_BYTES) // _RECORD_SHARE
        return max(0, self.capacity_bytes - beside_bytes) // BLOCK_BYTES

    @property
    def file_block_count(self) -> int:
        """Blocks of one file; the last one may have less."""
        size_bytes = self.block_count * BLOCK_BYTES // _FILES
        return min(max(size_bytes, _FILE_BYTES_MIN), _FILE_BYTES_MAX) // BLOCK_BYTES

    @property
    def live_limit_bytes(self) -> int:
        """What pages may be charged together (`charged_bytes`)."""
        return (self.block_count - self.block_count // _SLACK_SHARE) * BLOCK_BYTES


def page_blocks(page_bytes: int) -> int:
    """Blocks of one page with its trailer."""
    return blocks_of(page_bytes + TRAILER_BYTES)


def charged_bytes(page_bytes: int) -> int:
    """What one page counts towards the budget: its blocks, and for a small page as many as its record is worth."""
    return max(page_blocks(page_bytes) * BLOCK_BYTES, _RECORD_BYTES * _RECORD_SHARE)
