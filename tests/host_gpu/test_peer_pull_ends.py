"""What a pull still holds when nobody waits for it any more."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.core.elements import Dtype
from kvpool.core.errors import (
    DeadlineExceeded,
)
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from tests.fixtures import layout_presets as presets
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import PeerHost, Rank, equal, expected, peer_host

TIMEOUT_S = PATIENCE_S
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)


async def two_ranks(host: PeerHost) -> tuple[Rank, Rank]:
    """Source and destination."""
    return await host.rank(SPEC, presets.vllm_nhd_layout), await host.rank(SPEC, presets.vllm_nhd_layout)


async def test_a_deadline_ends_the_wait_and_a_lost_answer_not_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        event = rank.record()
        with pytest.raises(DeadlineExceeded, match="not done within"):
            await rank.pull(rank.tokens(source, [1], [3], 8), after=event, wait_s=0.02).done(TIMEOUT_S)
        rank.finish(event)
        rank.slots.give_back(event)
        host.hold()
        pull = rank.tokens(source, [1], [3], 8)
        wanted = expected(rank, [(source, pull)])
        peer_pull = rank.control.peer_pull

        async def lose_the_answer(request: gpuagent_pb2.PeerPullRequest, *, timeout_s: float) -> None:
            calling = asyncio.ensure_future(peer_pull(request, timeout_s=timeout_s))
            await eventually(lambda: equal(rank, wanted))
            calling.cancel()
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s")

        monkeypatch.setattr(rank.control, "peer_pull", lose_the_answer)
        handle = rank.pull(pull)
        with pytest.raises(DeadlineExceeded):
            await handle.done(TIMEOUT_S)
        assert not handle.hold_ended
        host.release()
        await asyncio.wait_for(handle.wait_hold(), TIMEOUT_S)
