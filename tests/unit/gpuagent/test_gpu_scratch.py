"""Scratch of the transfer engine: what kernels may be given."""

from __future__ import annotations

from typing import cast

import torch

from kvpool_gpuagent.adapters.gpu.runtime import GpuRuntime
from kvpool_gpuagent.adapters.gpu.scratch import ALIGNMENT_BYTES, Scratch


class _HostMemory:
    """Of a GpuRuntime, what Scratch uses."""

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


def test_ranges_begin_aligned_whatever_sizes_are_asked_for() -> None:
    # Burst sizes come from measured times. Kernels move 16 bytes at once: a range at any other address ended the agent
    # with "misaligned address".
    scratch = Scratch(cast(GpuRuntime, _HostMemory()), 32 << 20)
    with scratch.changed:
        taken = [scratch.take(size_bytes, 1 << 20) for size_bytes in (5_000_001, 4_194_305, 6_123_457)]
    ranges = [each for each in taken if each is not None]
    assert len(ranges) == 3
    first = ranges[0][0]
    assert [(address - first) % ALIGNMENT_BYTES for address, _ in ranges] == [0, 0, 0]
    assert all(size_bytes % ALIGNMENT_BYTES == 0 for _, size_bytes in ranges)


def test_an_aligned_size_is_given_whole() -> None:
    scratch = Scratch(cast(GpuRuntime, _HostMemory()), 32 << 20)
    with scratch.changed:
        taken = scratch.take(4 << 20, 4 << 20)
    assert taken is not None
    assert taken[1] == 4 << 20
