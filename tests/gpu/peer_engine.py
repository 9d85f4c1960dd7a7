"""An engine rank on a GPU as its own process: `python -m tests.gpu.peer_engine JSON`. One command a line, one answer.

{"op": "announce", "blocks": [chunks, blocks of a chunk]}      the first chunks of PROMPT lie there; answers {}
{"op": "load", "blocks": [chunks, blocks of a chunk], "skip"}  loads them from GPU caches of other ranks, but for the
                                                               first tokens; answers {"loaded", "gpu_tokens"}
{"op": "digest"}                                               answers {"digest"}: of all its cache memory
{"op": "churn", "blocks"}                                      begins to give these blocks away, write to all of its
                                                               cache and have the same chunks there again, many times
{"op": "end_churn"}                                            ends that; answers {"rounds"}
{"op": "compare", "file", "loaded"}                            answers {"equal"}: whether the cache has the bytes that a
                                                               file of numpy names for this many leading chunks
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

import numpy as np

from kvpool.client.block_generations import BlockGenerations, Int64s
from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Prompt
from kvpool.client.pool import spans_of
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from tests.fixtures import layout_presets
from tests.fixtures.kv_memory import KvMemory, Memory

CHUNK = 256
PROMPT = Prompt.of(b"h" * 32, list(range(32 * CHUNK + 1)), CHUNK)
LOAD_S = 90.0
OTHER_BYTE = 0xEE
CLIENT = ClientConfig(connect_timeout_s=60.0, call_timeout_s=60.0)


def spec_of(options: dict[str, Any]) -> KeyspaceSpec:
    """Of a rank's options."""
    return KeyspaceSpec(
        model_id="m",
        model_revision="r",
        groups=(KvGroup(*options["geometry"]),),
        dtype=Dtype.BF16,
        codec=Codec[options["codec"]],
        chunk_tokens=CHUNK,
    )


def layout_of(options: dict[str, Any]) -> EngineLayout:
    """Over one tensor of bytes for each handle."""
    preset = getattr(layout_presets, f"{options['layout']}_layout")
    spec, heads = spec_of(options), range(*options["heads"])
    layout: EngineLayout = preset(
        spec, range(spec.group.layers), heads, options["block_tokens"], options["block_count"]
    )
    return layout


class FirstMemory(KvMemory):
    """What a rank's memory holds at first."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.spec, self.layout = spec_of(options), layout_of(options)
        random = np.random.default_rng(options["seed"])
        self._memory = [random.integers(0, 256, size, dtype=np.uint8) for size in self.layout.handle_sizes]

    def memory(self) -> Memory:
        return self._memory


def digest(memory: Memory) -> str:
    """Of all bytes, by handle."""
    hasher = hashlib.sha256()
    for each in memory:
        hasher.update(each.tobytes())
    return hasher.hexdigest()


async def load(session: EngineSession, blocks: list[list[int]], skip: int) -> dict[str, Any]:
    """Into these blocks."""
    table, count = np.array(blocks, dtype=np.int64), len(blocks)
    (span,) = spans_of(PROMPT, table.reshape(-1), range(count), table.shape[1], count, skip)
    result = await (await session.load(span, wait_s=LOAD_S, from_gpu=True)).done(LOAD_S)
    return {"loaded": result.loaded_chunks, "gpu_tokens": result.tokens.gpu}


async def churn(
    session: EngineSession, generations: BlockGenerations, tensors: list[Any], blocks: Int64s, ends: asyncio.Event
) -> int:
    """Write to the cache as an engine does, generations first, and announce what is there again each time."""
    import torch

    kept = [tensor.clone() for tensor in tensors]
    hashes = b"".join(PROMPT.hashes[: len(blocks)])

    def write(values: list[Any]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize(tensors[0].device)

    others = [torch.full_like(tensor, OTHER_BYTE) for tensor in tensors]
    rounds = 0
    while not ends.is_set():
        rounds += 1
        generations.raise_blocks(blocks.reshape(-1))
        await asyncio.to_thread(write, others)
        await asyncio.to_thread(write, kept)
        session.announce_cached(hashes, blocks, generations.of(blocks))
        await asyncio.sleep(0.01)
    return rounds


def are_equal(memory: Memory, file: str, loaded_chunks: int) -> bool:
    """file: of each handle, the bytes that are expected, and of which chunk they are, counted from 1."""
    with np.load(file) as expected:
        return all(
            np.array_equal(each[mine], expected[f"bytes{number}"][mine])
            for number, each in enumerate(memory)
            for mine in [(expected[f"chunks{number}"] > 0) & (expected[f"chunks{number}"] <= loaded_chunks)]
        )


async def main(options: dict[str, Any]) -> None:
    """Serve commands until the input ends."""
    import torch

    from kvpool.client.gpu import export_tensors
    from kvpool_server.process import die_with_parent

    die_with_parent(options["parent_pid"])
    device = torch.device("cuda", options["device"])
    tensors = [torch.from_numpy(each).to(device) for each in FirstMemory(options).memory()]
    torch.cuda.synchronize(device)
    exported = export_tensors(tensors)
    generations = BlockGenerations(layout_of(options))
    plan = EngineRegistration(
        endpoint=options["agent"],
        engine_name=f"engine on {device}",
        keyspace_name="peer",
        spec=spec_of(options),
        layout=exported.layout(layout_of(options)),
        regions=exported.regions,
        generations=generations,
        engine_id=str(options["seed"]).encode(),
    )
    session = await EngineSession.open(plan, CLIENT)
    print(json.dumps({}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, answer = json.loads(line), dict[str, Any]()
        if command["op"] == "digest":
            answer = {"digest": digest([tensor.cpu().numpy() for tensor in tensors])}
        elif command["op"] == "announce":
            blocks = np.array(command["blocks"], dtype=np.int64)
            session.announce_cached(b"".join(PROMPT.hashes[: len(blocks)]), blocks, generations.of(blocks))
        elif command["op"] == "churn":
            blocks = np.array(command["blocks"], dtype=np.int64)
            ends = asyncio.Event()
            churning = asyncio.create_task(churn(session, generations, tensors, blocks, ends))
        elif command["op"] == "end_churn":
            ends.set()
            answer = {"rounds": await churning}
        elif command["op"] == "compare":
            memory = [tensor.cpu().numpy() for tensor in tensors]
            answer = {"equal": are_equal(memory, command["file"], command["loaded"])}
        else:
            answer = await load(session, command["blocks"], command["skip"])
        print(json.dumps(answer), flush=True)
    await session.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
