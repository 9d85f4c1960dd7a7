"""The cluster and the directory of vLLM's file tier, on one disk, and how both become cold."""

from __future__ import annotations

import asyncio
import mmap
import os
import queue
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.rig.cluster import endpoint_of
from bench.rig.machine import drop_from_page_cache
from kvpool.client.config import ClientConfig
from kvpool.client.pagestore_control import PageStoreControl
from kvpool_cli.state import ClusterState

_FLUSH_TIMEOUT_S = 120.0
_READS_AT_ONCE, _READ_FILES = 16, 128


class TierStores:
    """Where the tiers of a bench keep chunks. disk: the directory with both, removed in the end."""

    def __init__(self, disk: Path, settings: dict[str, Any], data: Path) -> None:
        """settings: addresses of the cluster, of the tier's JSON. data: the cluster's state directory."""
        self.files = disk / "files"
        self._settings, self._data = settings, data

    def pool_tier(self, **changes: Any) -> dict[str, Any]:
        """An entry of `secondary_tiers`: kvpool's."""
        return {
            "type": "KvPoolTier",
            "module_path": "kvpool.connectors.vllm.tier",
            "model_id": "bench",
            "model_revision": "1",
            "weight_version": "1",  # the bench resets caches, and changes no weights
            **self._settings,
            **changes,
        }

    def file_tier(self) -> dict[str, Any]:
        """An entry of `secondary_tiers`: vLLM's own."""
        self.files.mkdir(exist_ok=True)
        return {"type": "fs", "root_dir": str(self.files)}

    def flush(self) -> None:
        """Wait until the pool's pages are on its disk. raises: RuntimeError."""
        asyncio.run(self._flush(leave_memory=False))

    def make_cold(self) -> None:
        """All chunks are on disk, and neither in the pagestore's memory nor in the page cache."""
        asyncio.run(self._flush(leave_memory=True))
        drop_from_page_cache([one for root in (self._data, self.files) for one in root.rglob("*") if one.is_file()])

    async def _flush(self, *, leave_memory: bool) -> None:
        control = PageStoreControl(self._settings["pagestore"], ClientConfig())
        try:
            flushed = await control.flush(timeout_s=_FLUSH_TIMEOUT_S)
            if flushed.failed_count:
                raise RuntimeError(f"{flushed.failed_count} pages cannot be written; use a larger disk")
            if leave_memory:
                spaces = {chunk.keyspace async for chunk in control.list_chunks()}
                for keyspace in spaces:
                    await control.evict(keyspace, None, staging_only=True)
        finally:
            await control.close()

    def read_rate(self) -> float:
        """GB/s of chunks of the file tier read past the page cache into memory that is in place, 16 at once, as that
        tier does: what the disk gives."""
        paths = sorted(self.files.rglob("*.bin"))[:_READ_FILES]
        buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        size_bytes = max((path.stat().st_size for path in paths), default=0)
        for _ in range(_READS_AT_ONCE):
            buffer = mmap.mmap(-1, max(1, size_bytes))
            buffer[::] = bytes(len(buffer))
            buffers.put(buffer)

        def read(path: Path) -> int:
            buffer = buffers.get()
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                return os.preadv(descriptor, [buffer], 0)
            finally:
                os.close(descriptor)
                buffers.put(buffer)

        began_s = time.perf_counter()
        with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
            total_bytes = sum(threads.map(read, paths))
        return round(total_bytes / (time.perf_counter() - began_s) / 1e9, 3)

    def file_count(self) -> int:
        """Chunks of the file tier."""
        return sum(1 for _ in self.files.rglob("*.bin"))


@contextmanager
def tier_stores(
    disk: Path, cluster: AbstractContextManager[tuple[ClusterState, Path]], more: dict[str, Any]
) -> Iterator[TierStores]:
    """The file tier's directory goes below `disk`, where the cluster's data should be. more: of the pool's tier."""
    with tempfile.TemporaryDirectory(prefix="vllm-tier-", dir=disk) as directory, cluster as (state, data):
        settings = {
            "index_endpoints": [endpoint_of(state, "index", "endpoint")],
            "pagestore": f"unix:{endpoint_of(state, 'pagestore', 'socket')}",
            **more,
        }
        yield TierStores(Path(directory), settings, data)


def takes_direct_io(directory: Path) -> bool:
    """Whether files there can be written past the page cache, as both tiers do where they can."""
    path = directory / "direct"
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            return os.write(descriptor, page) == len(page)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
