"""Checks of a lent cache that get no answer, because the lender ends the loan or is gone, end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvpool.client.cache_loan import CacheLoan
from kvpool.client.session_stream import SessionStream
from kvpool.core.elements import Dtype
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, Stopped
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.v1.gpuagent_pb2 import LendCacheRequest
from tests.fixtures import layout_presets as presets
from tests.fixtures.agent import CLIENT
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import Rank, peer_host

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)


async def lender_ends(source: Rank, loan: CacheLoan) -> None:
    closing = asyncio.ensure_future(source.session.close())
    await asyncio.wait_for(loan.ended.wait(), PATIENCE_S)
    await loan.close()
    await closing


async def stream_breaks(source: Rank, loan: CacheLoan) -> None:
    await loan.close()


@pytest.mark.parametrize(("end", "error"), [(lender_ends, Stopped), (stream_breaks, ServiceUnavailable)])
async def test_checks_end_with_their_loan(
    end: Callable[[Rank, CacheLoan], Awaitable[None]], error: type[KvPoolError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peer_host() as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout)
        endpoint, session_id, keyspace = source.agent.endpoint, source.session.session_id, source.session.keyspace
        loan = await CacheLoan.open(endpoint, session_id, keyspace, CLIENT, timeout_s=PATIENCE_S)
        assert (await loan.check([0, 1], PATIENCE_S)).size == 2
        send = SessionStream.send

        def send_no_check(stream: SessionStream[Any, Any], *messages: Any) -> None:
            if not any(isinstance(message, LendCacheRequest) for message in messages):
                send(stream, *messages)

        with monkeypatch.context() as patch:
            patch.setattr(SessionStream, "send", send_no_check)
            checks = [asyncio.ensure_future(loan.check([0], PATIENCE_S)) for _ in range(2)]
            with pytest.raises(DeadlineExceeded):
                await loan.check([0], 0.001)
        assert not any(check.done() for check in checks)
        await end(source, loan)
        for check in checks:
            with pytest.raises(error):
                await asyncio.wait_for(check, PATIENCE_S)
