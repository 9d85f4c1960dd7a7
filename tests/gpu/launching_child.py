"""An engine in a process of its own, with its cache on the GPU, that launches kernels for its agent.

`python -m tests.gpu.launching_child ENDPOINT` answers one JSON command a line and ends with its input:

  {"op": "store", "seed": n}         compute a prompt's KV, store it
  {"op": "load", "seed": n}          clear the cache, load the prompt, compare every byte
  {"op": "busy", "on": bool}         keep the GPU busy with matrix products, or not
  {"op": "close"}                    end the session
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import ChunkBlocks, ChunkSpan
from kvpool.client.engine_registration import EnginePlan
from kvpool.client.gpu import export_tensors
from kvpool.client.gpu_launch import GpuLauncher
from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Chain
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.launches import Launch, Launched
from kvpool.core.layout_presets import vllm_nhd_layout

BLOCK_TOKENS, CHUNKS, BLOCKS = 16, 8, 512
CONFIG = ClientConfig(connect_timeout_s=60.0, call_timeout_s=30.0)


def make_spec(codec: Codec) -> KeyspaceSpec:
    """Pages of about 1 MiB."""
    return KeyspaceSpec(
        model_id="m",
        model_revision="r",
        groups=(KvGroup(8, 8, 128),),
        dtype=Dtype.BF16,
        codec=codec,
        chunk_tokens=256,
    )


class CountingLauncher:
    """See engine_registration.Launcher."""

    def __init__(self, launcher: GpuLauncher) -> None:
        self._launcher, self.scratch = launcher, launcher.scratch
        self.count = self.failed = 0

    def start(self, launch: Launch, ended: Callable[[Launched], None]) -> None:
        self.count += 1

        def told(launched: Launched) -> None:
            self.failed += launched.error is not None
            ended(launched)

        self._launcher.start(launch, told)


class Engine:
    """One rank."""

    def __init__(self, endpoint: str, codec: Codec) -> None:
        self.spec = make_spec(codec)
        layers, heads = range(self.spec.group.layers), range(self.spec.group.kv_heads)
        preset = vllm_nhd_layout(self.spec, layers, heads, BLOCK_TOKENS, BLOCKS)
        shape = (2, BLOCKS, BLOCK_TOKENS, len(heads), self.spec.group.head_dim)
        self.tensors = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in layers]
        exported = export_tensors(self.tensors)
        layout = exported.layout(preset)
        self.launcher = CountingLauncher(GpuLauncher(exported, self.spec, layout, scratch_bytes=64 << 20))
        self.plan = EnginePlan(
            endpoint=endpoint,
            engine_name="launching",
            keyspace_name=f"launching-{codec.name}",
            spec=self.spec,
            layout=layout,
            regions=exported.regions,
            launcher=self.launcher,
        )
        order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))
        self.blocks = order[: CHUNKS * self.spec.chunk_tokens // BLOCK_TOKENS].reshape(CHUNKS, -1)
        self.session: EngineSession
        self._stop_work: threading.Event | None = None

    def span(self, seed: int) -> ChunkSpan:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 1 << 20, (CHUNKS * self.spec.chunk_tokens,), generator=generator)
        chain = Chain.of(self.session.hash_key, tokens.numpy().astype("uint32"), self.spec.chunk_tokens)
        return ChunkSpan(
            chunks=tuple(ChunkBlocks(chain.hashes[number], self.blocks[number].numpy()) for number in range(CHUNKS)),
            first_chunk_index=0,
            parent_hash=chain.parent_hash(0),
            group_head_hashes=chain.group_head_hashes(0, CHUNKS),
            chain_head_hash=chain.head_hash,
        )

    def computed(self, seed: int) -> list[torch.Tensor]:
        """What `store` makes of a prompt, layer by layer, [2, blocks, ...] on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, self.blocks.numel(), *self.tensors[0].shape[2:])
        return [torch.randn(shape, generator=generator, dtype=torch.bfloat16) for _ in self.tensors]

    async def store(self, seed: int) -> dict[str, Any]:
        for tensor, rows in zip(self.tensors, self.computed(seed), strict=True):
            tensor[:, self.blocks.reshape(-1).cuda()] = rows.cuda()
        torch.cuda.current_stream().synchronize()
        handle = await self.session.store(self.span(seed))
        outcome = await handle.done(60.0)
        return {"stored": outcome.stored_chunks, "errors": [error.message for error in outcome.failed.values()]}

    async def load(self, seed: int) -> dict[str, Any]:
        for tensor in self.tensors:
            tensor.fill_(7.0)
        torch.cuda.current_stream().synchronize()
        handle = await self.session.load(self.span(seed), wait_s=60.0)
        outcome = await handle.done(70.0)
        chosen = self.blocks.reshape(-1).cuda()
        others = torch.ones(BLOCKS, dtype=torch.bool, device="cuda")
        others[chosen] = False
        worst = max(
            float((tensor[:, chosen].cpu().float() - rows.float()).abs().max())
            for tensor, rows in zip(self.tensors, self.computed(seed), strict=True)
        )
        untouched = all(bool((tensor[:, others] == 7.0).all()) for tensor in self.tensors)
        error = outcome.error.message if outcome.error is not None else ""
        return {"loaded": outcome.loaded_chunks, "worst": worst, "untouched": untouched, "error": error}

    def busy(self, on: bool) -> dict[str, Any]:
        if self._stop_work is not None:
            self._stop_work.set()
            self._stop_work = None
        if on:
            self._stop_work = threading.Event()
            threading.Thread(target=multiply, args=(self._stop_work,), daemon=True).start()
        return {}


def multiply(stop: threading.Event) -> None:
    """Matrix products until told to stop, never more than two ahead."""
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(matrix)
    ends: list[Any] = []
    while not stop.is_set():
        torch.mm(matrix, matrix, out=product)
        ends.append(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        ends[-1].record()
        if len(ends) > 2:
            ends.pop(0).synchronize()


async def serve(endpoint: str, codec: Codec) -> None:
    """Answer commands until the input ends."""
    engine = Engine(endpoint, codec)
    engine.session = await EngineSession.open(engine.plan, CONFIG)
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        match command["op"]:
            case "store":
                answer = await engine.store(command["seed"])
            case "load":
                answer = await engine.load(command["seed"])
            case "busy":
                answer = engine.busy(command["on"])
            case _:
                answer = {"closed": await engine.session.close()}
        answer |= {"launches": engine.launcher.count, "failed_launches": engine.launcher.failed}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Codec[sys.argv[2]]))
