"""The transfer engine on host memory: both paths, whatever the layout; stops, failures, small scratch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.elements import Dtype
from kvpool.core.errors import KvPoolError
from kvpool.core.geometry import AttentionKind, KvGroup
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import eventually
from tests.fixtures import layout_presets
from tests.fixtures.gpu_caches import batch_of, host_cache
from tests.fixtures.host_gpu import Path

CHUNK = 32
PATHS = pytest.mark.parametrize("path", Path)


def make_spec(
    *, layers: int = 2, heads: int = 2, dim: int = 16, latent: int = 0, chunk_tokens: int = CHUNK
) -> KeyspaceSpec:
    group = KvGroup(
        layers=layers,
        kv_heads=1 if latent else heads,
        head_dim=0 if latent else dim,
        latent_dim=latent,
        attention=AttentionKind.FULL,
    )
    return KeyspaceSpec(model_id="m", model_revision="r", groups=(group,), dtype=Dtype.BF16, chunk_tokens=chunk_tokens)


LAYOUTS = {
    "nhd": (make_spec(), layout_presets.vllm_nhd_layout),
    "hnd": (make_spec(), layout_presets.vllm_hnd_layout),
    "blhnc": (make_spec(), layout_presets.vllm_blhnc_layout),
    "lightllm": (make_spec(dim=40), layout_presets.lightllm_layout),
    "mla": (make_spec(latent=36), layout_presets.mla_layout),
}


@PATHS
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_pages_are_gathered_and_scattered_as_the_reference_says(layout: str, path: Path) -> None:
    spec, preset = LAYOUTS[layout]
    async with host_cache(spec, preset, path=path) as world:
        pages = [world.page(shard, blocks) for blocks in ([3, 1], [7, 0]) for shard in world.own_shards]
        assert await world.gather(pages)
        assert all(page.payload.tobytes() == world.expected(page) for page in pages)
        assert all(page.other_bytes_are_untouched() for page in pages)
        before = [array.copy() for array in world.memory]
        world.clear(0x5A)
        await world.scatter(pages)
        assert all(page.payload.tobytes() == world.expected(page) for page in pages)
        loaded = sum(int((now != 0x5A).sum()) for now in world.memory)
        assert loaded <= sum(page.payload_bytes for page in pages)
        assert all(((now == old) | (now == 0x5A)).all() for now, old in zip(world.memory, before, strict=True))


@PATHS
async def test_skipped_tokens_stay_as_they_are(path: Path) -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, path=path) as world:
        page = world.page(0, [2, 5])
        assert await world.gather([page])
        rows = [array.copy().reshape(2, 12, 16, -1) for array in world.memory]  # [k, v][block][token]
        world.clear()
        page.skip_tokens = 19
        await world.scatter([page])
        for array, old in zip(world.memory, rows, strict=True):
            now = array.reshape(2, 12, 16, -1)
            assert not now[:, 2].any()
            assert not now[:, 5, :3].any()
            assert (now[:, 5, 3:] == old[:, 5, 3:]).all()


SPLITS = ShardGrid(layers=2, kv_heads=4, layer_groups=1, splits=(1, 2))  # shard 0 has all heads, 1 and 2 have halves


@PATHS
@pytest.mark.parametrize("half", [0, 1])
async def test_a_rank_of_half_of_the_heads_loads_its_half_of_pages_of_all(path: Path, half: int) -> None:
    spec, heads = make_spec(heads=4), range(2 * half, 2 * half + 2)
    async with (
        host_cache(spec, layout_presets.vllm_nhd_layout, grid=SPLITS, path=path) as whole,
        host_cache(spec, layout_presets.vllm_hnd_layout, grid=SPLITS, path=path, heads=heads) as part,
    ):
        page, again, wanted = whole.page(0, [3, 1]), part.page(1 + half, [6, 2]), whole.page(1 + half, [3, 1])
        assert await whole.gather([page])
        part.clear()
        page.block_ids = again.block_ids
        await part.scatter([page])
        assert await part.gather([again])
        assert again.payload.tobytes() == whole.expected(wanted)


@PATHS
async def test_a_rank_of_all_heads_loads_two_pages_of_half_of_them(path: Path) -> None:
    spec = make_spec(heads=4)
    async with host_cache(spec, layout_presets.vllm_nhd_layout, grid=SPLITS, path=path) as whole:
        halves, expected = [], whole.expected(whole.page(0, [3, 1]))
        for half in range(2):
            heads = range(2 * half, 2 * half + 2)
            preset = layout_presets.vllm_hnd_layout
            async with host_cache(spec, preset, grid=SPLITS, path=path, heads=heads) as part:
                rank_page, wanted = part.page(1 + half, [6, 2]), whole.page(1 + half, [3, 1])
                payload = np.frombuffer(whole.expected(wanted), dtype=np.uint8)
                rank_page.payload[:] = payload
                await part.scatter([rank_page])
                again = part.page(1 + half, [6, 2])
                assert await part.gather([again])
                again.block_ids = np.array([8, 9])
                halves.append(again)
        await whole.scatter(halves)
        assert whole.expected(whole.page(0, [8, 9])) == expected


async def test_long_runs_need_no_kernels_and_no_scratch() -> None:
    """Also for pages of other ranks, whose runs are shorter."""
    spec = make_spec(layers=4, heads=4, dim=64)
    grid = ShardGrid(layers=4, kv_heads=4, layer_groups=1, splits=(1, 2, 4))
    async with host_cache(spec, layout_presets.vllm_blhnc_layout, grid=grid, memory_bytes=0) as world:
        for direction in (world.cache.store, world.cache.load):
            assert direction.kernels is None
            assert direction.by_runs[0]
            assert not direction.by_runs[1:].all()
        pages = [world.page(shard, [shard, 9 - shard]) for shard in range(grid.shard_count)]
        assert await world.gather(pages)
        assert all(page.payload.tobytes() == world.expected(page) for page in pages)
        assert world.runtime.copied_runs == [2 + 2 * 4 * 2 + 4 * 4 * 2]


async def test_a_stop_ends_what_has_not_begun_and_a_cancelled_caller_waits_for_what_has() -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, path=Path.RUNS) as world:
        stop = CancelToken()
        stop.cancel()
        assert not await world.cache.gather(batch_of([world.page(0, [0, 1])]), stop)
        world.runtime.gate.clear()
        task = asyncio.ensure_future(world.gather([world.page(0, [0, 1])]))
        await eventually(lambda: bool(world.runtime.copied_runs))
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()  # the copy engine still has the slot
        world.runtime.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_nothing_to_move_moves_nothing() -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, path=Path.RUNS) as world:
        nothing = batch_of([world.page(0, [0, 1])]).part(0, 0)
        assert await world.cache.gather(nothing, CancelToken())
        await world.cache.scatter(nothing)
        assert not world.runtime.copied_runs


@PATHS
async def test_a_failed_copy_fails_its_transfer_and_the_next_one_goes_on(path: Path) -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, path=path) as world:
        world.runtime.fail_copies = 1
        with pytest.raises(KvPoolError, match="the link failed"):
            await world.gather([world.page(0, [0, 1])])
        page = world.page(0, [0, 1])
        assert await world.gather([page])
        assert page.payload.tobytes() == world.expected(page)


@PATHS
async def test_a_gpu_that_is_broken_refuses_everything_from_then_on(path: Path) -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, path=path) as world:
        world.runtime.fail_copies, world.runtime.is_broken = 1, True
        with pytest.raises(KvPoolError):
            await world.gather([world.page(0, [0, 1])])
        world.runtime.is_broken = False
        with pytest.raises(KvPoolError, match="restart the agent"):
            await world.gather([world.page(0, [0, 1])])


async def test_a_gpu_without_room_for_scratch_copies_runs_one_by_one() -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, memory_bytes=1 << 20) as world:
        assert world.cache.store.kernels is None
        page = world.page(0, [4, 2])
        assert await world.gather([page])
        assert page.payload.tobytes() == world.expected(page)


async def test_less_scratch_than_a_transfer_means_more_bursts_and_the_same_bytes() -> None:
    spec = make_spec(layers=8, heads=1, dim=512)
    async with host_cache(
        spec, layout_presets.vllm_nhd_layout, path=Path.KERNELS, memory_bytes=5 << 20, scratch_bytes=16 << 20
    ) as world:
        pages = [world.page(0, [chunk, 11 - chunk]) for chunk in range(6)]
        assert all(await asyncio.gather(*(world.gather([page]) for page in pages)))
        assert all(page.payload.tobytes() == world.expected(page) for page in pages)


async def test_payloads_in_the_scratch_are_aligned_whatever_their_length() -> None:
    """Kernels load 16 bytes at once."""
    spec = make_spec(latent=36, layers=1)
    async with host_cache(spec, layout_presets.mla_layout, path=Path.KERNELS) as world:
        mover = world.cache.store.kernels
        assert mover is not None
        page = world.page(0, [0, 1])
        assert page.payload_bytes % 4096
        (size_bytes,) = mover.sizes_bytes(batch_of([page])).tolist()
        assert size_bytes % 16 == 0
        assert size_bytes >= page.payload_bytes
