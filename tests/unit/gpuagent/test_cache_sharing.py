"""Caches shared with other agents: a borrower that misbehaves does not keep a session from ending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import DeadlineExceeded, Stopped
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent import servicer
from kvpool_gpuagent.engine.agent import GpuAgentEngine
from kvpool_gpuagent.engine.session import CacheUse
from kvpool_gpuagent.ports import EngineCache
from tests.fixtures.patience import PATIENCE_S


async def checks() -> AsyncIterator[gpuagent_pb2.LendCacheRequest]:
    for number in range(1, 1000):
        yield gpuagent_pb2.LendCacheRequest(check=gpuagent_pb2.CheckCache(number=number))
    await asyncio.Event().wait()


@pytest.mark.parametrize("reads", [0, 1])
async def test_a_borrower_that_reads_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    monkeypatch.setattr(servicer, "RETURN_TIMEOUT_S", 0.05)
    written: list[gpuagent_pb2.LendCacheResponse] = []
    is_stuck = asyncio.Event()

    async def write(response: gpuagent_pb2.LendCacheResponse) -> None:
        if len(written) == reads:
            is_stuck.set()
            await asyncio.Event().wait()
        written.append(response)

    use = CacheUse(cast(EngineCache, None), CancelToken())
    answering = asyncio.ensure_future(servicer._answer(checks(), write, use, lambda blocks: blocks))
    await is_stuck.wait()
    use.stop.cancel()
    with pytest.raises(Stopped):
        await asyncio.wait_for(answering, PATIENCE_S)


async def test_the_end_is_said_to_who_does_not_read_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "RETURN_TIMEOUT_S", 0.05)

    async def silent() -> AsyncIterator[gpuagent_pb2.LendCacheRequest]:
        await asyncio.Event().wait()
        yield gpuagent_pb2.LendCacheRequest()

    async def write(response: gpuagent_pb2.LendCacheResponse) -> None:
        await asyncio.Event().wait()

    use = CacheUse(cast(EngineCache, None), CancelToken())
    use.stop.cancel()
    with pytest.raises(Stopped, match="kept its cache"):
        await asyncio.wait_for(servicer._answer(silent(), write, use, lambda blocks: blocks), PATIENCE_S)


async def test_a_borrower_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "BORROW_TIMEOUT_S", 0.05)

    async def silent() -> AsyncIterator[gpuagent_pb2.LendCacheRequest]:
        await asyncio.Event().wait()
        yield gpuagent_pb2.LendCacheRequest()

    async def write(response: gpuagent_pb2.LendCacheResponse) -> None:
        raise AssertionError(response)

    lender = servicer.SharedCaches(cast(GpuAgentEngine, None), lambda: "")
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(lender.serve(silent(), write), PATIENCE_S)


async def test_a_borrower_that_does_not_take_the_cache_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of many layers is more than gRPC sends unread."""
    use, is_stuck = CacheUse(cast(EngineCache, None), CancelToken()), asyncio.Event()

    async def requests() -> AsyncIterator[gpuagent_pb2.LendCacheRequest]:
        yield gpuagent_pb2.LendCacheRequest(borrow=gpuagent_pb2.BorrowCache())
        await asyncio.Event().wait()

    async def write(response: gpuagent_pb2.LendCacheResponse) -> None:
        is_stuck.set()
        await asyncio.Event().wait()

    lender = servicer.SharedCaches(cast(GpuAgentEngine, None), lambda: "")
    session = SimpleNamespace(share=lambda: nullcontext(use), generations=None)
    monkeypatch.setattr(lender, "_shareable", lambda wanted: session)
    monkeypatch.setattr(servicer, "_lent", lambda session: gpuagent_pb2.LentCache())
    serving = asyncio.ensure_future(lender.serve(requests(), write))
    await is_stuck.wait()
    use.stop.cancel()
    with pytest.raises(Stopped):
        await asyncio.wait_for(serving, PATIENCE_S)
