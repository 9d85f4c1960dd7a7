"""Sessions of peers and the leases that live with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvpool.core.errors import SessionBusy
from kvpool_pagestore.core.slots import Slot


class SessionState(Enum):
    """Life of a session; it is forgotten when closed, or when an abnormal end is resolved."""

    LIVE = "live"
    ENDED = "ended"  # abnormally: what it held is in quarantine
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Session:
    """One peer's right to arena slots. Changed only by the core.

    tenant is empty for sessions of an earlier process of this node, of which only the id is known.
    """

    session_id: bytes  # 16 bytes
    tenant: str
    peer_name: str
    max_leases: int  # of each kind: the window
    state: SessionState = SessionState.LIVE
    writes: dict[int, Slot] = field(default_factory=dict)  # by lease id
    reads: dict[int, Slot] = field(default_factory=dict)  # by lease id
    waiting: int = 0  # items of acquires that may still become read leases
    gone_s: float | None = None  # since when the peer's process is known to be gone
    last_lease_id: int = 0
    trusts_arena: bool = False  # takes pages that are not sealed, and does not verify what it reads

    @property
    def lease_count(self) -> int:
        return len(self.writes) + len(self.reads)

    def next_lease_id(self) -> int:
        self.last_lease_id += 1
        return self.last_lease_id


@dataclass(slots=True)
class ReadLeases:
    """Which of some pages were leased. Pages are named by their position."""

    pages: list[int] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)  # not in staging, or not sealed for a session that wants that
    refused: list[int] = field(default_factory=list)
    refusal: SessionBusy | None = None  # why


class SessionTable:
    """Open sessions, and ended ones whose peers may still touch memory."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._live: dict[bytes, Session] = {}
        self._ended: dict[bytes, Session] = {}

    @property
    def live(self) -> list[Session]:
        return list(self._live.values())

    @property
    def ended(self) -> list[Session]:
        return list(self._ended.values())

    @property
    def live_count(self) -> int:
        return len(self._live)

    def add(self, session: Session) -> None:
        self._live[session.session_id] = session

    def add_old(self, session_id: bytes) -> None:
        """A session of an earlier process of this node whose file was found."""
        session = Session(session_id, "", "", 0, state=SessionState.ENDED)
        self._ended[session_id] = session

    def end(self, session: Session) -> None:
        """Move a live session to the ended ones."""
        del self._live[session.session_id]
        session.state = SessionState.ENDED
        self._ended[session.session_id] = session

    def close(self, session: Session) -> None:
        del self._live[session.session_id]
        session.state = SessionState.CLOSED

    def forget(self, session: Session) -> None:
        """The peer of an ended session can touch nothing any more."""
        del self._ended[session.session_id]
        session.state = SessionState.CLOSED

    def find_ended(self, session_id: bytes, tenant: str) -> Session | None:
        """The ended session of that id, unless it is another tenant's."""
        session = self._ended.get(session_id)
        return session if session is not None and session.tenant in (tenant, "") else None

    def note_gone(self, session_ids: list[bytes], now_s: float) -> None:
        """The kernel says that these peers' processes are gone."""
        for session_id in session_ids:
            session = self._ended.get(session_id)
            if session is not None and session.gone_s is None:
                session.gone_s = now_s

    def resolvable(self, now_s: float) -> list[Session]:
        """Ended sessions whose peers have been gone for the grace period."""
        return [one for one in self._ended.values() if one.gone_s is not None and now_s - one.gone_s >= self._grace_s]
