"""The phases: each runs in a process of its own, with one engine or several that take turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.vllm_gpu.engines import Engine, EngineOptions, prompt, start_all, with_more
from bench.vllm_gpu.samples import Recorder

TAIL_TOKENS = 64
SMALL_TOKENS = 128
NEW_TOKENS = 16  # of a request of `press`
_MATCHABLE_S = 1.0
_SETTLE_S = 1.0  # between rounds: stores go on behind the last answer
_REST_S = 0.3  # before each first token: so no engine's prompt comes right after another's, on a warmer GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a phase measures. count: prompts of each length; runs: alternated ones; concurrency: requests that are asked
    together; clients: that ask on their own; kills: of each service; salt: other prompts and moments of kills."""

    kinds: list[str]
    options: EngineOptions
    lengths: tuple[int, ...] = (2048, 8192, 16384, 32768)
    count: int = 4
    runs: int = 1
    rounds: int = 3
    prefixes: int = 24
    prefix_tokens: int = 8192
    concurrency: tuple[int, ...] = (4,)
    clients: tuple[int, ...] = ()
    decode_requests: int = 32
    decode_tokens: tuple[int, int] = (1024, 256)
    kills: int = 3
    salt: int = 0


def head(plan: Plan, tokens: int, number: int) -> list[int]:
    """The part of a prompt that is asked for again."""
    return prompt(tokens - TAIL_TOKENS, 1_000_000 * (plan.salt + 1) + 100 * tokens + number)


def small_head(plan: Plan, number: int) -> list[int]:
    """A prefix of one chunk."""
    return prompt(SMALL_TOKENS, 900_000_000 + 1000 * plan.salt + number)


def tail(plan: Plan, tokens: int, number: int, asked: int) -> list[int]:
    """What follows a head when it is asked for the n-th time."""
    return prompt(TAIL_TOKENS, 500_000_000 + 10_000_000 * asked + 1_000 * plan.salt + 10 * tokens + number)


def run_ttft(plan: Plan, record: Recorder) -> None:
    """TTFT of prompts that no cache has, on each kind in turn after a rest; kvpool stores them. Plain: of a repetition,
    too.

    The prompts that `load` begins with come last. With a `reader`, another engine asks for each prompt of 8,192 tokens
    or more one second after it was computed.
    """
    engines = start_all(plan.kinds, plan.options)
    _note_memcpy(engines, record)
    for kind, engine in engines.items():
        record.add("cache tokens", kind, engine.cache_tokens)
    computing = [kind for kind in plan.kinds if kind != "reader"]
    _decode(plan, engines, record)  # its chunks are the oldest: `load` must find the prompts
    for number in reversed(range(plan.count)):
        for tokens in plan.lengths:
            prefix = head(plan, tokens, number)
            for kind in _turn(computing, number):
                time.sleep(_REST_S)
                answer = engines[kind].ask([prefix + tail(plan, tokens, number, 0)])
                asked_s = time.perf_counter()
                record.add("ttft computed", kind, answer.ms, key=tokens, run=number, cached=answer.cached[0])
                if kind == "kvpool":
                    _let_stores_end(plan, tokens)
                else:
                    again = engines[kind].ask([prefix + tail(plan, tokens, number, 1)])
                    record.add("ttft own cache", kind, again.ms, key=tokens, run=number, cached=again.cached[0])
                if kind == "kvpool" and "reader" in engines and tokens >= 8192:
                    time.sleep(max(0.0, asked_s + _MATCHABLE_S - time.perf_counter()))
                    read = engines["reader"].ask([prefix + tail(plan, tokens, number, 4)])
                    record.add("matchable", "kvpool", read.cached[0] / len(prefix), key=tokens, run=number)
    if "kvpool" in engines:
        for number in range(20):
            engines["kvpool"].ask([small_head(plan, number) + tail(plan, SMALL_TOKENS, number, 0)])
        time.sleep(_SETTLE_S)
    _note_counters(engines, record)


def run_load(plan: Plan, record: Recorder) -> None:
    """A fresh engine asks for what `ttft` has stored, with other tails; then again, of its own GPU's cache."""
    engines = start_all(plan.kinds, plan.options)
    for kind, engine in engines.items():
        for tokens in plan.lengths:
            for number in range(plan.count):
                prefix = head(plan, tokens, number)
                answer = engine.ask([prefix + tail(plan, tokens, number, 2)])
                share = answer.cached[0] / len(prefix)
                first = {"first": True} if number == 0 else {}
                record.add("ttft loaded", kind, answer.ms, key=tokens, run=number, share=round(share, 3), **first)
                record.add("loaded share", kind, share, key=tokens, run=number)
                again = engine.ask([prefix + tail(plan, tokens, number, 3)])
                record.add("ttft own cache", kind, again.ms, key=tokens, run=number, cached=again.cached[0])
        _load_small(plan, engine, record)
    _note_counters(engines, record)


