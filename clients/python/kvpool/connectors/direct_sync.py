"""The pool without an agent for engines that call it from threads of their own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from typing import TypeVar

from kvpool.client.retry import TRANSIENT
from kvpool.client.sync import BackgroundLoop
from kvpool.connectors.direct_config import DirectPoolConfig
from kvpool.connectors.direct_pool import DirectPool, PayloadCopy
from kvpool.connectors.direct_values import ChunkPlace, DirectCounts, OpenSpace, SharedSpace
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, StoreUnavailable

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
LATER: tuple[type[KvPoolError], ...] = (*TRANSIENT, DeadlineExceeded, StoreUnavailable)
"""The cluster is not there now, but it may come; everything else needs another configuration."""


class DirectSyncPool:
    """Thread-safe. See DirectPool; after `close` everything is a miss."""

    def __init__(self, config: DirectPoolConfig, peer_name: str) -> None:
        self._loop = BackgroundLoop("kvpool-direct")

        async def make() -> DirectPool:
            return DirectPool(config, peer_name)

        self._pool = self._loop.run(make)

    def open(self, space: SharedSpace) -> OpenSpace | None:
        """None when the index cannot be asked now. raises: what the configuration must change, see DirectPool.open."""
        try:
            return self._loop.run(lambda: self._pool.open(space))
        except CancelledError:
            return None  # closed meanwhile
        except LATER as error:
            self._pool.counts.last_failure = str(error)
            _log.warning("kvpool: computing instead, until the index can be reached: %s", error)
            return None

    def find(self, space: OpenSpace, chunks: Sequence[ChunkPlace]) -> list[bool]:
        """See DirectPool."""
        return self._run(lambda: self._pool.find(space, chunks), len(chunks))

    def get(self, space: OpenSpace, chunks: Sequence[ChunkPlace], take: PayloadCopy) -> list[bool]:
        """See DirectPool."""
        return self._run(lambda: self._pool.get(space, chunks, take), len(chunks))

    def put(self, space: OpenSpace, chunks: Sequence[ChunkPlace], fill: PayloadCopy) -> list[bool]:
        """See DirectPool."""
        return self._run(lambda: self._pool.put(space, chunks, fill), len(chunks))

    def clear(self, space: OpenSpace) -> bool:
        """See DirectPool."""
        try:
            return self._loop.run(lambda: self._pool.clear(space))
        except (CancelledError, ServiceUnavailable):
            return False

    def start(self, work: Callable[[DirectPool], Awaitable[ResultT]]) -> Future[ResultT]:
        """Begin something on the pool's loop. raises: ServiceUnavailable after `close`."""
        return self._loop.start(lambda: work(self._pool))

    @property
    def connected(self) -> bool:
        """Whether there is a session with the pagestore now."""
        return self._pool.connected

    @property
    def counts(self) -> DirectCounts:
        """A copy, of about now."""
        return replace(self._pool.counts)

    def close(self) -> None:
        """End the session and the thread. Idempotent."""
        self._loop.end(self._pool.close)

    def _run(self, work: Callable[[], Awaitable[list[bool]]], count: int) -> list[bool]:
        try:
            call = self._loop.start(work)
        except KvPoolError as error:  # closed, or forked
            _log.debug("kvpool: not asked: %s", error)
            return [False] * count
        try:
            return call.result()
        except (CancelledError, KvPoolError) as error:  # closed meanwhile
            _log.debug("kvpool: computing instead: %s", error)
            return [False] * count
        finally:
            wait([call])  # an interrupt of this thread ends no copy, and the caller's memory is being copied
