"""Caches leased from other agents: each request is answered for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import DeadlineExceeded, KeyspaceMismatch, Stopped
from kvpool.testing import eventually
from kvpool_gpuagent.core.cached_chunks import FoundChunks, HeldChunks, Share, SourceName
from kvpool_gpuagent.core.requests import Rank
from kvpool_gpuagent.engine import peers
from kvpool_gpuagent.engine.peers import PeerCacheTable, PeerPulls
from kvpool_gpuagent.engine.session import CacheUse
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import BlockIds
from tests.fixtures.patience import PATIENCE_S

RIGHT, WRONG = b"k" * 16, b"w" * 16


class Loan:
    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.layout = SimpleNamespace(validate=lambda spec: None)
        self.handles: tuple[Any, ...] = ()

    async def check(self, block_ids: BlockIds, timeout_s: float) -> BlockIds:
        return block_ids

    async def close(self) -> None:
        return None


class Agents:
    """Lend in one keyspace; answer once `may_answer`."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = 0
        self.lent: list[bytes] = []  # keyspaces

    async def lease(self, endpoint: str, session_id: bytes, keyspace: bytes, timeout_s: float) -> Any:
        self.asked += 1
        await self.may_answer.wait()
        if keyspace != RIGHT:
            raise KeyspaceMismatch("the session has another keyspace than the borrower's")
        self.lent.append(keyspace)
        return Loan()

    async def find(self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes, timeout_s: float) -> list[HeldChunks]:
        return []

    async def close(self) -> None:
        return None


@dataclass
class Cache:
    async def close(self) -> None:
        return None


class Device:
    async def map_peer(self, spec: object, layout: object, handles: object) -> Cache:
        return Cache()


def rank(keyspace: bytes) -> Rank:
    return cast(Rank, SimpleNamespace(keyspace=keyspace, spec=None))


def source(number: int) -> SourceName:
    return SourceName(number.to_bytes(16, "big"), "unix:/agent")


async def test_who_asks_in_another_keyspace_spoils_it_for_nobody() -> None:
    agents = Agents()
    table = PeerCacheTable(cast(Any, Device()), agents)
    wrong = asyncio.ensure_future(table.get(source(1), rank(WRONG)))
    right = [asyncio.ensure_future(table.get(source(1), rank(RIGHT))) for _ in range(2)]
    await eventually(lambda: agents.asked == 2)
    agents.may_answer.set()
    with pytest.raises(KeyspaceMismatch):
        await wrong
    first, second = await asyncio.gather(*right)
    assert first is second
    assert agents.lent == [RIGHT]
    assert agents.asked == 2
    await table.close()


async def test_a_cache_that_was_just_borrowed_is_not_given_back_for_those_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "MAX_LEASED_CACHES", 1)
    agents = Agents()
    agents.may_answer.set()
    table = PeerCacheTable(cast(Any, Device()), agents)
    first = await table.get(source(1), rank(RIGHT))
    with first.use(CancelToken()):
        second = await table.get(source(2), rank(RIGHT))
        with second.use(CancelToken()):
            assert not second.loan.ended.is_set()
    third = await table.get(source(3), rank(RIGHT))
    assert first.loan.ended.is_set()
    assert not third.loan.ended.is_set()
    await table.close()


async def test_a_loan_that_has_just_ended_is_not_handed_out_again() -> None:
    """The lender may have ended it within this very turn of the loop, before whoever keeps it has heard."""
    agents = Agents()
    agents.may_answer.set()
    table = PeerCacheTable(cast(Any, Device()), cast(Any, agents))
    first = await table.get(source(1), rank(RIGHT))
    first.loan.ended.set()
    second = await table.get(source(1), rank(RIGHT))
    assert second is not first and agents.asked == 2
    with second.use(CancelToken()):
        pass
    assert await table.get(source(1), rank(RIGHT)) is second
    await table.close()


class Shared:
    """A session that shares its cache."""

    def __init__(self) -> None:
        self.rank = SimpleNamespace(keyspace=RIGHT, spec=None)

    @contextmanager
    def share(self) -> Iterator[CacheUse]:
        yield CacheUse(cast(Any, None), CancelToken())


async def test_a_load_does_not_wait_longer_for_another_agent_than_it_has_time() -> None:
    clock, agents = asyncio.get_running_loop().time, Agents()
    pulls = PeerPulls(cast(Any, None), cast(Any, Device()), agents, AgentMetrics(CollectorRegistry()))
    zero = np.zeros(1, dtype=np.int64)
    found = FoundChunks(zero, zero.reshape(1, 1), zero.reshape(1, 1))
    held = HeldChunks(source=source(1), layers=range(1), heads=range(1), scales=False, found=found)
    span = cast(Any, SimpleNamespace(skip_tokens=0, block_ids=zero.reshape(1, 1), chunk_count=1))
    pulling = pulls.pull(cast(Any, Shared()), span, [Share(held, zero)], CancelToken(), clock() + 0.02)
    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(PATIENCE_S):
            await pulling
    assert agents.asked == 1
    agents.may_answer.set()
    await pulls.close()


async def test_nothing_is_leased_after_the_close() -> None:
    """A match that has just asked other agents would have their caches mapped."""
    agents = Agents()
    agents.may_answer.set()
    table = PeerCacheTable(cast(Any, Device()), agents)
    await table.close()
    with pytest.raises(Stopped):
        await table.get(source(1), rank(RIGHT))
    assert agents.asked == 0
