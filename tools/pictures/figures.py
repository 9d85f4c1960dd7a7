"""What the plots of the README show, each out of the files of bench/results that its bench has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.pictures.canvas import Theme
from tools.pictures.charts import BarChart, LineChart, Series

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
DAY = "2026-11-21"
KVPOOL = Series("kvpool", lambda theme: theme.strong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """name: of its files. caption: the machine, and what to read from it."""

    name: str
    chart: BarChart | LineChart
    caption: str


def result(name: str) -> Any:
    """The document of a results file of the day."""
    return json.loads((RESULTS / f"{DAY}-{name}.json").read_text())


def figures() -> tuple[Figure, ...]:
    """In the README's order."""
    return (first_token(), served(), link(), cluster_paths(), index(), eviction())


def claims() -> str:
    """What else the README says in figures, as a list."""
    cases, runs, soak = result("vllm-ttft")["cases"], result("vllm-serve")["runs"], result("soak")
    phases = {phase["name"]: phase["ttft_ms_median"] for phase in result("h200-demo")["phases"]}
    plain, restarted = runs["plain"], runs["restarted"]
    mean = restarted["ttft_s"]["mean"] / plain["ttft_s"]["mean"]
    faster = restarted["throughput"]["output_tokens_per_s"] / plain["throughput"]["output_tokens_per_s"]
    nothing = cases["ttft, nothing to share"]["ratio"]
    store_s, agent_s = (cases[f"{who} killed under a load"]["extra_ms"] / 1000 for who in ("pagestore", "agent"))
    kills, wrong, hung = (soak[key] for key in ("kills", "wrong_bytes", "hung_calls"))
    lines = (
        f"- A vLLM server that was restarted on a filled pool: {mean:.2f} of plain vLLM's mean time to first token,",
        f"  {faster:.2f} times its output tokens a second. Prompts that share nothing: {nothing:.2f} of its time.",
        f"- A pagestore killed under a load makes a vLLM request {store_s:.2f} s later than computing alone, an agent",
        f"  {agent_s:.2f} s; the tokens are right. Pagestores killed {kills} times in ten minutes under load:",
        f"  {wrong} wrong bytes, {hung} hung calls ([bench/soak.py](bench/soak.py)).",
        "- Where computing is quick, loading does not help: the demo's tiny model on an H200 has its first token after",
        f"  {phases['cold']:.0f} ms computed, {phases['shared']:.0f} ms loaded from another node.",
    )
    return "\n".join(lines) + "\n"


def first_token() -> Figure:
    vllm = result("vllm-ttft")["cases"]["ttft loaded"]
    rows = [("vLLM, CPU, 1,500 tokens", (vllm["baseline"] / vllm["value"],))]
    for tokens, case in result("h200-ttft")["results"].items():
        rows.append((f"H200, 8B, {int(tokens):,} tokens", (case["recomputed_ms"] / case["loaded_ms"],)))
    slower = result("h200-ttft-slower-host")["now"]["results"]["16384"]
    rows.append(("... a slower host, 16,384", (slower["recomputed_ms"] / slower["loaded_ms"],)))
    chart = BarChart(
        title="First token: computed / loaded",
        note="times sooner when the prefix is loaded from staging",
        series=(KVPOOL,),
        rows=tuple(rows),
        unit=" x",
        digits=1,
    )
    caption = (
        "vLLM 0.32 (CPU build) on 2 virtual cores; an 8B shape in bf16 under transformers on one NVIDIA H200, on two "
        "hosts: the slower one's cores take twice as long for a launch."
    )
    return Figure(name="first-token", chart=chart, caption=caption)


def served() -> Figure:
    runs = result("vllm-serve")["runs"]
    names = ("plain", "empty-pool", "restarted")

    def beside_plain(value: Callable[[Any], float]) -> tuple[float, ...]:
        return tuple(value(runs[name]) / value(runs["plain"]) for name in names)

    chart = BarChart(
        title="What users of vLLM's server see",
        note="two-turn conversations about shared texts; plain vLLM = 1",
        series=(
            Series("plain vLLM", lambda theme: theme.other),
            Series("kvpool, empty", lambda theme: theme.fourth),
            Series("kvpool, restarted", lambda theme: theme.strong),
        ),
        rows=(
            ("first token, mean", beside_plain(lambda run: run["ttft_s"]["mean"])),
            ("first token, p90", beside_plain(lambda run: run["ttft_s"]["p90"])),
            ("prompt tokens computed", beside_plain(lambda run: run["tiers"]["computed"])),
            ("output tokens a second", beside_plain(lambda run: run["throughput"]["output_tokens_per_s"])),
        ),
    )
    caption = (
        "vLLM 0.32 (CPU build), a small model, 2 virtual cores; 80 requests a server, none failed. Each server is a "
        "fresh process: the last one found what the one before had stored."
    )
    return Figure(name="vllm-serve", chart=chart, caption=caption)


