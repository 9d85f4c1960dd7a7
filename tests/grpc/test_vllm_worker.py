"""The vLLM connector's workers against an agent: tensors as vLLM lays them out, blocks out and in again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvpool.client.engine_registration import EngineRegistration
from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.connectors.vllm.cache_memory import CacheMemory, cache_memory
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, StepJobs, StoreJob, block_id_array
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from kvpool.core.geometry import OpaqueLayout, PayloadKind
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.partition import rank_part
from kvpool.testing import eventually
from tests.fixtures.agent import CLIENT, World, running_agent

LAYERS, HEADS, HEAD_DIM, BLOCK, CHUNK, BLOCKS = 8, 2, 32, 16, 64, 24
ROW_BYTES = 2 * HEAD_DIM * 2  # K and V in bfloat16
OPAQUE = OpaqueLayout("vllm", "cpu_attn test", "vec", BLOCK, ROW_BYTES * BLOCK)
GROUP = KvGroup(LAYERS, HEADS, HEAD_DIM)
CELLS = KeyspaceSpec("m", "r", (GROUP,), Dtype.BF16, chunk_tokens=CHUNK, payload=PayloadKind.OPAQUE, opaque=OPAQUE)
ROWS = KeyspaceSpec("m", "r", (GROUP,), Dtype.BF16, chunk_tokens=CHUNK)
HASHES = tuple(bytes([number + 1]) * 16 for number in range(3))


@dataclass
class Rank:
    """A worker and its tensors [blocks, heads, tokens, K and V]."""

    tensors: list[torch.Tensor]
    memory: CacheMemory
    connection: AgentConnection
    worker: ConnectorWorker

    def bits(self, blocks: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """[layer, block, head, ...] as bytes."""
        return np.stack([tensor[list(blocks)].contiguous().view(torch.uint8).numpy() for tensor in self.tensors])

    async def store(self, blocks: Sequence[int], chunks: int) -> None:
        """Until the blocks are given back and the store has ended."""
        job = StoreJob(
            number=1,
            request_id="r",
            hashes=b"".join(HASHES[:chunks]),
            token_count=999,
            block_ids=block_id_array(blocks),
            first_chunk=0,
            end_chunk=chunks,
        )
        self.worker.start_stores(StepJobs(step=1, stores=[job], release=["r"]))
        await eventually(lambda: self.worker.take_finished_sending() == {"r"})
        await eventually(lambda: bool(self.worker.take_reports()))

    async def load(self, blocks: Sequence[int], *, first_token: int = 0) -> LoadReport:
        """All three chunks, from the chunk of first_token on."""
        job = LoadJob(
            request_id="q",
            hashes=b"".join(HASHES),
            token_count=999,
            block_ids=block_id_array(blocks),
            first_chunk=first_token // CHUNK,
            end_chunk=3,
            first_token=first_token,
            end_token=3 * CHUNK,
            timeout_s=60,
        )
        self.worker.start_loads(StepJobs(step=2, loads=[job]))
        await eventually(lambda: self.worker.take_finished_recving() == {"q"})
        (end,) = self.worker.take_reports()
        assert isinstance(end, LoadReport)
        return end

    async def close(self) -> None:
        """In a thread: the agent, which answers, is on this loop."""
        assert await asyncio.to_thread(self.connection.close)
        self.memory.close()


def some_tensors(heads: int, *, tokens_outside: bool, split: int = 1) -> list[torch.Tensor]:
    """All layers in one storage. tokens_outside: heads lie inside of a token, as many GPU kernels have them."""
    shape = (LAYERS, BLOCKS * split, heads, BLOCK // split, 2 * HEAD_DIM)
    order = (0, 1, 3, 2, 4) if tokens_outside else (0, 1, 2, 3, 4)
    storage = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
    return list(storage.permute(*order).unbind(0))


def rank(
    endpoint: str,
    spec: KeyspaceSpec,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    tokens_outside: bool = False,
    split: int = 1,
) -> Rank:
    """Filled with random bits."""
    part = rank_part(GROUP, tp_rank=tp_rank, tp_size=tp_size)
    tensors = some_tensors(len(part.heads), tokens_outside=tokens_outside, split=split)
    memory = cache_memory(tensors, spec, part, BLOCK, BLOCKS)
    random = np.random.default_rng(tp_rank)
    for tensor in tensors:
        bits = random.integers(0, 1 << 16, tuple(tensor.shape), dtype=np.uint16)
        tensor.copy_(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    plan = EngineRegistration(
        endpoint=endpoint,
        engine_name=f"rank {tp_rank}",
        keyspace_name="vllm",
        spec=spec,
        layout=memory.layout,
        regions=memory.regions,
    )
    connection = AgentConnection(lambda: [plan], CLIENT)
    worker = ConnectorWorker(
        VllmSettings(agent=endpoint, chunk_tokens=CHUNK),
        connection,
        WorkerKvCache(
            groups=[
                WorkerKvCacheGroup(block_tokens=BLOCK, page_bytes=1, step_events=memory.step_events, split=memory.split)
            ]
        ),
    )
    return Rank(tensors, memory, connection, worker)


async def opened(*ranks: Rank) -> None:
    await eventually(lambda: all(one.connection.pools for one in ranks))


@pytest.mark.parametrize(
    ("spec", "tokens_outside", "split"), [(CELLS, False, 1), (ROWS, False, 1), (ROWS, True, 1), (ROWS, True, 2)]
)
async def test_bits_of_blocks_come_back_as_they_were(spec: KeyspaceSpec, tokens_outside: bool, split: int) -> None:
    async with running_agent(World()) as agent:
        one = rank(agent.endpoint, spec, tokens_outside=tokens_outside, split=split)
        await opened(one)
        source, target = [23, 5, 11, 2, 9, 1, 14, 6, 0, 3, 20, 7], [22, 4, 10, 12, 8, 13, 15, 16, 17, 18, 19, 21]
        kernel = [[block * split + part for block in blocks for part in range(split)] for blocks in (source, target)]
        before = one.bits(kernel[0])
        await one.store(source, chunks=3)
        end = await one.load(target)
        assert (end.result.loaded_chunks, end.failed_chunks) == (3, 0)
        assert np.array_equal(one.bits(kernel[1]), before)
        assert np.array_equal(one.bits(kernel[0]), before)
        await one.close()


async def test_what_the_engine_holds_of_a_chunk_is_left_alone() -> None:
    async with running_agent(World()) as agent:
        one = rank(agent.endpoint, CELLS)
        await opened(one)
        source, target = list(range(12)), list(range(12, 24))
        before, held = one.bits(source), one.bits(target)
        await one.store(source, chunks=3)
        end = await one.load(target, first_token=CHUNK + 2 * BLOCK)
        assert end.result.loaded_chunks == 2
        assert np.array_equal(one.bits(target[:6]), held[:, :6])
        assert np.array_equal(one.bits(target[6:]), before[:, 6:])
        await one.close()


async def test_two_ranks_store_what_one_loads() -> None:
    world = World()
    world.index.answer = world.pages_here
    async with running_agent(world) as agent:
        halves = [rank(agent.endpoint, CELLS, tp_rank=number, tp_size=2) for number in range(2)]
        whole = rank(agent.endpoint, CELLS)
        await opened(*halves, whole)
        for half in halves:
            await half.store(list(range(12)), chunks=3)
        await whole.load(list(range(12, 24)))
        expected = np.concatenate([half.bits(range(12)) for half in halves], axis=2)
        assert np.array_equal(whole.bits(range(12, 24)), expected)
        for one in (*halves, whole):
            await one.close()


async def test_chunks_that_are_not_there_are_named_by_their_blocks() -> None:
    async with running_agent(World()) as agent:
        one = rank(agent.endpoint, CELLS)
        await opened(one)
        await one.store(list(range(4)), chunks=1)
        end = await one.load(list(range(12, 24)))
        assert (end.result.loaded_chunks, end.failed_chunks) == (1, 2)
        assert one.worker.take_failed_blocks() == set(range(16, 24))
        await one.close()
