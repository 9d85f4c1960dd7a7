"""Settings of the whole process, made once at start: memory, threads, signals, the event loop and gRPC's polling."""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_PR_SET_PDEATHSIG: Final = 1
_MMAP_THRESHOLD_BYTES: Final = 32 << 20
_MMAP_AT_START_BYTES: Final = 256 << 10
_TRIM_THRESHOLD_BYTES: Final = 128 << 20
# CPython's default of 5 ms lets a bulk thread keep the ledger's loop waiting for longer than its whole latency budget.
_SWITCH_INTERVAL_S: Final = 0.0005
# The youngest generation is walked after so many new objects, an older one after so many walks of the one before it.
# With CPython's 700, 10 and 10 an index with 9,000 streams spent a third of its time on this: what it reads each second
# made it walk over all that the streams hold, again and again.
_COLLECTION_THRESHOLDS: Final = (20_000, 20, 10)


def tune_process(switch_interval_s: float = _SWITCH_INTERVAL_S) -> None:
    """Keep 1 to 2 MiB buffers in the heap (glibc maps and unmaps each one otherwise), switch threads often, collect
    garbage seldom, and allow as many open files as the system does: most start a service with a soft limit of 1,024."""
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    sys.setswitchinterval(switch_interval_s)
    gc.set_threshold(*_COLLECTION_THRESHOLDS)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


@contextlib.contextmanager
def mapping_large_buffers() -> Iterator[None]:
    """Have each large buffer mapped apart from the heaps meanwhile, as a start should.

    What it frees goes back to the system, which the heaps of threads keep; what stays can grow without being copied.
    """
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_AT_START_BYTES)
    try:
        yield
    finally:
        _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def release_free_memory() -> None:
    """Give memory that was freed back to the system, which glibc otherwise keeps for later: call it after a start."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def die_with_parent(parent_pid: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `death_signal` to this process when its parent exits.

    `parent_pid` is what the parent calls itself: if the parent is gone already, the signal is sent at once. The
    kernel means the parent's *thread*, so the parent must start us from one that lives as long as it does. Raises
    OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (an extra); else None for asyncio's own."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def poll_grpc_directly() -> None:
    """Let the thread that waits for gRPC's events read and write the sockets itself, not by way of gRPC's thread pool.

    For services of small messages: a round trip takes half the time, and half the processor time. Page streams lose a
    third of their rate. Call before gRPC is imported: it looks then, and not again. What GRPC_EXPERIMENTS says in the
    environment stays; gRPC versions without the choice log that and go on.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and does not need it
    if mallopt is not None:
        mallopt(parameter, value)
