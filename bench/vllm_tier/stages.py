"""What is measured of engines with tiers on a GPU, in an order in which each state that is needed comes by itself.

A writer, whose offload has kvpool's tier and vLLM's file tier, computes all prompts. Fresh engines with one tier each
load them: first from disk, then those that the pool has in memory, in turn with an engine without a tier, which
computes others. Then these two run the press workload, whose prefixes all fit into the CPU region.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.vllm_gpu.engines import Answer, Engine, EngineOptions, prompt
from bench.vllm_gpu.phases import NEW_TOKENS, TAIL_TOKENS
from bench.vllm_gpu.samples import Recorder
from bench.vllm_tier.store import TierStores, takes_direct_io

_SETTLE_S = 0.5
_WATCHED_TOKENS = 3  # a watch sums what a step has computed when the request's next step begins
_STORED_TIMEOUT_S = 60.0
_DISK, _MEMORY, _COMPUTED, _PRESS, _BYTES, _WARM = range(6)  # kinds of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """count: prompts of `tokens` tokens that are loaded from each place. press_kinds: the tier is compared with each of
    the others. budget_s: no run of press begins that would end later."""

    options: EngineOptions
    tokens: int = 16384
    count: int = 3
    press_kinds: tuple[str, ...] = ("tiering", "tier")
    runs: int = 5
    rounds: int = 3
    prefixes: int = 10
    prefix_tokens: int = 8192
    at_once: int = 4
    budget_s: float = 200.0


class TierStages:
    """All stages, in order."""

    def __init__(
        self,
        plan: Plan,
        stores: TierStores,
        record: Recorder,
        start: Callable[[str, EngineOptions], Engine] = Engine,
        began_s: float | None = None,
    ) -> None:
        """began_s: on time.monotonic, from which the budget counts."""
        self._plan, self._stores, self._record, self._start_engine = plan, stores, record, start
        self._began_s = time.monotonic() if began_s is None else began_s
        self._engines: dict[str, Engine] = {}

    def run(self, after: Callable[[], None]) -> None:
        """after: called when a stage has ended."""
        for stage in (self.write, self.load_from_disk, self.load_from_memory, self.press, self.compare_bytes):
            started_s = time.monotonic()
            stage()
            self._record.note(f"seconds of {stage.__name__}", round(time.monotonic() - started_s, 1))
            after()

    def write(self) -> None:
        """Compute what is loaded later: first what only disks will have, then what the pool has in memory, too."""
        writer = self._start("writer")
        self._record.note("direct I/O", takes_direct_io(self._stores.files))
        for place in (_DISK, _MEMORY):
            for number in range(self._plan.count):
                writer.ask([self._head(place, number) + _tail(place, number, 0)])
                self._await_stored(writer)  # a tier refuses chunks that come faster than a disk takes them
            if place == _DISK:
                self._stores.make_cold()
        self._record.note("counters of the writer", writer.call("bench_tier"))
        self._close("writer")

    def load_from_disk(self) -> None:
        """What is in no memory, with kvpool's tier and with vLLM's, in turn."""
        for kind in ("fs", "tier"):
            self._await_stored(self._start(kind))
        for number in range(self._plan.count):
            for kind in ("fs", "tier") if number % 2 else ("tier", "fs"):
                self._load(kind, "ttft from disk", _DISK, number)
        self._record.note("GB/s of plain reads of the file tier's files", self._stores.read_rate())
        self._close("fs")

    def load_from_memory(self) -> None:
        """What the pool has in memory, the same again from vLLM's CPU region, and prompts that are computed without a
        tier, in turn."""
        plan = self._plan
        self._start("tiering")
        for number in range(plan.count):
            self._load("tier", "ttft from memory", _MEMORY, number)
            self._engines["tier"].forget()
            self._load("tier", "ttft from region", _MEMORY, number, asked=2)
            for kind in ("tiering", "tier"):
                place = 10 * _COMPUTED + len(kind)
                answer = self._engines[kind].ask([self._head(place, number) + _tail(place, number, 0)])
                self._record.add("ttft computed", kind, answer.ms, key=plan.tokens, run=number)
            time.sleep(2 * _SETTLE_S)  # what the tier stores now
        self._record.note("counters after loads", self._engines["tier"].call("bench_tier"))

    def press(self) -> None:
        """Prefixes that the GPU's cache cannot hold all, and the CPU region can. Each run has others."""
        plan, longest_s = self._plan, 0.0
        for kind in plan.press_kinds:
            if kind not in self._engines:
                self._start(kind)
        for run in range(plan.runs):
            began_s = time.monotonic()
            if run and began_s - self._began_s + longest_s > plan.budget_s:
                break
            first = run % len(plan.press_kinds)
            for kind in plan.press_kinds[first:] + plan.press_kinds[:first]:
                self._press_run(kind, run)
            longest_s = max(longest_s, time.monotonic() - began_s)
        self._record.note("counters after press", self._engines["tier"].call("bench_tier"))

    def compare_bytes(self) -> None:
        """Sums of blocks as they were computed, and as they come from the pool; of prompts of their own."""
        tier = self._engines["tier"]
        tier.call("bench_watch", "")
        heads = [self._head(_BYTES, number) for number in range(2)]
        for number, head in enumerate(heads):
            tier.ask([head + _tail(_BYTES, number, 0)], _WATCHED_TOKENS)
        self._await_stored(tier)
        tier.forget(cpu_region=True)
        shares = [
            tier.ask([head + _tail(_BYTES, number, 1)], _WATCHED_TOKENS).cached[0] / len(head)
            for number, head in enumerate(heads)
        ]
        counts = tier.call("bench_watched", "")
        for verdict in ("equal", "unequal", "unknown"):
            self._record.add(f"blocks {verdict}", "tier", counts[verdict])
        self._record.note("shares of compared prompts that were loaded", shares)

    def close(self) -> None:
        """End all engines."""
        for kind in list(self._engines):
            self._close(kind)

    def _press_run(self, kind: str, run: int) -> None:
        plan, seconds, tokens = self._plan, 0.0, 0
        heads = [prompt(plan.prefix_tokens, _seed(_PRESS, 100 * run + number)) for number in range(plan.prefixes)]
        for number in range(plan.rounds):
            prompts = [head + _tail(_PRESS, 100 * run + place, 1 + number) for place, head in enumerate(heads)]
            answers: list[Answer] = []
            for first in range(0, len(prompts), plan.at_once):
                answers.append(self._engines[kind].ask(prompts[first : first + plan.at_once], NEW_TOKENS))
            asked = sum(map(len, prompts))
            took_s = sum(answer.seconds for answer in answers)
            share = sum(sum(answer.cached) for answer in answers) / asked
            self._record.add("press round", kind, asked / took_s, key=number + 1, run=run, cached=round(share, 3))
            seconds, tokens = seconds + took_s, tokens + asked
            time.sleep(_SETTLE_S)
        self._record.add("press", kind, tokens / seconds, run=run)

    def _load(self, kind: str, name: str, place: int, number: int, asked: int = 1) -> None:
        head = self._head(place, number)
        answer = self._engines[kind].ask([head + _tail(place, number, asked)])
        share = answer.cached[0] / len(head)
        self._record.add(name, kind, answer.ms, key=self._plan.tokens, run=number, share=round(share, 3))
        self._record.add(f"share {name.removeprefix('ttft ')}", kind, share, key=self._plan.tokens, run=number)

    def _head(self, place: int, number: int) -> list[int]:
        return prompt(self._plan.tokens - TAIL_TOKENS, _seed(place, number))

    def _start(self, kind: str) -> Engine:
        pool, files = self._stores.pool_tier(), self._stores.file_tier()
        tiers = {"writer": [pool, files], "tier": [pool], "fs": [files]}
        engine = self._engines[kind] = self._start_engine(kind, replace(self._plan.options, tiers=tiers))
        self._record.note(f"seconds to start {kind}", round(engine.start_seconds, 1))
        short = min(4096, self._plan.tokens // 2)  # the first steps of a process are slow, whatever serves them
        for number, tokens in enumerate((short, short, self._plan.tokens)):
            engine.ask([prompt(tokens, _seed(_WARM, 10 * len(self._engines) + number + 1000 * len(kind)))], 2)
        return engine

    def _close(self, kind: str) -> None:
        self._engines.pop(kind).close()

    def _await_stored(self, engine: Engine) -> None:
        """raises: TimeoutError. Steps are needed, as vLLM hears of a job's end in one."""
        deadline_s = time.monotonic() + _STORED_TIMEOUT_S
        seen: list[object] = []
        while len(seen) < 3 or not seen[-3] == seen[-2] == seen[-1]:
            engine.ask([prompt(20, 7)])
            counters = {} if engine.kind == "fs" else engine.call("bench_tier")
            seen.append(object() if counters.get("storing") else (counters, self._stores.file_count()))
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"what was offered is not stored after {_STORED_TIMEOUT_S:g} s: {counters}")
            time.sleep(_SETTLE_S)


def _seed(place: int, number: int) -> int:
    return 40_000_000 + 1_000_000 * place + number


def _tail(place: int, number: int, asked: int) -> list[int]:
    return prompt(TAIL_TOKENS, 900_000_000 + 10_000_000 * asked + _seed(place, number))
