"""Engine and agent of the GPU bench, and one measurement of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvpool.cli.bench_gpu_plan import CHUNK_TOKENS, GpuPlan, Shape
from kvpool.cli.bench_gpu_processes import START_TIMEOUT_S, Process

_MIB = 1 << 20


class OutOfTime(Exception):
    """The plan's time is over: what is left is left out."""


class Rig:
    """See `running_rig`. agent, engine: what they said of themselves."""

    def __init__(self, agent: Process, engine: Process, plan: GpuPlan, device_count: int, socket: Path) -> None:
        """socket: where the agent may listen for an engine that launches for it.

        Raises CommandFailed if either cannot start."""
        self._agent, self._engine, self.plan, self.device_count = agent, engine, plan, device_count
        self.engine: Mapping[str, Any] = engine.answer(START_TIMEOUT_S)
        self.agent: Mapping[str, Any] = agent.answer(START_TIMEOUT_S)
        self._deadline_s = time.monotonic() + plan.deadline_s
        self._allocated: tuple[int, list[int]] | None = None
        self._handles: list[Any] = []
        self._socket = str(socket)

    def map(self, shape: Shape, codec: str = "RAW", chunk_tokens: int = CHUNK_TOKENS) -> Mapping[str, Any]:
        """Have the agent map a cache of the engine's; what it says of it."""
        handles = self._cache(shape, 0)
        return self._agent.ask({"op": "map", **shape.command(codec, chunk_tokens), "handles": handles})

    def map_lent(self, shape: Shape) -> Mapping[str, Any]:
        """The same, with scratch that the engine lends: it launches kernels for this cache. Raises CommandRefused."""
        handles = self._cache(shape, 0)
        self._agent.ask({"op": "unmap"})  # what the engine lent before, too
        self._agent.ask({"op": "listen", "socket": self._socket})
        self._engine.ask({"op": "lend", **shape.command(), "socket": self._socket})
        return self._agent.ask({"op": "map", **shape.command(), "handles": handles, "lent": True})

    def hold_to(self, way: str | None) -> None:
        """Have all transfers take one way; None: the agent chooses."""
        self._agent.ask({"op": "way", "way": way})

    def run(self, what: str, mib: int, in_flight: int, seconds: float | None = None, **more: object) -> dict[str, Any]:
        """Move for some seconds (unless given: a sample's); the agent's answer. Raises OutOfTime."""
        self._check_time()
        return dict(self._agent.ask(_command(what, mib, in_flight, seconds or self._sample_s(mib)) | more))

    def work(self, mode: str) -> None:
        """Have the engine do this from now on: matmul, decode, idle."""
        self._engine.ask({"op": "work", "mode": mode})

    def window(self, seconds: float) -> Mapping[str, Any]:
        """The engine's batches for so long from now on. Raises OutOfTime."""
        self._check_time()
        self._engine.ask({"op": "window"})
        time.sleep(seconds)
        return self._engine.ask({"op": "window"})

    def run_beside(self, what: str, mib: int, in_flight: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """(transfers, batches) of agent and engine while both work. Raises OutOfTime."""
        self._check_time()
        # Transfers begin before the engine's window and end behind it.
        self._agent.tell(_command(what, mib, in_flight, self.plan.beside_s + 2 * self.plan.run_in_s))
        time.sleep(self.plan.run_in_s)
        try:
            batches = self.window(self.plan.beside_s)
        finally:
            moved = self._agent.answer()
        return moved, batches

    def open_peer(self, shape: Shape, *, by_ipc: bool) -> None:
        """Have a cache on the second GPU, the agent's own or the engine's, and one here to pull into."""
        self._agent.ask({"op": "unmap"})
        handles = self._cache(shape, 1) if by_ipc else []
        self._agent.ask({"op": "peer", "peer": 1, **shape.command(), "handles": handles})

    def run_peer(self, what: str, mib: int, in_flight: int) -> Mapping[str, Any]:
        """Pull or copy between the GPUs for a sample's seconds. Raises OutOfTime."""
        self._check_time()
        seconds = self.plan.sample_s
        return self._agent.ask(_command(what, mib, in_flight, seconds) | {"op": "peer-run", "programs": 24})

    def close_peer(self) -> None:
        """Free both caches."""
        self._agent.ask({"op": "peer-end"})

    def _sample_s(self, mib: int) -> float:
        return self.plan.sample_s * (2 if mib >= 512 else 1)  # at least some ten transfers

    def _cache(self, shape: Shape, ordinal: int) -> list[Any]:
        """Handles of a cache of the engine; allocated anew only if the one that it has is of another size."""
        wanted = ordinal, shape.handle_sizes()
        if self._allocated != wanted:
            self._agent.ask({"op": "unmap"})
            self._allocated = None
            self._handles = self._engine.ask({"op": "alloc", "sizes": wanted[1], "ordinal": ordinal})["handles"]
            self._allocated = wanted
        return self._handles

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise OutOfTime


@contextmanager
def running_rig(plan: GpuPlan, device_count: int) -> Iterator[Rig]:
    """Start both processes, end them. Raises CommandFailed."""
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory,
        closing(Process("the engine", ["kvpool.cli.bench_gpu_engine"])) as engine,
        closing(Process("the measured agent", ["kvpool_gpuagent.measure"])) as agent,  # ends first, as it maps memory
    ):
        yield Rig(agent, engine, plan, device_count, Path(directory) / "agent.sock")


def _command(what: str, mib: int, in_flight: int, seconds: float) -> dict[str, Any]:
    return {"op": "run", "what": what, "size_bytes": mib * _MIB, "in_flight": in_flight, "seconds": seconds}
