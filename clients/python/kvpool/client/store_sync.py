"""The pool without an agent for engines that call it from threads of their own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import TypeVar

from kvpool.client.retry import LATER
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_values import ChunkPlace, KeyspaceShards, OpenedShards, PayloadCopy, StoreCounts
from kvpool.client.sync import BackgroundLoop
from kvpool.core.errors import ServiceUnavailable

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class StorePages:
    """Thread-safe. See AsyncStorePages; after `close` everything is a miss."""

    def __init__(self, config: StoreConfig, peer_name: str) -> None:
        self._loop = BackgroundLoop("kvpool-direct")

        async def make() -> AsyncStorePages:
            pool = AsyncStorePages(config, peer_name)
            pool.prepare()
            return pool

        self._pool = self._loop.run(make)

    def open(self, space: KeyspaceShards) -> OpenedShards | None:
        """None when the index cannot be asked now. raises: what the configuration must change."""
        try:
            return self._loop.run(lambda: self._pool.open(space))
        except CancelledError:
            return None  # closed meanwhile
        except LATER as error:
            self._pool.counts.last_failure = str(error)
            _log.warning("kvpool: computing instead, until the index can be reached: %s", error)
            return None

    def find(self, space: OpenedShards, chunks: Sequence[ChunkPlace]) -> list[bool]:
        """See AsyncStorePages."""
        return self.run(lambda pool: pool.find(space, chunks), len(chunks))

    def get(self, space: OpenedShards, chunks: Sequence[ChunkPlace], take: PayloadCopy) -> list[bool]:
        """See AsyncStorePages."""
        return self.run(lambda pool: pool.get(space, chunks, take), len(chunks))

    def put(self, space: OpenedShards, chunks: Sequence[ChunkPlace], fill: PayloadCopy) -> list[bool]:
        """See AsyncStorePages."""
        return self.run(lambda pool: pool.put(space, chunks, fill), len(chunks))

    def clear(self, space: OpenedShards) -> bool:
        """See AsyncStorePages."""
        try:
            return self._loop.run(lambda: self._pool.clear(space))
        except (CancelledError, ServiceUnavailable):
            return False

    def start(self, work: Callable[[AsyncStorePages], Awaitable[ResultT]]) -> Future[ResultT]:
        """Begin something on the pool's loop. raises: ServiceUnavailable after `close`."""
        return self._loop.start(lambda: work(self._pool))

    @property
    def connected(self) -> bool:
        """Whether there is a session with the pagestore now."""
        return self._pool.connected

    @property
    def counts(self) -> StoreCounts:
        """A copy, of about now."""
        return replace(self._pool.counts)

    def close(self) -> None:
        """End the session and the thread. Idempotent."""
        self._loop.end(self._pool.close)

    def run(self, work: Callable[[AsyncStorePages], Awaitable[list[bool]]], count: int) -> list[bool]:
        """Await work on the pool's loop; `count` times False once it was closed. raises: what the work raises.

        Ctrl-C ends the work early and is raised when no copy touches the caller's memory any more; with a note if that
        takes long or a second one comes.
        """
        try:
            return self._loop.run(lambda: work(self._pool))
        except (CancelledError, ServiceUnavailable) as error:  # closed, before or meanwhile, or forked
            _log.debug("kvpool: computing instead: %s", error)
            return [False] * count
