"""One rank's cache as kernels of any GPU of this process reach it: mapped for each when a pull first needs it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout


class PeerMemory:
    """See ports.PeerCache. Thread-safe."""

    def __init__(
        self,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        home: int,
        open_at: Callable[[int], tuple[Sequence[int], Callable[[], None]]],
    ) -> None:
        """home: ordinal of the GPU that holds the cache. open_at: maps it for kernels of a GPU; returns the addresses
        of its handles and what unmaps them."""
        self.spec, self.layout, self.home = spec, layout, home
        self._open_at = open_at
        self._lock = threading.Lock()
        self._opened: dict[int, tuple[Sequence[int], Callable[[], None]]] = {}

    def addresses(self, ordinal: int) -> Sequence[int]:
        """Of each handle, for kernels of this GPU. Blocks while it maps; raises InvalidRequest, NotServed."""
        with self._lock:
            if ordinal not in self._opened:
                self._opened[ordinal] = self._open_at(ordinal)
            return self._opened[ordinal][0]

    def unmap(self) -> None:
        """Undo all mappings, also when some cannot be; no kernel uses them any more. Idempotent; may block shortly."""
        with self._lock, ExitStack() as undoing:
            while self._opened:
                _, (_, undo) = self._opened.popitem()
                undoing.callback(undo)

    async def close(self) -> None:
        """See ports.PeerCache."""
        await asyncio.to_thread(self.unmap)
