"""The ways that a shape's pages can be held to, those included on which the engine launches the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.cli.bench_gpu_plan import Shape
from kvpool.cli.bench_gpu_processes import CommandRefused
from kvpool.cli.bench_gpu_report import GpuReport
from kvpool.cli.bench_gpu_rig import Rig

# In the order in which they are measured. Bursts go first: how long their kernels wait tells the agent whether to sum
# on the CPU, on the other ways as well.
WAYS = ("bursts", "engine", "runs")


def map_with_launches(rig: Rig, report: GpuReport, shape: Shape) -> Mapping[str, Any]:
    """Map a cache whose engine launches; if it cannot, that is noted, and the other ways are left. Raises
    CommandRefused."""
    try:
        return rig.map_lent(shape)
    except CommandRefused as error:
        report.notes.append(f"{shape.label}: kernels launched by the engine are left out: {error}")
        report.failed = True
        return rig.map(shape)


def forcible(mapped: Mapping[str, Any]) -> list[str]:
    """Ways that a mapped cache can be held to: those that are chosen from, and runs wherever bytes are only copied."""
    return [way for way in WAYS if way in mapped["ways"] or (way == "runs" and mapped["copies_bytes"])]