def _load_small(plan: Plan, engine: Engine, record: Recorder) -> None:
    """One chunk on an idle engine: as the connector decides; then loaded, from the order until the worker sees its
    end."""
    engine.call("bench_trace")
    record.add("small load bytes", engine.kind, SMALL_TOKENS * plan.options.token_bytes)
    for number in range(20):
        prefix = small_head(plan, number)
        if number == 10:
            engine.call("bench_load_always")
        loaded = "small ttft loaded" if number >= 10 else "small ttft"
        for name, asked in ((loaded, 2), ("small ttft own cache", 3)):
            answer = engine.ask([prefix + tail(plan, SMALL_TOKENS, number, asked)])
            record.add(name, engine.kind, answer.ms, run=number, cached=answer.cached[0])
    asked_s: dict[str, float] = {}
    for at_s, what, request, _ in engine.call("bench_traced"):
        if what == "load asked":
            asked_s[request] = at_s
        elif what == "received" and request in asked_s:
            record.add("small load", engine.kind, (at_s - asked_s[request]) * 1e3)


@dataclass(frozen=True, slots=True)
class Load:
    """How the prompts of a round of `press` are asked: so many together, and the next when all of them have ended, or
    (closed) by so many clients, each of which asks the next one when its own has ended."""

    at_once: int
    closed: bool = False

    @property
    def name(self) -> str:
        """Of samples."""
        return f"press closed {self.at_once}" if self.closed else f"press of {self.at_once}"

    def ask(self, engine: Engine, prompts: list[list[int]]) -> int:
        """Returns the tokens that were found in a cache."""
        if self.closed:
            return sum(engine.ask_closed(prompts, self.at_once, NEW_TOKENS).cached)
        groups = [prompts[first : first + self.at_once] for first in range(0, len(prompts), self.at_once)]
        return sum(sum(engine.ask(group, NEW_TOKENS).cached) for group in groups)


def run_press(plan: Plan, record: Recorder) -> None:
    """Prefixes that the GPU's cache cannot hold all, asked for round after round. Each run has others."""
    engines = start_all(plan.kinds, plan.options)
    if "kvpool" in engines:
        engines["kvpool"].call("bench_trace")
    loads = [(run, Load(number)) for run in range(plan.runs) for number in plan.concurrency]
    loads += [(0, Load(number, closed=True)) for number in plan.clients]  # once, as nothing is demanded of it
    for run, load in loads:
        first_seed = 700_000_000 + 1_000_000 * plan.salt + 10_000 * load.at_once + 5_000 * load.closed + 100 * run
        heads = [prompt(plan.prefix_tokens, first_seed + number) for number in range(plan.prefixes)]
        name = "press" if load == Load(plan.concurrency[0]) else load.name
        for kind in _turn(plan.kinds, run):
            for number in range(plan.rounds):
                _press_round(plan, engines[kind], heads, load, Sampled(name, run, number), record)
                time.sleep(_SETTLE_S)
    if "kvpool" in engines:
        _note_delays(engines["kvpool"], record)
    _note_counters(engines, record)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Which sample of `press` a round is."""

    name: str
    run: int
    number: int


def _press_round(
    plan: Plan, engine: Engine, heads: list[list[int]], load: Load, sampled: Sampled, record: Recorder
) -> None:
    prompts = [
        prefix + tail(plan, plan.prefix_tokens, 100 * sampled.run + place, 5 + sampled.number)
        for place, prefix in enumerate(heads)
    ]
    tokens = sum(map(len, prompts))
    started_s = time.perf_counter()
    cached = load.ask(engine, prompts)
    rate = tokens / (time.perf_counter() - started_s)
    record.add(
        sampled.name, engine.kind, rate, key=sampled.number + 1, run=sampled.run, cached=round(cached / tokens, 3)
    )


def run_decode(plan: Plan, record: Recorder) -> None:
    """Output tokens a second of requests that share nothing."""
    engines = start_all(plan.kinds, plan.options)
    _decode(plan, engines, record)
    _note_counters(engines, record)


def _decode(plan: Plan, engines: dict[str, Engine], record: Recorder) -> None:
    """The kinds take turns; who begins does, too. First each has a go that does not count. No prompt comes twice."""
    kinds = [kind for kind in plan.kinds if kind != "reader"]
    tokens, new_tokens = plan.decode_tokens
    for run in range(-1, plan.runs):
        for place, kind in enumerate(_turn(kinds, run + 1)):
            first = 800_000_000 + 1_000_000 * plan.salt + 10_000 * (run + 1) + 1_000 * place
            answer = engines[kind].ask(
                [prompt(tokens, first + number) for number in range(plan.decode_requests)], new_tokens
            )
            if run >= 0:
                rate = plan.decode_requests * new_tokens / answer.seconds
                record.add("decode", kind, rate, run=run, cached=sum(answer.cached))
            time.sleep(_SETTLE_S)  # generated chunks are stored at the end


def run_bytes(plan: Plan, record: Recorder) -> None:
    """Every block that was loaded, compared with what was computed: prefixes that do not fit the GPU, several rounds.

    Then a fresh engine: all that the first one stored.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-gpu-") as directory:
        sums = str(Path(directory) / "sums.json")
        heads = [prompt(plan.prefix_tokens, 600_000_000 + 1000 * plan.salt + n) for n in range(plan.prefixes)]
        for engine_number in range(2):
            engine = start_all(["kvpool"], plan.options)["kvpool"]
            engine.call("bench_watch", sums)
            for number in range(plan.rounds):
                for first in range(0, len(heads), plan.concurrency[0]):
                    seed = 10 * engine_number + number
                    group = heads[first : first + plan.concurrency[0]]
                    engine.ask([h + tail(plan, seed, first + place, 8) for place, h in enumerate(group)], 3)
            counts = engine.call("bench_watched", sums)
            record.note(f"blocks of engine {engine_number}", counts)
            for verdict in ("equal", "unequal", "unknown"):
                record.add(f"blocks {verdict}", "kvpool", counts[verdict], run=engine_number)
            _note_counters({"kvpool": engine}, record)
            engine.close()


