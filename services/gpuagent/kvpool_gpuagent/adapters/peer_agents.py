"""Other agents of this host, by way of the client library."""

from __future__ import annotations

import asyncio

from kvpool.client.cache_loan import CacheLoan
from kvpool.client.config import ClientConfig
from kvpool_gpuagent.ports import MappedHandle


class LentCache:
    """See borrowing.CacheLoan."""

    def __init__(self, loan: CacheLoan) -> None:
        self._loan = loan
        self.layout = loan.layout
        self.handles = tuple(MappedHandle(size_bytes=each.size_bytes, ipc=each.memory) for each in loan.regions)

    @property
    def ended(self) -> asyncio.Event:
        """See borrowing.CacheLoan."""
        return self._loan.ended

    async def check(self, timeout_s: float) -> None:
        """See borrowing.CacheLoan."""
        await self._loan.check(timeout_s)

    async def close(self) -> None:
        """See borrowing.CacheLoan."""
        await self._loan.close()


class GrpcPeerAgents:
    """See borrowing.PeerAgents. Each loan has a connection of its own, so that its end is the end of the other side."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config

    async def borrow(self, endpoint: str, session_id: bytes, keyspace: bytes, timeout_s: float) -> LentCache:
        """See borrowing.PeerAgents."""
        return LentCache(await CacheLoan.open(endpoint, session_id, keyspace, self._config, timeout_s=timeout_s))
