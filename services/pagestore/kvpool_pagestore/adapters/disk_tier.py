"""The disk tier as configured: how a budget is cut into volumes, and what of it pages may fill."""

from __future__ import annotations

from pathlib import Path

from kvpool.core.errors import StartupFailed, StoreFault
from kvpool_pagestore.adapters.rocks import DEFAULT_VOLUME_BYTES, RocksPageStore
from kvpool_pagestore.adapters.rocks_volumes import live_limit_bytes

_VOLUMES_MIN = 32  # a small disk tier is cut into smaller volumes, so that little of it is lost to their slack
_VOLUMES_MAX = 256  # a large one into larger ones: each is an open file


def live_page_bytes(capacity_bytes: int) -> int:
    """Page bytes that may be live so that the tier's files stay within the capacity."""
    return live_limit_bytes(capacity_bytes, _volume_bytes(capacity_bytes))


def largest_batch_bytes(capacity_bytes: int, writer_count: int) -> int:
    """Bytes of one batch so that batches written at once fit into the room kept for them."""
    return max(1, _volume_bytes(capacity_bytes) // writer_count)


def open_disk_tier(directory: Path, capacity_bytes: int) -> RocksPageStore:
    """Blocks. Raises StartupFailed naming the cure."""
    if live_page_bytes(capacity_bytes) <= 0:
        raise StartupFailed(f"disk_bytes ({capacity_bytes}) is too small for a disk tier; give 64 MiB or more, or 0")
    store = RocksPageStore(directory, volume_bytes=_volume_bytes(capacity_bytes))
    try:
        store.open()
    except StoreFault as error:
        raise StartupFailed(f"the disk tier in {directory} cannot be opened: {error}") from error
    return store


def _volume_bytes(capacity_bytes: int) -> int:
    return max(1, capacity_bytes // _VOLUMES_MAX, min(DEFAULT_VOLUME_BYTES, capacity_bytes // _VOLUMES_MIN))
