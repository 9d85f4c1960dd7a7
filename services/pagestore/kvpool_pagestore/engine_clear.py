"""Clearing keyspaces: their pages go from staging, disk and index, whatever is on its way at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.core.page import PageKey
from kvpool_pagestore.engine_context import Tiers
from kvpool_pagestore.engine_locations import Announcer, NodeTruth

_PAGES_A_TURN = 512  # dropped between two turns of the event loop: each takes some 10 us


class Clearing:
    """One clear at a time. one_at_a_time: held while the writes of a keyspace are held back."""

    def __init__(self, tiers: Tiers, announcer: Announcer, truth: NodeTruth) -> None:
        self._table = tiers.staging.table
        self._disk = tiers.disk
        self._write_back = tiers.write_back
        self._announcer = announcer
        self._truth = truth
        self.one_at_a_time = asyncio.Lock()  # the end of one would let writes start beneath another

    async def clear(self, keyspaces: Sequence[bytes]) -> int:
        """How many pages there were. Raises StoreFault."""
        async with self.one_at_a_time:
            return sum([await self._clear_one(keyspace) for keyspace in keyspaces])

    async def _clear_one(self, keyspace: bytes) -> int:
        disk, write_back = self._disk, self._write_back
        staged = self._table.keys_of(keyspace)
        for start in range(0, len(staged), _PAGES_A_TURN):
            if start:
                await asyncio.sleep(0)
            for key in staged[start : start + _PAGES_A_TURN]:
                self._table.drop(key)
        keys = set(staged)
        count = len(keys)

        def gone(pages: Sequence[PageKey]) -> None:  # from disk; what was read from there meanwhile goes too
            nonlocal count
            count += len(pages) - sum(map(keys.__contains__, pages))
            self._table.drop_all(pages)

        if disk is not None and write_back is not None:
            # What is being written must be on disk before it is deleted there.
            await write_back.hold(keyspace)
            try:
                await disk.delete_keyspace(keyspace, gone)
            finally:
                write_back.unhold(keyspace)
        # What was stored while this ran is announced again.
        await self._announcer.drop_keyspace(keyspace, lambda: self._truth.of_keyspace(keyspace))
        return count
