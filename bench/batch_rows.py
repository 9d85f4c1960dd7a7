"""Do loads of a batch's rows gain by running beside each other? And what is a forward pass worth, in tokens?

Loads: rows that have nothing in common, from a pagestore's staging memory into an engine's blocks, as
`SharedPrefixGenerator` finds them (`find_rows`) beside one after another; alternating in one run, medians. Passes: the
time of a prompt of n tokens is fitted by a + b n; a / b is what `batch_plan.PASS_TOKENS` stands for.

Run: python -m bench.batch_rows [--device cpu] [--shape tiny] [--rows 2 4 8] [--tokens 2048] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.ttft_gpu import Bench, state_directory
from bench.ttft_model import SHAPES, build_model, prompt_of, synchronize
from bench.waiting import until
from kvpool.client.config import ClientConfig
from kvpool.connectors.agent_pool import AgentPool
from kvpool.connectors.block_memory import block_memory
from kvpool.connectors.prefix import Prefix
from kvpool.connectors.prefix_cache import PrefixCache
from kvpool.connectors.transformers_batch import find_rows
from kvpool.connectors.transformers_blocks import block_bytes, block_layout
from kvpool.connectors.transformers_model import shared_model
from kvpool.core.byte_sizes import size_from_text
from kvpool_cli.output import as_text, table

CHUNK_TOKENS = 256
PASS_TOKENS = (1, 32, 64, 128, 256, 512, 1024)
STORE_TIMEOUT_S = 60.0
FORGET_TIMEOUT_S = 10.0


def one_after_another(cache: PrefixCache, rows: Sequence[Any]) -> list[Prefix]:
    """As it was before."""
    return [cache.find(row) for row in rows]


def measure_loads(model: Any, agent: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """By number of rows."""
    spec = shared_model(model, model_id="batch-rows", model_revision="1", chunk_tokens=CHUNK_TOKENS).spec
    chunks = arguments.tokens // CHUNK_TOKENS
    block_count = 2 * max(arguments.rows) * chunks
    memory = block_memory(block_count * block_bytes(spec), model.device)
    config = ClientConfig(agent_endpoint=agent, connect_timeout_s=60.0, match_timeout_s=5.0)
    pool = AgentPool(spec, block_layout(spec, block_count), "batch-rows", "rows", config, memory)
    pool.open()
    cache = PrefixCache(
        pool,
        block_count=block_count,
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=block_bytes(spec),
        always_load=True,
    )
    try:
        random = np.random.default_rng(1)
        rows = [random.integers(0, 1 << 20, arguments.tokens + 1) for _ in range(max(arguments.rows))]
        for row in rows:
            cache.keep(row, lambda first, blocks: None)
        assert cache.flush_stores(STORE_TIMEOUT_S)
        return {str(count): _compare(cache, rows[:count], chunks, spec, arguments.runs) for count in arguments.rows}
    finally:
        pool.close()


def _compare(cache: PrefixCache, rows: Sequence[Any], chunks: int, spec: Any, runs: int) -> dict[str, float]:
    ways: dict[str, Callable[..., list[Prefix]]] = {"apart": one_after_another, "together": find_rows}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(runs + 1):
        for name, way in ways.items():
            until(partial(_forgotten, cache, rows), FORGET_TIMEOUT_S, "an agent that lets go of the blocks")
            started_s = time.perf_counter()
            found = way(cache, rows)
            if number:  # the first run of each warms up
                samples[name].append((time.perf_counter() - started_s) * 1e3)
            assert all(prefix.loaded.loaded_chunks == chunks for prefix in found), [prefix.failure for prefix in found]
            for prefix in found:
                cache.release(prefix)
    medians = {f"{name}_ms": statistics.median(values) for name, values in samples.items()}
    size_bytes = len(rows) * chunks * block_bytes(spec)
    ratio = medians["apart_ms"] / medians["together_ms"]
    return {**medians, "ratio": ratio, "together_gb_per_s": size_bytes / medians["together_ms"] / 1e6}


def _forgotten(cache: PrefixCache, rows: Sequence[Any]) -> bool:
    """Whether the engine has nothing of the rows; blocks that the agent has not let go of yet stay."""
    cache.forget()
    held = [cache.begin(row, ask_pool=False).finish() for row in rows]
    for prefix in held:
        cache.release(prefix)
    return not any(prefix.blocks for prefix in held)


def measure_passes(model: Any, runs: int) -> dict[str, Any]:
    """Milliseconds by number of tokens, medians; and the fit."""
    times: dict[int, float] = {}
    for count in PASS_TOKENS:
        inputs = prompt_of(count, 0, str(model.device))
        samples = []
        for number in range(runs + 1):
            synchronize(inputs)
            started_s = time.perf_counter()
            with torch.no_grad():
                model(input_ids=inputs, use_cache=True, logits_to_keep=1)
            synchronize(inputs)
            if number:
                samples.append((time.perf_counter() - started_s) * 1e3)
        times[count] = statistics.median(samples)
    slope, start = np.polyfit(list(times), list(times.values()), 1)
    return {"ms_by_tokens": times, "pass_ms": start, "ms_per_token": slope, "pass_tokens": start / slope}


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured."""
    parser = argparse.ArgumentParser(
        prog="bench.batch_rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, default=2048, help="of each row; a multiple of 256")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--arena-bytes", type=size_from_text, default=2 << 30)
    parser.add_argument("--budget-s", type=float, default=85.0, help="everything is ended after this")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    model = build_model(SHAPES[arguments.shape], arguments.device)
    passes = measure_passes(model, arguments.runs)
    print(f"passes: {passes['ms_by_tokens']}", flush=True)
    with state_directory() as state_dir:
        bench, well = Bench(arguments.budget_s, state_dir), False
        try:
            bench.kvpool(
                *("cluster", "up", "--pagestores", "1", "--agents", "1", "--device", arguments.device, "--detach"),
                *("--arena-bytes", str(arguments.arena_bytes), "--disk-bytes", str(2 * arguments.arena_bytes)),
            )
            loads = measure_loads(model, bench.agent, arguments)
            well = True
        finally:
            bench.end(show_logs=not well)
    headers = ["rows", "one after another ms", "together ms", "ratio", "GB/s"]
    rows = [[count, *(f"{value:.2f}" for value in result.values())] for count, result in loads.items()]
    print(as_text(table(headers, rows, right=range(len(headers)))), flush=True)
    print(f"a pass costs {passes['pass_ms']:.2f} ms, a token {passes['ms_per_token']:.4f} ms: ", end="")
    print(f"{passes['pass_tokens']:.0f} tokens; {passes['ms_by_tokens']}", flush=True)
    if arguments.json is not None:
        document = {
            "date": "2026-11-21",
            "command": "python -m bench.batch_rows " + " ".join(sys.argv[1:] if argv is None else argv),
            "device": arguments.device,
            "shape": arguments.shape,
            "tokens": arguments.tokens,
            "loads": loads,
            "passes": passes,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
