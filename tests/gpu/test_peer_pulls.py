"""Pulls between engine processes on real GPUs, through real agents: every byte, and how fast."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.core.layout import EngineLayout, RowPlane
from tests.fixtures.agent import Agent, World, running_agent
from tests.gpu.peer_engine import digest, first_bytes, layout_of, spec_of

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
        self.session = ""

    @property
    def layout(self) -> EngineLayout:
        return layout_of(self.options)

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

    def tokens(self, source: Engine, source_blocks: list[int], blocks: list[int], count: int) -> dict[str, Any]:
        return {
            "source_session_id": source.session,
            "source_agent": "" if source.agent is self.agent else source.agent.endpoint,
            "source_blocks": source_blocks,
            "destination_blocks": blocks,
            "token_count": count,
        }


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
        child.session = (await child.answer())["session"]
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
        yield [
            await stack.enter_async_context(
                running_agent(World(), device=CudaDevice(ordinal=ordinal, scratch_bytes=64 << 20))
            )
            for ordinal in ordinals
        ]


def need_gpus(*ordinals: int) -> None:
    import torch

    if max(ordinals) >= torch.cuda.device_count():
        pytest.skip(f"needs {max(ordinals) + 1} GPUs")


def copied(destination: Engine, pulls: Sequence[tuple[Engine, dict[str, Any]]]) -> list[npt.NDArray[np.uint8]]:
    """The destination's memory after pulls, row by row."""
    memory = first_bytes(destination.options)
    own = destination.layout
    for source, pull in pulls:
        theirs, there = first_bytes(source.options), source.layout
        heads = [head for head in there.head_range if head in own.head_range]
        for token in range(pull["token_count"]):
            from_place, to_place = divmod(token, there.block_tokens), divmod(token, own.block_tokens)
            from_block, to_block = pull["source_blocks"][from_place[0]], pull["destination_blocks"][to_place[0]]
            for layer, own_layer in zip(there.layers, own.layers, strict=True):
                planes = zip((*layer.planes, *layer.scales), (*own_layer.planes, *own_layer.scales), strict=True)
                for from_plane, to_plane in planes:
                    for head in heads:
                        rows = row(from_plane, from_block, from_place[1], head - there.first_head)
                        own_rows = row(to_plane, to_block, to_place[1], head - own.first_head)
                        memory[to_plane.handle][own_rows] = theirs[from_plane.handle][rows]
    return memory


def row(plane: RowPlane, block: int, token: int, head: int) -> slice:
    start = plane.offset_bytes + block * plane.block_stride_bytes
    start += token * plane.token_stride_bytes + head * plane.head_stride_bytes
    return slice(start, start + plane.row_bytes)


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
    theirs |= {"device": devices[0], "seed": 1, "block_count": 512 // theirs["block_tokens"]}
    ours |= {"device": devices[1], "seed": 2, "block_count": 512 // ours["block_tokens"]}
    # A single agent is on the source's GPU: the kernel runs on the destination's all the same.
    async with cuda_agents(devices[:agents]) as served:
        async with engine(served[0], **theirs) as source, engine(served[-1], **ours) as rank:
            random = np.random.default_rng(3)
            blocks = [random.permutation(each["block_count"]).tolist() for each in (theirs, ours)]
            half = 256 // ours["block_tokens"]
            pulls = [
                rank.tokens(source, blocks[0], blocks[1][:half], 250),
                rank.tokens(source, blocks[0], blocks[1][half:], 131),
            ]
            answer = await rank.ask(op="pull", pulls=pulls)
            assert "error" not in answer
            spec = spec_of(ours)
            row_bytes = spec.data_row_bytes + spec.scale_row_bytes
            assert answer["size_bytes"] == 381 * 4 * 2 * len(range(*ours["heads"])) * row_bytes
            wanted = digest(copied(rank, [(source, pull) for pull in pulls]))
            assert (await rank.ask(op="digest"))["digest"] == wanted
            assert (await source.ask(op="digest"))["digest"] == digest(first_bytes(theirs))
            # An engine that is gone lends nothing any more.
            source.process.kill()
            await asyncio.wait_for(source.process.wait(), 60.0)
            assert (await rank.ask(op="pull", pulls=pulls))["error"] in (
                "SESSION_UNKNOWN", "STOPPED", "SERVICE_UNAVAILABLE"
            )  # fmt: skip


@pytest.mark.parametrize("agents", [1, 2])
async def test_how_fast_a_long_prefix_comes(agents: int, capsys: pytest.CaptureFixture[str]) -> None:
    need_gpus(0, 1)
    options = LLAMA | {"geometry": [32, 8, 128], "block_count": 520}
    async with cuda_agents([1] if agents == 1 else [0, 1]) as served:
        async with (
            engine(served[0], **options, device=0, seed=1) as source,
            engine(served[-1], **options, device=1, seed=2) as rank,
        ):
            pull = rank.tokens(source, list(range(512)), list(range(512))[::-1], 8192)
            answers = [await rank.ask(op="pull", pulls=[pull]) for _ in range(5)]
            rates = [answer["size_bytes"] / answer["copy_s"] / 1e9 for answer in answers]
            with capsys.disabled():
                print(f"\n1 GiB pulled with {agents} agent(s): {', '.join(f'{rate:.0f}' for rate in rates)} GB/s")
            assert max(rates) > 50.0  # slower than the host link: then the way over it would be better
