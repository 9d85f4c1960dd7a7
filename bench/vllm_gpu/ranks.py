"""Several GPUs of a host: what engines of one degree store and others load, and prefixes from GPU to GPU.

Start `kvpool cluster up --device cuda --agents 2` first, and name its directory: `--agent auto:.kvpool/run`.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from bench.vllm_gpu.engines import Engine, prompt
from bench.vllm_gpu.phases import Load, Plan, head, tail
from bench.vllm_gpu.samples import Recorder

GPUS = 2
_SETTLE_S = 3.0  # stores go on behind the last answer
_FORGET_S = 30.0  # the last stores hold blocks
# The GPUs that an engine sees, and how vLLM divides the model among them.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "first": ("0", {}),
    "second": ("1", {}),
    "tp2": ("0,1", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    "pp2": ("0,1", {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}),
}
# Of each degree its engines. A dense model's replicas share nothing: data parallelism is two engines.
DEGREES: dict[str, tuple[str, ...]] = {
    "one": ("first",),
    "dp2": ("first", "second"),
    "tp2": ("tp2",),
    "pp2": ("pp2",),
}


def gpu_count() -> int:
    """Return how many GPUs there are, without using any."""
    import torch

    return int(torch.cuda.device_count())


def need_gpus(phase: str, count: Callable[[], int] = gpu_count) -> None:
    """raises: ValueError on a host with fewer than two."""
    found = count()
    if found < GPUS:
        raise ValueError(f"phase {phase} needs a host with {GPUS} GPUs, this one has {found}")


def run_ranks(plan: Plan, record: Recorder) -> None:
    """Every degree stores prefixes of its own, then every degree loads those of all. Each layer and head of each block
    that was loaded is compared with what its writer had computed.

    All engines live until the end, and each is started once. First no engine offers its GPU cache to others, so that
    all comes from the pool; then all is loaded again with the connector's defaults, which prefer such copies.
    """
    need_gpus("ranks")
    prefixes = {
        name: [
            prompt(plan.prefix_tokens, 610_000_000 + 1_000_000 * plan.salt + 1_000 * place + number)
            for number in range(plan.count)
        ]
        for place, name in enumerate(DEGREES)
    }
    engines: dict[str, Engine] = {}
    try:
        for name, members in DEGREES.items():
            for member in members:
                if member not in engines:
                    engines[member] = _watched(member, plan, record)
            for number, prefix in enumerate(prefixes[name]):
                writer = engines[members[number % len(members)]]
                writer.ask([prefix + tail(plan, 0, number, 10)], 2)
        with tempfile.TemporaryDirectory(prefix="vllm-ranks-") as sums:
            for method in ("bench_heads_watched", "bench_learn_heads"):
                _call(list(engines.values()), method, sums)
        time.sleep(_SETTLE_S)
        for source in ("pool", "any"):
            for name, members in DEGREES.items():
                readers = [engines[member] for member in members]
                for reader in readers:
                    _forget(reader)
                if source == "pool":
                    _call(list(engines.values()), "bench_offer_none")
                for writer_name, heads in prefixes.items():
                    _load_and_compare(plan, record, (name, readers), heads, writer=writer_name, source=source)
    finally:
        for engine in engines.values():
            engine.close()


def _watched(name: str, plan: Plan, record: Recorder) -> Engine:
    """One of ENGINES, warmed; from now on its blocks are summed."""
    gpus, division = ENGINES[name]
    engine = Engine("kvpool", replace(plan.options, gpus=gpus, division=division))
    record.note(f"seconds to start {name}", round(engine.start_seconds, 1))
    engine.warm()
    engine.call_all("bench_watch_heads")
    return engine


def _forget(engine: Engine) -> None:
    """raises: TimeoutError if its blocks stay in use: it would find its own instead of loading any."""
    ends_at_s = time.monotonic() + _FORGET_S
    while not engine.forget():
        if time.monotonic() > ends_at_s:
            raise TimeoutError(f"blocks are in use {_FORGET_S:g} s after the last request; vLLM's log says how many")
        engine.ask([prompt(10, 98)], 2)  # a step, in which the worker reports its stores


def _load_and_compare(
    plan: Plan, record: Recorder, reader: tuple[str, list[Engine]], heads: list[list[int]], **more: Any
) -> None:
    """A degree loads what one has stored; what was found is recorded at once. more: of all samples."""
    name, engines = reader
    before = _counted(engines)
    for number, prefix in enumerate(heads):
        engine = engines[(number + 1) % len(engines)]
        answer = engine.ask([prefix + tail(plan, 1, number, 11)], 2)
        share, ms = answer.cached[0] / len(prefix), round(answer.ms, 1)
        record.add("ranks loaded share", name, share, run=number, ms=ms, **more)
    for what, count in _counted(engines).items():
        record.add(f"ranks {what}", name, count - before[what], **more)


def _counted(engines: list[Engine]) -> dict[str, float]:
    """Verdicts on blocks, and loaded tokens by where they came from, so far. Tokens count once for each rank."""
    watched = _call(engines, "bench_heads_watched", "")
    counters = [engine.counters() for engine in engines]
    sources = {"gpu tokens": ("gpu",), "pool tokens": ("staging", "disk", "remote")}
    return {verdict: sum(one[verdict] for one in watched) for verdict in ("equal", "unequal", "unknown")} | {
        what: sum(one.get(f"kvpool_{source}_tokens", 0.0) for one in counters for source in several)
        for what, several in sources.items()
    }


def run_two_engines(plan: Plan, record: Recorder) -> None:
    """`press` by one engine while the other does nothing, each in turn, and by both at once. All prefixes are new."""
    need_gpus("two-engines")
    engines = [Engine(kind, replace(plan.options, gpus=gpus)) for kind, gpus in (("kvpool", "0"), ("reader", "1"))]
    for engine in engines:
        engine.warm()
    load = Load(plan.concurrency[0])
    for run in range(plan.runs):
        for name, pressed in (("one engine", [engines[run % GPUS]]), ("two engines", engines)):
            first = 680_000_000 + 1_000_000 * plan.salt + 1_000 * run + 500 * (len(pressed) - 1)
            heads = [
                [prompt(plan.prefix_tokens, first + 100 * place + number) for number in range(plan.prefixes)]
                for place in range(len(pressed))
            ]
            for number in range(plan.rounds):
                prompts = [
                    [prefix + tail(plan, 100 * place, number, 17) for place, prefix in enumerate(each)]
                    for each in heads
                ]
                tokens = sum(len(one) for each in prompts for one in each)
                began_s = time.perf_counter()
                with ThreadPoolExecutor(len(pressed)) as threads:
                    cached = sum(threads.map(load.ask, pressed, prompts))
                rate = tokens / (time.perf_counter() - began_s)
                record.add(f"{name} press", "kvpool", rate, key=number + 1, run=run)
                record.add(f"{name} press share", "kvpool", cached / tokens, key=number + 1, run=run)
                time.sleep(_SETTLE_S / 3)  # stores go on behind the last answer


def run_pull(plan: Plan, record: Recorder) -> None:
    """A prefix that only the other engine's GPU has: the pool stores nothing. Then the source's decode, alone and while
    it is copied from all the time."""
    need_gpus("pull")
    options = replace(plan.options, extra={**plan.options.extra, "store": "never"})
    source = Engine("kvpool", replace(options, gpus="0"))
    reader = Engine("reader", replace(options, gpus="1"))
    for engine in (source, reader):
        engine.warm()
    for number in range(plan.count):
        for tokens in plan.lengths:
            prefix = head(plan, tokens, number)
            answer = source.ask([prefix + tail(plan, tokens, number, 12)], 2)
            time.sleep(_SETTLE_S / 10)  # its last chunks are announced with the step after
            pulled = reader.ask([prefix + tail(plan, tokens, number, 13)])
            record.add("pull ttft", "reader", pulled.ms, key=tokens, run=number)
            record.add("pull share", "reader", pulled.cached[0] / len(prefix), key=tokens, run=number)
            unseen = prompt(len(prefix), 660_000_000 + 1_000 * plan.salt + 100 * tokens + number)
            computed = reader.ask([unseen + tail(plan, tokens, number, 14)])
            record.add("pull computed", "reader", computed.ms, key=tokens, run=number, cached=answer.cached[0])
    heads = [prompt(plan.prefix_tokens, 670_000_000 + 1_000 * plan.salt + number) for number in range(2)]
    for run in range(max(1, plan.runs)):
        for busy in (False, True):
            _decode(plan, record, (source, reader), heads, run, busy=busy)
    record.note("counters of reader", reader.counters())


def _decode(
    plan: Plan, record: Recorder, pair: tuple[Engine, Engine], heads: list[list[int]], run: int, *, busy: bool
) -> None:
    """Output tokens a second of the source. busy: the reader copies from it meanwhile, forgets, and copies again."""
    source, reader = pair
    source.ask([prefix + tail(plan, 0, run, 15) for prefix in heads], 2)  # they are in its cache
    ended, copied = threading.Event(), list[int]()

    def copy() -> None:
        while not ended.is_set():
            reader.forget()
            answer = reader.ask([prefix + tail(plan, 0, len(copied), 16) for prefix in heads])
            copied.append(sum(answer.cached))

    copying = threading.Thread(target=copy)
    if busy:
        copying.start()
    tokens, new_tokens = plan.decode_tokens
    first = 860_000_000 + 1_000_000 * plan.salt + 10_000 * (2 * run + busy)
    answer = source.ask([prompt(tokens, first + number) for number in range(plan.decode_requests)], new_tokens)
    ended.set()
    if busy:
        copying.join()
    rate = plan.decode_requests * new_tokens / answer.seconds
    record.add("pull decode" if busy else "pull decode alone", "kvpool", rate, run=run, copied=copied)


def _call(engines: list[Engine], method: str, *arguments: Any) -> list[Any]:
    """Of all workers of all engines."""
    return [answer for engine in engines for answer in engine.call_all(method, *arguments)]


PHASES: dict[str, Callable[[Plan, Recorder], None]] = {
    "ranks": run_ranks,
    "two-engines": run_two_engines,
    "pull": run_pull,
}
