"""The log of events in memory."""

import asyncio
from collections import deque
from collections.abc import Sequence

from kvpool_index.core.events import ORIGIN, LogEntry, entry_order


class MemoryEventLog:
    """EventLog over bounded deques. Ids count entries: 1-0, 2-0, ..."""

    def __init__(self, *, stream_count: int, max_entries: int) -> None:
        self._streams: list[deque[LogEntry]] = [deque(maxlen=max_entries) for _ in range(stream_count)]
        self._counts = [0] * stream_count
        self._grown = [asyncio.Event() for _ in range(stream_count)]

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    async def append(self, entries: Sequence[tuple[int, bytes]]) -> None:
        for stream, payload in entries:
            self.append_now(stream, payload)

    def append_now(self, stream: int, payload: bytes) -> None:
        """Append one entry; negative streams count from the last one."""
        self._counts[stream] += 1
        self._streams[stream].append(LogEntry(f"{self._counts[stream]}-0", payload))
        self._grown[stream].set()
        self._grown[stream] = asyncio.Event()

    async def tails(self) -> tuple[str, ...]:
        return tuple(f"{count}-0" if count else ORIGIN for count in self._counts)

    async def read(self, stream: int, after: str, *, limit: int, wait_s: float) -> list[LogEntry]:
        order = entry_order(after)
        if order >= (self._counts[stream], 0) and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._grown[stream].wait()
            except TimeoutError:
                return []
        return [entry for entry in self._streams[stream] if entry_order(entry.entry_id) > order][:limit]

    async def is_kept(self, stream: int, entry_id: str) -> bool:
        count, kept = self._counts[stream], len(self._streams[stream])
        return count - kept <= entry_order(entry_id)[0] <= count
