"""Tables of kernels, whose addresses are arguments."""

from __future__ import annotations

import mmap
import platform

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool_gpuagent.kernels.copying import table_row
from kvpool_gpuagent.kernels.launching import check_table

_MAP_32BIT = 0x40  # Linux on x86-64: within the first 2 GiB


@triton.jit  # type: ignore[untyped-decorator]  # triton says nothing of its types
def _copy_second_row(table: tl.tensor, to: tl.tensor) -> None:
    tl.store(table_row(to, 0, 1), tl.load(table_row(table, 1, 2)))


@pytest.mark.skipif(
    platform.machine() != "x86_64" or torch.cuda.is_available(),
    reason="only x86-64 maps memory at low addresses when asked to, and no GPU reads it",
)
def test_a_table_at_a_low_address_is_read() -> None:
    """As memory of a Python that is not a position-independent executable is: Triton takes its address for an int32."""
    memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_32BIT)
    table = torch.frombuffer(memory, dtype=torch.int64)
    table[:5] = torch.tensor([1, 2, 3, 4, 0])
    assert table.data_ptr() < 1 << 31
    _copy_second_row[(1,)](table.data_ptr(), table.data_ptr() + 4 * table.element_size())
    assert table[4] == 3


@pytest.mark.parametrize(
    ("table", "columns", "rows"),
    [
        (torch.zeros((1, 7), dtype=torch.int64), 8, None),
        (torch.zeros((1, 8), dtype=torch.int32), 8, None),
        (torch.zeros((1, 5), dtype=torch.int64), 4, 1),
        (torch.zeros((2, 4), dtype=torch.int64), 4, 1),
        (torch.zeros((8, 8), dtype=torch.int64).T, 8, None),
        (torch.zeros((2, 16), dtype=torch.int64)[:, ::2], 8, None),
        (torch.zeros(8, dtype=torch.int64), 8, None),
    ],
)
def test_a_wrong_table_is_refused_by_name(table: Tensor, columns: int, rows: int | None, device: str) -> None:
    # As it lies: a plain copy to the device would be contiguous.
    table = torch.empty_strided(table.shape, table.stride(), dtype=table.dtype, device=device)
    with pytest.raises(ValueError, match=r"^planes must"):
        check_table("planes", table, torch.int64, columns, rows)


@pytest.mark.gpu
def test_pageable_tables_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pages lies in pageable memory"):
        check_table("pages", torch.zeros((1, 8), dtype=torch.int64), torch.int64, 8)
