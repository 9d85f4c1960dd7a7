"""Reading a page from disk into its place, verified. Blocks."""

from __future__ import annotations

from kvpool.core.errors import PageCorrupt
from kvpool.core.page import PageKey, verify
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.ports import PageStore


def read_verified(store: PageStore, key: PageKey, keyspace: Keyspace, destination: memoryview) -> int | None:
    """Bytes of the page, which fills `destination`; None if it is absent. Raises PageCorrupt, StoreFault."""
    size_bytes = store.get_into(key, destination)
    if size_bytes is None:
        return None
    if size_bytes != len(destination):
        raise PageCorrupt(f"page {key} has {size_bytes} bytes on disk instead of {len(destination)}")
    fault = verify(destination, key, keyspace.spec.codec, keyspace.payload_bytes(key.shard))
    if fault is not None:
        raise PageCorrupt(f"page {key} on disk: {fault}")
    return size_bytes
