"""Large copies in host memory that bypass the processor's caches.

memcpy writes through the caches: each line of the destination is first read, and what others have there is pushed out.
glibc bypasses them only for copies larger than about three quarters of the last-level cache, which virtual machines
report as up to hundreds of MiB. With non-temporal stores one thread copies 1.4 to 1.6 times as much a second, and
sixteen threads 63 instead of 46 GB/s (16 virtual processors of a Xeon with 300 MiB).

The kernel is compiled by numba, which vLLM requires; without numba copies are memcpy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

_log = logging.getLogger(__name__)
_Kernel: TypeAlias = Callable[[int, int, int], None]  # destination, source: addresses; number of lines
_LINE_BYTES: Final = 64
_BYTES_MIN: Final = 1 << 20  # what is smaller may be in a cache when it is used next
_lock = threading.Lock()
_kernel: _Kernel | None = None


def compile_streaming_copy() -> bool:
    """Have `copy` bypass the caches from now on: takes about a second, once in a process. False where numba is not
    there or does not work."""
    global _kernel  # noqa: PLW0603  # one for the process, as compiled code is
    with _lock:
        if _kernel is None:
            try:
                _kernel = _compiled()
            except ImportError as error:
                _log.debug("copies go through the caches: %s", error)
            except Exception as error:  # a numba that does not fit numpy raises several kinds of errors
                _log.warning("copies go through the caches, as numba does not work: %s", error)
    return _kernel is not None


def copy(source: memoryview, destination: memoryview) -> None:
    """Copy contiguous bytes, without the GIL. raises: ValueError if sizes differ, or the destination is read-only."""
    there, here = np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8)
    if there.nbytes != here.nbytes:  # numpy would repeat a single byte
        raise ValueError(f"{here.nbytes} bytes cannot be copied to {there.nbytes}")
    if _kernel is None or there.nbytes < _BYTES_MIN or not there.flags.writeable:
        np.copyto(there, here)
        return
    start = -there.ctypes.data % _LINE_BYTES
    count = (there.nbytes - start) // _LINE_BYTES
    end = start + count * _LINE_BYTES
    _kernel(there.ctypes.data + start, here.ctypes.data + start, count)
    for rest in (slice(start), slice(end, None)):
        np.copyto(there[rest], here[rest])


def _compiled() -> _Kernel:
    """raises: ImportError without numba, or where it is told to compile nothing."""
    from llvmlite import ir
    from numba import config, njit, types
    from numba.extending import intrinsic

    if config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set")

    line, number = ir.VectorType(ir.IntType(64), 8), ir.IntType(64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """A loop over the lines, each read as a vector and written with LLVM's `nontemporal` metadata."""
        destination, source, count = arguments
        before, loop, after = (
            builder.block,
            builder.append_basic_block("loop"),
            builder.append_basic_block("after"),
        )
        builder.cbranch(builder.icmp_unsigned("==", count, number(0)), after, loop)
        builder.position_at_end(loop)
        index = builder.phi(number)
        index.add_incoming(number(0), before)
        offset = builder.mul(index, number(_LINE_BYTES))
        start, target = (
            builder.inttoptr(builder.add(base, offset), line.as_pointer()) for base in (source, destination)
        )
        written = builder.store(builder.load(start, align=1), target, align=_LINE_BYTES)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        following = builder.add(index, number(1))
        index.add_incoming(following, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, count), loop, after)
        builder.position_at_end(after)
        builder.fence("seq_cst")  # such stores may otherwise be seen after those that say that the copy has ended
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def stream(typing: Any, destination: Any, source: Any, count: Any) -> Any:
        return types.void(types.uintp, types.uintp, types.uintp), generate

    @njit("void(uintp, uintp, uintp)", nogil=True)  # type: ignore[untyped-decorator]
    def kernel(destination: int, source: int, count: int) -> None:
        stream(destination, source, count)

    return kernel  # type: ignore[no-any-return]
