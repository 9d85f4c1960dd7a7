"""Caches that agents lend each other, and what they say of them: within tenant and keyspace, until the session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpool.client.cache_loan import CacheLoan
from kvpool.core.elements import Dtype
from kvpool.core.errors import InvalidRequest, KeyspaceMismatch, KvPoolError, SessionUnknown, Stopped, TenantDenied
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent.servicer import SharedCaches
from tests.fixtures import layout_presets as presets
from tests.fixtures.agent import CLIENT
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import PeerHost, Rank, peer_host

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)
Request = gpuagent_pb2.LendCacheRequest


async def test_a_lender_waits_for_what_it_has_lent_and_says_whether_it_is_alive() -> None:
    async with peer_host() as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout)
        endpoint, session_id, keyspace = source.agent.endpoint, source.session.session_id, source.session.keyspace
        with pytest.raises(KeyspaceMismatch):
            await CacheLoan.open(endpoint, session_id, b"k" * 16, CLIENT, timeout_s=PATIENCE_S)
        with pytest.raises(SessionUnknown):
            await CacheLoan.open(endpoint, b"s" * 16, keyspace, CLIENT, timeout_s=PATIENCE_S)
        loan = await CacheLoan.open(endpoint, session_id, keyspace, CLIENT, timeout_s=PATIENCE_S)
        assert loan.layout == source.layout
        await asyncio.gather(*(loan.check([], PATIENCE_S) for _ in range(3)))
        session = host.agents[0].engine.sessions[0]
        closing = asyncio.ensure_future(source.session.close())
        await asyncio.wait_for(loan.ended.wait(), PATIENCE_S)
        with pytest.raises(Stopped):
            await loan.check([], PATIENCE_S)
        assert not session.unmapped.is_set()
        await loan.close()
        assert await closing


def borrow(source: Rank, **changes: bytes) -> Request:
    ids = {"session_id": source.session.session_id, "keyspace_id": source.session.keyspace}
    return Request(borrow=gpuagent_pb2.BorrowCache(**(ids | changes)))


def check(number: int, block_ids: bytes = b"") -> Request:
    return Request(check=gpuagent_pb2.CheckCache(number=number, block_ids=block_ids))


async def serve(host: PeerHost, *requests: Request, tenant: str = "default") -> list[gpuagent_pb2.LendCacheResponse]:
    """The answers to a borrower that sends these messages and ends the stream."""
    sent: list[gpuagent_pb2.LendCacheResponse] = []

    async def messages() -> AsyncIterator[Request]:
        for request in requests:
            yield request

    async def write(response: gpuagent_pb2.LendCacheResponse) -> None:
        sent.append(response)

    await SharedCaches(host.agents[0].engine, lambda: tenant).serve(messages(), write)
    return sent


async def test_caches_are_lent_and_named_within_their_tenant_only() -> None:
    async with peer_host() as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout)
        with pytest.raises(TenantDenied):
            await serve(host, borrow(source), tenant="other")
        with pytest.raises(TenantDenied):
            SharedCaches(host.agents[0].engine, lambda: "other").find(gpuagent_pb2.FindCachedChunksRequest())
        (lent,) = await serve(host, borrow(source))
        assert lent.lent.layout.block_tokens == 8


async def test_what_a_borrower_sends_that_does_not_fit_is_refused_by_name() -> None:
    async with peer_host() as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout)
        cases: list[tuple[list[Request], type[KvPoolError], str]] = [
            ([], InvalidRequest, "must be `borrow`"),
            ([check(1)], InvalidRequest, "must be `borrow`"),
            ([borrow(source, session_id=b"short")], InvalidRequest, "session_id must be 16 bytes"),
            ([borrow(source, keyspace_id=b"short")], InvalidRequest, "keyspace_id must be 16 bytes"),
            ([borrow(source, session_id=b"x" * 16)], SessionUnknown, "no session"),
            ([borrow(source), check(0)], InvalidRequest, "check.number must be > 0"),
            ([borrow(source), check(1, b"123")], InvalidRequest, "check.block_ids"),
            ([borrow(source), check(1, (8).to_bytes(8, "little"))], InvalidRequest, r"must lie in \[0, 8\), got 8"),
        ]
        for requests, error, named in cases:
            with pytest.raises(error, match=named):
                await serve(host, *requests)
        wanted = gpuagent_pb2.FindCachedChunksRequest
        keyspace, most = source.session.keyspace, host.agents[0].engine.config.max_request_chunks
        for request, named in (
            (wanted(keyspace_id=b"short"), "keyspace_id must be 16 bytes"),
            (wanted(keyspace_id=keyspace, chunk_hashes=b"123"), "multiple of 16 bytes"),
            (wanted(keyspace_id=keyspace, chunk_hashes=bytes(16 * (most + 1))), f"at most {most} chunks"),
        ):
            with pytest.raises(InvalidRequest, match=named):
                SharedCaches(host.agents[0].engine, lambda: "default").find(request)
        # Every one was given back: else the agent would wait for it before it lets the engine's memory go.
        assert await source.session.close()
