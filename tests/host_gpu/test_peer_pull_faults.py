"""Pulls that end early: whose slots may be used when, and what counts, whatever ends first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool.client.cache_loan import CacheLoan
from kvpool.client.peer_pulls import PullHandle, TokenPull
from kvpool.core.elements import Dtype
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KeyspaceMismatch,
    KvPoolError,
    Overloaded,
    ServiceUnavailable,
    SessionUnknown,
    Stopped,
)
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert_engine import engine_event_to_proto
from kvpool_gpuagent.adapters.gpu import peers as gpu_peers
from tests.fixtures import layout_presets as presets
from tests.fixtures.agent import CLIENT
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import PeerHost, Rank, equal, expected, peer_host

TIMEOUT_S = PATIENCE_S
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)


async def two_ranks(host: PeerHost) -> tuple[Rank, Rank]:
    """Source and destination; the destination is the last agent's."""
    source = await host.rank(SPEC, presets.vllm_nhd_layout)
    return source, await host.rank(SPEC, presets.vllm_nhd_layout, agent=len(host.agents) - 1)


def request_of(rank: Rank, source: Rank, pull_id: int, **changes: Any) -> gpuagent_pb2.PeerPullRequest:
    pull = gpuagent_pb2.PeerPull(
        source_session_id=source.session.session_id,
        source_block_ids=bytes(8),
        destination_block_ids=bytes(8),
        token_count=8,
    )
    return gpuagent_pb2.PeerPullRequest(session_id=rank.session.session_id, pull_id=pull_id, pulls=[pull], **changes)


async def copying(rank: Rank, source: Rank, pull: TokenPull) -> PullHandle:
    """A pull whose kernel runs: the bytes have come, but not its end."""
    wanted = expected(rank, [(source, pull)])
    handle = rank.pull(pull)
    await eventually(lambda: equal(rank, wanted))
    return handle


async def kill(rank: Rank) -> None:
    """As if its process had ended."""
    await rank.session._stream.abort("killed")


@pytest.mark.parametrize("agents", [1, 2])
async def test_a_pull_from_an_engine_that_dies_meanwhile_does_not_count(agents: int) -> None:
    async with peer_host(agents) as host:
        source, rank = await two_ranks(host)
        sessions = [agent.engine.sessions[0] for agent in host.agents]
        host.hold(agents - 1)
        handle = await copying(rank, source, rank.tokens(source, [1, 2], [3, 4], 16))
        await kill(source)
        await eventually(lambda: not sessions[0].is_open)
        # The copy runs, so the source's session has not ended, and nobody is told that it has let go.
        await rank.control.status()
        assert not sessions[0].unmapped.is_set()
        assert not handle.hold_ended
        host.release(agents - 1)
        with pytest.raises((Stopped, ServiceUnavailable)):
            await handle.done(TIMEOUT_S)
        await handle.wait_hold()
        await asyncio.wait_for(sessions[0].unmapped.wait(), TIMEOUT_S)
        await eventually(lambda: all(device.peer_mappings <= 1 for device in host.devices))
        assert rank.agent.metric("peer_pulled_bytes_total") == 0
        # And later ones are refused.
        with pytest.raises(SessionUnknown):
            await rank.pull(rank.tokens(source, [1], [3], 8)).done(TIMEOUT_S)


@pytest.mark.parametrize("agents", [1, 2])
async def test_a_source_that_closes_stops_pulls_that_have_not_begun(agents: int) -> None:
    async with peer_host(agents) as host:
        source, rank = await two_ranks(host)
        event = rank.record()
        handle = rank.pull(rank.tokens(source, [1], [3], 8), after=event)
        await eventually(lambda: rank.agent.metric("active_requests", operation="pull") == 1)
        await host.ranks[1].pull(rank.tokens(source, [1], [4], 8)).done(TIMEOUT_S)
        assert await source.session.close()
        with pytest.raises(Stopped):
            await handle.done(TIMEOUT_S)
        await handle.wait_hold()
        assert host.devices[-1].launched == 1
        rank.slots.give_back(event)
        await eventually(lambda: rank.slots.free_count == 2)


