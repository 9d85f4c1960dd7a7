"""The gpuagent's engine: what all sessions of engine ranks share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from kvpool.core.errors import Draining, Overloaded, SessionUnknown, Stopped
from kvpool.core.ipc import IpcEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.core.leases import LeaseBudget
from kvpool_gpuagent.core.requests import Rank, check_bases
from kvpool_gpuagent.engine.events import OnEventWaited, SessionEvents
from kvpool_gpuagent.engine.host_caches import HostCaches
from kvpool_gpuagent.engine.locations import SeenChunks
from kvpool_gpuagent.engine.peers import PeerPulls
from kvpool_gpuagent.engine.session import AgentParts, EngineIdentity, EngineSession
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import Device, IndexPort, MappedHandle, PeerAgents, PoolFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What an engine rank asks for when it registers."""

    engine_name: str
    keyspace_name: str
    spec: KeyspaceSpec
    layout: EngineLayout
    handles: tuple[MappedHandle, ...]  # shared memory without its descriptors, which come later
    events: tuple[IpcEvent, ...] = ()
    load_only: bool = False
    previous_session_id: bytes = field(default=b"", repr=False)
    hold_file: bool = False  # the engine lends one with its memory
    match_only: bool = False  # of an engine's scheduler: the handles have no memory
    block_generations: bool = False  # the engine lends a table of them
    engine_id: bytes = b""  # equal for all sessions of an engine that also loads from GPU caches of others


class GpuAgentEngine:
    """Opens and ends sessions. Belongs to one event loop."""

    def __init__(
        self,
        config: GpuAgentConfig,
        device: Device,
        index: IndexPort,
        pools: PoolFactory,
        metrics: AgentMetrics,
        agents: PeerAgents | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """agents: of this host, whose sessions' caches loads may be copied from; None: no others."""
        self.tracer = tracer
        self.config, self.device, self.metrics = config, device, metrics
        self._pools = pools
        self._sessions: dict[EngineSession, None] = {}  # in order
        self._pulls = PeerPulls(self.session_of, device, agents, metrics)
        self.caches = HostCaches(lambda: self.sessions, agents, self._pulls)
        self._parts = AgentParts(
            config=config,
            device=device,
            index=index,
            metrics=metrics,
            lease_budget=LeaseBudget(config.lease_share),
            tracer=tracer,
            caches=self.caches if device.name == "cuda" else None,
        )
        self.bandwidths = self._parts.bandwidths
        self.link_bytes_per_s = 0.0  # of a plain copy to the device, measured at the start; 0: not known
        self._seen: WeakValueDictionary[tuple[bytes, int], SeenChunks] = WeakValueDictionary()
        self._draining = False

    @property
    def sessions(self) -> list[EngineSession]:
        """Sessions now open."""
        return list(self._sessions)

    def session_of(self, session_id: bytes) -> EngineSession:
        """Raises SessionUnknown."""
        for session in self._sessions:
            if session.session_id == session_id:
                return session
        raise SessionUnknown(f"this agent has no session {session_id.hex() or '(empty id)'}")

    async def open_session(
        self,
        wanted: Registration,
        on_event_waited: OnEventWaited = lambda event: None,
        owner: str = "",
    ) -> EngineSession:
        """Open the keyspace at the index and check the rank against its grid.

        A broken earlier session of the same rank is ended first: when this returns nothing touches its blocks any more.
        on_event_waited: see SessionEvents. owner: see `claim`.
        Raises KeyspaceMismatch, PartitionRefused, NotServed, InvalidRequest naming the argument, Overloaded (too many
        sessions), Draining.
        """
        # Refused before the name is bound: a layout that does not fit must leave no keyspace behind.
        rank = Rank.of(wanted.spec, wanted.layout, load_only=wanted.load_only)
        check_bases(rank, [handle.ipc.allocation_offset if handle.ipc else 0 for handle in wanted.handles])
        if not wanted.match_only:
            self.device.check(wanted.handles, wanted.events)
        await self._end_previous(wanted.previous_session_id)
        opened = await self._parts.index.open_keyspace(wanted.keyspace_name, wanted.spec)
        if self._draining:
            raise Draining("this agent is shutting down")
        if len(self._sessions) >= self.config.max_sessions:
            raise Overloaded(f"this agent serves {self.config.max_sessions} engine sessions at once")
        seen = self._seen.setdefault((opened.keyspace, rank.shards), SeenChunks(self.config.max_remembered_chunks))
        self._check_share(owner)
        identity = EngineIdentity(
            rank=rank.opened(opened.keyspace),
            engine_name=wanted.engine_name,
            keyspace_name=wanted.keyspace_name,
            hash_key=opened.hash_key,
            engine_id=wanted.engine_id,
        )
        pool = self._pools(opened.keyspace, wanted.spec)
        events = SessionEvents(len(wanted.events), on_event_waited)
        session = EngineSession(identity, self._parts, pool, events, seen, self._forget)
        session.owner = owner
        self._sessions[session] = None
        self.metrics.sessions.set(len(self._sessions))
        return session

    def claim(self, session: EngineSession, owner: str) -> None:
        """Count the session as its owner's: the address or process that has opened it. Empty: not counted.

        Raises Overloaded when the owner has half of all sessions that may be open.
        """
        self._check_share(owner)
        session.owner = owner

    async def close(self) -> None:
        """Take no more sessions and end all; running copies are waited for."""
        self._draining = True
        for session in self.sessions:
            session.begin_close(Draining("this agent is shutting down"))
        await asyncio.gather(*(session.close() for session in self.sessions))
        await self._pulls.close()

    def _check_share(self, owner: str) -> None:
        count = sum(session.owner == owner for session in self._sessions) if owner else 0
        if count >= max(1, self.config.max_sessions // 2):
            raise Overloaded(f"half of all engine sessions are open, of {owner}: the rest is for others")

    async def _end_previous(self, session_id: bytes) -> None:
        for session in self.sessions:
            if session_id and session.session_id == session_id:
                session.begin_close(Stopped("the same engine has registered again"))
                await session.unmapped.wait()

    def _forget(self, session: EngineSession) -> None:
        self._sessions.pop(session, None)
        self.metrics.sessions.set(len(self._sessions))
