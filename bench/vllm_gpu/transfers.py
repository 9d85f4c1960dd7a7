"""Transfers at link speed between an agent and GPU caches in vLLM's layouts, alone and beside an engine's decode."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from bench.vllm_gpu.engines import prompt, start_all
from bench.vllm_gpu.phases import Plan
from bench.vllm_gpu.samples import Recorder
from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.hashing import Prompt
from kvpool.client.sync import Pool
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.partition import rank_part

if TYPE_CHECKING:
    import torch

    from kvpool.connectors.vllm.cache_memory import CacheMemory

IN_FLIGHT = 4
COPY_BYTES = 64 << 20
_STORED = 16  # prompts that loads go round
CHUNK_TOKENS = 128
_TIMEOUT_S = 60.0
_WINDOW_S = 2.0
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """name: in the results. layout: as vLLM names it."""

    name: str
    layout: str
    group: KvGroup
    block_tokens: int
    chunks: int  # of a transfer: 64 MiB, about

    @property
    def row_elements(self) -> int:
        """Of a token and head: K and V, or a latent."""
        return self.group.latent_dim or 2 * self.group.head_dim

    @property
    def chunk_bytes(self) -> int:
        """KV of one chunk."""
        return CHUNK_TOKENS * self.group.layers * self.group.kv_heads * self.row_elements * 2

    def spec(self, user: str) -> KeyspaceSpec:
        """A keyspace for one user of the shape."""
        return KeyspaceSpec(
            model_id=f"{user} {self.name}",
            model_revision="1",
            groups=(self.group,),
            dtype=Dtype.BF16,
            chunk_tokens=CHUNK_TOKENS,
        )

    def allocate(
        self, spec: KeyspaceSpec, block_count: int, ordinal: int = 0
    ) -> tuple[list[torch.Tensor], CacheMemory]:
        """A cache of so many blocks on the GPU with this ordinal: its tensors, and how a rank registers them."""
        import torch

        from kvpool.connectors.vllm.cache_memory import cache_memory
        from tests.fixtures.vllm_caches import CacheShape, allocate

        cache = CacheShape(
            layout=self.layout,
            block_tokens=self.block_tokens,
            layers=self.group.layers,
            heads=self.group.kv_heads,
            row_elements=self.row_elements,
            block_count=block_count,
        )
        tensors = allocate(cache, torch.device("cuda", ordinal))
        torch.cuda.synchronize(ordinal)
        return tensors, cache_memory(tensors, spec, rank_part(self.group), self.block_tokens, block_count)


# LBNHC is what vLLM takes by itself; BLHNC is what kvpool's connector asks for.
SHAPES = (
    Shape("K/V interleaved", "LBNHC", KvGroup(32, 8, 128), 16, 4),
    Shape("K/V interleaved BLHNC", "BLHNC", KvGroup(32, 8, 128), 16, 4),
    Shape("MLA", "LBNHC", KvGroup.mla(61, 576), 64, 7),
)
_BESIDE = SHAPES[1], SHAPES[0]


class Transfers:
    """A client with a GPU cache of its own, which has nothing else to do."""

    def __init__(self, agent: str, shape: Shape) -> None:
        """Register with the agent and store what loads are of."""
        spec = shape.spec("transfers")
        self._tokens = shape.chunks * CHUNK_TOKENS
        blocks_each = self._tokens // shape.block_tokens
        block_count = blocks_each * 2 * IN_FLIGHT
        self._caches, memory = shape.allocate(spec, block_count)
        order = np.random.default_rng(5).permutation(block_count).astype(np.int64)
        self._blocks = order.reshape(2 * IN_FLIGHT, blocks_each)
        self._chunks = shape.chunks
        self.size_bytes = shape.chunks * shape.chunk_bytes
        plan = EngineRegistration(
            endpoint=agent,
            engine_name="transfers",
            keyspace_name=f"transfers-{shape.layout}-{shape.group.layers}",
            spec=spec,
            layout=memory.layout,
            regions=memory.regions,
        )
        self._pool = Pool(plan, ClientConfig(store_timeout_s=_TIMEOUT_S, load_timeout_s=_TIMEOUT_S))
        self._lock = threading.Lock()
        self._seed = int(time.time()) << 20
        self._loaded = [self._chain() for _ in range(_STORED)]
        for number, chain in enumerate(self._loaded):
            self._store(number % IN_FLIGHT, chain)

    def rate(self, way: str, seconds: float) -> float:
        """GB/s of so many seconds with four in flight, each way. way: store, load or both."""
        ways = {"store": [self._stores], "load": [self._loads], "both": [self._stores, self._loads]}[way]
        began_s = time.perf_counter()
        with ThreadPoolExecutor(2 * IN_FLIGHT) as threads:
            counts = [threads.submit(work, slot, began_s + seconds) for work in ways for slot in range(IN_FLIGHT)]
            ended = sum(count.result() for count in counts)
        return ended * self.size_bytes / (time.perf_counter() - began_s) / 1e9

    def close(self) -> None:
        """End the session and free the cache."""
        import torch

        self._pool.close()
        self._caches.clear()
        torch.cuda.empty_cache()

    def _stores(self, slot: int, until_s: float) -> int:
        count = 0
        while time.perf_counter() < until_s:
            with self._lock:
                chain = self._chain()
            self._store(slot, chain)
            count += 1
        return count

    def _loads(self, slot: int, until_s: float) -> int:
        count = 0
        while time.perf_counter() < until_s:
            chain = self._loaded[(slot + IN_FLIGHT * count) % _STORED]
            report = self._pool.load(
                chain, self._blocks[IN_FLIGHT + slot], first_chunk=0, end_chunk=self._chunks, timeout_s=_TIMEOUT_S
            )
            if report.loaded_chunks != self._chunks:
                with self._lock:  # evicted by the stores: have it again
                    self._store(slot, chain)
                continue
            count += 1
        return count

    def _store(self, slot: int, chain: Prompt) -> None:
        handle = self._pool.store(chain, self._blocks[slot], first_chunk=0, end_chunk=self._chunks)
        report = handle.result(_TIMEOUT_S)
        if report.failed_chunks:
            raise RuntimeError(f"a store failed: {next(iter(report.failed_chunks.values()))}")

    def _chain(self) -> Prompt:
        self._seed += 1
        tokens = np.random.default_rng(self._seed).integers(0, 1 << 31, self._tokens, dtype=np.uint32)
        return self._pool.prompt(tokens)


class Memcpy:
    """Plain copies of 64 MiB between pinned memory and the GPU, four in flight each way."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._hosts = [torch.empty(IN_FLIGHT * COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._devices = [torch.empty(IN_FLIGHT * COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def rate(self, way: str, seconds: float) -> float:
        """GB/s; way as in Transfers."""
        ways = {"store": (0,), "load": (1,), "both": (0, 1)}[way]
        copies = 0
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            for number in ways:
                pair = (memory[number].view(IN_FLIGHT, COPY_BYTES) for memory in (self._hosts, self._devices))
                with self._torch.cuda.stream(self._streams[number]):
                    for host, device in zip(*pair, strict=True):
                        target, source = (device, host) if number else (host, device)
                        target.copy_(source, non_blocking=True)
                        copies += 1
            for number in ways:
                self._streams[number].synchronize()
        return copies * COPY_BYTES / (time.perf_counter() - began_s) / 1e9


