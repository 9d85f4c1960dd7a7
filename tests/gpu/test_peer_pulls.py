"""Loads from the GPU cache of another engine process on real GPUs, through real agents: every byte, and how fast."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.testing import eventually
from kvpool_gpuagent.engine import host_caches
from tests.fixtures.agent import Agent, World, running_agent
from tests.fixtures.kv_memory import Blocks, KvMemory, Memory, loaded
from tests.gpu.peer_engine import CHUNK, FirstMemory, digest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ANSWER_S = 180.0  # the first launch compiles
LLAMA: dict[str, Any] = {
    "geometry": [4, 8, 128], "codec": "RAW", "heads": [0, 8], "layout": "vllm_nhd", "block_tokens": 16
}  # fmt: skip


class Engine:
    """A child process. It dies with us, and is killed in any case."""

    def __init__(self, process: asyncio.subprocess.Process, options: dict[str, Any], agent: Agent) -> None:
        self.process, self.options, self.agent = process, options, agent
        self.first = FirstMemory(options)

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_S)
        assert line, "the engine has ended; see its stderr above"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()
        return await self.answer()

    async def announce(self, blocks: Blocks) -> None:
        """Until its agent knows."""
        await self.ask(op="announce", blocks=blocks.tolist())
        session = self.agent.engine.sessions[0]
        await eventually(lambda: len(session.cached or ()) == len(blocks), ANSWER_S)

    async def load(self, blocks: Blocks, skip: int = 0) -> dict[str, Any]:
        return await self.ask(op="load", blocks=blocks.tolist(), skip=skip)


@asynccontextmanager
async def engine(agent: Agent, **options: Any) -> AsyncIterator[Engine]:
    """A registered engine."""
    options |= {"agent": agent.endpoint, "parent_pid": os.getpid()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gpu.peer_engine", json.dumps(options),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
    )  # fmt: skip
    child = Engine(process, options, agent)
    try:
        await child.answer()
        yield child
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 60.0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def cuda_agents(ordinals: Sequence[int]) -> AsyncIterator[list[Agent]]:
    """One agent on each of these GPUs."""
    # Only where there is a GPU: elsewhere kernels are for the interpreter, which other tests set up.
    from kvpool_gpuagent.adapters.gpu.device import CudaDevice

    async with AsyncExitStack() as stack:
        agents: list[Agent] = []

        def beside(own: int) -> list[str]:
            paths = [agent.endpoint.removeprefix("unix:") for agent in agents]
            return [path for number, path in enumerate(paths) if number != own]

        for number, ordinal in enumerate(ordinals):
            world, device = World(), CudaDevice(ordinal=ordinal, scratch_bytes=64 << 20)
            world.index.answer = world.pages_here
            serving = running_agent(world, device=device, agents_beside=partial(beside, number))
            agents.append(await stack.enter_async_context(serving))
        yield agents


@pytest.fixture(autouse=True)
def _patient_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_caches, "FIND_TIMEOUT_S", ANSWER_S)


def need_gpus(*ordinals: int) -> None:
    import torch

    if max(ordinals) >= torch.cuda.device_count():
        pytest.skip(f"needs {max(ordinals) + 1} GPUs")


def scattered(count: int, options: dict[str, Any], seed: int) -> Blocks:
    """Blocks for so many chunks, anywhere in a cache."""
    width = CHUNK // options["block_tokens"]
    order = np.random.default_rng(seed).permutation(options["block_count"])[: count * width]
    return order.astype(np.int64).reshape(count, width)


@pytest.mark.parametrize("devices", [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize(
    ("their_changes", "own_changes"),
    [
        pytest.param({}, {"layout": "vllm_hnd", "block_tokens": 64}, id="other layout and blocks"),
        pytest.param(
            {"codec": "INT8_GROUP8", "layout": "lightllm_quantized", "block_tokens": 1},
            {"codec": "INT8_GROUP8", "layout": "block_scales", "block_tokens": 16},
            id="int8 with scales",
        ),
        pytest.param({}, {"heads": [4, 8], "layout": "sglang", "block_tokens": 1}, id="tp"),
    ],
)
async def test_every_byte_comes_and_no_other_changes(
    devices: tuple[int, int], agents: int, their_changes: dict[str, Any], own_changes: dict[str, Any]
) -> None:
    need_gpus(*devices)
    theirs, ours = LLAMA | their_changes, LLAMA | own_changes
    theirs |= {"device": devices[0], "seed": 1, "block_count": 3 * CHUNK // theirs["block_tokens"]}
    ours |= {"device": devices[1], "seed": 2, "block_count": 3 * CHUNK // ours["block_tokens"]}
    # A single agent is on the source's GPU: the kernel runs on the destination's all the same.
    async with cuda_agents(devices[:agents]) as served:
        async with engine(served[0], **theirs) as source, engine(served[-1], **ours) as rank:
            there, here = scattered(2, theirs, 3), scattered(2, ours, 4)
            await source.announce(there)
            answer = await rank.load(here, skip=131)
            assert (answer["loaded"], answer["gpu_tokens"]) == (2, 2 * CHUNK - 131)
            wanted = digest(loaded(rank.first, [(source.first, there)], here, skip=131))
            assert (await rank.ask(op="digest"))["digest"] == wanted
            assert (await source.ask(op="digest"))["digest"] == digest(source.first.memory())
            # An engine that is gone lends nothing any more.
            source.process.kill()
            await asyncio.wait_for(source.process.wait(), 60.0)
            await eventually(lambda: not served[0].engine.sessions or not served[0].engine.sessions[0].cached, ANSWER_S)
            assert (await rank.load(here))["loaded"] == 0


@pytest.mark.parametrize("devices", [(0, 0), (0, 1)])
@pytest.mark.parametrize("agents", [1, 2])
async def test_no_byte_counts_that_was_written_while_it_was_copied(
    devices: tuple[int, int], agents: int, tmp_path: Path
) -> None:
    """The source gives its blocks away and writes to them all the time; a load comes whole, in part or not at all."""
    need_gpus(*devices)
    options = LLAMA | {"geometry": [8, 8, 128], "block_count": 8 * CHUNK // LLAMA["block_tokens"]}
    async with cuda_agents(devices[:agents]) as served:
        async with (
            engine(served[0], **options, device=devices[0], seed=1) as source,
            engine(served[-1], **options, device=devices[1], seed=2) as rank,
        ):
            there, here = scattered(4, options, 3), scattered(4, options, 4)
            file, arrays = str(tmp_path / "bytes.npz"), dict[str, Any]()
            arrays |= {f"bytes{n}": each for n, each in enumerate(loaded(rank.first, [(source.first, there)], here))}
            arrays |= {f"chunks{n}": each for n, each in enumerate(chunks_of(rank.first, here))}
            np.savez(file, **arrays)
            await source.announce(there)
            assert (await rank.load(here))["loaded"] == 4
            await source.ask(op="churn", blocks=there.tolist())
            counts = list[int]()
            for _ in range(60):
                counts.append((await rank.load(here))["loaded"])
                answer = await rank.ask(op="compare", file=file, loaded=counts[-1])
                assert answer["equal"], f"load {len(counts)}: {counts[-1]} chunks counted"
            assert (await source.ask(op="end_churn"))["rounds"] > len(counts)
            assert min(counts) < 4, "no load met a write"
            assert max(counts) == 4


def chunks_of(rank: KvMemory, blocks: Blocks) -> Memory:
    """Of each byte of a rank's cache: in which of these chunks it is, counted from 1; 0: in none."""
    marked = [np.zeros_like(each) for each in rank.memory()]
    width, rows = blocks.shape[1], rank.layout.rows_of_block(rank.spec)
    for chunk, ids in enumerate(blocks.tolist(), 1):
        for place in range(width * rows):
            block, row = ids[place // rows], place % rows
            for layer in rank.layout.layers:
                for plane in (*layer.planes, *layer.scales):
                    for head in rank.layout.head_range:
                        handle, where = rank.row(plane, block, row, head)
                        marked[handle][where] = chunk
    return marked
