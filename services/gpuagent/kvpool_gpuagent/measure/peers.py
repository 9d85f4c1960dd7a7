"""Rows pulled from another GPU's cache into one here, beside plain copies between the two."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvpool.core.errors import NotServed
from kvpool.core.plane_table import Int64s
from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime, Stream
from kvpool_gpuagent.measure.cache_plan import CachePlan
from kvpool_gpuagent.measure.moved import joined, repeat_on_stream
from kvpool_gpuagent.measure.plain_copies import Copy

if TYPE_CHECKING:
    from torch import Tensor

    from kvpool.kernels.peer_pull import PullPlanes
    from kvpool_gpuagent.adapters.cuda_runtime import CudaRuntime

Result = TypeVar("Result")

_BUFFER_BYTES = 512 << 20
_CHECKED_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """Two caches of one layout on two GPUs. slots: [T, 2], a token's slot there and here. buffers: there and here."""

    plan: CachePlan
    data: PullPlanes
    slots: Tensor
    rows: tuple[list[list[int]], list[list[int]]]  # of the two tables
    buffers: tuple[Tensor, Tensor]
    stream: Stream
    memory: Sequence[Tensor]  # kept
    close: Callable[[], None]

    @property
    def token_bytes(self) -> int:
        """Of all planes of one token."""
        return len(self.rows[0]) * len(self.plan.layout.head_range) * self.plan.spec.data_row_bytes


