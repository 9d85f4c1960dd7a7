"""Several GPUs of a host: what engines of one degree store and others load, and prefixes from GPU to GPU.

Start `kvpool cluster up --device cuda --agents 2` first, and name its directory: `--agent auto:.kvpool/run`.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bench.vllm_gpu.engines import Engine, EngineOptions, prompt
from bench.vllm_gpu.phases import Load, Plan, head, tail
from bench.vllm_gpu.samples import Recorder

GPUS = 2
_SETTLE_S = 3.0  # stores go on behind the last answer
# Of each degree its engines: the GPUs that they see, and how vLLM divides the model among them. A dense model's
# replicas share nothing: data parallelism is two engines.
DEGREES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("0", {})],
    "tp2": [("0,1", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})],
    "pp2": [("0,1", {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"})],
    "dp2": [("0", {}), ("1", {})],
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


@contextmanager
def started(name: str, options: EngineOptions) -> Iterator[list[Engine]]:
    """The engines of a degree, warmed."""
    engines: list[Engine] = []
    try:
        for gpus, division in DEGREES[name]:
            engines.append(Engine("kvpool", replace(options, gpus=gpus, division=division)))
        for engine in engines:
            engine.warm()
        yield engines
    finally:
        for engine in engines:
            engine.close()


def run_ranks(plan: Plan, record: Recorder) -> None:
    """Every degree stores prefixes of its own, then every degree loads those of all. Each layer and head of each block
    that was loaded is compared with what its writer had computed."""
    need_gpus("ranks")
    prefixes = {
        name: [
            prompt(plan.prefix_tokens, 610_000_000 + 1_000_000 * plan.salt + 1_000 * place + number)
            for number in range(plan.count)
        ]
        for place, name in enumerate(DEGREES)
    }
    with tempfile.TemporaryDirectory(prefix="vllm-ranks-") as sums:
        for name in DEGREES:
            with started(name, plan.options) as engines:
                _call(engines, "bench_watch_heads", "")
                for number, prefix in enumerate(prefixes[name]):
                    engines[number % len(engines)].ask([prefix + tail(plan, 0, number, 10)], 2)
                time.sleep(_SETTLE_S)
                _call(engines, "bench_heads_watched", sums)
        for name in DEGREES:
            with started(name, plan.options) as engines:
                _call(engines, "bench_watch_heads", sums)
                for writer, heads in prefixes.items():
                    for number, prefix in enumerate(heads):
                        reader = engines[(number + 1) % len(engines)]
                        answer = reader.ask([prefix + tail(plan, 1, number, 11)], 2)
                        share = answer.cached[0] / len(prefix)
                        record.add("ranks loaded share", name, share, run=number, writer=writer)
                counts = _call(engines, "bench_heads_watched", "")
                for verdict in ("equal", "unequal", "unknown"):
                    record.add(f"ranks {verdict}", name, sum(count[verdict] for count in counts))


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
