"""The pool as one engine reaches it through its gpuagent, which may come late, over memory that goes with the pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future

from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration, OfferFd
from kvpool.client.fds import offer_fd
from kvpool.client.pool import AsyncPool
from kvpool.client.retry import LATER, Backoff
from kvpool.client.sync import BackgroundLoop, Pool
from kvpool.connectors.block_memory import BlockMemory
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

_log = logging.getLogger(__name__)


class AgentPool(Pool):
    """A Pool whose agent may come later: one that cannot be reached is tried again in the background, and every call
    raises ServiceUnavailable until then. Implements PrefixPool."""

    def __init__(
        self,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        keyspace_name: str,
        engine_name: str,
        config: ClientConfig,
        memory: BlockMemory,
        *,
        offer: OfferFd = offer_fd,
    ) -> None:
        """config: agent_endpoint names the agent. memory: of the layout's one handle; closed with the pool."""
        self._memory = memory
        self._config, self._offer = config, offer
        self._registration = EngineRegistration(
            endpoint=config.agent_endpoint,
            engine_name=engine_name,
            keyspace_name=keyspace_name,
            spec=spec,
            layout=layout,
            regions=memory.regions,
            events=memory.events,
        )
        self._loop = BackgroundLoop()
        self._reached: AsyncPool | None = None
        self._opening: Future[None] | None = None

    def open(self) -> None:
        """Register with the agent, or begin to try again in the background.

        raises: KeyspaceMismatch, PartitionRefused, GeometryUnsupported, InvalidRequest, NotServed: what the
        configuration must change.
        """
        try:
            self._loop.run(self._reach)
        except LATER as error:
            _log.warning("kvpool: computing everything until the agent can be reached: %s", error)
            self._opening = self._loop.start(self._reach_later)

    @property
    def pool(self) -> AsyncPool:
        """See Pool. raises: ServiceUnavailable while the agent has never been reached."""
        if self._reached is None:
            raise ServiceUnavailable("the agent was never reached")
        return self._reached

    def hash_key(self) -> bytes | None:
        """See PrefixPool."""
        return self._reached.session.hash_key if self._reached is not None else None

    def close(self) -> None:
        """End the session and the thread, and free the memory. Idempotent."""
        if self._opening is not None:
            self._opening.cancel()
        with contextlib.suppress(ServiceUnavailable):  # closed before
            untouched = self._loop.run(self._close)
            self._loop.stop()
            self._memory.close(untouched=untouched)

    async def _reach(self) -> None:
        self._reached = await AsyncPool.open(self._registration, self._config, offer=self._offer, cache=self._memory)

    async def _reach_later(self) -> None:
        backoff = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s)
        while self._reached is None:
            await asyncio.sleep(backoff.next_s())
            try:
                await self._reach()
                _log.info("kvpool: the agent is reached now")
            except LATER as error:
                _log.debug("kvpool: the agent cannot be reached yet: %s", error)
            except KvPoolError as error:
                _log.error("kvpool: not used in this process: %s", error)
                return

    async def _close(self) -> bool:
        """Whether nothing touches the blocks any more."""
        if self._reached is not None and not await self._reached.close():
            _log.warning("kvpool: the agent did not confirm the end of the session")
        return self._reached is None or self._reached.session.released.is_set()