def run_zeroed(plan: Plan, record: Recorder) -> None:
    """Whether zeroed KV changes tokens: otherwise equal tokens would prove nothing. Other weights: see bench_scale."""
    options = with_more(plan.options, revision="scaled")
    engine = start_all(["kvpool"], options)["kvpool"]
    engine.call("bench_scale", 3.0)
    engine.call("bench_watch", "")
    loaded: list[list[list[int]]] = []
    length = min(4096, options.max_tokens // 2)
    prompts = [prompt(length, 650_000_000 + 1000 * plan.salt + number) for number in range(plan.count)]
    for number, tokens in enumerate(prompts):
        engine.ask([tokens], NEW_TOKENS)
        time.sleep(_SETTLE_S)
        answers = []
        for zero in (False, False, True):
            engine.forget()
            engine.call("bench_zero", zero)
            answer = engine.ask([tokens], NEW_TOKENS)
            answers.append(answer.tokens[0])
            share = answer.cached[0] / len(tokens)
            record.add("zeroed cached", "kvpool", share, run=number, zero=zero, tokens=answer.tokens[0][:8])
        engine.call("bench_zero", False)
        loaded.append(answers)
    record.add("zeroed changes tokens", "kvpool", statistics.mean(first != third for first, _, third in loaded))
    record.add("loaded again changes tokens", "kvpool", statistics.mean(first != second for first, second, _ in loaded))
    record.note("blocks zeroed", engine.call("bench_watched", ""))


def run_timeline(plan: Plan, record: Recorder) -> None:
    """Milliseconds of each step of a load and of a store, as vLLM calls the connector and hears from it."""
    engine = start_all(["kvpool"], plan.options)["kvpool"]
    engine.call("bench_trace")
    tokens = min(8192, plan.options.max_tokens // 2)
    for number in range(3):
        prefix = prompt(tokens - TAIL_TOKENS, 950_000_000 + 1000 * plan.salt + number)
        for what, asked in (("store", 0), ("load", 1)):
            engine.forget()
            began_s = time.perf_counter()
            answer = engine.ask([prefix + tail(plan, tokens, number, asked)])
            ended_s = time.perf_counter()
            time.sleep(_SETTLE_S)
            engine.ask([prompt(20, number)])  # a step, in which the worker reports
            steps = [
                (round((at_s - began_s) * 1e3, 2), name, round(said, 2))
                for at_s, name, _, said in engine.call("bench_traced")
            ]
            steps.append((round((ended_s - began_s) * 1e3, 2), "first token", float(answer.cached[0])))
            record.note(f"timeline of {what} {number}, {tokens} tokens", _shortened(sorted(steps)))


def run_store_rate(plan: Plan, record: Recorder) -> None:
    """Blocks of the GPU's cache are stored as chunks that the pool does not have, as many as `concurrency` prompts of
    `prefix_tokens` have, all ordered at once; between memcpys."""
    engine = start_all(["kvpool"], plan.options)["kvpool"]
    time.sleep(_SETTLE_S)
    engine.ask([prompt(40, 97)], 2)  # a step, in which the worker reports its stores so far
    for run in range(plan.runs):
        _note_memcpy({"kvpool": engine}, record)
        stored = engine.call("bench_store", plan.concurrency[0], plan.prefix_tokens)
        rate = stored["bytes"] / stored["seconds"] / 1e9
        record.add("store rate", "kvpool", rate, run=run, **stored)
        record.add("store rate failed chunks", "kvpool", stored["failed_chunks"], run=run)


def _shortened(steps: list[tuple[float, str, float]]) -> list[tuple[float, str, float]]:
    """Without repetitions of what vLLM asks in every step."""
    kept: list[tuple[float, str, float]] = []
    for step in steps:
        if not kept or step[1:] != kept[-1][1:]:
            kept.append(step)
    return kept[:60]


def _turn(kinds: list[str], number: int) -> list[str]:
    """Each kind comes first once."""
    start = number % len(kinds)
    return kinds[start:] + kinds[:start]


def _let_stores_end(plan: Plan, tokens: int) -> None:
    """So that the next engine is not slowed by them; at 20 GB/s at least."""
    time.sleep(0.1 + tokens * plan.options.token_bytes / 20e9)


def _note_memcpy(engines: dict[str, Engine], record: Recorder) -> None:
    engine = next(iter(engines.values()))
    try:
        rates = engine.call("bench_memcpy")
    except Exception as error:  # no GPU: the bench is being tried out
        record.note("memcpy", f"not measured: {error}")
        return
    for direction, rate in rates.items():
        record.add(f"memcpy {direction}", engine.kind, rate)


def _note_delays(engine: Engine, record: Recorder) -> None:
    """Loads, and stores from the end of a step on the GPU until its chunks are stored, by the worker's clock of each.

    The step in which the worker reports an end does not matter: an engine without requests makes no steps.
    """
    engine.ask([prompt(40, 95)], 2)
    ordered_s: dict[str, float] = {}
    computed_s: dict[str, float] = {}
    delays, loads, asked_s = [], [], {}
    calls = engine.call("bench_traced")
    for at_s, what, number, _ in calls:
        if what == "store ordered":
            ordered_s[number] = at_s
        elif what == "step ended":
            computed_s[number] = at_s
        elif what == "load asked":
            asked_s[number] = at_s
        elif what == "received" and number in asked_s:
            loads.append((at_s - asked_s.pop(number)) * 1e3)
    if loads:
        record.add("load in press", "kvpool", statistics.median(loads), most=round(max(loads), 1), count=len(loads))
    for _, what, number, took_ms in calls:
        if what == "store ended" and number in ordered_s and number in computed_s:
            delays.append((took_ms - (computed_s[number] - ordered_s[number]) * 1e3, number))
    if delays:
        record.note("longest store delays, ms, with the number of the store", sorted(delays)[-6:])
        sorted_ms = sorted(delay for delay, _ in delays)
        record.add("store delay p50", "kvpool", statistics.median(sorted_ms), count=len(sorted_ms))
        record.add("store delay p99", "kvpool", sorted_ms[min(len(sorted_ms) - 1, int(len(sorted_ms) * 0.99))])


def _note_counters(engines: dict[str, Engine], record: Recorder) -> None:
    last = list(engines.values())[-1]
    if last.kind not in ("kvpool", "reader"):
        return
    counters = last.counters()
    record.note(f"counters of {last.kind}", counters)
    for name in ("failed_store_chunks", "stored_chunks", "declined_chunks", "failed_load_chunks", "loaded_chunks"):
        record.add(f"counter {name}", last.kind, counters.get(f"kvpool_{name}", 0.0))


PHASES: dict[str, Callable[[Plan, Recorder], None]] = {
    "ttft": run_ttft,
    "load": run_load,
    "press": run_press,
    "decode": run_decode,
    "bytes": run_bytes,
    "zeroed": run_zeroed,
    "timeline": run_timeline,
    "store-rate": run_store_rate,
}
