"""Listings of chain groups: what one takes while it is made."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from typing import Any, cast

from kvpool_index.engine.index import GroupListings

PARTS, HEADS = 64, 1024


class Store:
    """Has many groups, which it names some at a time."""

    async def group_heads(self, keyspace: bytes) -> AsyncIterator[list[bytes]]:
        for part in range(PARTS):
            yield [(part * HEADS + number).to_bytes(16, "big") for number in range(HEADS)]


async def test_a_listing_takes_little_more_memory_than_the_heads() -> None:
    listings = GroupListings(cast(Any, Store()))
    tracemalloc.start()
    try:
        heads = await listings.heads(b"k" * 16)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert heads == b"".join(number.to_bytes(16, "big") for number in range(PARTS * HEADS))
    assert peak_bytes < 3 * len(heads)  # an object for each would be five times as much
    await listings.close()
