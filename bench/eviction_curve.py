"""Which eviction policy hits most, at which size of the cache?

Replays a recorded trace and synthetic ones (bench/eviction_traces.py) at shares of their different blocks, beside LRU
and Belady's optimum. The default must reach 0.215 and 0.290 at 5 and 10 %
of the recorded trace, and nowhere be below LRU by more than 0.002.

Run: python -m bench.eviction_curve TRACE [--json FILE] [--plot FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.eviction_replay import BELADY, DEFAULT, GDSF, LRU, POLICIES, replay_trace
from bench.eviction_traces import SYNTHETIC, Requests
from bench.request_trace import Trace, read_trace

SHARES = (0.01, 0.02, 0.05, 0.10, 0.25, 0.50)
MOST_BELOW_LRU = 0.002
RECORDED = "recorded"
_SEED = 1


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rates of one trace, by policy, at each of SHARES; and block references replayed in a second of CPU time."""

    trace: str
    unique_blocks: int
    block_references: int
    hit_rates: dict[str, list[float]]
    references_per_cpu_s: dict[str, float]

    @property
    def worst_below_lru(self) -> float:
        """How far the default falls below LRU where it does most; negative if it never does."""
        pairs = zip(self.hit_rates[LRU], self.hit_rates[DEFAULT], strict=True)
        return max(lru - default for lru, default in pairs)


def measure(name: str, requests: Requests) -> Curve:
    """Replay with every policy at every share."""
    trace = Trace(requests)
    unique = trace.unique_blocks
    references = sum(map(len, requests))
    hit_rates: dict[str, list[float]] = {}
    speeds: dict[str, float] = {}
    for policy in POLICIES:
        began_s = time.process_time()
        replays = [replay_trace(trace, str(policy), max(1, round(unique * share)), unique) for share in SHARES]
        speeds[str(policy)] = len(SHARES) * references / (time.process_time() - began_s)
        hit_rates[str(policy)] = [round(replayed.result.hit_rate, 4) for replayed in replays]
    return Curve(name, unique, references, hit_rates, speeds)


def traces(recorded: Requests, *, quick: bool) -> dict[str, Requests]:
    """The recorded trace, parts of it, and the synthetic ones."""
    if quick:
        return {RECORDED: recorded[: len(recorded) // 8]}
    half = len(recorded) // 2
    parts = {
        RECORDED: recorded,
        "recorded, first half": recorded[:half],
        "recorded, second half": recorded[half:],
        "recorded, each second request": recorded[::2],
    }
    return parts | {name: make(random.Random(_SEED)) for name, make in SYNTHETIC.items()}


def to_document(curves: list[Curve], argv: list[str]) -> dict[str, Any]:
    """What is kept in bench/results."""
    return {
        "machine": "2-core virtual machine",
        "command": "python -m bench.eviction_curve TRACE " + " ".join(argv[1:]),
        "shares_of_unique_blocks": SHARES,
        "default": DEFAULT,
        "curves": {
            curve.trace: {
                "unique_blocks": curve.unique_blocks,
                "block_references": curve.block_references,
                "hit_rates": curve.hit_rates,
                "references_per_cpu_s": {policy: round(speed) for policy, speed in curve.references_per_cpu_s.items()},
                "worst_below_lru": round(curve.worst_below_lru, 4),
            }
            for curve in curves
        },
    }


def table(curve: Curve) -> str:
    """One trace, for people."""
    lines = [f"{curve.trace}: {curve.block_references} references to {curve.unique_blocks} blocks"]
    lines.append("  " + " " * 10 + "".join(f"{share:>8.0%}" for share in SHARES) + "   references/CPU s")
    for policy, rates in curve.hit_rates.items():
        cells = "".join(f"{rate:8.3f}" for rate in rates)
        lines.append(f"  {policy:10}{cells}   {curve.references_per_cpu_s[policy]:10,.0f}")
    lines.append(f"  the default is below LRU by at most {curve.worst_below_lru:.4f}")
    return "\n".join(lines)


def plot(curves: list[Curve], path: Path) -> None:
    """One panel a trace: hit rate over size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 2.9 * rows), squeeze=False)
    styles = {GDSF: ("C3", "o-"), LRU: ("C0", "s--"), BELADY: ("0.4", ":")}
    percents = [100 * share for share in SHARES]
    for panel, curve in zip(panels.flat, curves, strict=False):
        for policy, rates in curve.hit_rates.items():
            color, style = styles[policy]
            panel.plot(percents, rates, style, color=color, label=policy, markersize=4, linewidth=1.5)
        panel.set_xscale("log")
        panel.set_xticks(percents, [f"{percent:g}" for percent in percents])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_title(curve.trace, fontsize=9)
        panel.grid(alpha=0.3)
    for panel in list(panels.flat)[len(curves) :]:
        panel.set_visible(False)
    figure.supxlabel("capacity, % of the different blocks", fontsize=10)
    figure.supylabel("prefix hit rate", fontsize=10)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower right", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    """Measure, print, keep; exit code 1 if the default is below LRU somewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true", help="an eighth of the recorded trace and nothing else")
    arguments = parser.parse_args(argv)
    curves = []
    for name, requests in traces(read_trace(arguments.trace).requests, quick=arguments.quick).items():
        curves.append(measure(name, requests))
        print(table(curves[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(to_document(curves, argv), indent=1) + "\n")
    if arguments.plot:
        plot(curves, arguments.plot)
    return 1 if max(curve.worst_below_lru for curve in curves) > MOST_BELOW_LRU else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
