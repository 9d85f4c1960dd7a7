"""What the bench of copies between GPUs counts has come out of the other rank's cache."""

from __future__ import annotations

import asyncio

import numpy as np

from bench.vllm_gpu.copies import Copies
from kvpool.core.elements import Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from tests.fixtures import layout_presets as presets
from tests.fixtures.agent import CLIENT
from tests.fixtures.peer_ranks import peer_host

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)
PROMPTS, CHUNKS = 2, 3


async def test_prompts_come_out_of_scattered_blocks_into_scattered_blocks() -> None:
    async with peer_host(2) as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=PROMPTS * CHUNKS * 4)
        rank = await host.rank(SPEC, presets.vllm_nhd_layout, agent=1, block_count=PROMPTS * CHUNKS * 4)
        wanted = [memory.copy() for memory in source.memory()]
        copies = await asyncio.to_thread(Copies, source.registration(), rank.registration(), PROMPTS, CHUNKS, CLIENT)
        launched = host.devices[1].launched
        assert await asyncio.to_thread(copies.rate, PROMPTS, 0.0, 1 << 20) > 0
        assert host.devices[1].launched == launched + PROMPTS
        # Both caches are as large as the prompts, and their blocks are scattered alike.
        for own, theirs in zip(rank.memory(), wanted, strict=True):
            assert np.array_equal(own, theirs)
        await asyncio.to_thread(copies.close)