def run_layouts(plan: Plan, record: Recorder) -> None:
    """Stores, loads and both with the pagestore running, beside memcpy; they take turns."""
    memcpy = Memcpy()
    for shape in SHAPES:
        transfers = Transfers(plan.options.agent, shape)
        transfers.rate("both", 0.5)
        for number in range(_ROUNDS):
            for way in ("store", "load", "both"):
                record.add(f"layout {way} memcpy", shape.name, memcpy.rate(way, 0.3), run=number)
                record.add(f"layout {way}", shape.name, transfers.rate(way, _WINDOW_S / 2), run=number)
                record.add(f"layout {way} memcpy", shape.name, memcpy.rate(way, 0.3), run=number)
        transfers.close()


def run_beside(plan: Plan, record: Recorder) -> None:
    """Decode of an engine while another process's requests store and load; before and after without."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(theirs, plan.options.agent), daemon=True)
    process.start()
    if plan.kinds != ["plain"]:
        raise ValueError("beside measures a plain engine: --kinds plain")
    engine = start_all(["plain"], plan.options)["plain"]
    assert ours.recv() == "ready"
    tokens, new_tokens = plan.decode_tokens
    seed = int.from_bytes(b"beside", "little")

    def decode() -> float:
        nonlocal seed
        seed += 1000
        asked = [prompt(tokens, seed + number) for number in range(plan.decode_requests)]
        return plan.decode_requests * new_tokens / engine.ask(asked, new_tokens).seconds

    decode()
    for number in range(_ROUNDS):
        for shape, way in itertools.product(_BESIDE, ("store", "load", "both")):
            before = decode()
            ours.send((shape.name, way))
            record.add(f"beside {way}", shape.layout, decode(), run=number)
            ours.send("stop")
            record.add(f"beside {way} GB/s", shape.layout, ours.recv(), run=number)
            record.add(f"beside {way} alone", shape.layout, (before + decode()) / 2, run=number)
    process.kill()


def _serve(pipe: Connection, agent: str) -> None:
    """Of the process beside the engine: transfers from a shape's and way's names on, until `stop`; answers GB/s."""
    transfers = {shape.name: Transfers(agent, shape) for shape in _BESIDE}
    for one in transfers.values():
        one.rate("both", 0.5)
    pipe.send("ready")
    while True:
        (name, way), rates = pipe.recv(), []
        while not pipe.poll():
            rates.append(transfers[name].rate(way, 0.25))
        pipe.recv()
        pipe.send(float(np.median(rates)) if rates else 0.0)


PHASES: dict[str, Callable[[Plan, Recorder], None]] = {"layouts": run_layouts, "beside": run_beside}
