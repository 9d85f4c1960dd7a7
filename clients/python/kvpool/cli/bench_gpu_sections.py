"""The sections of the GPU bench: what is measured in which order, and the row that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvpool.cli.bench_gpu_beside import measure_beside
from kvpool.cli.bench_gpu_engine import DECODE_STEPS, MATMUL_SIZE, MATMULS
from kvpool.cli.bench_gpu_plan import CHUNK_TOKENS, LLAMA_8B, SECTIONS
from kvpool.cli.bench_gpu_report import GpuReport
from kvpool.cli.bench_gpu_rig import Rig
from kvpool.cli.bench_gpu_ways import forcible, map_with_launches
from kvpool.cli.bench_results import progress

CODECS = ("INT8_GROUP8", "FP8_E4M3", "INT4_GROUP8")
PAIRS = (("store", "copy-out"), ("load", "copy-in"), ("both", "copy-both"))
_SHORTEST_FORCED_RUN_BYTES = 4096  # shorter runs take seconds a transfer, and nobody would choose them
_GB = 1e9


def compare(rig: Rig, report: GpuReport, name: str, mib: int, in_flight: int, rounds: int | None = None) -> list[str]:
    """Store, load and both at once, each between two memcpys as large and as many in flight. Cells of a row: of each
    the rate and its ratio, then the memcpys, then the ways that were chosen. rounds: unless given, the plan's."""
    progress(f"{name}: {mib} MiB x {in_flight}")
    ways: Counter[str] = Counter()
    names = {what: f"{name}, {mib} MiB x {in_flight}, {what}" for what, _ in PAIRS}
    for _ in range(rounds or rig.plan.rounds):
        for what, plain in PAIRS:
            before, moved, after = (rig.run(each, mib, in_flight) for each in (plain, what, plain))
            ways.update(moved["ways"])
            report.add(
                names[what],
                "GB/s",
                moved["bytes_per_s"] / _GB,
                (before["bytes_per_s"] + after["bytes_per_s"]) / 2 / _GB,
                f"memcpy, {plain.removeprefix('copy-')}",
                transfer_bytes=moved["transfer_bytes"],
                in_flight=in_flight,
                p50_ms=round(moved["p50_s"] * 1e3, 3),
                memcpy_p50_ms=round(after["p50_s"] * 1e3, 3),
                ways=dict(moved["ways"]),
            )
    cells = [cell for what in names for cell in (report.value(names[what]), report.ratio(names[what]))]
    plain = " / ".join(f"{report.results[names[what]].baseline_value:.1f}" for what in names)
    return [*cells, plain, ways_in_words(ways)]


COMPARED = ("store", "ratio", "load", "ratio", "both", "ratio", "memcpy out / in / both", "ways")


def ways_in_words(ways: Mapping[str, int]) -> str:
    """The ways, the usual one first, with their share unless it is all."""
    total = sum(ways.values())
    ordered = sorted(ways.items(), key=lambda item: -item[1])
    return ", ".join(way if count == total else f"{way} {count / total:.0%}" for way, count in ordered)


def measure_link(rig: Rig, report: GpuReport) -> None:
    """What everything else is compared with."""
    section = report.section("The link and the engine's work, alone", ("what", "value", "unit"), left=(0, 2))

    def row(name: str, unit: str, values: list[float], digits: int = 1) -> None:
        for value in values:
            report.add(name, unit, value, None, "nothing")
        section.rows.append([name, f"{report.results[name].value:.{digits}f}", unit])

    rounds = range(rig.plan.rounds)
    for memory in ("arena", "allocated"):
        for what, words in (("out", "GPU to host"), ("in", "host to GPU"), ("both", "both ways")):
            runs = [rig.run(f"copy-{what}", 64, 4, memory=memory)["bytes_per_s"] / _GB for _ in rounds]
            row(f"memcpy, {memory} memory, {words}", "GB/s", runs)
    if rig.device_count > 1:
        rig.open_peer(LLAMA_8B, by_ipc=False)
        row("memcpy between GPUs", "GB/s", [rig.run_peer("copy", 64, 4)["bytes_per_s"] / _GB for _ in rounds])
        rig.close_peer()
    for mode in ("matmul", "decode"):
        rig.work(mode)
        rig.window(rig.plan.alone_s)  # clocks settle
        batches_s = [rig.window(rig.plan.alone_s)["mean_s"] for _ in rounds]
        if mode == "matmul":
            flop = 2 * MATMUL_SIZE**3 * MATMULS / 1e12
            row(f"bf16 product of {MATMUL_SIZE}", "TFLOP/s", [flop / batch_s for batch_s in batches_s])
        else:
            steps = [batch_s / DECODE_STEPS * 1e6 for batch_s in batches_s]
            row("decode-like step: a small product and an activation", "us", steps)
    rig.work("idle")


