"""Pages put and got by a pagestore session directly: what an engine without an agent would do, on one thread."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from bench.rig.engine import FIRST_SHARD, GRID, KEYSPACE_NAME, SPEC
from bench.rig.machine import rate, shared_bytes
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.page_items import AcquireItem, ReserveItem, Slot
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.sync import BackgroundLoop
from kvpool.core.cluster import PageMetadata
from kvpool.core.page import HEADER_BYTES, PageKey, page_bytes, seal, verify
from kvpool.core.payload import payload_bytes
from kvpool_cli.errors import CommandFailed

PAYLOAD_BYTES = payload_bytes(SPEC, GRID, FIRST_SHARD)
PAGE_BYTES = page_bytes(PAYLOAD_BYTES)
METADATA = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))
_WAIT_S = 30.0
_MADV_POPULATE_READ = 22  # since Linux 5.14; the mmap module of Python 3.11 does not name it


class BenchSession:
    """One session with the local pagestore, mapped."""

    def __init__(self, pagestore_endpoint: str, index_endpoint: str, page_count: int) -> None:
        """Raises KvPoolError."""
        self._loop = BackgroundLoop()
        config = ClientConfig(index_endpoints=(index_endpoint,))
        self.keyspace = self._loop.run(lambda: _open_keyspace(config))
        plan = SessionPlan(endpoint=pagestore_endpoint, peer_name="bench", keyspaces=((self.keyspace, SPEC),))
        self._session = self._loop.run(lambda: PageStoreSession.open(plan, config, on_map=_populate))
        self.size_bytes = PAYLOAD_BYTES * page_count
        self._payloads = shared_bytes(self.size_bytes).reshape(page_count, PAYLOAD_BYTES)
        self._page_count = page_count
        self._window = max(1, min(16, self._session.max_leases // 2))

    def keys(self, seed: int) -> list[PageKey]:
        """Keys of page_count pages."""
        draw = np.random.default_rng(seed).bytes
        return [PageKey(self.keyspace, draw(16), FIRST_SHARD) for _ in range(self._page_count)]

    def put_rate(self, keys: list[PageKey]) -> float:
        """GB/s of reserving, copying, sealing and committing all pages."""
        return rate(self.size_bytes, lambda: self._loop.run(lambda: self._put(keys)))

    def get_rate(self, keys: list[PageKey]) -> float:
        """GB/s of acquiring, verifying and copying all pages."""
        return rate(self.size_bytes, lambda: self._loop.run(lambda: self._get(keys)))

    def close(self) -> None:
        """End the session."""
        self._loop.run(self._session.close)
        self._loop.stop()

    async def _put(self, keys: list[PageKey]) -> None:
        for start in range(0, len(keys), self._window):
            part = keys[start : start + self._window]
            results = await self._session.reserve([ReserveItem(key, PAGE_BYTES, METADATA) for key in part])
            leases = []
            for number, (key, result) in enumerate(zip(part, results, strict=True), start):
                if result.slot is None:
                    raise CommandFailed(f"a page was not admitted: {result.error or result.admission.name}")
                page = self._session.slot_view(*result.slot.place)
                page[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = self._payloads[number].data
                seal(page, key, SPEC.codec, PAYLOAD_BYTES)
                leases.append(result.slot.lease_id)
            failed = [error for _, error in await self._session.commit(leases)]
            if failed:
                raise CommandFailed(f"a page was not committed: {failed[0]}")

    async def _get(self, keys: list[PageKey]) -> None:
        parts = [range(start, min(start + self._window, len(keys))) for start in range(0, len(keys), self._window)]
        coming = asyncio.ensure_future(self._acquire([keys[number] for number in parts[0]]))
        for position, part in enumerate(parts):
            slots = await coming
            if position + 1 < len(parts):  # the pagestore works on it while this window is being copied
                coming = asyncio.ensure_future(self._acquire([keys[number] for number in parts[position + 1]]))
                await asyncio.sleep(0)
            for number, slot in zip(part, slots, strict=True):
                page = self._session.slot_view(*slot.place)
                fault = verify(page, keys[number], SPEC.codec)
                if fault is not None:
                    raise CommandFailed(f"a page is not what was stored: {fault}")
                self._payloads[number].data[:] = page[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
            self._session.release_soon([slot.lease_id for slot in slots])

    async def _acquire(self, keys: list[PageKey]) -> list[Slot]:
        """Slots in the order of their keys. Raises CommandFailed for a miss."""
        slots: dict[int, Slot] = {}
        async with self._session.acquire([AcquireItem(key) for key in keys], wait_s=_WAIT_S) as results:
            async for result in results:
                if result.slot is None:
                    raise CommandFailed(f"a page was missed: {result.error or 'it was evicted'}")
                slots[result.item_index] = result.slot
        return [slots[number] for number in range(len(keys))]


def _populate(segment: memoryview) -> Callable[[], None]:
    """Fill the page tables now, as the agent does: first touches are no part of a copy."""
    if isinstance(segment.obj, mmap.mmap):
        with suppress(OSError):  # an older kernel
            segment.obj.madvise(_MADV_POPULATE_READ)
    return lambda: None


async def _open_keyspace(config: ClientConfig) -> bytes:
    index = IndexClient(config)
    try:
        return (await index.open_keyspace(KEYSPACE_NAME, SPEC)).keyspace
    finally:
        await index.close()
