"""The session of an agent with its pagestore is opened again by itself, and permits are never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvpool.client import pagestore_link
from kvpool.client.config import ClientConfig
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.core.errors import InvalidRequest, KvPoolError, LeaseLost, Overloaded, ServiceUnavailable
from kvpool.core.spans import PageGrants, PageSpan, SpanAnswer
from kvpool.testing import eventually
from kvpool_gpuagent.adapters import arena_pool
from kvpool_gpuagent.adapters.arena_pool import ArenaLink, ArenaPool
from tests.fixtures.pagestore import KEYSPACE, SPEC, chunk_hash

PAGES = PageSpan(
    keyspace=KEYSPACE,
    chunk_hashes=chunk_hash(0),
    first_chunk_index=0,
    parent_hash=bytes(16),
    group_heads=chunk_hash(0),
    positions=np.zeros(1, dtype=np.int32),
    shards=np.zeros(1, dtype=np.uint8),
)
ONE_PAGE = PageGrants(
    pages=np.zeros(1, np.int32),
    lease_ids=np.ones(1, np.int64),
    segment_ids=np.ones(1, np.int64),
    offsets=np.zeros(1, np.int64),
    sources=np.zeros(1, np.uint8),
)


@dataclass
class Pagestore:
    """Opens sessions, after as many failures as are set, and refuses to prepare them as often as is set."""

    failures_left: int = 0
    refusals_left: int = 0
    attempts: int = 0
    serves: asyncio.Event = field(default_factory=asyncio.Event)  # until then it takes connections and answers nothing
    answers_reserves: bool = True
    sessions: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.serves.set()

    async def open(self) -> Session:
        self.attempts += 1
        await self.serves.wait()
        if self.failures_left:
            self.failures_left -= 1
            raise ServiceUnavailable("not yet")
        self.sessions.append(Session(self))
        return self.sessions[-1]


class Session:
    """What the link and its pools use of a PageStoreSession."""

    node_id, max_leases, arena_bytes = bytes(16), 8, 1 << 20

    def __init__(self, pagestore: Pagestore) -> None:
        self.pagestore, self.broken = pagestore, asyncio.Event()
        self.drained: list[bool] = []
        self.prepared: list[int] = []
        self.given_back: list[Any] = []
        self.failure: KvPoolError | None = None

    async def reopen(self, *, drained: bool) -> Session:
        self.drained.append(drained)
        return await self.pagestore.open()

    async def prepare(self, share_bytes: int) -> None:
        if self.pagestore.refusals_left:
            self.pagestore.refusals_left -= 1
            raise Overloaded("not now")
        self.prepared.append(share_bytes)

    async def add_keyspace(self, keyspace: bytes, spec: Any) -> None: ...

    async def close(self) -> bool:
        return True

    async def reserve_span(self, span: PageSpan) -> SpanAnswer:
        if not self.pagestore.answers_reserves:
            await asyncio.Event().wait()
        return SpanAnswer(granted=ONE_PAGE)

    def acquire_span(self, span: PageSpan, *, wait_s: float) -> Any:
        raise InvalidRequest("no such span")

    def addresses(self, grants: Any) -> Any:
        raise LeaseLost("not mapped")

    def abort_soon(self, lease_ids: Any) -> None:
        self.given_back.append(lease_ids)


@pytest.fixture
async def pagestore(monkeypatch: pytest.MonkeyPatch) -> Pagestore:
    made = Pagestore()

    async def open_session(plan: SessionPlan, config: ClientConfig, **unused: Any) -> Session:
        return await made.open()

    monkeypatch.setattr(PageStoreSession, "open", open_session)
    monkeypatch.setattr(arena_pool, "RETRY_INTERVAL_S", 0.0)
    monkeypatch.setattr(pagestore_link, "PREPARE_RETRY_MAX_S", 0.0)
    return made


@pytest.fixture
async def link(pagestore: Pagestore) -> AsyncIterator[ArenaLink]:
    link = ArenaLink(SessionPlan(endpoint="unix:/unused", peer_name="test"), ClientConfig())
    yield link
    await link.close()


async def test_a_broken_session_is_reopened_and_prepared_without_a_request(
    pagestore: Pagestore, link: ArenaLink
) -> None:
    await link.prepare()
    pagestore.failures_left = 3
    pagestore.sessions[0].broken.set()
    await eventually(lambda: len(pagestore.sessions) == 2 and pagestore.sessions[1].prepared == [0])
    assert pagestore.sessions[0].drained == [True] * 4
    assert pagestore.sessions[0].prepared == [0]
    pagestore.sessions[1].broken.set()
    await eventually(lambda: len(pagestore.sessions) == 3)


async def test_a_session_is_not_reopened_while_a_slot_of_it_is_out(pagestore: Pagestore, link: ArenaLink) -> None:
    await link.live(KEYSPACE, SPEC)
    await link.reads.take(1)
    pagestore.sessions[0].broken.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pagestore.sessions[0].drained == []
    link.reads.give(1)
    await eventually(lambda: len(pagestore.sessions) == 2)
    assert pagestore.sessions[0].drained == [True]
    assert pagestore.sessions[1].prepared == [], "this agent does not prepare"


async def test_a_pagestore_that_is_not_there_yet_is_prepared_once_it_comes(
    pagestore: Pagestore, link: ArenaLink
) -> None:
    pagestore.failures_left = 2
    with pytest.raises(ServiceUnavailable):
        await link.prepare()
    await eventually(lambda: pagestore.sessions and pagestore.sessions[0].prepared == [0])


async def test_a_live_session_is_prepared_again_until_that_succeeds(pagestore: Pagestore, link: ArenaLink) -> None:
    pagestore.refusals_left = 3
    with pytest.raises(Overloaded):
        await link.prepare()
    (session,) = pagestore.sessions
    await eventually(lambda: session.prepared == [0])
    for _ in range(20):
        await asyncio.sleep(0)
    assert session.prepared == [0] and len(pagestore.sessions) == 1


async def test_a_reopened_session_is_prepared_again_until_that_succeeds(pagestore: Pagestore, link: ArenaLink) -> None:
    await link.prepare()
    pagestore.refusals_left = 2
    pagestore.sessions[0].broken.set()
    await eventually(lambda: len(pagestore.sessions) == 2 and pagestore.sessions[1].prepared == [0])
    assert pagestore.refusals_left == 0 and len(pagestore.sessions) == 2


async def test_a_closed_link_opens_nothing(pagestore: Pagestore, link: ArenaLink) -> None:
    await link.prepare()
    pagestore.sessions[0].broken.set()
    await link.close()
    opened = pagestore.attempts
    for _ in range(20):
        await asyncio.sleep(0)
    assert pagestore.attempts == opened


async def test_permits_come_back_when_slots_cannot_be_asked_for_or_used(pagestore: Pagestore, link: ArenaLink) -> None:
    pool = ArenaPool(link, KEYSPACE, SPEC)
    with pytest.raises(InvalidRequest):
        async for _ in pool.acquire(PAGES, 60):
            pass
    assert link.slots_out == 0
    with pytest.raises(LeaseLost):
        await pool.reserve(PAGES, bytes(16))
    assert link.slots_out == 0
    assert len(pagestore.sessions[0].given_back) == 1


async def test_requests_wait_a_bounded_time_for_a_pagestore_that_hangs_while_its_session_opens(
    pagestore: Pagestore, link: ArenaLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_pool, "CONNECT_WAIT_S", 0.0)
    pool = ArenaPool(link, KEYSPACE, SPEC)
    pagestore.serves.clear()
    for _ in range(3):
        with pytest.raises(ServiceUnavailable):
            await pool.reserve(PAGES, bytes(16))
        with pytest.raises(ServiceUnavailable):
            async for _answer in pool.acquire(PAGES, 60):
                pass
    assert pagestore.attempts == 1, "all wait for one opening, which none of them ends"
    pagestore.serves.set()
    await eventually(lambda: link.connected)
    assert pagestore.attempts == 1 and link.slots_out == 0


async def test_a_store_waits_one_bounded_time_for_a_pagestore_that_answers_no_reserve(
    pagestore: Pagestore, link: ArenaLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ArenaPool(link, KEYSPACE, SPEC)
    await pool.connect()
    monkeypatch.setattr(arena_pool, "RESERVE_WAIT_S", 0.0)
    pagestore.answers_reserves = False
    with pytest.raises(Overloaded):
        await pool.reserve(PAGES, bytes(16))
    assert link.slots_out == 0
