"""What is not copied out of GPU caches: other keyspaces, own memory, and what another agent says that does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.client.engine_registration import GpuRegion
from kvpool.core.elements import Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import KvGroup
from kvpool.core.ipc import IpcMemory
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.core.cached_chunks import HeldChunks
from kvpool_gpuagent.engine import host_caches
from tests.fixtures import layout_presets as presets
from tests.fixtures.agent import EngineProcess, World, prompt, run_store, running_agent
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import CHUNKS, Rank, peer_host

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)
THREES = np.zeros((CHUNKS, 3), np.int64)


@pytest.mark.parametrize("agents", [1, 2])
async def test_another_keyspace_is_no_source(agents: int) -> None:
    async with peer_host(agents) as host:
        source = await host.rank(replace(SPEC, salt=b"s"), presets.vllm_nhd_layout, block_count=16, keyspace_name="b")
        rank = await host.rank(SPEC, presets.vllm_nhd_layout, agent=agents - 1, block_count=16)
        source.announce()
        await host.announced()
        assert await rank.sources() == []
        assert (await rank.load()).loaded_chunks == 0
        assert all(device.launched == device.peer_mappings == 0 for device in host.devices)


def found_as(**values: Any) -> Callable[[HeldChunks], HeldChunks]:
    return lambda held: replace(held, found=replace(held.found, **values))


def block(value: int) -> Callable[[HeldChunks], HeldChunks]:
    """One of its blocks is another one."""

    def change(held: HeldChunks) -> HeldChunks:
        blocks = held.found.block_ids.copy()
        blocks[1, 2] = value
        return replace(held, found=replace(held.found, block_ids=blocks))

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (block(16), r"blocks.* must lie in \[0, 16\), got 16"),
        (block(-1), r"blocks.* must lie in \[0, 16\), got -1"),
        (lambda held: replace(held, heads=range(3)), r"heads \[0, 3\).*its layout has \[0, 2\)"),
        (lambda held: replace(held, layers=range(-1, 3)), r"layers \[-1, 3\).*its layout has \[0, 2\)"),
        (found_as(block_ids=THREES, generations=THREES), "3 blocks for each chunk, its layout needs 4"),
    ],
)
async def test_what_an_agent_says_that_does_not_fit_its_layout_is_refused_by_name(
    change: Callable[[HeldChunks], HeldChunks],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with peer_host(2) as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16)
        rank = await host.rank(SPEC, presets.vllm_nhd_layout, agent=1, block_count=16)
        source.announce()
        await host.announced()
        caches = host.agents[0].engine.caches
        held = caches.held
        monkeypatch.setattr(caches, "held", lambda *asked: [change(one) for one in held(*asked)])
        before = rank.rows(range(CHUNKS))
        assert (await rank.load()).loaded_chunks == 0
        assert rank.rows(range(CHUNKS)) == before
        assert host.devices[1].launched == 0
        (record,) = [one for one in caplog.records if "out of reach" in one.message]
        assert re.search(named, record.message)
        assert await rank.sources() == []  # and it is not asked again


async def test_memory_that_is_the_destinations_own_is_no_source_however_it_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with peer_host(2) as host:
        rank = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16)
        twin = Rank(host.gpu, SPEC, rank.layout, host.agents[1], "twin", engine_id=b"another")
        for region in twin.regions:
            region.close()
        twin.regions = rank.regions
        exported = {id(region): memory for region, memory in zip(rank.regions, exports(rank), strict=True)}
        host.gpu.export = lambda region: exported[id(region)]  # type: ignore[method-assign]  # both of one engine
        await twin.open()
        twin.announce()
        await host.announced(agent=1)
        assert (await rank.load()).loaded_chunks == 0
        assert "the destination's own memory" in caplog.text
        assert host.devices[0].launched == 0
        await twin.session.close()
        twin.generations.close()


def exports(rank: Rank) -> list[IpcMemory]:
    """What the rank registered."""
    return [region.memory for region in rank.registered.regions if isinstance(region, GpuRegion)]


async def test_an_agent_on_the_cpu_serves_such_loads_from_the_pool() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 3)
        engine.compute(chain, range(3))
        await run_store(session, engine.span(chain, range(3)))
        handle = await session.load(engine.span(chain, range(3), at=4), wait_s=PATIENCE_S, from_gpu=True)
        result = await handle.done(PATIENCE_S)
        assert (result.loaded_chunks, result.tokens.gpu) == (3, 0)
        assert engine.holds(chain, range(3), at=4)
        await session.close()
        engine.close()


@pytest.mark.parametrize(("left_out_s", "sources"), [(3600.0, []), (0.0, [(CHUNKS, "GPU")])])
async def test_a_source_that_could_not_be_mapped_is_left_out_for_a_while_by_the_session_that_tried(
    left_out_s: float, sources: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_caches, "OUT_OF_REACH_S", left_out_s)
    async with peer_host(2) as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16)
        rank, other = [await host.rank(SPEC, presets.vllm_nhd_layout, agent=1, block_count=16) for _ in range(2)]
        source.announce()
        await host.announced()
        device, map_peer = host.devices[1], host.devices[1].map_peer

        async def no_room(*arguments: Any) -> Any:
            raise InvalidRequest("out of memory")

        monkeypatch.setattr(device, "map_peer", no_room)
        assert await rank.sources() == []
        monkeypatch.setattr(device, "map_peer", map_peer)
        assert await rank.sources() == sources
        assert await other.sources() == [(CHUNKS, "GPU")]
