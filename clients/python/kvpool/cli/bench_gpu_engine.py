"""A process that plays the engine: it owns caches that the agent maps, and keeps the GPU busy while they move.

`python -m kvpool.cli.bench_gpu_engine` answers one JSON command a line and ends with its input:

  {"op": "alloc", "sizes": [bytes, ...], "ordinal": n}   caches in place of those before; their IPC handles
  {"op": "work", "mode": "matmul" | "decode" | "idle"}
  {"op": "lend", ... a shape's command, "socket": path}   scratch and launches for the agent that listens there
  {"op": "window"}                                        what was done since the last one, per batch of work
"""

from __future__ import annotations

import json
import queue
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.client.gpu import ExportedTensors

MATMUL_SIZE, MATMULS = 8192, 8  # of a batch
DECODE_ROWS, DECODE_WIDTH, DECODE_STEPS = 64, 4096, 100
_AHEAD = 2  # batches enqueued: the GPU is never without work
_SWITCH_INTERVAL_S = 0.0005  # as an engine sets it that launches for its agent: threads get the GIL soon


class Caches:
    """Memory that other processes map."""

    def __init__(self) -> None:
        from kvpool.cuda.driver import Driver

        self._driver = Driver.load()
        self._held: list[Any] = []
        self.exported: ExportedTensors | None = None

    def allocate(self, sizes: list[int], ordinal: int) -> list[list[Any]]:
        """[[device uuid, handle in hex, offset, allocation bytes, size], ...] of caches full of numbers as KV has."""
        import torch

        from kvpool.client.engine_registration import GpuRegion
        from kvpool.client.gpu import ExportedTensors
        from kvpool.cuda.ipc import export_memory

        self._held.clear()
        self.exported = None
        torch.cuda.empty_cache()
        uuid, regions = self._driver.device_uuid(ordinal), []
        with torch.cuda.device(ordinal):
            for size_bytes in sizes:
                tensor = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
                self._held.append(tensor)
                regions.append(GpuRegion(size_bytes, export_memory(self._driver, uuid, tensor.data_ptr(), size_bytes)))
            torch.cuda.synchronize()
        addresses = tuple(tensor.data_ptr() for tensor in self._held)
        self.exported = ExportedTensors(tuple(regions), (), addresses, ordinal)
        handles = [(region.memory, region.size_bytes) for region in regions]
        return [
            [memory.device_uuid, memory.handle.hex(), memory.allocation_offset, memory.allocation_bytes, size_bytes]
            for memory, size_bytes in handles
        ]


class Work:
    """Batches of one kind, one after another; the seconds of each from the end of the one before to its own."""

    def __init__(self, enqueue: Callable[[], None]) -> None:
        self._enqueue = enqueue
        self._ends: deque[Any] = deque()
        self._previous: Any = None
        self._batches_s: list[float] = []

    def step(self) -> None:
        """Enqueue one batch more, and wait for the one that is due."""
        import torch

        self._enqueue()
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end.record()
        self._ends.append(end)
        if len(self._ends) > _AHEAD:
            end = self._ends.popleft()
            end.synchronize()
            if self._previous is not None:
                self._batches_s.append(self._previous.elapsed_time(end) / 1e3)
            self._previous = end

    def window(self) -> dict[str, Any]:
        """Batches since the last call. Mean: what the engine gets done; median: its usual batch."""
        batches_s, self._batches_s = self._batches_s, []
        if not batches_s:
            return {"batches": 0, "mean_s": 0.0, "p50_s": 0.0}
        return {
            "batches": len(batches_s),
            "mean_s": statistics.fmean(batches_s),
            "p50_s": statistics.median(batches_s),
        }


def matmuls() -> Callable[[], None]:
    """Large products: the GPU is full."""
    import torch

    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    right = torch.randn_like(left)
    product = torch.empty_like(left)

    def enqueue() -> None:
        for _ in range(MATMULS):
            torch.mm(left, right, out=product)

    return enqueue


def decode_steps() -> Callable[[], None]:
    """Many small kernels launched one by one: the GPU often waits for the CPU."""
    import torch

    rows = torch.randn(DECODE_ROWS, DECODE_WIDTH, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(DECODE_WIDTH, DECODE_WIDTH, device="cuda", dtype=torch.bfloat16) / DECODE_ROWS

    def enqueue() -> None:
        hidden = rows
        for _ in range(DECODE_STEPS):
            hidden = torch.nn.functional.silu(hidden @ weights)

    return enqueue


class Engine:
    """Works between commands."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], None]) -> None:
        """Raises RuntimeError where torch sees no GPU."""
        import torch

        from kvpool.cli.bench_gpu_lending import Lending

        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no CUDA device; install a CUDA build of it")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._answer = answer
        self._caches, self._lending = Caches(), Lending()
        self._kinds = {"matmul": matmuls(), "decode": decode_steps()}
        self._work: Work | None = None
        answer({"device": torch.cuda.get_device_name(0), "cuda": torch.version.cuda})

    def run(self, commands: queue.SimpleQueue[str | None]) -> None:
        """Until None comes."""
        while True:
            try:
                line = commands.get(block=self._work is None)
            except queue.Empty:
                assert self._work is not None
                self._work.step()
                continue
            if line is None:
                return
            try:
                self._answer(self._do(json.loads(line)))
            except Exception as error:  # the peer prints it
                self._answer(failure(error))

    def close(self) -> None:
        """Launch no more; the agent must be gone or have unmapped all."""
        self._lending.stop()

    def _do(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        if command["op"] == "alloc":
            self._lending.close()  # it launches over the cache that goes
            return {"handles": self._caches.allocate(command["sizes"], command.get("ordinal", 0))}
        if command["op"] == "lend":
            if self._caches.exported is None:
                raise ValueError("there is no cache to launch for; send alloc first")
            self._lending.lend(self._caches.exported, command)
            return {}
        if command["op"] == "work":
            mode = command["mode"]
            self._work = None if mode == "idle" else Work(self._kinds[mode])
            return {}
        if command["op"] == "window":
            return self._work.window() if self._work else {"batches": 0, "mean_s": 0.0, "p50_s": 0.0}
        raise ValueError(f"op must be alloc, lend, work or window, got {command['op']!r}")


def failure(error: Exception) -> Mapping[str, Any]:
    """The answer to a command that could not be done."""
    return {"error": str(error) or type(error).__name__, "type": type(error).__name__}


def main() -> int:
    """Serve until the input ends."""

    def answer(document: Mapping[str, Any]) -> None:
        print(json.dumps(document), flush=True)

    commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line)
        commands.put(None)

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        engine = Engine(answer)
    except Exception as error:  # the peer prints it
        answer(failure(error))
        return 1
    threading.Thread(target=read, daemon=True).start()
    try:
        engine.run(commands)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