def measure_shapes(rig: Rig, report: GpuReport) -> None:
    """All shapes and sizes, one transfer at a time and several."""
    headers = ("shape", "MiB", "in flight", *COMPARED)
    section = report.section("Beside memcpy of the same size and as many in flight, GB/s", headers, left=(0, 10))
    for shape in rig.plan.shapes:
        mapped = 0
        for mib, pipelined in rig.plan.in_flight.items():
            chunk_tokens = shape.small_chunk_tokens if mib == 1 else CHUNK_TOKENS
            if chunk_tokens != mapped:
                rig.map(shape, chunk_tokens=chunk_tokens)
                mapped = chunk_tokens
            for in_flight in (1, pipelined):
                cells = compare(rig, report, shape.label, mib, in_flight)
                section.rows.append([shape.label, str(mib), str(in_flight), *cells])


def measure_codecs(rig: Rig, report: GpuReport) -> None:
    """Pages quantized on the way."""
    headers = ("codec", "MiB", "in flight", *COMPARED)
    title = f"{LLAMA_8B.label} with codecs: logical GB/s beside memcpy of as much bf16"
    section = report.section(title, headers, left=(0, 10))
    for codec in CODECS:
        rig.map(LLAMA_8B, codec)
        for mib in rig.plan.codec_mib:
            in_flight = rig.plan.in_flight.get(mib, 4)
            cells = compare(rig, report, f"{LLAMA_8B.label} {codec}", mib, in_flight)
            section.rows.append([codec, str(mib), str(in_flight), *cells])


def measure_ways(rig: Rig, report: GpuReport) -> None:
    """Every way that a shape has, whether it would be chosen or not."""
    headers = ("shape", "way", "MiB", "in flight", *COMPARED)
    section = report.section("Each way forced, GB/s", headers, left=(0, 1, 11))
    for shape in rig.plan.way_shapes:
        mapped = map_with_launches(rig, report, shape)
        for way in forcible(mapped):
            if way == "runs" and mapped["run_bytes"] < _SHORTEST_FORCED_RUN_BYTES:
                report.notes.append(f"ways: runs of {shape.label} have {mapped['run_bytes']} bytes and are left out")
                continue
            rig.hold_to(way)
            for mib, in_flight in ((8, 1), (64, 4)):
                cells = compare(rig, report, f"{shape.label}, {way} only", mib, in_flight, rig.plan.way_rounds)
                section.rows.append([shape.label, way, str(mib), str(in_flight), *cells])


def measure_peer(rig: Rig, report: GpuReport) -> None:
    """One launch for all planes, in one process and across two."""
    headers = ("shape", "source", "MiB", "in flight", "pull", "memcpy", "ratio")
    section = report.section("Rows pulled from another GPU by 24 programs, GB/s", headers, left=(0, 1))
    if rig.device_count < 2:
        report.notes.append("peer: one GPU is visible; a pull wants two")
        return
    for shape in rig.plan.peer_shapes:
        for by_ipc, source in ((False, "own process"), (True, "by CUDA IPC")):
            rig.open_peer(shape, by_ipc=by_ipc)
            for mib in rig.plan.peer_mib:
                for in_flight in (1, 4):
                    name = f"{shape.label}, peer pull, {source}, {mib} MiB x {in_flight}"
                    progress(name)
                    for _ in range(rig.plan.rounds):
                        rates = [rig.run_peer(each, mib, in_flight)["bytes_per_s"] / _GB for each in _ABA]
                        report.add(name, "GB/s", rates[1], (rates[0] + rates[2]) / 2, "memcpy between GPUs")
                    plain = f"{report.results[name].baseline_value:.1f}"
                    cells = [report.value(name), plain, report.ratio(name)]
                    section.rows.append([shape.label, source, str(mib), str(in_flight), *cells])
            rig.close_peer()


_ABA = ("copy", "pull", "copy")

MEASURES: Mapping[str, Callable[[Rig, GpuReport], None]] = MappingProxyType(
    {
        "link": measure_link,
        "shapes": measure_shapes,
        "beside": measure_beside,
        "codecs": measure_codecs,
        "peer": measure_peer,
        "ways": measure_ways,
    }
)
assert list(MEASURES) == list(SECTIONS)
