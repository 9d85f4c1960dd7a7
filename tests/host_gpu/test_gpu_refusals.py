"""Bad input to an agent with a GPU: refused by the name of the argument before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.chunks import ChunkRange
from kvpool.core.elements import Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.layout import EngineLayout, LayerLayout
from tests.fixtures.agent import BLOCKS_PER_CHUNK, prompt, run_load, run_store
from tests.fixtures.gpu_agent import GpuEngine
from tests.fixtures.host_agent import SPEC, host_agent
from tests.fixtures.host_gpu import Path

BLOCKS = 12 * BLOCKS_PER_CHUNK


def with_blocks(position: int, *ids: int, skip_tokens: int = 0) -> Callable[[ChunkRange], ChunkRange]:
    def change(span: ChunkRange) -> ChunkRange:
        block_ids = span.block_ids.copy()
        block_ids[position] = ids
        return replace(span, block_ids=block_ids, skip_tokens=skip_tokens)

    return change


def twice(span: ChunkRange) -> ChunkRange:
    return with_blocks(1, *span.block_ids[0].tolist())(span)


def too_few(span: ChunkRange) -> ChunkRange:
    return replace(span, block_ids=span.block_ids[:, :3])


SLOTS = {
    "beyond the cache": (with_blocks(1, 0, 1, 2, BLOCKS), r"chunks\[1\]\.block_ids must lie in \[0, 48\), got 0 to 48"),
    "negative": (with_blocks(0, -1, 1, 2, 3), r"chunks\[0\]\.block_ids must lie in \[0, 48\), got -1 to 3"),
    "a wrapped one": (with_blocks(0, (1 << 63) - 1, 1, 2, 3), r"chunks\[0\]\.block_ids must lie in"),
    "too few": (too_few, "block_ids must name 4 blocks of 8 tokens for each of 2 chunks, got 6"),
}
DESTINATIONS = {
    "in two chunks": (twice, "block_ids names block [0-9]+ twice; destinations must be distinct"),
    "in one chunk": (with_blocks(0, 7, 3, 7, 4), "block_ids names block 7 twice"),
    "skipped in part": (with_blocks(0, 5, 5, 3, 4, skip_tokens=3), "block_ids names block 5 twice"),
    "skipped beyond": (with_blocks(0, 1, 2, 3, 4, skip_tokens=32), r"chunks\[0\]\.skip_tokens must lie in \[0, 32\)"),
}


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("case", [*SLOTS, *DESTINATIONS])
async def test_bad_slots_are_refused_before_anything_is_launched(path: Path, case: str) -> None:
    change, named = (SLOTS | DESTINATIONS)[case]
    async with host_agent(path=path) as one:
        engine = one.engine()
        session = await engine.open()
        bad = change(engine.span(prompt(session, 2), range(2)))
        with pytest.raises(InvalidRequest, match=named):
            await run_load(session, bad)
        if case in SLOTS:
            with pytest.raises(InvalidRequest, match=named):
                await run_store(session, bad)
        assert not one.moved_runs
        assert not one.world.pools[0].asked
        assert await session.close()


def change_planes(**changes: int) -> Callable[[EngineLayout], EngineLayout]:
    """Of the second plane of the second layer."""

    def change(layout: EngineLayout) -> EngineLayout:
        first, second = layout.layers
        planes = (second.planes[0], replace(second.planes[1], **changes))
        return replace(layout, layers=(first, LayerLayout(planes)))

    return change


PLANE = r"layers\[1\]\.planes\[1\]"
STRIDES = {
    "overlapping": (change_planes(token_stride_bytes=64), PLANE + " overlap"),
    "no multiple": (
        change_planes(token_stride_bytes=130),
        PLANE + r"\.token_stride_bytes must be a multiple of 4, got 130",
    ),
    "none": (change_planes(block_stride_bytes=0), PLANE + r"\.block_stride_bytes must be > 0"),
    "beyond": (change_planes(block_stride_bytes=1 << 20), PLANE + " ends at byte [0-9]+, but handle 1 has"),
    "overflowing": (change_planes(block_stride_bytes=1 << 61), PLANE + " ends at byte"),
    "misplaced": (change_planes(offset_bytes=2), PLANE + r"\.offset_bytes must be a multiple of 4, got 2"),
    "of another type": (change_planes(row_bytes=32), PLANE + r"\.row_bytes must be 64, got 32"),
}


@pytest.mark.parametrize("case", STRIDES)
async def test_a_cache_of_other_strides_or_types_is_refused_before_it_is_mapped(case: str) -> None:
    change, named = STRIDES[case]
    async with host_agent() as one:
        engine = one.engine()
        engine.plan = replace(engine.plan, layout=change(engine.plan.layout))
        await refused(engine, named)
        assert one.world.index.opened == []
        assert not one.device.caches


async def test_a_dtype_that_is_not_the_caches_is_refused() -> None:
    async with host_agent() as one:
        engine = one.engine()
        engine.plan = replace(engine.plan, spec=replace(SPEC, dtype=Dtype.BF16))
        await refused(engine, r"layers\[0\]\.planes\[0\]\.row_bytes must be 32, got 64")
        assert one.world.index.opened == []


@pytest.mark.parametrize("offset", [1, 2])
async def test_a_base_that_is_not_aligned_to_an_element_is_refused_before_it_is_mapped(offset: int) -> None:
    async with host_agent() as one:
        engine = one.engine()
        regions: list[Any] = list(engine.plan.regions)
        memory = regions[1].memory
        moved = replace(memory, allocation_offset=offset, allocation_bytes=memory.allocation_bytes + offset)
        regions[1] = replace(regions[1], memory=moved)
        engine.plan = replace(engine.plan, regions=tuple(regions))
        await refused(engine, rf"handles\[1\]\.allocation_offset must be a multiple of 4, .*, got {offset}")
        assert one.world.index.opened == []
        assert not one.device.caches


async def refused(engine: GpuEngine, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        await engine.open()
