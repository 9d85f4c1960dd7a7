"""What the plots of the README show, each out of the files of bench/results that its bench has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.pictures.charts import BarChart, Color, LineChart, Series

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
# Files of bench/results, each named by its day.
VLLM_GPU = "2026-11-28-vllm-gpu-loads"
VLLM_PRESS = "2026-11-28-vllm-gpu"
VLLM_SERVE = "2026-11-21-vllm-serve"
VLLM_TTFT = "2026-11-21-vllm-ttft"
PAGES = "2026-11-21-pages"
MATCH = "2026-11-21-match"
EVICTION = "2026-11-22-eviction"
SOAK = "2026-11-21-soak"
DEMO = "2026-11-28-h200-demo"
KVPOOL = Series("kvpool", Color.KVPOOL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """name: of its files. result: the file of bench/results. caption: the machine, and what to read from it."""

    name: str
    result: str
    chart: BarChart | LineChart
    caption: str

    @property
    def description(self) -> str:
        """What a picture's metadata say: the result's file and all that is drawn, as JSON."""
        return json.dumps({"result": f"bench/results/{self.result}.json", "chart": asdict(self.chart)})


def result(name: str) -> Any:
    """The document of a results file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def figures() -> tuple[Figure, ...]:
    """In the README's order: the first two stand on its first screen."""
    return (first_token(), press(), served(), cluster_paths(), index(), eviction())


def claims() -> str:
    """What else the README says in figures, as a list."""
    cases, runs, soak = result(VLLM_TTFT)["cases"], result(VLLM_SERVE)["runs"], result(SOAK)
    phases = {phase["name"]: phase["ttft_ms_median"] for phase in result(DEMO)["phases"]}
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
    cases = result(VLLM_GPU)["cases"]

    def milliseconds(tokens: int) -> tuple[float, ...]:
        loaded, own = (cases[f"ttft {tokens} {way}"] for way in ("loaded, first engine", "own cache"))
        return loaded["baseline"], loaded["value"], own["value"]

    chart = BarChart(
        title="vLLM on a GPU: first token",
        note="ms",
        series=(
            Series("computed", Color.BASELINE),
            Series("kvpool, fresh engine", Color.KVPOOL),
            Series("own GPU cache", Color.FOURTH),
        ),
        rows=tuple((f"{tokens:,} tokens", milliseconds(tokens)) for tokens in (2048, 8192, 16384, 32768)),
        digits=0,
    )
    second = cases["ttft 8192 loaded, second engine"]
    caption = (
        "vLLM 0.32, an 8B shape in bf16, CUDA graphs, one NVIDIA H200; the engine that loads has computed none of it. "
        f"The next fresh engine took {second['value']:.0f} ms for 8,192 tokens."
    )
    return Figure(name="first-token", result=VLLM_GPU, chart=chart, caption=caption)


def press() -> Figure:
    cases = result(VLLM_PRESS)["cases"]

    def thousands(number: int) -> tuple[float, ...]:
        return tuple(cases[f"press {what} {number}"]["value"] / 1000 for what in ("offload", "round", "control"))

    chart = BarChart(
        title="A working set larger than the GPU's cache",
        note="thousand prompt tokens a second, 24 x 8,192, 4 at a time",
        series=(
            Series("vLLM offload", Color.BASELINE),
            Series("kvpool", Color.KVPOOL),
            Series("GPU cache holds all", Color.FOURTH),
        ),
        rows=tuple((f"round {number}", thousands(number)) for number in (1, 2, 3)),
        digits=0,
    )
    caption = (
        "The same engine, another H200; medians of three alternated runs. In round 1 all of them compute; plain vLLM, "
        "whose cache loses what it has computed, does so in each round."
    )
    return Figure(name="press", result=VLLM_PRESS, chart=chart, caption=caption)


def served() -> Figure:
    runs = result(VLLM_SERVE)["runs"]
    names = ("plain", "empty-pool", "restarted")

    def beside_plain(value: Callable[[Any], float]) -> tuple[float, ...]:
        return tuple(value(runs[name]) / value(runs["plain"]) for name in names)

    chart = BarChart(
        title="What users of vLLM's server see",
        note="two-turn conversations about shared texts; plain vLLM = 1",
        series=(
            Series("plain vLLM", Color.BASELINE),
            Series("kvpool, empty", Color.FOURTH),
            Series("kvpool, restarted", Color.KVPOOL),
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
    return Figure(name="vllm-serve", result=VLLM_SERVE, chart=chart, caption=caption)


def cluster_paths() -> Figure:
    cases = result(PAGES)["results"]
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
        "2 virtual cores for engine, agent, pagestore and baseline together. Measured when every page was still sealed "
        "when it was put, and verified when it was read."
    )
    return Figure(name="pages", result=PAGES, chart=chart, caption=caption)


def index() -> Figure:
    latency = result(MATCH)["latency_512_chunks_by_chunks_stored"]
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
        series=(Series("median", Color.KVPOOL), Series("99th percentile", Color.BASELINE)),
        rows=tuple((name, tuple(case[f"{key}_{one}_ms"] / base for one in percentiles)) for name, key in what),
        unit=" x",
    )
    rate = result(MATCH)["throughput_128_chunks_1_million_stored"]["1 index"]["matches_a_second"]
    caption = (
        "2 virtual cores for Redis, index and client together, beside other work: hence the tails. One index answers "
        f"{round(rate, -2):,.0f} matches of 128 chunks a second there."
    )
    return Figure(name="index-match", result=MATCH, chart=chart, caption=caption)


def eviction() -> Figure:
    document = result(EVICTION)
    curve = document["curves"]["recorded"]["hit_rates"]
    names = (("gdsf", "pagestore"), ("lru", "LRU"), ("belady", "Belady's optimum"))
    colors = (Color.KVPOOL, Color.THIRD, Color.BASELINE)
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
    return Figure(name="eviction", result=EVICTION, chart=chart, caption=caption)
