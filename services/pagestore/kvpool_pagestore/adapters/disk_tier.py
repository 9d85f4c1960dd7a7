"""The disk tier as configured: what of a budget pages may fill, and how large one batch may be."""

from __future__ import annotations

from pathlib import Path

from kvpool.core.errors import StartupFailed, StoreFault
from kvpool_pagestore.adapters.rocks import RocksPageStore
from kvpool_pagestore.core.disk_budget import ExtentBudget


def live_page_bytes(capacity_bytes: int) -> int:
    """What pages on disk may be charged together so that the tier's files stay within the capacity."""
    return ExtentBudget(capacity_bytes).live_limit_bytes


def largest_batch_bytes(capacity_bytes: int, writer_count: int) -> int:
    """Bytes of one batch so that batches written at once leave most of a small tier as it is."""
    return max(1, live_page_bytes(capacity_bytes) // 16 // writer_count)


def open_disk_tier(directory: Path, capacity_bytes: int) -> RocksPageStore:
    """Blocks. Raises StartupFailed naming the cure."""
    if live_page_bytes(capacity_bytes) <= 0:
        raise StartupFailed(f"disk_bytes ({capacity_bytes}) is too small for a disk tier; give 64 MiB or more, or 0")
    store = RocksPageStore(directory, capacity_bytes)
    try:
        store.open()
    except StoreFault as error:
        raise StartupFailed(f"the disk tier in {directory} cannot be opened: {error}") from error
    return store
