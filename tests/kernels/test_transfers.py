"""The transfer engine on host memory: both ways, whatever the layout; faults, stops, failures, small scratch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvpool.core import layout_presets
from kvpool.core.elements import Dtype
from kvpool.core.errors import KvPoolError
from kvpool.core.geometry import AttentionKind, KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageFaultKind, verify
from kvpool.testing import eventually
from kvpool_gpuagent.core.ways import Way
from tests.fixtures.gpu_caches import HostCache, host_cache

CHUNK = 32


def make_spec(*, layers: int = 2, heads: int = 2, dim: int = 16, latent: int = 0) -> KeyspaceSpec:
    group = KvGroup(
        layers=layers,
        kv_heads=1 if latent else heads,
        head_dim=0 if latent else dim,
        latent_dim=latent,
        attention=AttentionKind.FULL,
    )
    return KeyspaceSpec(model_id="m", model_revision="r", groups=(group,), dtype=Dtype.BF16, chunk_tokens=CHUNK)


LAYOUTS = {
    "nhd": (make_spec(), layout_presets.vllm_nhd_layout),
    "hnd": (make_spec(), layout_presets.vllm_hnd_layout),
    "lightllm": (make_spec(dim=40), layout_presets.lightllm_layout),
    "mla": (make_spec(latent=36), layout_presets.mla_layout),
}


def force(world: HostCache, way: Way) -> None:
    """Leave the cache one way."""
    for direction in (world.cache.store, world.cache.load):
        direction.chooser.pin(way)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_pages_are_gathered_sealed_and_scattered_as_the_reference_says(layout: str) -> None:
    spec, preset = LAYOUTS[layout]
    async with host_cache(spec, preset) as world:
        copies = [
            world.copy(chunk, shard, blocks)
            for chunk, blocks in enumerate(([3, 1], [7, 0]))
            for shard in range(world.grid.shard_count)
        ]
        assert await world.cache.gather(copies, lambda: False)
        for copy in copies:
            assert verify(copy.page, copy.key, spec.codec) is None
            assert world.payload(copy) == world.expected(copy)
        before = [array.copy() for array in world.memory]
        for array in world.memory:
            array[:] = 0x5A
        assert await world.cache.scatter(copies) == [None] * len(copies)
        for copy in copies:
            assert world.payload(copy) == world.expected(copy)
        loaded = sum(int((now != 0x5A).sum()) for now in world.memory)
        assert loaded <= sum(len(world.payload(copy)) for copy in copies)
        assert all(((now == old) | (now == 0x5A)).all() for now, old in zip(world.memory, before, strict=True))


@pytest.mark.parametrize("way", [Way.BURSTS, Way.RUNS])
async def test_a_page_that_fails_leaves_the_cache_as_it_was_and_its_neighbours_are_loaded(way: Way) -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, block_tokens=CHUNK) as world:
        force(world, way)
        copies = [world.copy(chunk, 0, [chunk]) for chunk in range(4)]
        assert await world.cache.gather(copies, lambda: False)
        copies[1].page[100] ^= 1  # payload
        copies[2].page[20] ^= 1  # header
        before = [array.copy() for array in world.memory]
        for array in world.memory:
            array[:] = 0
        wiped = [array.copy() for array in world.memory]
        faults = await world.cache.scatter(copies)
        assert [None if fault is None else fault.kind for fault in faults] == [
            None,
            PageFaultKind.BAD_SUM,
            PageFaultKind.WRONG_KEY,
            None,
        ]
        world.memory, now = before, world.memory
        good = [world.expected(copy) for copy in (copies[0], copies[3])]
        world.memory = now
        assert [world.expected(copy) for copy in (copies[0], copies[3])] == good
        world.memory = wiped
        untouched = [world.expected(copy) for copy in (copies[1], copies[2])]
        world.memory = now
        assert [world.expected(copy) for copy in (copies[1], copies[2])] == untouched


async def test_skipped_tokens_stay_as_they_are_on_every_way() -> None:
    for way in (Way.BURSTS, Way.RUNS):
        async with host_cache(make_spec(), layout_presets.vllm_nhd_layout) as world:
            force(world, way)
            stored = world.copy(1, 0, [2, 5])
            assert await world.cache.gather([stored], lambda: False)
            old = world.expected(stored)
            for array in world.memory:
                array[:] = 0
            skipping = world.copy(1, 0, [2, 5], skip_tokens=19)
            skipping.page[:] = stored.page
            assert await world.cache.scatter([skipping]) == [None]
            shape = (2 * 2, CHUNK, -1)  # layers and planes
            now = np.frombuffer(world.expected(stored), np.uint8).reshape(shape)
            assert not now[:, :19].any()
            assert (now[:, 19:] == np.frombuffer(old, np.uint8).reshape(shape)[:, 19:]).all()


async def test_a_stop_ends_what_has_not_begun_and_a_cancelled_caller_waits_for_what_has() -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout) as world:
        assert not await world.cache.gather([world.copy(1, 0, [0, 1])], lambda: True)
        world.runtime.gate.clear()
        copy = world.copy(2, 0, [0, 1])
        task = asyncio.ensure_future(world.cache.gather([copy], lambda: False))
        await eventually(lambda: bool(world.runtime.copied_runs))
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()  # the copy engine still has the slot
        world.runtime.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_failed_copy_fails_its_transfer_and_the_next_one_goes_on() -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout) as world:
        world.runtime.fail_copies = 1
        with pytest.raises(KvPoolError, match="the link failed"):
            await world.cache.gather([world.copy(1, 0, [0, 1])], lambda: False)
        copy = world.copy(1, 0, [0, 1])
        assert await world.cache.gather([copy], lambda: False)
        assert world.payload(copy) == world.expected(copy)


async def test_a_gpu_that_is_broken_refuses_everything_from_then_on() -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout) as world:
        world.runtime.fail_copies, world.runtime.is_broken = 1, True
        with pytest.raises(KvPoolError):
            await world.cache.gather([world.copy(1, 0, [0, 1])], lambda: False)
        world.runtime.is_broken = False
        with pytest.raises(KvPoolError, match="restart the agent"):
            await world.cache.gather([world.copy(1, 0, [0, 1])], lambda: False)


async def test_a_gpu_without_room_for_scratch_copies_runs_one_by_one() -> None:
    async with host_cache(make_spec(), layout_presets.vllm_nhd_layout, memory_bytes=1 << 20) as world:
        assert world.cache.store.chooser.ways == (Way.RUNS,)
        copy = world.copy(1, 0, [4, 2])
        assert await world.cache.gather([copy], lambda: False)
        assert world.payload(copy) == world.expected(copy)


async def test_less_scratch_than_a_transfer_means_more_bursts_and_the_same_bytes() -> None:
    spec = make_spec(layers=8, heads=1, dim=512)
    async with host_cache(spec, layout_presets.vllm_nhd_layout, memory_bytes=5 << 20, scratch_bytes=16 << 20) as world:
        assert Way.BURSTS in world.cache.store.chooser.ways
        copies = [world.copy(chunk, 0, [chunk, 11 - chunk]) for chunk in range(6)]
        assert await asyncio.gather(*(world.cache.gather([copy], lambda: False) for copy in copies))
        assert all(world.payload(copy) == world.expected(copy) for copy in copies)
