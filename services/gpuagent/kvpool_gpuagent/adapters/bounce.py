"""Memory for pages in flight where there is no local pagestore, and connections to those of other hosts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvpool.client.tls import TlsCredentials
from kvpool.client.transfer import PageTransferClient
from kvpool.core.errors import ArenaFull
from kvpool_gpuagent.adapters.budget import Budget

_log = logging.getLogger(__name__)

STREAM_THREADS = 4


class BounceBuffers:
    """Uninitialized buffers within a hard budget, shared by all sessions of an agent.

    A buffer is its taker's until it is given back; its view is dead from then on.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._budget = Budget(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes out at most."""
        return self._budget.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes out now."""
        return self._budget.used

    async def take(self, sizes_bytes: Sequence[int]) -> list[memoryview]:
        """All buffers at once, when there is room. Raises ArenaFull for more than can ever be."""
        total_bytes = sum(sizes_bytes)
        if total_bytes > self.capacity_bytes:
            raise ArenaFull(f"{total_bytes} bytes at once are more than the agent's {self.capacity_bytes} for pages")
        await self._budget.take(total_bytes)
        try:
            return [np.empty(size_bytes, dtype=np.uint8).data for size_bytes in sizes_bytes]
        except MemoryError:
            self._budget.give(total_bytes)
            raise ArenaFull(f"this machine has no {total_bytes} bytes for pages in flight") from None

    def give_back(self, pages: Sequence[memoryview]) -> None:
        """Return buffers."""
        size_bytes = sum(len(page) for page in pages)
        for page in pages:
            try:
                page.release()
            except BufferError:
                _log.error("an array outlives the bounce buffer that it was made of")
        self._budget.give(size_bytes)


class PeerClients:
    """One client per bulk endpoint, and the threads that run their calls."""

    def __init__(self, tls: TlsCredentials | None = None) -> None:
        self._tls = tls
        self._clients: dict[str, PageTransferClient] = {}
        self._lock = threading.Lock()  # calls ask for clients on their own threads
        self._threads = ThreadPoolExecutor(STREAM_THREADS, thread_name_prefix="stream")

    def get(self, endpoint: str) -> PageTransferClient:
        """The client of an endpoint; idle connections close themselves."""
        with self._lock:
            client = self._clients.get(endpoint)
            if client is None:
                client = self._clients[endpoint] = PageTransferClient(endpoint, tls=self._tls)
            return client

    async def run(self, job: Callable[[], None]) -> None:
        """Run a call on a thread. It goes on when its caller is cancelled: see BounceBuffers for who owns what then."""
        await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def close(self) -> None:
        """End all connections; running calls fail, and are waited for."""
        with self._lock:
            for client in self._clients.values():
                client.close()
        self._threads.shutdown(wait=True)
