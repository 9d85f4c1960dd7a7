"""kvpool's tier below vLLM's own offloading, beside vLLM without it: `python -m bench.vllm_tier gpu|manager`.

gpu: a real vLLM with CUDA, `python -m bench.vllm_tier gpu --disk DIRECTORY --out OUT`: the first token of a prompt that
the pool has in memory, or on disk only, beside computed and beside vLLM's own file tier on that disk, and the press
workload with and without the tier. manager: the tiers under vLLM's manager alone, which its CPU build has. Results:
OUT/vllm-tier.json. The cluster is the bench's own, or with --state-dir one that runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bench.rig.cluster import bench_cluster, running_cluster
from bench.vllm_gpu.about import about
from bench.vllm_gpu.engines import EngineOptions
from bench.vllm_gpu.samples import Recorder, Sample, Samples
from bench.vllm_tier.cases import cases
from bench.vllm_tier.manager import measure_managers
from bench.vllm_tier.stages import Plan, TierStages
from bench.vllm_tier.store import TierStores, tier_stores
from kvpool_cli.cluster import ClusterOptions

_GIB = 1 << 30


class Kept(Recorder):
    """Keeps what it prints, and writes all of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._samples: list[Sample] = []
        self._notes: dict[str, Any] = {}

    def add(self, name: str, kind: str, value: float, *, key: int = 0, run: int = 0, **more: Any) -> None:
        super().add(name, kind, value, key=key, run=run, **more)
        self._samples.append(Sample(name=name, kind=kind, value=round(value, 4), key=key, run=run, more=more))

    def note(self, name: str, value: Any) -> None:
        super().note(name, value)
        self._notes[name] = value

    def write(self) -> None:
        """All so far."""
        found = cases(Samples(self._samples))
        samples = [f"{one.name}, {one.kind}, {one.key}, {one.run}: {one.value:g}" for one in self._samples]
        document = {"about": about("bench.vllm_tier"), "cases": found, "notes": self._notes, "samples": samples}
        self._path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Exit code."""
    arguments = _arguments()
    began_s = time.monotonic()
    for directory in (arguments.out, arguments.disk):
        directory.mkdir(parents=True, exist_ok=True)
    record = Kept(arguments.out / "vllm-tier.json")
    code = 0
    try:
        cluster = (
            running_cluster(arguments.state_dir)
            if arguments.state_dir
            else bench_cluster(_cluster_options(arguments), arguments.disk)
        )
        with tier_stores(arguments.disk, cluster, json.loads(arguments.tier)) as stores:
            run = _run_managers if arguments.what == "manager" else _run_engines
            run(arguments, stores, record, began_s)
    except Exception:
        traceback.print_exc()
        code = 1
    record.note("seconds", round(time.monotonic() - began_s, 1))
    record.write()
    print((arguments.out / "vllm-tier.json").read_text(), flush=True)
    for engine in multiprocessing.active_children():
        engine.kill()  # their orderly end takes seconds
    os._exit(code)


def _cluster_options(arguments: argparse.Namespace) -> ClusterOptions:
    return ClusterOptions(
        state_dir=Path(),
        agents=0,
        arena_bytes=int(arguments.arena_gib * _GIB),
        disk_bytes=int(arguments.disk_gib * _GIB),
    )


def _run_engines(arguments: argparse.Namespace, stores: TierStores, record: Kept, began_s: float) -> None:
    options = EngineOptions(
        root=arguments.root,
        shape=arguments.shape,
        eager=arguments.eager,
        blocks=arguments.blocks,
        max_tokens=arguments.tokens + 512,
        offload_gib=arguments.region_gib,
        memory_share=arguments.memory_share,
        blocks_per_chunk=arguments.blocks_per_chunk,
    )
    plan = Plan(
        options=options,
        tokens=arguments.tokens,
        count=arguments.count,
        press_kinds=tuple(arguments.press_kinds.split(",")),
        runs=arguments.runs,
        rounds=arguments.rounds,
        prefixes=arguments.prefixes,
        prefix_tokens=arguments.prefix_tokens,
        budget_s=arguments.budget_s,
    )
    TierStages(plan, stores, record, began_s=began_s).run(record.write)


def _run_managers(arguments: argparse.Namespace, stores: TierStores, record: Kept, began_s: float) -> None:
    measure_managers(
        stores, record, int(arguments.chunk_mib * (1 << 20)), arguments.chunks, arguments.samples, record.write
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_tier", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("gpu", "manager"))
    parser.add_argument(
        "--disk", type=Path, default=Path("/tmp/vllm-tier"), help="a directory for the data of both tiers"
    )
    parser.add_argument("--out", type=Path, default=Path("vllm-tier"), help="directory")
    parser.add_argument("--state-dir", type=Path, help="of a cluster that runs, on that disk, too")
    parser.add_argument("--arena-gib", type=float, default=32.0)
    parser.add_argument(
        "--disk-gib", type=float, default=24.0, help="of the pool; the file tier needs as much (gpu: 20)"
    )
    parser.add_argument("--tier", default="{}", help="more settings of kvpool's tier, JSON")
    gpu = parser.add_argument_group("gpu")
    gpu.add_argument("--budget-s", type=float, default=190.0, help="no run of press begins that would end later")
    gpu.add_argument("--root", type=Path, default=Path("/tmp/vllm-gpu-model"), help="where the model's config goes")
    gpu.add_argument("--shape", default="8b", choices=("8b", "tiny"))
    gpu.add_argument("--eager", action="store_true", help="no CUDA graphs, for a quick try")
    gpu.add_argument("--blocks", type=int, default=2600, help="of the GPU's cache, 16 tokens each")
    gpu.add_argument("--blocks-per-chunk", type=int, default=8, help="of vLLM's offload, for all engines")
    gpu.add_argument("--region-gib", type=float, default=14.0, help="vLLM's CPU region of each engine")
    gpu.add_argument("--memory-share", type=float, default=0.2, help="that must be free at an engine's start")
    gpu.add_argument("--tokens", type=int, default=16384, help="of prompts that are loaded")
    gpu.add_argument("--count", type=int, default=3, help="prompts that are loaded from each place")
    gpu.add_argument("--runs", type=int, default=5, help="of press, alternated")
    gpu.add_argument("--rounds", type=int, default=3)
    gpu.add_argument("--prefixes", type=int, default=10)
    gpu.add_argument("--prefix-tokens", type=int, default=8192)
    gpu.add_argument("--press-kinds", default="tiering,tier", help="offload (vLLM's without tiers), tiering, tier")
    manager = parser.add_argument_group("manager")
    manager.add_argument("--chunk-mib", type=float, default=2.0)
    manager.add_argument("--chunks", type=int, default=256)
    manager.add_argument("--samples", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
