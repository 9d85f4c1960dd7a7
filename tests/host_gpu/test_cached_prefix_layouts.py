"""Loads from GPU caches, whatever the two layouts: equal to a copy row by row, and no other byte changes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.adapters.gpu import peers as gpu_peers
from kvpool_gpuagent.kernels import peer_pull
from tests.fixtures import layout_presets as presets
from tests.fixtures.kv_memory import loaded
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import CHUNKS, PROMPT, Preset, equal, peer_host

ROWS = 192  # of each cache, in tokens
THERE, HERE = [3, 0, 5, 1], [1, 4, 0, 2]  # where the chunks lie


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
async def test_every_byte_comes_and_no_other_changes(
    agents: int, spec: KeyspaceSpec, theirs: Preset, their_rows: int, own: Preset, own_rows: int
) -> None:
    async with peer_host(agents) as host:
        source = await host.rank(spec, theirs, block_tokens=their_rows, block_count=ROWS // their_rows)
        rank = await host.rank(spec, own, agent=agents - 1, block_tokens=own_rows, block_count=ROWS // own_rows)
        source.announce(places=THERE)
        await host.announced()
        wanted = loaded(rank, [(source, source.blocks_of(THERE[1:]))], rank.blocks_of(HERE[1:]), skip=13)
        before = [memory.copy() for memory in source.memory()]
        result = await rank.load(range(1, CHUNKS), HERE, skip=13)
        assert (result.loaded_chunks, result.tokens.gpu) == (3, 3 * 32 - 13)
        assert equal(rank, wanted)
        assert equal(source, before)
        row_bytes = sum(plane.row_bytes for layer in rank.layout.layers for plane in (*layer.planes, *layer.scales))
        assert rank.agent.metric("peer_pulled_bytes_total") == (3 * 32 - 13) * row_bytes * spec.group.kv_heads
        assert rank.agent.metric("peer_pull_duration_seconds_count") == 1


async def test_opaque_cells_come_whole() -> None:
    async with peer_host() as host:
        source = await host.rank(OPAQUE, presets.vllm_cpu_opaque_layout, block_count=ROWS // 8)
        rank = await host.rank(OPAQUE, presets.vllm_cpu_opaque_layout, block_count=ROWS // 8)
        source.announce(places=THERE)
        await host.announced()
        wanted = loaded(rank, [(source, source.blocks_of(THERE))], rank.blocks_of(HERE), skip=2)
        assert (await rank.load(places=HERE, skip=16)).tokens.gpu == CHUNKS * 32 - 16
        assert equal(rank, wanted)


@pytest.mark.parametrize("agents", [1, 3])
@pytest.mark.parametrize("same_blocks", [True, False])
async def test_ranks_of_a_tp_group_cover_the_heads_together(agents: int, same_blocks: bool) -> None:
    async with peer_host(agents) as host:
        sources = [
            await host.rank(
                TP4, presets.vllm_nhd_layout, agent=part % agents, heads=range(2 * part, 2 * part + 2), block_count=16
            )
            for part in range(2)
        ]
        rank = await host.rank(TP4, presets.vllm_hnd_layout, agent=agents - 1, block_tokens=4, block_count=32)
        places = [[2, 0], [2, 0] if same_blocks else [1, 3]]
        for number, (source, own) in enumerate(zip(sources, places, strict=True)):
            source.announce(PROMPT.hashes[:2], own)
            await host.announced(2, agent=number % agents, session=number if agents == 1 else 0)
        theirs = [(source, source.blocks_of(own)) for source, own in zip(sources, places, strict=True)]
        wanted = loaded(rank, theirs, rank.blocks_of([3, 1]), skip=21)
        assert (await rank.load(range(2), [3, 1, 0, 2], skip=21)).loaded_chunks == 2
        assert equal(rank, wanted)
        assert host.devices[agents - 1].launched == 1


async def test_a_rank_of_a_finer_split_takes_its_heads_of_a_coarser_one() -> None:
    async with peer_host() as host:
        source = await host.rank(TP4, presets.vllm_nhd_layout, heads=range(2, 4), block_count=16)
        rank = await host.rank(TP4, presets.sglang_layout, heads=range(3, 4), block_count=16)
        source.announce()
        await host.announced()
        wanted = loaded(rank, [(source, source.blocks_of(range(2)))], rank.blocks_of(range(2)))
        assert (await rank.load(range(2))).tokens.gpu == 2 * 32
        assert equal(rank, wanted)


async def test_a_lent_cache_is_mapped_once_for_many_loads() -> None:
    async with peer_host(2) as host:
        source = await host.rank(make_spec(), presets.vllm_nhd_layout, block_count=16)
        rank = await host.rank(make_spec(), presets.vllm_nhd_layout, agent=1, block_count=16)
        source.announce()
        await host.announced()
        handles = [await rank.begin_load(rank.span(range(number, number + 1))) for number in range(CHUNKS)]
        for handle in handles:
            assert (await handle.done(PATIENCE_S)).tokens.gpu == 32
        assert host.devices[1].peer_mappings == 2  # the source and the rank itself
        assert host.devices[0].peer_mappings == 0


@pytest.mark.parametrize(
    ("theirs", "own", "skip", "runs"),
    [
        pytest.param(presets.vllm_blhnc_layout, presets.vllm_blhnc_layout, 0, [8], id="whole blocks"),
        pytest.param(presets.vllm_blhnc_layout, presets.vllm_blhnc_layout, 5, [7], id="a block in part"),
        pytest.param(presets.vllm_blhnc_layout, presets.vllm_lbnhc_layout, 5, [], id="short runs"),
    ],
)
async def test_the_kernel_moves_only_what_has_no_long_runs(
    theirs: Preset, own: Preset, skip: int, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def pull_rows(slots: Tensor, *arguments: Any, **options: Any) -> None:
        launched.append(len(slots))
        peer_pull.pull_rows(slots, *arguments, **options)

    monkeypatch.setattr(gpu_peers, "pull_rows", pull_rows)
    monkeypatch.setattr(gpu_peers, "PEER_RUN_BYTES", 4 << 10)
    spec = make_spec(layers=4)  # 512 bytes a token
    async with peer_host(2) as host:
        source = await host.rank(spec, theirs, block_count=ROWS // 8)
        rank = await host.rank(spec, own, agent=1, block_count=ROWS // 8)
        source.announce(PROMPT.hashes[:2], [3, 0])
        await host.announced(2)
        wanted = loaded(rank, [(source, source.blocks_of([3, 0]))], rank.blocks_of([1, 2]), skip=skip)
        assert (await rank.load(range(2), [1, 2, 0, 3], skip=skip)).tokens.gpu == 64 - skip
        assert equal(rank, wanted)
        assert host.devices[1].runtime.copied_runs == runs
        assert launched == [-skip % 8 if runs else 64 - skip]


@pytest.mark.parametrize(
    ("spec", "preset", "rows", "heads"),
    [
        pytest.param(make_spec(), presets.lightllm_layout, 1, range(2), id="a block for each token"),
        pytest.param(make_spec(latent=36), presets.mla_per_layer_layout, 8, range(1), id="mla"),
        pytest.param(INT8, presets.block_scales_layout, 8, range(2), id="scales"),
        pytest.param(OPAQUE, presets.vllm_cpu_opaque_layout, 8, range(2), id="opaque"),
        pytest.param(TP4, presets.vllm_blhnc_layout, 8, range(2, 4), id="half of the heads"),
        pytest.param(TP4, presets.vllm_nhd_layout, 16, range(1, 2), id="one head of four"),
    ],
)
async def test_runs_of_any_length_bring_the_same_bytes(
    spec: KeyspaceSpec, preset: Preset, rows: int, heads: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_peers, "PEER_RUN_BYTES", 1)
    async with peer_host(2) as host:
        source = await host.rank(spec, preset, block_tokens=rows, block_count=ROWS // rows)
        rank = await host.rank(spec, preset, agent=1, heads=heads, block_tokens=rows, block_count=ROWS // rows)
        source.announce(places=THERE)
        await host.announced()
        wanted = loaded(rank, [(source, source.blocks_of(THERE))], rank.blocks_of(HERE), skip=2 if spec.opaque else 16)
        assert (await rank.load(places=HERE, skip=16)).tokens.gpu == CHUNKS * 32 - 16
        assert equal(rank, wanted)
        assert host.devices[1].runtime.copied_runs