async def test_a_destination_that_closes_waits_for_its_pulls() -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        session = host.agents[0].engine.sessions[1]
        host.hold()
        handle = await copying(rank, source, rank.tokens(source, [1], [3], 8))
        closing = asyncio.ensure_future(rank.session.close())
        await eventually(lambda: not session.is_open)
        assert not session.unmapped.is_set()
        assert not handle.hold_ended
        host.release()
        assert await closing
        await handle.wait_hold()


async def test_a_pull_comes_after_the_destinations_work() -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        event = rank.record()
        pull = rank.tokens(source, [1, 2], [3, 4], 16)
        wanted = expected(rank, [(source, pull)])
        before = [memory.copy() for memory in rank.memory()]
        handle = rank.pull(pull, after=event)
        rank.slots.give_back(event)
        await eventually(lambda: rank.agent.metric("active_requests", operation="pull") == 1)
        assert equal(rank, before)
        assert rank.slots.free_count == 1
        rank.finish(event)
        await handle.done(TIMEOUT_S)
        assert equal(rank, wanted)
        await eventually(lambda: rank.slots.free_count == 2)


async def test_a_pull_may_come_before_the_word_of_its_event() -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        event = rank.record()
        rank.finish(event)
        request = request_of(rank, source, 1, after=engine_event_to_proto(event))
        calling = asyncio.ensure_future(rank.control.peer_pull(request, timeout_s=TIMEOUT_S))
        await eventually(lambda: rank.agent.metric("active_requests", operation="pull") == 1)
        assert host.devices[0].launched == 0
        rank.session.announce(event)
        assert (await calling).size_bytes
        rank.slots.give_back(event)
        await eventually(lambda: rank.slots.free_count == 2)
        with pytest.raises(InvalidRequest, match="event slot 7 does not exist"):
            await rank.control.peer_pull(
                request_of(rank, source, 2, after=gpuagent_pb2.EngineEvent(slot=7, generation=1)), timeout_s=TIMEOUT_S
            )


async def test_a_cancelled_pull_ends_at_once_before_its_copy_and_with_it_after() -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        event = rank.record()
        waiting = rank.pull(rank.tokens(source, [1], [3], 8), after=event)
        await eventually(lambda: rank.agent.metric("active_requests", operation="pull") == 1)
        waiting.cancel()
        with pytest.raises(Stopped):
            await waiting.done(TIMEOUT_S)
        await waiting.wait_hold()
        assert host.devices[0].launched == 0
        host.hold()
        handle = await copying(rank, source, rank.tokens(source, [1], [3], 8))
        handle.cancel()
        with pytest.raises(DeadlineExceeded):
            await handle.done(0.02)
        assert not handle.hold_ended
        host.release()
        await handle.done(TIMEOUT_S)
        await handle.wait_hold()
        rank.slots.give_back(event)
        await eventually(lambda: rank.slots.free_count == 2)


async def test_a_pull_that_was_ended_before_it_came_never_runs() -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        session_id = rank.session.session_id
        event = rank.record()
        rank.session.announce(event)
        rank.slots.give_back(event)
        await rank.session.match([])  # the announcement has arrived
        await rank.control.end_peer_pull(session_id, 7, event)
        await eventually(lambda: rank.slots.free_count == 2)
        for number in range(8, 1100):  # many of them are forgotten as one number
            await host.agents[0].engine.pulls.end(session_id, number, None)
        for number in (7, 500, 1099):
            with pytest.raises(Stopped, match="was ended before it came"):
                await rank.control.peer_pull(request_of(rank, source, number), timeout_s=TIMEOUT_S)
        assert host.devices[0].launched == 0
        await rank.control.peer_pull(request_of(rank, source, 2000), timeout_s=TIMEOUT_S)
        with pytest.raises(InvalidRequest, match="pull_id must be > 0"):
            await rank.control.end_peer_pull(session_id, 0)


