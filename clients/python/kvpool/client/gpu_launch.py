"""Kernels that the agent would launch, launched in the engine's own process instead.

Kernels of two processes take turns on a GPU; those of one process share it, so a gather here costs the engine next to
nothing and waits for nobody's turn. They go to streams of their own, some for each direction, with a high priority:
all of them together take three hundredths of the GPU at the full speed of the link, early or late, and early the link
does not wait. The engine's streams are never used or waited for, nor is the whole device: that the cache is in the
right state is told by the events that stores and loads name.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.client.engine_registration import GpuRegion
from kvpool.client.gpu import ExportedTensors
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.launches import Launch, Launched, LaunchKind, most_pages
from kvpool.core.layout import EngineLayout
from kvpool.core.plane_table import PlaneTable

if TYPE_CHECKING:
    import torch

    from kvpool.kernels.burst_tables import BurstPages, BurstTables
    from kvpool.kernels.cache_kernels import KernelSpace

_log = logging.getLogger(__name__)

DEFAULT_SCRATCH_BYTES = 256 << 20
# Of each direction: beside the engine's work each kernel waits for its turn, those of several lines for the same one.
_LINES = 3
_TABLES = 4  # of each line, made beforehand: pinning memory while the engine works would make it wait


class LaunchMark(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block, without keeping a CPU core busy, until the work before it has ended. Raises what the GPU reports."""
        ...


class LaunchStream(Protocol):
    """Work in order."""

    def mark(self) -> LaunchMark:
        """After the work enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Block until all of its work has ended. Raises what the GPU reports."""
        ...


class LaunchRuntime(Protocol):
    """What is needed of the engine's GPU; gpu_launch_runtime has the real one."""

    def launch_stream(self) -> LaunchStream:
        """A new stream whose work goes before the engine's."""
        ...

    def attach(self, stream: LaunchStream) -> None:
        """Make the device current in this thread; its kernels go to this stream."""
        ...

    def lend(self, size_bytes: int) -> tuple[int, GpuRegion]:
        """Memory that others can map, and its address here. Raises InvalidRequest saying what to set."""
        ...

    def take_back(self) -> None:
        """Free what was lent."""
        ...

    def to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """A copy on the device; it has arrived when this returns."""
        ...

    def kernel_space(self) -> KernelSpace:
        """What kernels of one stream share."""
        ...

    def host_table(self, count: int) -> torch.Tensor:
        """[count] int64 of host memory that kernels can read and write, zeroed."""
        ...