def link() -> Figure:
    cases = result("h200-gpu")["cases"]
    sizes = ("1 MiB x 1", "1 MiB x 32", "64 MiB x 1", "64 MiB x 4", "512 MiB x 2")
    pull = result("h200x2-peer")["cases"]["8B NHD, peer pull, by CUDA IPC, 64 MiB x 4"]["ratio"]
    chart = BarChart(
        title="Paged GPU cache to verified pages and back",
        note="bytes a second beside memcpy of as many, as many in flight (= 1)",
        series=(Series("store", lambda theme: theme.third), Series("load", lambda theme: theme.strong)),
        rows=tuple(
            (size, tuple(cases[f"8B NHD, {size}, {way}"]["ratio"] for way in ("store", "load"))) for size in sizes
        ),
        line=1.0,
    )
    caption = (
        "One NVIDIA H200 (55 GB/s each way), 16-token blocks in random order, another process's arena. Small single "
        f"transfers pay for Python. A pull from another GPU's cache reaches {pull:.2f} of memcpy between the GPUs."
    )
    return Figure(name="gpu-link", chart=chart, caption=caption)


def cluster_paths() -> Figure:
    cases = result("pages")["results"]
    rows = (
        ("arena put", "arena put, contiguous tensor"),
        ("arena get", "arena get, contiguous tensor"),
        ("arena get, 16-token blocks", "arena get, 16-token blocks"),
        ("page stream, write", "stream write"),
        ("page stream, read", "stream read"),
        ("disk put, durable", "disk put, until durable"),
        ("disk get, cold", "disk get, cold"),
    )
    chart = BarChart(
        title="Pages between CPU processes",
        note="beside memcpy, a bare gRPC stream, plain files (= 1) in the same run",
        series=(KVPOOL,),
        rows=tuple((name, (cases[case]["ratio"],)) for name, case in rows),
        line=1.0,
    )
    caption = (
        "2 virtual cores for engine, agent, pagestore and baseline together. Every page is sealed when it is put, and "
        "verified when it is read."
    )
    return Figure(name="pages", chart=chart, caption=caption)


def index() -> Figure:
    latency = result("match")["latency_512_chunks_by_chunks_stored"]
    what = (
        ("Redis alone, pipelined", "plain_redis"),
        ("bare gRPC echo", "grpc_echo"),
        ("index, open stream", "stream"),
        ("replica in the client", "replica"),
    )
    percentiles = ("p50", "p99")
    case = latency["1000000"]
    base = case["plain_redis_p50_ms"]
    chart = BarChart(
        title="Match of 512 chunks, a million stored",
        note="time beside the median of one pipelined read from Redis (= 1)",
        series=(Series("median", lambda theme: theme.strong), Series("99th percentile", lambda theme: theme.other)),
        rows=tuple((name, tuple(case[f"{key}_{one}_ms"] / base for one in percentiles)) for name, key in what),
        unit=" x",
    )
    rate = result("match")["throughput_128_chunks_1_million_stored"]["1 index"]["matches_a_second"]
    caption = (
        "2 virtual cores for Redis, index and client together, beside other work: hence the tails. One index answers "
        f"{round(rate, -2):,.0f} matches of 128 chunks a second there."
    )
    return Figure(name="index-match", chart=chart, caption=caption)


def eviction() -> Figure:
    document = result("eviction")
    curve = document["curves"]["recorded"]["hit_rates"]
    names = (("chain", "chain (default)"), ("s3-fifo", "S3-FIFO"), ("lru", "LRU"), ("belady", "Belady's optimum"))
    colors: tuple[Callable[[Theme], str], ...] = (
        lambda theme: theme.strong,
        lambda theme: theme.fourth,
        lambda theme: theme.third,
        lambda theme: theme.other,
    )
    chart = LineChart(
        title="Hits over a recorded conversation trace",
        note="share of blocks found, by eviction policy and size of the cache",
        series=tuple(Series(shown, color) for (_, shown), color in zip(names, colors, strict=True)),
        places=tuple(f"{share:.0%}" for share in document["shares_of_unique_blocks"]),
        values=tuple(tuple(curve[name]) for name, _ in names),
        across="capacity, share of the trace's different blocks",
        percent_max=40,
    )
    caption = "Replayed, no machine in it. The optimum knows the future; above a quarter of the blocks all are alike."
    return Figure(name="eviction", chart=chart, caption=caption)
