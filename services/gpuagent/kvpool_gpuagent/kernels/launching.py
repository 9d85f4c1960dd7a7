"""How kernels are launched, without work twice for a shape that was launched before; how tables are checked."""

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction, driver

MOST_ITEMS = (1 << 31) - 1  # of one launch: kernels count them in int32

_interpreter = threading.Lock()  # it keeps the program's number in a global


class Launch:
    """A kernel and its constants, ready to run over any number of pages of its shape; addresses are not checked."""

    def __init__(self, kernel: Any, constants: dict[str, Any], warps: int, items_of_page: int = 1) -> None:
        """constants: the constexpr arguments, in the order of the kernel's signature."""
        self._kernel, self._constants, self._warps = kernel, constants, warps
        self._items_of_page = items_of_page
        self._values = tuple(constants.values())
        # By device. Triton's own way to a compiled kernel costs several microseconds a launch.
        self._compiled: dict[int, Any] = {}

    def start(self, pages: int, *addresses: int, programs: int | None = None) -> None:
        """Run on the current stream of the current device.

        programs: at most so many; None takes one for each tile. raises: ValueError for more pages than can be counted.
        """
        items = pages * self._items_of_page
        if items:  # an empty grid cannot be launched
            self.run(grid_size(items, programs), *addresses, items)

    def run(self, programs: int, *arguments: int) -> None:
        """Start the kernel on the current stream of the current device; in the interpreter, run it.

        arguments: those that are no constants, in order; their types are fixed by annotations and never specialized.
        """
        if not isinstance(self._kernel, JITFunction):
            # Later launches on a GPU pass all by place, which nothing there checks.
            names = self._kernel.arg_names
            assert names == [*names[: len(arguments)], *self._constants]
            with _interpreter:
                self._kernel[(programs,)](*arguments, **self._constants)
            return
        device = driver.active.get_current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            self._compiled[device] = self._kernel[(programs,)](*arguments, **self._constants, num_warps=self._warps)
        else:
            compiled[(programs, 1, 1)](*arguments, *self._values)


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def check_table(name: str, table: Tensor, dtype: torch.dtype, columns: int, rows: int | None = None) -> int:
    """The address of a table that a kernel may read.

    raises: ValueError naming the table.
    """
    if table.dtype != dtype or table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} with two dimensions, got {table.dtype} {table.shape}")
    if table.shape[1] != columns or rows not in (None, table.shape[0]):
        wanted = f"[{'any' if rows is None else rows}, {columns}]"
        raise ValueError(f"{name} must have the shape {wanted}, got {list(table.shape)}")
    if not table.is_cuda and _has_cuda() and not table.is_pinned():
        raise ValueError(f"{name} lies in pageable memory: pin it or put it on the device")
    return table.data_ptr()


def grid_size(items: int, programs: int | None) -> int:
    """Programs for so many items; a bound makes them take several each, and so keeps multiprocessors free.

    raises: ValueError for more items than a launch can count.
    """
    if items > MOST_ITEMS:
        raise ValueError(f"one launch moves at most {MOST_ITEMS} tiles, got {items}: cut the burst")
    return items if programs is None else min(items, max(1, programs))
