"""What a plain copy between an engine's memory and the host's reaches: the mark that transfers are measured against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_CPU_BYTES = 32 << 20  # more than a core's own caches hold
_GPU_BYTES = 64 << 20  # from here on a link's latency is not seen
_ROUNDS = 3  # the best counts: anything else that runs can only slow a copy


def cpu_link() -> dict[str, float]:
    """Bytes per second of one thread's memcpy, as {"copy": ...}. Takes some 20 ms."""
    source, target = (np.ones(_CPU_BYTES, dtype=np.uint8) for _ in range(2))
    return {"copy": _CPU_BYTES / _best_s(lambda: np.copyto(target, source))}


def gpu_link(device: torch.device) -> dict[str, float]:
    """Bytes per second between pinned host memory and the device, {"to_device": ..., "from_device": ...}.

    Takes some 20 ms and 64 MiB of either memory, which are given back.
    """
    import torch

    host = torch.empty(_GPU_BYTES, dtype=torch.uint8, pin_memory=True)
    resident = torch.empty(_GPU_BYTES, dtype=torch.uint8, device=device)

    def copied(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return copy

    directions = {"to_device": copied(resident, host), "from_device": copied(host, resident)}
    return {name: _GPU_BYTES / _best_s(copy) for name, copy in directions.items()}


def _best_s(copy: Callable[[], None]) -> float:
    copy()  # the first one touches the memory
    best_s = float("inf")
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
