"""Transfers beside an engine that keeps the GPU busy, each way by itself: what both lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.cli.bench_gpu_plan import Shape
from kvpool.cli.bench_gpu_report import GpuReport
from kvpool.cli.bench_gpu_rig import Rig
from kvpool.cli.bench_gpu_ways import forcible, map_with_launches
from kvpool.cli.bench_results import progress

MODES = ("matmul", "decode")
MIB, IN_FLIGHT = 64, 8
_SHORTEST_RUN_BYTES = 64 << 10  # shorter runs are not taken beside a busy engine where there is another way
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Move:
    """What is measured. way: it is held to; "": memcpy, which stands beside memcpy without an engine."""

    what: str
    way: str
    plain: str

    @property
    def label(self) -> str:
        """In the names of cases."""
        return f"{self.what} by {self.way}" if self.way else self.what

    @property
    def words(self) -> str:
        """In the table."""
        return self.what if self.way else self.what.replace("copy-", "memcpy ")


PLAIN = tuple(Move(f"copy-{each}", "", f"copy-{each}") for each in ("out", "in", "both"))


def moves_of(mapped: Mapping[str, Any]) -> tuple[Move, ...]:
    """Of a cache, in the order in which they are measured."""
    ways = [way for way in forcible(mapped) if way != "runs" or mapped["run_bytes"] >= _SHORTEST_RUN_BYTES]
    pairs = zip(("store", "load", "both"), PLAIN, strict=True)
    moved = [(what, plain.what) for what, plain in pairs]
    return (*PLAIN, *(Move(what, way, plain) for way in ways for what, plain in moved))


def measure_beside(rig: Rig, report: GpuReport) -> None:
    """Both kinds of engine, each with every transfer on every way."""
    headers = ("shape", "engine does", "transfer", "way", "GB/s", "of memcpy beside it", "of memcpy alone")
    title = f"Beside a busy engine, each way forced, {MIB} MiB x {IN_FLIGHT}"
    section = report.section(title, (*headers, "engine takes"), left=(0, 1, 2, 3))
    for shape in rig.plan.beside_shapes:
        moves = moves_of(map_with_launches(rig, report, shape))
        alone = {plain.what: rig.run(plain.what, MIB, IN_FLIGHT)["bytes_per_s"] / _GB for plain in PLAIN}
        for mode in MODES:
            rig.work(mode)
            rig.window(rig.plan.alone_s)  # clocks settle
            for number in range(rig.plan.beside_rounds):
                progress(f"{shape.label} beside {mode}: round {number + 1} of {rig.plan.beside_rounds}")
                ordered = moves[::-1] if number % 2 else moves
                _add(report, prefix(shape, mode), alone, _round(rig, ordered))
            rig.work("idle")
            section.rows += [_row(report, shape, mode, move) for move in moves]


def prefix(shape: Shape, mode: str) -> str:
    """Of the names of cases."""
    return f"{shape.label}, beside {mode}"


def _round(rig: Rig, moves: Sequence[Move]) -> dict[Move, tuple[float, float, float]]:
    """(GB/s, seconds of a batch beside it, seconds of a batch alone right before and after) of each."""
    found: dict[Move, tuple[float, float, float]] = {}
    before = _mean_s(rig.window(rig.plan.alone_s))
    for move in moves:
        if move.way:
            rig.hold_to(move.way)
        moved, batches = rig.run_beside(move.what, MIB, IN_FLIGHT)
        after = _mean_s(rig.window(rig.plan.alone_s))
        found[move] = moved["bytes_per_s"] / _GB, _mean_s(batches), (before + after) / 2
        before = after
    return found


def _mean_s(batches: Mapping[str, Any]) -> float:
    """Of the batches of a window. The mean: a few batches that wait long count as what they cost."""
    mean_s: float = batches["mean_s"]
    return mean_s


def _add(
    report: GpuReport, name: str, alone: Mapping[str, float], found: Mapping[Move, tuple[float, float, float]]
) -> None:
    rates = {move.what: rate for move, (rate, _, _) in found.items() if not move.way}
    for move, (rate, beside_s, alone_s) in found.items():
        plain = move.plain
        baseline, against = (
            (rates[plain], f"{plain.replace('copy-', 'memcpy ')} beside it")
            if move.way
            else (alone[plain], "without engine")
        )
        report.add(f"{name}, {move.label}", "GB/s", rate, baseline, against, memcpy_alone=round(alone[plain], 4))
        report.add(f"{name}, {move.label}, engine", "ms", beside_s * 1e3, alone_s * 1e3, "alone before and after")


def _row(report: GpuReport, shape: Shape, mode: str, move: Move) -> list[str]:
    name = f"{prefix(shape, mode)}, {move.label}"
    of_alone = report.results[name].value / report.details[name]["memcpy_alone"]
    beside = report.ratio(name) if move.way else "-"
    cells = (report.value(name), beside, f"{of_alone:.3f}", f"{report.ratio(f'{name}, engine')} x")
    return [shape.label, mode, move.words, move.way or "-", *cells]