async def test_pulls_of_a_session_are_bounded_and_have_one_number_each() -> None:
    async with peer_host(max_running_requests=1) as host:
        source, rank = await two_ranks(host)
        host.hold()
        first = asyncio.ensure_future(rank.control.peer_pull(request_of(rank, source, 1), timeout_s=TIMEOUT_S))
        await eventually(lambda: host.devices[0].launched == 1)
        with pytest.raises(InvalidRequest, match="pull_id 1 is that of a pull that runs"):
            await rank.control.peer_pull(request_of(rank, source, 1), timeout_s=TIMEOUT_S)
        with pytest.raises(Overloaded, match="1 pulls into this session run"):
            await rank.control.peer_pull(request_of(rank, source, 2), timeout_s=TIMEOUT_S)
        host.release()
        await first


async def test_a_gpu_that_fails_is_told_and_one_that_is_gone_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    async with peer_host() as host:
        source, rank = await two_ranks(host)
        with monkeypatch.context() as patch:
            patch.setattr(gpu_peers, "pull_rows", fail)
            with pytest.raises(KvPoolError, match="the GPU failed"):
                await rank.pull(rank.tokens(source, [1], [3], 8)).done(TIMEOUT_S)
            await rank.pull(rank.tokens(source, [1], [3], 8)).wait_hold()
        await rank.pull(rank.tokens(source, [1], [3], 8)).done(TIMEOUT_S)
        with monkeypatch.context() as patch:
            patch.setattr(gpu_peers, "pull_rows", fail)
            host.devices[0].runtime.is_broken = True
            with pytest.raises(KvPoolError, match="the GPU failed"):
                await rank.pull(rank.tokens(source, [1], [3], 8)).done(TIMEOUT_S)
            host.devices[0].runtime.is_broken = False
        assert len(host.devices[0].broken) == 1
        with pytest.raises(KvPoolError, match="restart the agent"):
            await rank.pull(rank.tokens(source, [1], [3], 8)).done(TIMEOUT_S)
        host.devices[0].broken.clear()


async def test_a_lender_waits_for_what_it_has_lent_and_says_whether_it_is_alive() -> None:
    async with peer_host() as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout)
        endpoint, session_id, keyspace = source.agent.endpoint, source.session.session_id, source.session.keyspace
        with pytest.raises(KeyspaceMismatch):
            await CacheLoan.open(endpoint, session_id, b"k" * 16, CLIENT, timeout_s=TIMEOUT_S)
        with pytest.raises(SessionUnknown):
            await CacheLoan.open(endpoint, b"s" * 16, keyspace, CLIENT, timeout_s=TIMEOUT_S)
        loan = await CacheLoan.open(endpoint, session_id, keyspace, CLIENT, timeout_s=TIMEOUT_S)
        assert loan.layout == source.layout
        await asyncio.gather(*(loan.check(TIMEOUT_S) for _ in range(3)))
        session = host.agents[0].engine.sessions[0]
        closing = asyncio.ensure_future(source.session.close())
        await asyncio.wait_for(loan.ended.wait(), TIMEOUT_S)
        with pytest.raises(Stopped):
            await loan.check(TIMEOUT_S)
        assert not session.unmapped.is_set()
        await loan.close()
        assert await closing


async def test_a_gpu_without_room_for_a_pulls_tables_refuses_it_and_serves_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        pull = rank.tokens(source, [1, 2], [3, 4], 16)
        wanted = expected(rank, [(source, pull)])
        with monkeypatch.context() as patch:
            patch.setattr(host.devices[0].runtime, "_memory_bytes", 0)
            with pytest.raises(KvPoolError, match="could not be prepared"):
                await rank.pull(pull).done(TIMEOUT_S)
        await rank.pull(pull).done(TIMEOUT_S)
        assert equal(rank, wanted)