class PeerMeasurement:
    """See the package for its commands."""

    def __init__(self, runtime: GpuRuntime, copy: Copy) -> None:
        self._runtime, self._copy = runtime, copy
        self._peers: Peers | None = None
        # A thread of their own: kernels go to the thread's stream, and other threads must keep theirs.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peers")

    async def open(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have a cache there and one here. Raises NotServed where there is no other GPU that can be reached."""
        await self.end({})
        self._peers = await self._in_thread(_open, self._runtime, command)
        await self._in_thread(self._check_rows, self._peers)
        return {"token_bytes": self._peers.token_bytes, "tokens": self._peers.slots.shape[0]}

    async def run(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Pull or copy for some seconds."""
        peers = self._peers
        if peers is None:
            raise ValueError("there is no other GPU's cache; send peer first")
        tokens = max(1, command["size_bytes"] // peers.token_bytes)
        if tokens > peers.slots.shape[0] or tokens * peers.token_bytes > _BUFFER_BYTES:
            raise ValueError(f"size_bytes is more than the caches or buffers hold: {command['size_bytes']}")
        enqueue = {
            "pull": functools.partial(self._pull, peers, tokens, command.get("programs", 24)),
            "copy": functools.partial(self._plain, peers, tokens * peers.token_bytes),
        }[command["what"]]
        in_flight, seconds = command["in_flight"], command["seconds"]
        run = functools.partial(repeat_on_stream, self._runtime, peers.stream, enqueue, in_flight, seconds)
        return joined([await self._in_thread(run)])

    async def end(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let go of both caches."""
        peers, self._peers = self._peers, None
        if peers is not None:
            await self._in_thread(peers.stream.synchronize)
            await self._in_thread(peers.close)
        return {}

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _pull(self, peers: Peers, tokens: int, programs: int, number: int) -> int:
        from kvpool.kernels.peer_pull import pull_rows

        self._runtime.launch_on(peers.stream)
        start = number % (peers.slots.shape[0] // tokens) * tokens
        pull_rows(peers.slots[start : start + tokens], peers.data, programs=programs)
        return tokens * peers.token_bytes

    def _plain(self, peers: Peers, size_bytes: int, number: int) -> int:
        start = number % (_BUFFER_BYTES // size_bytes) * size_bytes
        there, here = (int(buffer.data_ptr()) + start for buffer in peers.buffers)
        self._copy(here, there, size_bytes, peers.stream.address)
        return size_bytes

    def _check_rows(self, peers: Peers) -> None:
        """Pull all once: some rows of the first and last plane must have come. Raises RuntimeError."""
        self._runtime.attach()
        self._pull(peers, peers.slots.shape[0], 24, 0)
        row_bytes = peers.plan.spec.data_row_bytes
        words = -(-row_bytes // 8)
        found = self._runtime.host_table(2 * _CHECKED_ROWS * words)
        slots = peers.slots[:_CHECKED_ROWS].tolist()
        for plane in (0, len(peers.rows[0]) - 1):
            for number, pair in enumerate(slots):
                for side, slot in enumerate(pair):
                    source = self._row_address(peers, side, plane, slot)
                    target = int(found.data_ptr()) + (side * _CHECKED_ROWS + number) * words * 8
                    self._copy(target, source, row_bytes, peers.stream.address)
            peers.stream.synchronize()
            there, here = found.view(2, -1)
            if not bool((there == here).all()) or not bool(there.any()):
                raise RuntimeError(f"pulled rows of plane {plane} are not those of the other GPU")

    def _row_address(self, peers: Peers, side: int, plane: int, slot: int) -> int:
        address, block_stride, token_stride, *_ = peers.rows[side][plane]
        block, token = divmod(slot, peers.plan.layout.block_tokens)
        return address + block * block_stride + token * token_stride


def _open(runtime: GpuRuntime, command: Mapping[str, Any]) -> Peers:
    import torch

    from kvpool.kernels.peer_pull import PullPlanes, pull_shape

    cuda, peer = _cuda(runtime), int(command["peer"])
    if peer >= cuda.driver.device_count():
        raise NotServed(f"device {peer} is not there: this process sees {cuda.driver.device_count()}")
    cuda.driver.enable_peer_access(cuda.ordinal, peer)
    cuda.attach()
    plan, there = CachePlan.of(command), torch.device("cuda", peer)
    own = [cuda.device_bytes(size_bytes) for size_bytes in plan.layout.handle_sizes]
    theirs: list[Tensor] = []
    if plan.handles:
        addresses, close = _mapped(cuda, plan)
    else:
        theirs = [_random(size_bytes, there) for size_bytes in plan.layout.handle_sizes]
        addresses, close = [int(tensor.data_ptr()) for tensor in theirs], _nothing
    buffers = _random(_BUFFER_BYTES, there), cuda.device_bytes(_BUFFER_BYTES)
    torch.cuda.synchronize(there)
    cuda.attach()
    source, destination = _rows(plan, addresses), _rows(plan, [int(tensor.data_ptr()) for tensor in own])
    shape = pull_shape(
        source,
        destination,
        heads=len(plan.layout.head_range),
        row_bytes=plan.spec.data_row_bytes,
        source_block_rows=plan.layout.block_tokens,
        destination_block_rows=plan.layout.block_tokens,
    )
    tables = [torch.tensor(rows, dtype=torch.int64).to(cuda.device) for rows in (source, destination)]
    return Peers(
        plan=plan,
        data=PullPlanes(tables[0], tables[1], shape),
        slots=torch.from_numpy(_slots(plan)).to(cuda.device),
        rows=(source, destination),
        buffers=buffers,
        stream=cuda.stream(urgent=True),
        memory=[*own, *theirs],
        close=close,
    )


def _cuda(runtime: GpuRuntime) -> CudaRuntime:
    from kvpool_gpuagent.adapters.cuda_runtime import CudaRuntime

    if not isinstance(runtime, CudaRuntime):
        raise NotServed("rows are pulled between CUDA devices only")
    return runtime


def _mapped(cuda: CudaRuntime, plan: CachePlan) -> tuple[list[int], Callable[[], None]]:
    """Addresses of another process's memory on another GPU, and what unmaps them."""
    from kvpool.cuda.ipc import IpcMappings

    mappings = IpcMappings(cuda.driver)
    opened = [(handle.ipc, handle.size_bytes) for handle in plan.handles if handle.ipc is not None]
    addresses = [mappings.open(ipc, size_bytes, ordinal=cuda.ordinal) for ipc, size_bytes in opened]

    def close() -> None:
        for ipc, _ in opened:
            mappings.close(ipc, ordinal=cuda.ordinal)

    return addresses, close


def _nothing() -> None:
    """torch frees its memory itself."""


def _random(size_bytes: int, device: Any) -> Tensor:
    import torch

    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=device)


def _rows(plan: CachePlan, addresses: Sequence[int]) -> list[list[int]]:
    """The rank's planes, all of its heads in each, as pull_rows reads them."""
    return [
        [
            addresses[plane.handle] + plane.offset_bytes,
            plane.block_stride_bytes,
            plane.token_stride_bytes,
            plane.head_stride_bytes,
            *(0, 0, 0, 0),
        ]
        for layer in plan.layout.layers
        for plane in layer.planes
    ]


def _slots(plan: CachePlan) -> Int64s:
    """[T, 2]: scattered blocks on both sides, tokens of a block in order."""
    random, tokens = np.random.default_rng(5), np.arange(plan.layout.block_tokens)
    there, here = (
        (random.permutation(plan.layout.block_count)[:, None] * plan.layout.block_tokens + tokens).ravel()
        for _ in range(2)
    )
    return np.ascontiguousarray(np.stack([there, here], axis=1).astype(np.int64))
