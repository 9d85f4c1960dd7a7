"""Scratch that an engine lends, and what it is asked to launch there."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.core.launches import Launched, LaunchKind, LaunchPage
from kvpool.core.page import HEADER_BYTES, slot_bytes
from kvpool.core.plane_table import PlaneTable
from kvpool_gpuagent.adapters.gpu_movers import scratch_bytes
from kvpool_gpuagent.adapters.gpu_runtime import Int64s
from kvpool_gpuagent.core.extents import Extents
from kvpool_gpuagent.ports import EngineLaunches, PageCopy

_log = logging.getLogger(__name__)

_MOST_RANGES = 64  # launches and copies of one engine at once: answers never pile up in its session
_SHARE = 4  # of the scratch that one launch takes at most, so that copies and launches overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class LentCopy(PageCopy):
    """A page whose payload lies, or will lie, in the engine's scratch: scratch_offset bytes in, at payload_address.

    sums: the engine's launch sums it or verifies it; else that is for our CPU.
    """

    scratch_offset: int
    payload_address: int
    sums: bool


class LentScratch:
    """What one engine lends, for both directions of its cache. Belongs to the session's event loop.

    A range is given back once nobody uses it any more; after `give_up` no range is given out again, so that launches
    which were not answered can do no harm.
    """

    def __init__(self, launches: EngineLaunches, address: int) -> None:
        """address: of the mapped scratch."""
        self.burst_bytes = launches.scratch.size_bytes // _SHARE  # of one launch at most
        self.given_up = False
        self.on_given_up: list[Callable[[], None]] = []
        self._launches, self._address = launches, address
        self._extents = Extents(launches.scratch.size_bytes)
        self._out = 0
        self._waiting: deque[tuple[int, asyncio.Future[int | None]]] = deque()

    def has_room(self, table: PlaneTable) -> bool:
        """Whether there is enough scratch for the pages of this rank."""
        return all(slot_bytes(shard.payload_bytes) <= self.burst_bytes for shard in table.shards.values())

    async def take(self, copies: Sequence[PageCopy], *, sums: bool) -> tuple[LentCopy, ...] | None:
        """Places for pages, side by side, once there is room; first come first served. None after `give_up`."""
        sizes = [scratch_bytes(copy) for copy in copies]
        room: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sum(sizes), room))
        self._grant()
        start = await room
        if start is None:
            return None
        offsets = start + np.cumsum(sizes) - sizes + HEADER_BYTES
        return tuple(self._lent(copy, offset, sums) for copy, offset in zip(copies, offsets.tolist(), strict=True))

    def _lent(self, copy: PageCopy, offset: int, sums: bool) -> LentCopy:
        return LentCopy(
            key=copy.key,
            page=copy.page,
            block_ids=copy.block_ids,
            skip_tokens=copy.skip_tokens,
            scratch_offset=offset,
            payload_address=self._address + offset,
            sums=sums,
        )

    def give(self, copies: Sequence[LentCopy]) -> None:
        """Neither we nor the engine use the places of these pages any more."""
        self._out -= 1
        self._extents.give(copies[0].scratch_offset - HEADER_BYTES, sum(scratch_bytes(copy) for copy in copies))
        self._grant()

    def give_up(self, cause: str) -> None:
        """Ask the engine for nothing more in this session. Idempotent."""
        if self.given_up:
            return
        _log.warning("an engine does not launch for us any more (%s): the agent launches its kernels itself", cause)
        self.given_up = True
        for told in self.on_given_up:
            told()
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size_bytes, room = self._waiting[0]
            start = None
            if not self.given_up:
                start = self._extents.take(size_bytes) if self._out < _MOST_RANGES else None
                if start is None:
                    return
                self._out += 1
            self._waiting.popleft()
            room.set_result(start)

    async def launch(self, kind: LaunchKind, copies: Sequence[LentCopy]) -> Launched | None:
        """Have the engine launch. None if it failed, and then nothing of it touches the cache any more.

        Raises Stopped when the engine's session is over.
        """
        chunks: dict[bytes, int] = {}
        rows: list[Int64s] = []
        pages: list[LaunchPage] = []
        for copy in copies:
            chunk = chunks.setdefault(copy.block_ids.tobytes(), len(chunks))
            if chunk == len(rows):
                rows.append(copy.block_ids)
            pages.append(LaunchPage(copy.key.shard, chunk, copy.scratch_offset, copy.skip_tokens))
        answer = self._launches.ask(kind, pages, np.stack(rows), sums=copies[0].sums)
        try:
            async with asyncio.timeout(self._launches.timeout_s):
                launched = await asyncio.shield(answer)
        except TimeoutError:
            self.give_up(f"no answer within {self._launches.timeout_s:g} s")
            if kind is LaunchKind.GATHER:
                return None
            launched = await asyncio.shield(answer)
        if launched.error is not None:
            self.give_up(launched.error.message)
            return None
        return launched
