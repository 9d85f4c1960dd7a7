"""Keyspaces with a codec through a real agent: what an engine gets back is what it had, up to the stated error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.client.gpuagent import EngineSession
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.core.codecs import error_bound
from kvpool.core.elements import Codec
from tests.fixtures.agent import BLOCK_TOKENS, SPEC, EngineProcess, World, prompt, run_load, run_store, running_agent
from tests.fixtures.layout_presets import lightllm_quantized_layout

LOSSY = [Codec.INT8_GROUP8, Codec.FP8_E4M3, Codec.INT4_GROUP8]
CHUNKS = range(3)
HEAD_DIM = SPEC.group.head_dim


@asynccontextmanager
async def opened(engine: EngineProcess) -> AsyncIterator[EngineSession]:
    session = await engine.open()
    try:
        yield session
    finally:
        await session.close()


def elements(engine: EngineProcess, first_block: int, last_block: int) -> npt.NDArray[np.float32]:
    """What the engine has in its blocks of some places: [layer, plane, block, element]."""
    blocks = engine.blocks.ravel()[first_block:last_block]
    return np.stack([layer[:, blocks].view(np.float32) for layer in engine.memory()])


@pytest.mark.parametrize("codec", LOSSY)
async def test_a_chunk_comes_back_up_to_the_stated_error(codec: Codec) -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint, spec=replace(SPEC, codec=codec))
        for number, layer in enumerate(engine.memory()):
            values = layer.view(np.float32)
            values[:] = np.random.default_rng(number).standard_normal(values.shape)
        before = elements(engine, 0, 12).astype(np.float64)
        async with opened(engine) as session:
            chain = prompt(session, len(CHUNKS))
            stored = await run_store(session, engine.span(chain, CHUNKS))
            assert stored.stored_chunks == len(CHUNKS)
            engine.clear()
            loaded = await run_load(session, engine.span(chain, CHUNKS, at=5, skip_tokens=11))
            assert loaded.loaded_chunks == len(CHUNKS)
        after = elements(engine, 5 * 4, 5 * 4 + 12).astype(np.float64)

        # [layer, plane, token, head * dim]: the skipped tokens stay untouched, all others are near.
        had = before.reshape(4, 2, 12 * BLOCK_TOKENS, -1)
        got = after.reshape(4, 2, 12 * BLOCK_TOKENS, -1)
        assert not got[:, :, :11].any()
        group = codec.format.scale_group_elements(HEAD_DIM)
        had, got = (each[:, :, 11:].reshape(4, 2, -1, group) for each in (had, got))
        largest = np.abs(had).max(axis=-1, keepdims=True)
        errors = np.abs(got - had)
        assert (errors <= error_bound(codec, SPEC.dtype, largest)).all()
        assert (errors / error_bound(codec, SPEC.dtype, largest)).max() > 0.5  # it is a codec
        assert not elements(engine, 0, 5 * 4).any()
        engine.close()
    raw_bytes = len(CHUNKS) * 4 * 2 * SPEC.chunk_tokens * SPEC.group.kv_heads * HEAD_DIM * SPEC.dtype.bits // 8
    page_bytes = sum(len(page) for page in world.cluster.pages.values())
    assert page_bytes < raw_bytes * (0.38 if codec is Codec.INT8_GROUP8 else 0.27)


async def test_an_engine_that_is_quantized_itself_reads_what_a_float_engine_stored() -> None:
    """Same keyspace, two ways of holding it: pages are the same, and the second gets data and scales as they are."""
    spec = replace(SPEC, codec=Codec.INT8_GROUP8)
    group = spec.group
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint, spec=spec)
        for number, layer in enumerate(engine.memory()):
            values = layer.view(np.float32)
            values[:] = np.random.default_rng(number).standard_normal(values.shape)
        async with opened(engine) as session:
            chain = prompt(session, 1)
            assert (await run_store(session, engine.span(chain, [0]))).stored_chunks == 1

        layout = lightllm_quantized_layout(spec, range(group.layers), range(group.kv_heads), BLOCK_TOKENS, 48)
        regions = tuple(SharedMemoryRegion(size_bytes) for size_bytes in layout.handle_sizes)
        quantized = EngineProcess(agent.endpoint, spec=spec, layout=layout, regions=regions)
        async with opened(quantized) as session:
            assert (await run_load(session, quantized.span(chain, [0]))).loaded_chunks == 1
        data, scales = (np.frombuffer(region.buffer, dtype=np.uint8) for region in regions)
        slots = (quantized.blocks[0][:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
        integers = data.view(np.int8).reshape(group.layers, -1, 2, group.kv_heads, HEAD_DIM // 8, 8)[:, slots]
        steps = scales.view(np.float32).reshape(group.layers, -1, 2, group.kv_heads, HEAD_DIM // 8, 1)[:, slots]
        had = elements(engine, 0, 4).reshape(group.layers, 2, -1, group.kv_heads, HEAD_DIM // 8, 8)
        had = had.transpose(0, 2, 1, 3, 4, 5).astype(np.float64)
        bounds = error_bound(spec.codec, spec.dtype, np.abs(had).max(axis=-1, keepdims=True))
        assert (np.abs(integers * steps.astype(np.float64) - had) <= bounds).all()
        del data, scales, integers, steps
        for process in (engine, quantized):
            process.close()
        for region in regions:
            region.close()
