"""Sessions of peers: opening, liveness, descriptors, and what becomes of their slots when they end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import Draining, InvalidRequest, KvPoolError, LeaseLost, Overloaded, SessionUnknown
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.sessions import Session, SessionState
from kvpool_pagestore.core.slots import SegmentState
from kvpool_pagestore.engine.arena import Quarantine
from kvpool_pagestore.engine.fetch import Acquisition
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import Arena

_log = logging.getLogger(__name__)

_MAX_KEYSPACES = 256  # of one session


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """What a peer asks for when it opens a session."""

    tenant: str
    keyspaces: Sequence[tuple[bytes, KeyspaceSpec]] = ()
    peer_name: str = ""
    address: str = ""  # as gRPC says, without a port; empty: not known, and not counted
    previous_session_id: bytes = b""
    previous_drained: bool = False
    wants_arena: bool = False
    trusts_arena: bool = False


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor for a peer. give_up: the session file's, of which the owner must keep no copy."""

    fd: int
    size_bytes: int
    give_up: bool


def _new_future() -> asyncio.Future[KvPoolError]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class PeerSession:
    """A session with what the engine keeps beside the page table's part."""

    session: Session
    token: bytes  # of the descriptor socket; empty if the peer may not map
    keyspaces: dict[bytes, Keyspace] = field(default_factory=dict)
    acquisitions: set[Acquisition] = field(default_factory=set)
    ended: asyncio.Future[KvPoolError] = field(default_factory=_new_future)  # why, unless the peer itself closed it
    session_fd: int = -1  # until the peer has fetched it
    owner: str = ""  # whose share of all sessions it takes: an address, or a process once that is known

    def keyspace(self, keyspace: bytes) -> Keyspace | None:
        """One that the session has named, or None."""
        return self.keyspaces.get(keyspace)

    @property
    def live(self) -> bool:
        """Whether the session has not ended."""
        return self.session.state is SessionState.LIVE

    def check_live(self) -> None:
        """Raises SessionUnknown once the session has ended."""
        if self.session.state is not SessionState.LIVE:
            raise SessionUnknown(f"session {self.session.session_id.hex()} has ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimes:
    """Bounds of sessions."""

    max_sessions: int
    max_leases: int


class PeerSessions:
    """All sessions."""

    def __init__(
        self,
        times: SessionTimes,
        table: PageTable,
        arena: Arena,
        keyspaces: KeyspaceBook,
        quarantine: Quarantine,
        metrics: PageStoreMetrics,
    ) -> None:
        self._times = times
        self._table = table
        self._arena = arena
        self._keyspaces = keyspaces
        self._quarantine = quarantine
        self._metrics = metrics
        self._peers: dict[bytes, PeerSession] = {}

    def admit(self, request: SessionRequest) -> list[Keyspace]:
        """Return the keyspaces that a session is to have. Raises TenantDenied, InvalidRequest."""
        if len(request.keyspaces) > _MAX_KEYSPACES:
            raise InvalidRequest(f"{len(request.keyspaces)} keyspaces, at most {_MAX_KEYSPACES} in a session")
        return [self._keyspaces.admit(request.tenant, *one) for one in request.keyspaces]

    async def open(self, request: SessionRequest, named: Sequence[Keyspace]) -> PeerSession:
        """named: what `admit` returned for the request. Raises Overloaded for too many sessions."""
        await self._end_previous(request)
        if len(self._peers) >= self._times.max_sessions:
            raise Overloaded(f"{len(self._peers)} sessions are open, the limit")
        if self._share_taken(request.address):
            raise Overloaded("half of all sessions are open, of one peer: the rest is for others")
        session = Session(
            secrets.token_bytes(16),
            request.tenant,
            request.peer_name,
            self._times.max_leases,
            trusts_arena=request.trusts_arena,
        )
        peer = PeerSession(session, secrets.token_bytes(32) if request.wants_arena else b"")
        peer.keyspaces, peer.owner = {one.keyspace: one for one in named}, request.address
        if request.wants_arena:
            # Shared memory is never waited for; and a caller who left during an await would leave the file behind.
            peer.session_fd = self._arena.create_session_file(session.session_id)
        self._peers[session.session_id] = peer
        self._table.sessions.add(session)
        return peer

    def open_internal(self, tenant: str, keyspaces: Sequence[tuple[bytes, KeyspaceSpec]]) -> PeerSession:
        """A session of this process itself: it never ends abnormally and is never silent."""
        named = [self._keyspaces.admit(tenant, *one) for one in keyspaces]
        session = Session(secrets.token_bytes(16), tenant, "bulk", self._times.max_leases)
        peer = PeerSession(session, b"")
        peer.keyspaces = {one.keyspace: one for one in named}
        self._table.sessions.add(session)
        return peer

    def add_keyspace(self, peer: PeerSession, keyspace: bytes, spec: KeyspaceSpec) -> None:
        """Raises TenantDenied, InvalidRequest."""
        if len(peer.keyspaces) >= _MAX_KEYSPACES and keyspace not in peer.keyspaces:
            raise InvalidRequest(f"at most {_MAX_KEYSPACES} keyspaces in a session")
        peer.keyspaces[keyspace] = self._keyspaces.admit(peer.session.tenant, keyspace, spec)

    def close(self, peer: PeerSession) -> None:
        """The peer ended the session properly. Idempotent."""
        if peer.session.state is not SessionState.LIVE:
            return
        self._table.close_session(peer.session)
        self._forget_peer(peer, "closed")
        if peer.token:
            self._quarantine.departed(peer.session.session_id)

    def end(self, peer: PeerSession, cause: str, error: KvPoolError | None = None) -> None:
        """The session ended in any other way: what it held is quarantined. Idempotent. error: for the peer."""
        if peer.session.state is not SessionState.LIVE:
            return
        held = peer.session.lease_count
        _log.warning("session of %s ended (%s) with %d leases", peer.session.peer_name or "a peer", cause, held)
        self._table.end_session(peer.session)
        self._forget_peer(peer, "abnormal")
        peer.ended.set_result(error or SessionUnknown(f"the session has ended: {cause}"))
        self._quarantine.watch()

    def descriptor(self, token: bytes, number: int, process: str = "") -> Descriptor:
        """What the token's session asks for on the raw socket.

        process: who asks, as the kernel says: from its session file on a session counts as that process's. Raises
        SessionUnknown, InvalidRequest, LeaseLost, ArenaFull, and Overloaded when that process has half of all sessions.
        """
        peer = next((one for one in self._peers.values() if one.token and hmac.compare_digest(one.token, token)), None)
        if peer is None:
            raise SessionUnknown("no open session has this descriptor token")
        if number == SESSION_FILE_NUMBER:
            if peer.session_fd < 0:
                raise InvalidRequest("the session file was fetched before; it is handed out once")
            if self._share_taken(process):
                raise Overloaded("half of all sessions are open, of one process: the rest is for others")
            peer.owner = process or peer.owner
            fd, peer.session_fd = peer.session_fd, -1
            return Descriptor(fd, 0, True)
        if peer.session_fd >= 0:
            raise InvalidRequest(f"fetch the session file (number {SESSION_FILE_NUMBER}) before any segment")
        segment = self._table.space.segment(number)
        if segment is None or segment.tenant != peer.session.tenant or segment.state is not SegmentState.LIVE:
            raise LeaseLost(f"segment {number} is not (or no longer) one of this tenant's")
        fd = self._arena.descriptor(number, peer.session.session_id)
        segment.mappers.add(peer.session.session_id)
        return Descriptor(fd, segment.size_bytes, False)

    async def stop(self) -> None:
        """End all sessions."""
        for peer in list(self._peers.values()):
            self.end(peer, "shutdown", Draining("the pagestore is shutting down"))

    # Inside

    def _share_taken(self, owner: str) -> bool:
        """Whether one owner has half of the sessions that may be open."""
        count = sum(one.owner == owner for one in self._peers.values()) if owner else 0
        return count >= max(1, self._times.max_sessions // 2)

    async def _end_previous(self, request: SessionRequest) -> None:
        """The peer has reconnected: its earlier session, if it is known, has ended."""
        session_id = request.previous_session_id
        peer = self._peers.get(session_id)
        if peer is not None and peer.session.tenant == request.tenant:
            self.end(peer, "its peer opened another")
        ended = self._table.sessions.find_ended(session_id, request.tenant)
        if ended is not None and request.previous_drained:
            await self._quarantine.drained(ended)

    def _forget_peer(self, peer: PeerSession, manner: str) -> None:
        if self._peers.pop(peer.session.session_id, None) is not None:
            self._metrics.ended_sessions.labels(manner).inc()
        for acquisition in list(peer.acquisitions):
            acquisition.cancel()
        peer.acquisitions.clear()
        if peer.session_fd >= 0:  # never fetched: our copy alone would keep the lock
            os.close(peer.session_fd)
            peer.session_fd = -1