class GpuLauncher:
    """See engine_registration.Launcher: EnginePlan.launcher. One for each engine rank; it outlives sessions.

    Takes scratch_bytes of GPU memory and 48 MiB more, and twelve threads that wait most of the time. Making it compiles
    the kernels if no process on this machine has, which takes seconds. Make it after CUDA graphs have been captured, or
    capture them with capture_error_mode="thread_local": launches must not fall into a capture. The threads need the GIL
    for some 0.2 ms a launch; an engine that never lets go of it makes them wait sys.getswitchinterval() each time.
    """

    def __init__(
        self,
        exported: ExportedTensors,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        *,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
        runtime: LaunchRuntime | None = None,
    ) -> None:
        """layout: the plan's, over the regions of `exported`. raises: InvalidRequest if the scratch cannot be had or
        shared; NotServed without a driver."""
        from kvpool.kernels.burst_tables import TablePool
        from kvpool.kernels.cache_kernels import CacheKernels

        if runtime is None:
            from kvpool.client.gpu_launch_runtime import TorchRuntime

            runtime = TorchRuntime(exported.device_index)
        self._runtime = runtime
        self._table = PlaneTable.of(spec, ShardGrid.of(spec), layout, exported.addresses)
        self._tables = TablePool(runtime.host_table)
        self._lines = {kind: [_Line(kind.name.lower(), runtime) for _ in range(_LINES)] for kind in LaunchKind}
        self._turns = {kind: itertools.cycle(lines) for kind, lines in self._lines.items()}
        first = self._lines[LaunchKind.GATHER][0].issuing
        try:
            self._address, self.scratch = first.submit(runtime.lend, scratch_bytes).result()
            self._kernels = first.submit(CacheKernels, self._table, runtime.to_device).result()
            self._most_pages = min(self._kernels.most_pages, most_pages(spec.chunk_tokens // layout.block_tokens))
            for kind, lines in self._lines.items():
                for line in lines:
                    line.issuing.submit(self._warm_up, kind, line).result()
        except BaseException:
            self.close()
            raise

    def start(self, launch: Launch, ended: Callable[[Launched], None]) -> None:
        """See engine_registration.Launcher."""
        line = next(self._turns[launch.kind])
        try:
            line.issuing.submit(self._issue, launch, line, ended)
        except RuntimeError:
            ended(Launched(launch.ticket, error=KvPoolError("the engine has closed its launcher")))

    def close(self) -> None:
        """Free the memory, after what was begun has ended. No session may have it any more: an agent that maps the
        scratch would read and write what then is others'. Idempotent."""
        for line in itertools.chain.from_iterable(self._lines.values()):
            line.issuing.shutdown()
            line.settling.shutdown()
        self._runtime.take_back()

    def _issue(self, launch: Launch, line: _Line, ended: Callable[[Launched], None]) -> None:
        tables = self._tables.take()
        try:
            launch.check(self._table, self.scratch.size_bytes)
            if len(launch.pages) > self._most_pages:
                raise InvalidRequest(f"a launch for this cache has at most {self._most_pages} pages")
            tables.fill(self._table, self._burst(launch))
            self._run(launch.kind, tables, line, sums=launch.sums)
            line.settling.submit(self._settle, launch, tables, line, ended, line.stream.mark())
        except Exception as error:
            ended(_failed(launch, error, line))

    def _settle(
        self, launch: Launch, tables: BurstTables, line: _Line, ended: Callable[[Launched], None], mark: LaunchMark
    ) -> None:
        try:
            mark.wait()
        except Exception as error:
            ended(_failed(launch, error, line))
            return
        found = tables.found_faults() if launch.kind is LaunchKind.SCATTER and launch.sums else []
        self._tables.give(tables)
        faults = tuple((page, fault.block or 0) for page, fault in enumerate(found) if fault is not None)
        ended(Launched(launch.ticket, faults))

    def _run(self, kind: LaunchKind, tables: BurstTables, line: _Line, *, sums: bool) -> None:
        if kind is LaunchKind.GATHER:
            self._kernels.gather(tables)
            if sums:
                self._kernels.sum(tables, line.space)
        else:
            if sums:
                self._kernels.verify(tables, line.space)
            self._kernels.scatter(tables, line.space if sums else None)

    def _burst(self, launch: Launch) -> BurstPages:
        from kvpool.kernels.burst_tables import BurstPages

        return BurstPages(
            shards=[page.shard for page in launch.pages],
            block_ids=launch.block_ids[[page.chunk for page in launch.pages]],
            skip_tokens=[page.skip_tokens for page in launch.pages],
            payloads=self._address + np.array([page.scratch_offset for page in launch.pages], dtype=np.int64),
            present=[True] * len(launch.pages),
        )

    def _warm_up(self, kind: LaunchKind, line: _Line) -> None:
        """Have kernels compiled and tables large enough before anybody waits for either."""
        from kvpool.kernels.burst_tables import BurstPages

        made = [self._tables.take() for _ in range(_TABLES)]
        for tables in made:
            tables.fill(self._table, BurstPages.absent(self._table, self._most_pages))
        made[0].fill(self._table, BurstPages.absent(self._table, 1))
        for sums in (True, False):
            self._run(kind, made[0], line, sums=sums)
        line.stream.synchronize()
        for tables in made:
            self._tables.give(tables)


class _Line:
    """Some launches of one kind, in order: one thread enqueues them, another waits for their ends."""

    def __init__(self, name: str, runtime: LaunchRuntime) -> None:
        self.stream = runtime.launch_stream()
        self.issuing, self.settling = (
            ThreadPoolExecutor(1, f"kvpool-{name}-{role}", initializer=runtime.attach, initargs=(self.stream,))
            for role in ("issue", "settle")
        )
        self.space = self.issuing.submit(runtime.kernel_space).result()


def _failed(launch: Launch, error: Exception, line: _Line) -> Launched:
    """Part of the launch may be running: it has ended when this returns, or the GPU has."""
    if isinstance(error, KvPoolError):
        return Launched(launch.ticket, error=error)  # before anything was launched
    _log.error("kernels for %d pages failed", len(launch.pages), exc_info=error)
    try:
        line.stream.synchronize()
    except Exception as broken:
        _log.error("the GPU does not answer any more: %s", broken)
    return Launched(launch.ticket, error=KvPoolError(f"the engine's GPU failed ({error})"))
