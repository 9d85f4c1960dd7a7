"""Pulls that are refused, each by the name of the argument, before anything is launched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from kvpool.client.engine_registration import GpuRegion
from kvpool.client.gpuagent_control import AgentControl
from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import (
    InvalidRequest,
    KeyspaceMismatch,
    KvPoolError,
    NotServed,
    Overloaded,
    ServiceUnavailable,
    SessionUnknown,
    TenantDenied,
)
from kvpool.core.geometry import KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.ipc import EngineEvent, IpcMemory
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent.core.pulls import SourceName, TokenPull, WantedPull
from kvpool_gpuagent.servicer import SharedCaches
from tests.fixtures import layout_presets as presets
from tests.fixtures.agent import CLIENT, EngineProcess, World, running_agent
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import Rank, peer_host

TIMEOUT_S = PATIENCE_S
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)
TP4 = replace(SPEC, groups=(KvGroup(4, 4, 64),), dtype=Dtype.FP32)
INT8 = replace(SPEC, codec=Codec.INT8_GROUP8)
OPAQUE = replace(
    SPEC,
    payload=PayloadKind.OPAQUE,
    opaque=OpaqueLayout(engine="e", layout_id="l", isa="", block_tokens=8, cell_bytes=96),
)

Pull = gpuagent_pb2.PeerPull
Request = gpuagent_pb2.PeerPullRequest


def change(**values: object) -> Callable[[Request], None]:
    """Of the first pull."""

    def apply(request: Request) -> None:
        for name, value in values.items():
            setattr(request.pulls[0], name, value)

    return apply


def change_request(**values: object) -> Callable[[Request], None]:
    def apply(request: Request) -> None:
        for name, value in values.items():
            setattr(request, name, value)

    return apply


def twice(request: Request) -> None:
    request.pulls.append(request.pulls[0])


def none(request: Request) -> None:
    del request.pulls[:]


def many(request: Request) -> None:
    request.pulls.extend([request.pulls[0]] * 4096)


def many_tokens(request: Request) -> None:
    request.pulls[0].token_count = 1 << 20
    request.pulls.append(request.pulls[0])


def many_sources(request: Request) -> None:
    for number in range(64):
        request.pulls.add(source_session_id=bytes([number] * 16), token_count=1)


def own_session(request: Request) -> None:
    request.pulls[0].source_session_id = request.session_id


def blocks(*ids: int) -> bytes:
    return b"".join(number.to_bytes(8, "little", signed=True) for number in ids)


async def refused(rank: Rank, request: Request, error: type[KvPoolError], named: str) -> None:
    with pytest.raises(error, match=named):
        await rank.control.peer_pull(request, timeout_s=TIMEOUT_S)


def request_of(rank: Rank, source: Rank, pull_id: int = 1) -> Request:
    pull = Pull(
        source_session_id=source.session.session_id,
        source_block_ids=blocks(3, 1),
        destination_block_ids=blocks(0, 7),
        token_count=11,
    )
    return Request(session_id=rank.session.session_id, pull_id=pull_id, pulls=[pull])


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (change_request(session_id=b"short"), InvalidRequest, "session_id must be 16 bytes"),
        (change_request(session_id=b"x" * 16), SessionUnknown, "no session"),
        (change_request(pull_id=0), InvalidRequest, "pull_id must be > 0"),
        (change_request(wait_ms=-1), InvalidRequest, "wait_ms must lie in"),
        (none, InvalidRequest, "pulls must be 1 to 4096, got 0"),
        (many, InvalidRequest, "pulls must be 1 to 4096, got 4097"),
        (many_tokens, InvalidRequest, "at most 1048576 are allowed"),
        (many_sources, InvalidRequest, "name 65 sources, at most 64"),
        (own_session, InvalidRequest, r"pulls\[0\]\.source_session_id is the destination's own session"),
        (change(source_session_id=b"x"), InvalidRequest, r"pulls\[0\]\.source_session_id must have 16 bytes"),
        (change(source_session_id=b"x" * 16), SessionUnknown, r"pulls\[0\]\.source_session_id: this agent has no"),
        (change(source_agent="10.0.0.1:1"), InvalidRequest, r"pulls\[0\]\.source_agent must be unix:/path"),
        (change(source_agent="unix:/nowhere/agent.sock"), ServiceUnavailable, "connect"),
        (change(token_count=0), InvalidRequest, r"pulls\[0\]\.token_count must be > 0"),
        (change(token_count=17), InvalidRequest, r"pulls\[0\]\.source_block_ids has 2 blocks, the tokens need 3"),
        (change(source_first_token=8), InvalidRequest, r"pulls\[0\]\.source_first_token must lie in \[0, 8\)"),
        (change(destination_first_token=-1), InvalidRequest, r"pulls\[0\]\.destination_first_token must lie in"),
        (change(source_block_ids=blocks(3, 8)), InvalidRequest, r"source_block_ids must lie in \[0, 8\), got 8"),
        (change(source_block_ids=b"123"), InvalidRequest, "source_block_ids must be little-endian int64, got 3"),
        (change(destination_block_ids=blocks(-1, 0)), InvalidRequest, r"destination_block_ids must lie .*got -1"),
        (change(destination_block_ids=blocks(5, 5)), InvalidRequest, r"pulls\[0\]\..*slot 40 is written twice"),
        (twice, InvalidRequest, "slot 0 is written twice; destinations must be distinct"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(
    change: Callable[[Request], None], error: type[KvPoolError], named: str
) -> None:
    async with peer_host() as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout)
        rank = await host.rank(SPEC, presets.vllm_nhd_layout)
        request = request_of(rank, source)
        change(request)
        await refused(rank, request, error, named)
        assert host.devices[0].launched == 0
        # And nothing is left of it: the same numbers serve again.
        await rank.control.peer_pull(request_of(rank, source), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("agents", [1, 2])
async def test_another_keyspace_is_refused(agents: int) -> None:
    async with peer_host(agents) as host:
        source = await host.rank(replace(SPEC, salt=b"s"), presets.vllm_nhd_layout, keyspace_name="other")
        rank = await host.rank(SPEC, presets.vllm_nhd_layout, agent=agents - 1)
        with pytest.raises(KeyspaceMismatch, match="another keyspace"):
            await rank.pull(rank.tokens(source, [1], [1], 8)).done(TIMEOUT_S)
        assert all(device.peer_mappings == 0 for device in host.devices)


@pytest.mark.parametrize("agents", [1, 2])
async def test_rows_of_another_kind_are_refused(agents: int) -> None:
    async with peer_host(agents) as host:
        source = await host.rank(INT8, presets.vllm_nhd_layout)
        rank = await host.rank(INT8, presets.inline_scales_layout, agent=agents - 1)
        named = r"pulls\[0\]\.source_session_id: its cache holds rows as the model has them, the destination's rows as"
        with pytest.raises(InvalidRequest, match=named):
            await rank.pull(rank.tokens(source, [1], [1], 8)).done(TIMEOUT_S)


async def test_heads_must_be_in_common_complete_and_not_twice() -> None:
    async with peer_host() as host:
        halves = [
            await host.rank(TP4, presets.vllm_nhd_layout, heads=range(2 * half, 2 * half + 2)) for half in range(2)
        ]
        whole = await host.rank(TP4, presets.vllm_nhd_layout)
        rank = await host.rank(TP4, presets.vllm_nhd_layout)
        with pytest.raises(InvalidRequest, match=r"the source has heads \[2, 4\), the destination \[0, 2\): none in"):
            await halves[0].pull(halves[0].tokens(halves[1], [1], [1], 8)).done(TIMEOUT_S)
        with pytest.raises(InvalidRequest, match=r"slot 8 would get only 8 of 16 .*or set partial"):
            await rank.pull(rank.tokens(halves[1], [1], [1], 8)).done(TIMEOUT_S)
        both = [rank.tokens(halves[0], [1], [1], 8), rank.tokens(halves[1], [1], [1], 7)]
        with pytest.raises(InvalidRequest, match="slot 15 would get only 8 of 16"):
            await rank.pull(*both).done(TIMEOUT_S)
        with pytest.raises(InvalidRequest, match=r"pulls\[1\].*slot 15 is written twice"):
            pulls = rank.tokens(halves[0], [1], [1], 8), rank.tokens(whole, [1], [1], 1, destination_first_token=7)
            await rank.pull(*pulls, partial=True).done(TIMEOUT_S)
        assert host.devices[0].launched == 0


async def test_cells_that_cannot_be_taken_apart_are_pulled_whole_or_not() -> None:
    async with peer_host() as host:
        source = await host.rank(OPAQUE, presets.vllm_cpu_opaque_layout)
        rank = await host.rank(OPAQUE, presets.vllm_cpu_opaque_layout)
        changes = ((7, 0, 0), (8, 1, 0), (8, 0, 1))
        for count, first, own_first in changes:
            pull = rank.tokens(
                source, [1, 2], [1, 2], count, source_first_token=first, destination_first_token=own_first
            )
            with pytest.raises(InvalidRequest, match="must be multiples of 8: cells are whole"):
                await rank.pull(pull).done(TIMEOUT_S)


async def test_memory_that_is_the_destinations_own_is_refused_however_it_is_named() -> None:
    async with peer_host(2) as host:
        rank = await host.rank(SPEC, presets.vllm_nhd_layout)
        twin = Rank(host.gpu, SPEC, rank.layout, host.agents[1], "twin")
        for region in twin.regions:
            region.close()
        twin.regions = rank.regions
        exported = {id(region): memory for region, memory in zip(rank.regions, exports(rank), strict=True)}
        host.gpu.export = lambda region: exported[id(region)]  # type: ignore[method-assign]  # both of one engine
        await twin.open()
        with pytest.raises(InvalidRequest, match=r"pulls\[0\]\.source_session_id lends the destination's own memory"):
            await rank.pull(rank.tokens(twin, [1], [2], 8)).done(TIMEOUT_S)
        await twin.session.close()
        await twin.control.close()


def exports(rank: Rank) -> list[IpcMemory]:
    """What the rank registered."""
    return [region.memory for region in rank.session._plan.regions if isinstance(region, GpuRegion)]


async def test_an_agent_on_the_cpu_says_that_it_does_not_serve_pulls() -> None:
    async with running_agent(World()) as agent:
        engines = [EngineProcess(agent.endpoint) for _ in range(2)]
        sessions = [await engine.open() for engine in engines]
        control = AgentControl(agent.endpoint, CLIENT)
        pull = Pull(
            source_session_id=sessions[0].session_id,
            source_block_ids=blocks(0),
            destination_block_ids=blocks(0),
            token_count=8,
        )
        request = Request(session_id=sessions[1].session_id, pull_id=1, pulls=[pull])
        with pytest.raises(NotServed, match=r"PeerPull copies between GPUs.*load from staging"):
            await control.peer_pull(request, timeout_s=TIMEOUT_S)
        await control.close()
        for session, engine in zip(sessions, engines, strict=True):
            await session.close()
            engine.close()


async def test_caches_are_lent_within_their_tenant_only() -> None:
    async with peer_host() as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout)
        borrow = gpuagent_pb2.BorrowCache(session_id=source.session.session_id, keyspace_id=source.session.keyspace)
        sent: list[gpuagent_pb2.LendCacheResponse] = []

        async def requests() -> AsyncIterator[gpuagent_pb2.LendCacheRequest]:
            yield gpuagent_pb2.LendCacheRequest(borrow=borrow)

        async def write(response: gpuagent_pb2.LendCacheResponse) -> None:
            sent.append(response)

        with pytest.raises(TenantDenied):
            await SharedCaches(host.agents[0].engine, lambda: "other").serve(requests(), write)
        assert not sent
        await SharedCaches(host.agents[0].engine, lambda: "default").serve(requests(), write)
        assert sent[0].lent.layout.block_tokens == 8


async def test_pulls_that_wait_for_events_nobody_announces_are_bounded_too() -> None:
    async with peer_host(max_running_requests=1) as host:
        source, rank = await host.rank(SPEC, presets.vllm_nhd_layout), await host.rank(SPEC, presets.vllm_nhd_layout)
        pulls = host.agents[0].engine.pulls
        session = next(each for each in host.agents[0].engine.sessions if each.session_id == rank.session.session_id)

        def wanted(number: int, generation: int) -> WantedPull:
            name = SourceName(source.session.session_id, "")
            pull = TokenPull(
                source=name,
                source_block_ids=bytes(8),
                source_first_token=0,
                destination_block_ids=bytes(8),
                destination_first_token=0,
                token_count=8,
            )
            after = EngineEvent(slot=0, generation=generation) if generation else None
            return WantedPull(pull_id=number, pulls=(pull,), after=after, wait_ms=60_000, partial=False)

        waiting = [asyncio.ensure_future(pulls.pull(session.session_id, wanted(number, 99))) for number in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 pulls into this session run or wait"):
            await asyncio.wait_for(pulls.pull(session.session_id, wanted(3, 0)), TIMEOUT_S)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await pulls.pull(session.session_id, wanted(4, 0))).moved.size_bytes
