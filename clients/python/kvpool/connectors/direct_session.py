"""The one pagestore session of an engine's process: opened when first needed, and again after a break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.connectors.direct_config import DirectPoolConfig
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec

_log = logging.getLogger(__name__)


class DirectSession:
    """Belongs to one event loop.

    A new session is opened only when nothing uses the broken one any more: by then no copy touches its arena, which is
    what `drained` says to the pagestore. That happens as soon as it can, also while the engine is idle:
    until then a pagestore that came back after a crash lacks the memory that is mapped here.
    """

    def __init__(self, config: DirectPoolConfig, peer_name: str) -> None:
        self._config, self._peer_name = config, peer_name
        self._session: PageStoreSession | None = None
        self._known: set[bytes] = set()  # keyspaces that the session has
        self._opening = asyncio.Lock()
        self._users = 0
        self._failed_s = float("-inf")
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def node_id(self) -> bytes:
        """16 bytes: the pagestore; none before it was ever reached."""
        return self._session.node_id if self._session is not None else b""

    @property
    def connected(self) -> bool:
        """Whether there is a session now."""
        return self._session is not None and not self._session.broken.is_set()

    @contextlib.asynccontextmanager
    async def use(self, keyspace: bytes, spec: KeyspaceSpec) -> AsyncGenerator[PageStoreSession]:
        """The session, for as long as the block lasts; nothing may touch its slots afterwards.

        raises: ServiceUnavailable, DeadlineExceeded and what the pagestore refuses a session or a keyspace with.
        """
        session = await self._live(keyspace, spec)
        self._users += 1
        try:
            yield session
        finally:
            self._users -= 1

    async def _live(self, keyspace: bytes, spec: KeyspaceSpec) -> PageStoreSession:
        async with self._opening:
            if self._closed:
                raise ServiceUnavailable("the pool was closed")
            if self._session is None or self._session.broken.is_set():
                self._session = await self._open((keyspace, spec))
            if keyspace not in self._known:
                await self._session.add_keyspace(keyspace, spec, timeout_s=self._config.connect_timeout_s)
                self._known.add(keyspace)
            return self._session

    async def _keep_open(self, session: PageStoreSession) -> None:
        """Open the next session as soon as one has ended and nothing uses it."""
        while True:
            await session.broken.wait()
            with contextlib.suppress(KvPoolError):
                async with self._opening:
                    if self._session is session:  # no request has done it
                        self._session = await self._open()
            session = self._session or session
            await asyncio.sleep(self._config.retry_interval_s)

    async def _open(self, *first: tuple[bytes, KeyspaceSpec]) -> PageStoreSession:
        """first: keyspaces of the first session; later ones keep what they have."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._failed_s < self._config.retry_interval_s:
            raise ServiceUnavailable(f"the pagestore at {self._config.pagestore} did not answer a moment ago")
        if self._users:
            raise ServiceUnavailable("the pagestore session broke, and its last copies still run")
        try:
            if self._session is not None:
                return await self._session.reopen(drained=True)
            plan = SessionPlan(endpoint=self._config.pagestore, peer_name=self._peer_name, keyspaces=first)
            session = await PageStoreSession.open(plan, self._config.client)
        except KvPoolError:
            self._failed_s = loop.time()
            raise
        self._known.update(keyspace for keyspace, _ in first)
        self._keeper = asyncio.ensure_future(self._keep_open(session))
        return session

    async def close(self) -> None:
        """End the session. Idempotent."""
        self._closed = True
        async with self._opening:
            session, self._session = self._session, None
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.wait((self._keeper,))
            if session is not None and not await session.close():
                _log.warning("kvpool: the pagestore session did not end in order; its slots come back by themselves")
