"""Transfers beside an engine that keeps the GPU busy: what both lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.cli.bench_gpu_plan import Shape
from kvpool.cli.bench_gpu_report import GpuReport
from kvpool.cli.bench_gpu_rig import Rig
from kvpool.cli.bench_results import progress

MODES = ("matmul", "decode")
MIB, IN_FLIGHT = 64, 8
# What is measured, and what it stands beside: memcpy beside memcpy without an engine.
ORDER = (
    *(("copy-out", ""), ("store", "copy-out")),
    *(("copy-in", ""), ("load", "copy-in")),
    *(("copy-both", ""), ("both", "copy-both")),
)
_GB = 1e9
_WORDS = {"copy-out": "memcpy out", "copy-in": "memcpy in", "copy-both": "memcpy both"}


def measure_beside(rig: Rig, report: GpuReport) -> None:
    """Both kinds of engine, each with every transfer."""
    headers = ("shape", "engine does", "transfer", "GB/s", "of memcpy beside it", "of memcpy alone", "engine takes")
    section = report.section(f"Beside a busy engine, {MIB} MiB x {IN_FLIGHT}", headers, left=(0, 1, 2))
    for shape in rig.plan.beside_shapes:
        rig.map(shape)
        alone = {what: rig.run(what, MIB, IN_FLIGHT)["bytes_per_s"] / _GB for what, _ in ORDER}
        for mode in MODES:
            rig.work(mode)
            rig.window(rig.plan.alone_s)  # clocks settle
            for number in range(rig.plan.beside_rounds):
                progress(f"{shape.label} beside {mode}: round {number + 1} of {rig.plan.beside_rounds}")
                _add(report, prefix(shape, mode), alone, _round(rig, reverse=number % 2 == 1))
            rig.work("idle")
            section.rows += [_row(report, shape, mode, what) for what, _ in ORDER]


def prefix(shape: Shape, mode: str) -> str:
    """Of the names of cases."""
    return f"{shape.label}, beside {mode}"


def _round(rig: Rig, *, reverse: bool) -> dict[str, tuple[float, float, float]]:
    """(GB/s, seconds of a batch beside it, seconds of a batch alone right before and after) of each."""
    found: dict[str, tuple[float, float, float]] = {}
    before = _mean_s(rig.window(rig.plan.alone_s))
    for what, _ in reversed(ORDER) if reverse else ORDER:
        moved, batches = rig.run_beside(what, MIB, IN_FLIGHT)
        after = _mean_s(rig.window(rig.plan.alone_s))
        found[what] = moved["bytes_per_s"] / _GB, _mean_s(batches), (before + after) / 2
        before = after
    return found


def _mean_s(batches: Mapping[str, Any]) -> float:
    """Of the batches of a window. The mean: a few batches that wait long count as what they cost."""
    mean_s: float = batches["mean_s"]
    return mean_s


def _add(
    report: GpuReport, name: str, alone: Mapping[str, float], found: Mapping[str, tuple[float, float, float]]
) -> None:
    for what, plain in ORDER:
        rate, beside_s, alone_s = found[what]
        baseline, against = (
            (found[plain][0], f"{_WORDS[plain]} beside it") if plain else (alone[what], "without engine")
        )
        report.add(f"{name}, {what}", "GB/s", rate, baseline, against, memcpy_alone=round(alone[plain or what], 4))
        report.add(f"{name}, {what}, engine", "ms", beside_s * 1e3, alone_s * 1e3, "alone before and after")


def _row(report: GpuReport, shape: Shape, mode: str, what: str) -> list[str]:
    name = f"{prefix(shape, mode)}, {what}"
    of_alone = report.results[name].value / report.details[name]["memcpy_alone"]
    beside = "-" if what in _WORDS else report.ratio(name)
    cells: Sequence[str] = (report.value(name), beside, f"{of_alone:.3f}", f"{report.ratio(f'{name}, engine')} x")
    return [shape.label, mode, _WORDS.get(what, what), *cells]
