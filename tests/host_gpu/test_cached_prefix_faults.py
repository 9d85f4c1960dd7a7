"""Loads from GPU caches that end early or fail: whose blocks may be used when, and what counts, whatever ends first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.core.elements import Dtype
from kvpool.core.errors import DeadlineExceeded, Stopped
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import eventually
from kvpool_gpuagent.adapters.gpu import peers as gpu_peers
from tests.fixtures import layout_presets as presets
from tests.fixtures.kv_memory import loaded
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import CHUNKS, PeerHost, Rank, equal, peer_host

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)


async def two_ranks(host: PeerHost) -> tuple[Rank, Rank]:
    """A source that has announced all chunks, and a rank at the last agent."""
    source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=32)
    rank = await host.rank(SPEC, presets.vllm_nhd_layout, agent=len(host.agents) - 1, block_count=32)
    source.announce()
    await host.announced()
    return source, rank


async def kill(rank: Rank) -> None:
    await rank.kill()


async def close(rank: Rank) -> None:
    await rank.session.close()


@pytest.mark.parametrize(("agents", "starts_again"), [(1, False), (2, False), (2, True)])
async def test_what_comes_from_an_engine_that_dies_meanwhile_does_not_count(agents: int, starts_again: bool) -> None:
    async with peer_host(agents) as host:
        source, rank = await two_ranks(host)
        session = host.agents[0].engine.sessions[0]
        host.hold(agents - 1)
        handle = await rank.begin_load(rank.span())
        await host.copying(agents - 1)
        await kill(source)
        await eventually(lambda: not session.is_open)
        if starts_again:  # and has computed the same: it is another session all the same
            await source.open()
            source.announce()
            await host.announced(session=-1)
        # The copy reads, so the memory stays mapped, and the engine's blocks are not given back.
        assert not session.unmapped.is_set()
        assert not handle.released
        host.release(agents - 1)
        result = await handle.done(PATIENCE_S)
        assert (result.loaded_chunks, result.tokens.total) == (0, 0)
        assert result.error is not None
        await handle.wait_released()
        await asyncio.wait_for(session.unmapped.wait(), PATIENCE_S)
        await eventually(lambda: all(device.peer_mappings <= 1 for device in host.devices))
        assert rank.agent.metric("peer_pulled_bytes_total") == 0
        if starts_again:
            assert (await rank.load()).loaded_chunks == CHUNKS
            assert rank.rows(range(CHUNKS)) == source.rows(range(CHUNKS))
        else:
            assert await rank.sources() == []


@pytest.mark.parametrize("agents", [1, 2])
async def test_a_source_that_closes_stops_copies_that_have_not_begun(agents: int) -> None:
    async with peer_host(agents) as host:
        source, rank = await two_ranks(host)
        session = host.agents[0].engine.sessions[0]
        before = rank.rows(range(4, 8))
        host.hold(agents - 1)
        handles = [await rank.begin_load(rank.span())]
        await host.copying(agents - 1)
        handles.append(await rank.begin_load(rank.span(places=range(4, 8))))
        await eventually(lambda: host.devices[-1].launched == 2)  # it is in line behind the first one
        closing = asyncio.ensure_future(source.session.close())
        await eventually(lambda: not session.is_open and all(stop.cancelled for stop in host.devices[-1].stops))
        assert not closing.done()
        host.release(agents - 1)
        assert [(await handle.done(PATIENCE_S)).loaded_chunks for handle in handles] == [0, 0]
        assert rank.rows(range(4, 8)) == before
        assert await closing


@pytest.mark.parametrize("end", [close, kill])
async def test_a_destination_that_ends_waits_for_its_copies(end: Callable[[Rank], Any]) -> None:
    async with peer_host() as host:
        _, rank = await two_ranks(host)
        session = host.agents[0].engine.sessions[1]
        host.hold()
        handle = await rank.begin_load(rank.span())
        await host.copying()
        ending = asyncio.ensure_future(end(rank))
        await eventually(lambda: not session.is_open)
        assert not session.unmapped.is_set()
        assert not handle.released
        host.release()
        await ending
        await asyncio.wait_for(handle.wait_released(), PATIENCE_S)
        await asyncio.wait_for(session.unmapped.wait(), PATIENCE_S)


async def test_a_copy_comes_after_the_destinations_work() -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        event = rank.record()
        wanted = loaded(rank, [(source, source.blocks_of(range(CHUNKS)))], rank.blocks_of(range(CHUNKS)))
        before = [memory.copy() for memory in rank.memory()]
        handle = await rank.begin_load(rank.span(), after=event)
        rank.slots.give_back(event)
        await eventually(lambda: rank.agent.metric("active_requests", operation="load") == 1)
        assert equal(rank, before)
        rank.finish(event)
        assert (await handle.done(PATIENCE_S)).tokens.gpu == CHUNKS * 32
        assert equal(rank, wanted)
        await eventually(lambda: rank.slots.free_count == 2)


async def test_an_event_that_cannot_be_asked_fails_the_load_and_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer_host() as host:
        _, rank = await two_ranks(host)

        async def event_passed(slot: int) -> bool:
            raise RuntimeError("the driver is gone")

        monkeypatch.setattr(host.devices[0].caches[1], "event_passed", event_passed)
        event = rank.record()
        result = await rank.load(after=event)
        assert result.loaded_chunks == 0 and result.failed_chunks == tuple(range(CHUNKS))
        rank.finish(event)


@pytest.mark.parametrize("ends", ["source", "cancelled", "time is up"])
async def test_a_load_that_ends_before_its_copy_copies_nothing(ends: str) -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        event = rank.record()
        handle = await rank.begin_load(rank.span(), after=event, wait_s=0.02 if ends == "time is up" else PATIENCE_S)
        await eventually(lambda: rank.agent.metric("active_requests", operation="load") == 1 or ends == "time is up")
        if ends == "source":
            assert await source.session.close()
            rank.finish(event)
        elif ends == "cancelled":
            handle.cancel()
        result = await handle.done(PATIENCE_S)
        assert result.loaded_chunks == 0
        if ends != "source":
            assert isinstance(result.error, Stopped if ends == "cancelled" else DeadlineExceeded)
        assert handle.released
        assert host.devices[1].launched == 0
        rank.finish(event)
        rank.slots.give_back(event)
        await eventually(lambda: rank.slots.free_count == 2)


async def test_a_callers_deadline_ends_the_wait_and_not_the_hold() -> None:
    async with peer_host(2) as host:
        _, rank = await two_ranks(host)
        host.hold(1)
        handle = await rank.begin_load(rank.span())
        await host.copying(1)
        with pytest.raises(DeadlineExceeded):
            await handle.done(0.02)
        assert not handle.released
        host.release(1)
        assert (await handle.done(PATIENCE_S)).loaded_chunks == CHUNKS
        assert handle.released


def fail(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("an illegal memory access was encountered")


@contextmanager
def launches_fail(host: PeerHost) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_peers, "pull_rows", fail)
        yield


@contextmanager
def no_memory(host: PeerHost) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.devices[0].runtime, "_memory_bytes", 0)
        yield


@pytest.mark.parametrize("fault", [launches_fail, no_memory])
async def test_where_the_gpu_fails_the_pool_serves_and_the_next_load_comes_from_the_gpu(
    fault: Callable[[PeerHost], Any],
) -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        await (await source.session.store(source.span(range(3)))).done(PATIENCE_S)
        wanted = loaded(rank, [(source, source.blocks_of(range(3)))], rank.blocks_of(range(3)))
        with fault(host):
            result = await rank.load(range(3))
        assert (result.loaded_chunks, result.tokens.gpu) == (3, 0)
        assert result.tokens.staging == 3 * 32
        assert equal(rank, wanted)
        assert rank.agent.metric("failed_peer_pulls_total", reason="INTERNAL") == 1
        assert (await rank.load(range(3), range(4, 8))).tokens.gpu == 3 * 32
        assert rank.rows(range(4, 7)) == source.rows(range(3))


async def test_a_gpu_that_is_gone_is_told_and_copies_nothing_any_more() -> None:
    async with peer_host() as host:
        _, rank = await two_ranks(host)
        with launches_fail(host):
            host.devices[0].runtime.is_broken = True
            assert (await rank.load()).loaded_chunks == 0
            host.devices[0].runtime.is_broken = False
        (broken,) = host.devices[0].broken
        assert "restart the agent" in str(broken)
        assert (await rank.load()).loaded_chunks == 0
        assert len(host.devices[0].broken) == 1
        host.devices[0].broken.clear()
