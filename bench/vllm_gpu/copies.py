"""Copies between GPUs: loads of scattered blocks out of another rank's cache, beside memcpy between the same two GPUs.

Start `kvpool cluster up --device cuda --agents 2` first, and name its directory: `--agent auto:.kvpool/run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.vllm_gpu.phases import Plan
from bench.vllm_gpu.ranks import GPUS, need_gpus
from bench.vllm_gpu.samples import Recorder
from bench.vllm_gpu.transfers import CHUNK_TOKENS, SHAPES, Shape
from kvpool.client.block_generations import BlockGenerations
from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.hashing import Prompt
from kvpool.client.sync import Pool

IN_FLIGHT = (4, 1)
COPY_BYTES = 512 << 20
_TIMEOUT_S = 60.0
_WINDOW_S = 1.0
_ROUNDS = 3


class Copies:
    """A source whose cache holds prompts, and a reader that loads them out of it. Neither has anything else to do."""

    def __init__(
        self, source: EngineRegistration, reader: EngineRegistration, prompts: int, chunks: int, config: ClientConfig
    ) -> None:
        """prompts: so many, of so many chunks each, in scattered blocks of both. raises: RuntimeError if none comes."""
        self._pools = Pool(source, config), Pool(reader, config)
        self._chunks, self._chunk_tokens = chunks, source.spec.chunk_tokens
        random = np.random.default_rng(time.time_ns())
        tokens = [random.integers(0, 1 << 31, chunks * self._chunk_tokens, dtype=np.uint32) for _ in range(prompts)]
        self._prompts = [self._pools[1].prompt(each) for each in tokens]
        held, self._blocks = (_scattered(one, prompts, chunks) for one in (source, reader))
        assert source.generations is not None
        for prompt, blocks in zip(self._prompts, held, strict=True):
            self._announce(prompt, blocks, source.generations)
        ends_at_s = time.monotonic() + _TIMEOUT_S  # announcements are not answered
        while not all(self._copy(number) for number in range(prompts)):
            if time.monotonic() > ends_at_s:
                raise RuntimeError("nothing is copied out of the other rank's cache; the agents' logs say why")

    def rate(self, in_flight: int, seconds: float, copy_bytes: int) -> float:
        """GB/s of so many seconds with so many loads in flight. copy_bytes: of one."""
        began_s = time.perf_counter()

        def work(number: int) -> int:
            done = 0
            while not done or time.perf_counter() < began_s + seconds:
                if not self._copy(number):
                    raise RuntimeError("a prompt did not come out of the other rank's cache")
                done += 1
            return done

        with ThreadPoolExecutor(in_flight) as threads:
            done = sum(threads.map(work, range(in_flight)))
        return done * copy_bytes / (time.perf_counter() - began_s) / 1e9

    def close(self) -> None:
        """End both sessions."""
        for pool in self._pools:
            pool.close()

    def _announce(self, prompt: Prompt, blocks: np.ndarray, generations: BlockGenerations) -> None:
        pool = self._pools[0]

        async def announce() -> None:
            pool.pool.session.announce_cached(b"".join(prompt.hashes), blocks, generations.of(blocks))

        pool.background.run(announce)

    def _copy(self, number: int) -> bool:
        """Load a prompt; whether all of it came out of the source's cache."""
        handle = self._pools[1].start_load(
            self._prompts[number],
            self._blocks[number].reshape(-1),
            first_chunk=0,
            end_chunk=self._chunks,
            by_layer=False,
            from_gpu=True,
        )
        return handle.result(_TIMEOUT_S).tokens.gpu == self._chunks * self._chunk_tokens


def _scattered(registration: EngineRegistration, prompts: int, chunks: int) -> np.ndarray:
    """[prompts, chunks, blocks of a chunk]: any blocks of the cache, each once."""
    width = registration.spec.chunk_tokens // registration.layout.block_tokens
    order = np.random.default_rng(5).permutation(registration.layout.block_count).astype(np.int64)
    return order[: prompts * chunks * width].reshape(prompts, chunks, width)


class GpuCache:
    """A rank's cache on a GPU, and how the rank registers."""

    def __init__(self, agent: str, ordinal: int, shape: Shape, prompts: int, chunks: int) -> None:
        """agent: as the connector's setting."""
        from kvpool.connectors.vllm.agent_selector import AgentSelector, WorkerPlacement
        from kvpool.cuda.driver import Driver

        spec = shape.spec("copies")
        block_count = prompts * chunks * CHUNK_TOKENS // shape.block_tokens
        self._tensors, memory = shape.allocate(spec, block_count, ordinal)
        self.generations = BlockGenerations(memory.layout)
        place = WorkerPlacement(number=ordinal, on_gpu=True, gpu=Driver.load().device_uuid(ordinal))
        self.registration = EngineRegistration(
            endpoint=AgentSelector(agent).select(place),
            engine_name=f"copies-{ordinal}",
            keyspace_name=f"copies-{shape.layout}-{shape.group.layers}",
            spec=spec,
            layout=memory.layout,
            regions=memory.regions,
            generations=self.generations,
            engine_id=f"copies-{ordinal}".encode(),
        )

    def close(self) -> None:
        """Free it; no session uses it any more."""
        self._tensors.clear()
        self.generations.close()


class Memcpy:
    """Plain copies from GPU 0 to GPU 1."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._pairs: list[Sequence[torch.Tensor]] = [
            [torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{ordinal}") for ordinal in range(GPUS)]
            for _ in range(max(IN_FLIGHT))
        ]
        self._streams = [torch.cuda.Stream(1) for _ in self._pairs]  # type: ignore[no-untyped-call]

    def rate(self, in_flight: int, seconds: float) -> float:
        """GB/s of so many seconds with so many copies in flight."""
        copies, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            for (source, target), stream in list(zip(self._pairs, self._streams, strict=True))[:in_flight]:
                with self._torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                    copies += 1
            for stream in self._streams:
                stream.synchronize()
        return copies * COPY_BYTES / (time.perf_counter() - began_s) / 1e9


def run_copies(plan: Plan, record: Recorder) -> None:
    """Loads out of the other GPU's cache beside memcpy between the two; they take turns."""
    need_gpus("copies")
    memcpy = Memcpy()
    config = ClientConfig(load_timeout_s=_TIMEOUT_S, load_grace_s=_TIMEOUT_S)
    for shape in SHAPES:
        chunks = round(COPY_BYTES / shape.chunk_bytes)
        caches = [GpuCache(plan.options.agent, ordinal, shape, max(IN_FLIGHT), chunks) for ordinal in range(GPUS)]
        copies = Copies(caches[0].registration, caches[1].registration, max(IN_FLIGHT), chunks, config)
        for number in range(_ROUNDS):
            for in_flight in IN_FLIGHT:
                case = {"key": in_flight, "run": number}
                record.add("memcpy between GPUs", shape.name, memcpy.rate(in_flight, _WINDOW_S / 2), **case)
                rate = copies.rate(in_flight, _WINDOW_S, chunks * shape.chunk_bytes)
                record.add("peer pull", shape.name, rate, **case)
                record.add("memcpy between GPUs", shape.name, memcpy.rate(in_flight, _WINDOW_S / 2), **case)
        copies.close()
        for cache in caches:
            cache.close()


PHASES: dict[str, Callable[[Plan, Recorder], None]] = {"copies": run_copies}
