"""Caches that other agents of this host lend, mapped once for all pulls and until their session ends.

A mapping outlives the engine: its memory stays allocated and readable after the engine has died, or has begun to use
its slots for something else. So each pull asks the lender, after its copy, whether the session was alive all the while;
the lender, when the session ends, waits for us to let go of the memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import InvalidRequest, NotServed, Stopped
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.core.pulls import SourceName
from kvpool_gpuagent.core.requests import Rank
from kvpool_gpuagent.ports import Device, MappedHandle, PeerCache

_log = logging.getLogger(__name__)

BORROW_TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 2.0
MAX_BORROWED = 64  # idle ones beyond it are given back, the longest unused first

_Wanted = tuple[SourceName, bytes]  # and the keyspace


class CacheLoan(Protocol):
    """A cache of another agent's session, for reading. Belongs to one event loop."""

    @property
    def layout(self) -> EngineLayout: ...
    @property
    def handles(self) -> Sequence[MappedHandle]: ...

    @property
    def ended(self) -> asyncio.Event:
        """Set when the lender wants it back or cannot be reached any more; who wants to give it back may set it."""
        ...

    async def check(self, timeout_s: float) -> None:
        """Return if the session has been alive until now. Raises Stopped, ServiceUnavailable, DeadlineExceeded."""
        ...

    async def close(self) -> None:
        """Give it back: the memory is unmapped. Idempotent, never raises."""
        ...


class PeerAgents(Protocol):
    """Other agents of this host."""

    async def borrow(self, endpoint: str, session_id: bytes, keyspace: bytes, timeout_s: float) -> CacheLoan:
        """Raises SessionUnknown, KeyspaceMismatch, TenantDenied, NotServed, ServiceUnavailable, ..."""
        ...


class Borrowed:
    """One lent cache and who uses it."""

    def __init__(self, loan: CacheLoan, cache: PeerCache, keyspace: bytes) -> None:
        self.loan, self.cache, self.keyspace = loan, cache, keyspace
        self._uses: set[CancelToken] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending = False

    @property
    def is_idle(self) -> bool:
        """Whether no pull uses it."""
        return self._idle.is_set()

    @contextmanager
    def use(self, stop: CancelToken) -> Iterator[None]:
        """Read it as long as the block runs; `stop` is set when it has to end. Raises Stopped."""
        if self._ending or self.loan.ended.is_set():
            raise Stopped("the source session has ended, or its agent cannot be reached any more")
        self._uses.add(stop)
        self._idle.clear()
        try:
            yield
        finally:
            self._uses.discard(stop)
            if not self._uses:
                self._idle.set()

    async def end(self) -> None:
        """Tell users to stop, wait for them, unmap, give back. Never raises."""
        self._ending = True
        for stop in self._uses:
            stop.cancel()
        await self._idle.wait()
        try:
            await self.cache.close()
        except Exception:
            _log.exception("a borrowed cache could not be unmapped")
        await self.loan.close()


class Borrowings:
    """All that this agent has borrowed. Belongs to one event loop."""

    def __init__(self, device: Device, agents: PeerAgents | None) -> None:
        """agents: None where no other agent is ever asked."""
        self._device, self._agents = device, agents
        self._opening: dict[_Wanted, asyncio.Future[Borrowed]] = {}
        self._kept: dict[_Wanted, Borrowed] = {}  # the longest unused first
        self._keepers: set[asyncio.Future[None]] = set()

    async def get(self, name: SourceName, rank: Rank) -> Borrowed:
        """A session's cache, borrowed now or before. rank: of the session that wants it. Raises as PeerAgents.borrow;
        InvalidRequest for a layout that is none of the keyspace."""
        wanted = (name, rank.keyspace)  # who asks in another keyspace is refused, and that must not hit the others
        kept = self._kept.pop(wanted, None)
        # One that has ended stays here until its keeper has run: whoever got it could not use it.
        if kept is not None and not kept.loan.ended.is_set():
            self._kept[wanted] = kept
            return kept
        opening = self._opening.get(wanted)
        if opening is None:
            opening = self._opening[wanted] = asyncio.ensure_future(self._open(name, rank))
            opening.add_done_callback(lambda done: self._opened(wanted, done))
        return await asyncio.shield(opening)  # others may wait for the same

    async def close(self) -> None:
        """Give all back; no pull runs any more."""
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for borrowed in list(self._kept.values()):
            borrowed.loan.ended.set()
        if self._keepers:
            await asyncio.wait(self._keepers)

    async def _open(self, name: SourceName, rank: Rank) -> Borrowed:
        if self._agents is None:
            raise NotServed("this agent reaches no other agents; pull from sessions of its own")
        loan = await self._agents.borrow(name.agent, name.session_id, rank.keyspace, BORROW_TIMEOUT_S)
        try:
            loan.layout.validate(rank.spec)
            if any(handle.ipc is None for handle in loan.handles):
                raise InvalidRequest("the source's cache is not GPU memory")
            cache = await self._device.map_peer(rank.spec, loan.layout, loan.handles)
        except BaseException:
            await loan.close()
            raise
        return Borrowed(loan, cache, rank.keyspace)

    def _opened(self, wanted: _Wanted, opening: asyncio.Future[Borrowed]) -> None:
        del self._opening[wanted]
        if opening.cancelled() or opening.exception() is not None:
            return
        self._kept[wanted] = opening.result()
        keeper = asyncio.ensure_future(self._keep(wanted, opening.result()))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        # Not the new one: whoever wanted it is about to use it.
        idle = [kept for kept in list(self._kept.values())[:-1] if kept.is_idle]
        for kept in idle[: max(0, len(self._kept) - MAX_BORROWED)]:
            kept.loan.ended.set()

    async def _keep(self, wanted: _Wanted, borrowed: Borrowed) -> None:
        await borrowed.loan.ended.wait()
        if self._kept.get(wanted) is borrowed:
            del self._kept[wanted]
        await borrowed.end()
