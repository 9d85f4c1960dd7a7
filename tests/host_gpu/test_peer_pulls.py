"""Pulls between ranks through real agents, on host memory: equal to a row by row copy, whatever the layouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvpool.client.sync import Pool
from kvpool.client.sync_peer_pulls import SyncPeerPulls
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.keyspace import KeyspaceSpec
from tests.fixtures import layout_presets as presets
from tests.fixtures.agent import CLIENT
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import Preset, equal, expected, peer_host

TIMEOUT_S = PATIENCE_S


def make_spec(*, layers: int = 2, heads: int = 2, dim: int = 16, latent: int = 0, **changes: Any) -> KeyspaceSpec:
    group = KvGroup.mla(layers, latent) if latent else KvGroup(layers, heads, dim)
    values: dict[str, Any] = {"model_id": "m", "model_revision": "r", "groups": (group,), "dtype": Dtype.BF16}
    return KeyspaceSpec(**(values | {"chunk_tokens": 32} | changes))


INT8 = make_spec(codec=Codec.INT8_GROUP8)
# Up to four parts of the heads: 16 KiB a head and chunk over 4 layers.
TP4 = make_spec(layers=4, heads=4, dim=64, dtype=Dtype.FP32)
OPAQUE = make_spec(
    payload=PayloadKind.OPAQUE, opaque=OpaqueLayout(engine="e", layout_id="l", isa="", block_tokens=8, cell_bytes=96)
)


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize(
    ("spec", "theirs", "their_rows", "own", "own_rows"),
    [
        pytest.param(make_spec(), presets.vllm_nhd_layout, 8, presets.vllm_nhd_layout, 8, id="alike"),
        pytest.param(make_spec(), presets.lightllm_layout, 1, presets.sglang_layout, 1, id="lightllm to sglang"),
        pytest.param(
            make_spec(dim=20), presets.vllm_hnd_layout, 4, presets.vllm_blocks_nhd_layout, 16, id="hnd to nhd"
        ),
        pytest.param(make_spec(latent=36), presets.mla_layout, 1, presets.mla_per_layer_layout, 8, id="mla"),
        pytest.param(INT8, presets.lightllm_quantized_layout, 1, presets.block_scales_layout, 8, id="scales apart"),
        pytest.param(INT8, presets.inline_scales_layout, 8, presets.lightllm_quantized_layout, 1, id="scales inline"),
    ],
)
async def test_all_requests_of_a_source_come_bit_for_bit(
    agents: int, spec: KeyspaceSpec, theirs: Preset, their_rows: int, own: Preset, own_rows: int
) -> None:
    async with peer_host(agents) as host:
        source = await host.rank(spec, theirs, block_tokens=their_rows, block_count=64 // their_rows)
        rank = await host.rank(spec, own, agent=agents - 1, block_tokens=own_rows, block_count=64 // own_rows)
        there, here = list(range(64 // their_rows)), list(range(64 // own_rows))[::-1]
        pulls = [
            rank.tokens(source, there, here, 13, source_first_token=their_rows - 1),
            # The same prefix for another request, behind the first one's blocks.
            rank.tokens(source, there[1:], here[-(-13 // own_rows) :], 9, destination_first_token=own_rows // 2),
        ]
        wanted = expected(rank, [(source, pull) for pull in pulls])
        before = [memory.copy() for memory in source.memory()]
        handle = rank.pull(*pulls)
        report = await handle.done(TIMEOUT_S)
        assert handle.hold_ended
        assert equal(rank, wanted)
        assert equal(source, before)
        row_bytes = sum(plane.row_bytes for layer in rank.layout.layers for plane in (*layer.planes, *layer.scales))
        assert report.size_bytes == 22 * row_bytes * spec.group.kv_heads
        assert [(part.layers, part.heads) for part in report.parts] == [(range(2), range(spec.group.kv_heads))] * 2
        assert rank.agent.metric("peer_pulled_bytes_total") == report.size_bytes
        assert rank.agent.metric("peer_pull_duration_seconds_count") == 1


async def test_opaque_cells_come_whole() -> None:
    async with peer_host() as host:
        source = await host.rank(OPAQUE, presets.vllm_cpu_opaque_layout)
        rank = await host.rank(OPAQUE, presets.vllm_cpu_opaque_layout)
        pull = rank.tokens(source, [3, 1, 2], [5, 0, 7], 24)
        for each in (rank, source):  # for the reference a block is one token
            each.layout = replace(each.layout, block_tokens=1)
        wanted = expected(rank, [(source, replace(pull, token_count=3))])
        await rank.pull(pull).done(TIMEOUT_S)
        assert equal(rank, wanted)


@pytest.mark.parametrize("agents", [1, 3])
@pytest.mark.parametrize("same_slots", [True, False])
async def test_ranks_of_a_tp_group_cover_the_heads_together(agents: int, same_slots: bool) -> None:
    async with peer_host(agents) as host:
        sources = [
            await host.rank(
                TP4, presets.vllm_nhd_layout, agent=part % agents, heads=range(2 * part, 2 * part + 2), block_count=4
            )
            for part in range(2)
        ]
        rank = await host.rank(TP4, presets.vllm_hnd_layout, agent=agents - 1, block_tokens=4, block_count=8)
        blocks = [[2, 0], [2, 0] if same_slots else [1, 3]]
        pulls = [rank.tokens(source, own, [7, 1, 4], 11) for source, own in zip(sources, blocks, strict=True)]
        wanted = expected(rank, list(zip(sources, pulls, strict=True)))
        report = await rank.pull(*pulls).done(TIMEOUT_S)
        assert equal(rank, wanted)
        assert [part.heads for part in report.parts] == [range(2), range(2, 4)]
        assert host.devices[agents - 1].launched == 1


async def test_a_rank_of_a_finer_split_takes_its_heads_of_a_coarser_one() -> None:
    async with peer_host() as host:
        source = await host.rank(TP4, presets.vllm_nhd_layout, heads=range(2, 4), block_count=4)
        rank = await host.rank(TP4, presets.sglang_layout, heads=range(3, 4), block_count=4)
        pull = rank.tokens(source, [3, 2], [0, 1], 10)
        wanted = expected(rank, [(source, pull)])
        report = await rank.pull(pull).done(TIMEOUT_S)
        assert equal(rank, wanted)
        assert report.parts[0].heads == range(3, 4)


async def test_part_of_the_heads_is_enough_if_the_caller_says_so() -> None:
    async with peer_host() as host:
        source = await host.rank(TP4, presets.vllm_nhd_layout, heads=range(2, 4), block_count=4)
        rank = await host.rank(TP4, presets.vllm_nhd_layout, block_count=4)
        pull = rank.tokens(source, [3, 2], [0, 1], 10)
        wanted = expected(rank, [(source, pull)])
        await rank.pull(pull, partial=True).done(TIMEOUT_S)
        assert equal(rank, wanted)


async def test_a_lent_cache_is_mapped_once_for_many_pulls() -> None:
    async with peer_host(2) as host:
        source = await host.rank(make_spec(), presets.vllm_nhd_layout)
        rank = await host.rank(make_spec(), presets.vllm_nhd_layout, agent=1)
        handles = [rank.pull(rank.tokens(source, [number], [number], 8)) for number in range(4)]
        for handle in handles:
            await handle.done(TIMEOUT_S)
        assert host.devices[1].peer_mappings == 2  # the source and the rank itself
        assert host.devices[0].peer_mappings == 0


async def test_an_engine_without_an_event_loop_pulls() -> None:
    async with peer_host() as host:
        spec = make_spec()
        source = await host.rank(spec, presets.vllm_nhd_layout)
        rank = await host.rank(spec, presets.vllm_nhd_layout)
        await rank.session.close()
        pull = rank.tokens(source, [3], [1], 8)
        wanted = expected(rank, [(source, pull)])

        def use_pool() -> int:
            with Pool(rank.session._plan, CLIENT) as pool:
                pulls = SyncPeerPulls(pool, rank.agent.endpoint, CLIENT)
                ticket = pulls.begin([pull])
                size_bytes = ticket.report(TIMEOUT_S).size_bytes
                assert ticket.wait_hold(TIMEOUT_S)
                ticket.cancel()
                pulls.close()
                return size_bytes

        assert await asyncio.to_thread(use_pool) == 8 * 2 * 2 * 2 * 32
        assert equal(rank, wanted)
