"""Pulls between ranks for code without an event loop. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.client.config import ClientConfig
from kvpool.client.gpuagent_control import AgentControl
from kvpool.client.peer_pulls import DEFAULT_WAIT_S, PeerPulls, PullHandle, PullReport, TokenPull
from kvpool.client.sync import BackgroundLoop, Pool
from kvpool.core.errors import DeadlineExceeded
from kvpool.core.ipc import EngineEvent


class SyncPullTicket:
    """PullHandle for code without an event loop."""

    def __init__(self, loop: BackgroundLoop, handle: PullHandle) -> None:
        self._loop, self._handle = loop, handle

    @property
    def hold_ended(self) -> bool:
        """See PullHandle.hold_ended."""
        return self._handle.hold_ended

    def report(self, timeout_s: float) -> PullReport:
        """See PullHandle.done."""
        return self._loop.run(lambda: self._handle.done(timeout_s))

    def cancel(self) -> None:
        """See PullHandle.cancel."""

        async def cancel() -> None:
            self._handle.cancel()

        self._loop.run(cancel)

    def wait_hold(self, timeout_s: float) -> bool:
        """Wait until slots may be unpinned and used; False if timeout_s passed first."""
        try:
            self._loop.run(self._handle.wait_hold, timeout_s)
        except DeadlineExceeded:
            return self._handle.hold_ended
        return True


class SyncPeerPulls:
    """PeerPulls of a pool's session. Close it before the pool."""

    def __init__(self, pool: Pool, agent_endpoint: str, config: ClientConfig) -> None:
        """agent_endpoint: of the pool's agent."""
        self._pool, self._loop, self._config = pool, pool.background, config

        async def open_control() -> AgentControl:
            return AgentControl(agent_endpoint, config)

        self._control = self._loop.run(open_control)

    def begin(
        self,
        pulls: Sequence[TokenPull],
        *,
        wait_s: float = DEFAULT_WAIT_S,
        after: EngineEvent | None = None,
        partial: bool = False,
    ) -> SyncPullTicket:
        """See PeerPulls.begin."""

        async def begin() -> PullHandle:
            own = PeerPulls(self._pool.pool.session, self._control, self._config)
            return own.begin(pulls, wait_s=wait_s, after=after, partial=partial)

        return SyncPullTicket(self._loop, self._loop.run(begin))

    def close(self) -> None:
        """Close the connection; pulls in flight go on in the agent. Idempotent."""
        self._loop.run(self._control.close)
