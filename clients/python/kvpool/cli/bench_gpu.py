"""`kvpool bench gpu`: pages between an engine's cache on a GPU and an agent's arena, beside the link itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from kvpool import __version__
from kvpool.cli.bench_gpu_about import check_gpu, driver_version, mps_state
from kvpool.cli.bench_gpu_plan import SECTIONS, GpuPlan
from kvpool.cli.bench_gpu_processes import CommandRefused, ProcessFailed
from kvpool.cli.bench_gpu_report import GpuReport
from kvpool.cli.bench_gpu_rig import OutOfTime, Rig, running_rig
from kvpool.cli.bench_gpu_sections import MEASURES
from kvpool.cli.bench_results import progress


def sections_from_text(text: str) -> list[str]:
    """Names between commas, in the order in which they are measured. Raises ValueError naming a wrong one."""
    wanted = text.split(",")
    for name in wanted:
        if name not in SECTIONS:
            raise ValueError(f"{name!r} is not one of {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in wanted]


def measure_gpu(plan: GpuPlan, sections: Sequence[str], command: str, show: Callable[[str], None]) -> GpuReport:
    """Measure sections. show: given each part of the report as soon as it is known.

    A section that fails ends; the next one is measured if the processes still run. Raises StartupFailed without a GPU,
    CommandFailed if the processes cannot be started.
    """
    device_count = check_gpu()
    with running_rig(plan, device_count) as rig:
        report = GpuReport(about(rig, command))
        show(report.header())
        try:
            for name in sections:
                _measure(name, rig, report, show)
        except OutOfTime:
            later = sections[sections.index(name) + 1 :]
            report.notes.append(
                f"after {plan.deadline_s:g} s nothing new was begun: the end of {name} is left out"
                + "".join(f", {other}" for other in later)
            )
        except ProcessFailed as error:
            report.notes.append(f"{name} failed: {error}; nothing was measured after it")
            report.failed = True
    for note in report.notes:
        show(f"\nnote: {note}")
    return report


def about(rig: Rig, command: str) -> dict[str, object]:
    """The report's head."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": rig.agent["device"],
        "visible GPUs": rig.device_count,
        "driver": driver_version(),
        "CUDA": rig.engine["cuda"],
        "MPS": mps_state(),
        "torch": rig.agent["torch"],
        "triton": rig.agent["triton"],
        "python": rig.agent["python"],
        "kvpool": __version__,
    }


def _measure(name: str, rig: Rig, report: GpuReport, show: Callable[[str], None]) -> None:
    """One section, shown however it ends. Raises OutOfTime, ProcessFailed."""
    shown = len(report.sections)
    try:
        MEASURES[name](rig, report)
    except CommandRefused as error:
        report.notes.append(f"{name} failed: {error}")
        report.failed = True
        rig.work("idle")
    finally:
        progress("")
        for section in report.sections[shown:]:
            show(section.render())
