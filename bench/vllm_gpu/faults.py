"""Services killed in the middle of an engine's loads and stores: no request fails, and none gets other KV."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench.vllm_gpu.engines import Engine, prompt, start_all
from bench.vllm_gpu.host_usage import state_directory
from bench.vllm_gpu.phases import Plan
from bench.vllm_gpu.samples import Recorder
from kvpool_cli.state import read_state

VICTIMS = ("agent-0", "pagestore-0", "index-0", "redis")
_BACK_S = 120.0  # `kvpool cluster up` starts a process again at once, or up to 30 s after its last start
_SPARE = 3  # kills for one that must hit a transfer
_TRIES = 5  # rounds in which the engine orders nothing of what the kill waits for
_PROMPTS = 12


@dataclass(frozen=True, slots=True)
class Transfer:
    """A load or store of a worker. ended_s: infinite if nothing was heard of its end."""

    what: str
    began_s: float
    ended_s: float


def transfers(calls: Iterable[tuple[float, str, str, float]]) -> list[Transfer]:
    """All that were ordered, out of what BenchWorker.bench_traced returns."""
    began_s: dict[tuple[str, str], float] = {}
    ended_s: dict[tuple[str, str], float] = {}
    for at_s, what, name, took_ms in calls:
        if what == "load asked":
            began_s["load", name] = at_s
        elif what == "received":
            ended_s["load", name] = at_s
        elif what == "store ordered":
            began_s["store", name] = at_s
        elif what == "store ended" and ("store", name) in began_s:  # reported with a later step
            ended_s["store", name] = began_s["store", name] + took_ms / 1e3
    return [Transfer(of[0], at_s, ended_s.get(of, float("inf"))) for of, at_s in began_s.items()]


def under_way(seen: Iterable[Transfer], what: str, at_s: float) -> int:
    """How many had begun and not ended at a moment."""
    return sum(one.what == what and one.began_s <= at_s <= one.ended_s for one in seen)


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill: delay_s after an engine has ordered a load or store, the one after `skip` others."""

    what: str
    skip: int
    delay_s: float


def moment(what: str, seen: Iterable[Transfer], random: Random) -> Moment:
    """A random moment of a round like the one in which `seen` ran, before the end of most such transfers."""
    took_s = sorted(one.ended_s - one.began_s for one in seen if one.what == what and one.ended_s < float("inf"))
    if not took_s:
        return Moment(what, 0, 0.0)
    return Moment(what, random.randrange(max(1, len(took_s) // 2)), random.uniform(0.0, took_s[len(took_s) // 4]))


def run_kills(plan: Plan, record: Recorder) -> None:
    """Prefixes that the GPU cannot hold go round while services are killed in turn, until each of them has been killed
    so many times while a load or store was under way: some kills come too late for that.

    Every block that was not computed is compared with what was (see BlockWatch). The next kill comes when the engine
    loads again.
    """
    engine = start_all(["kvpool"], plan.options)["kvpool"]
    engine.call("bench_watch", "")
    engine.call("bench_trace")
    heads = [prompt(plan.prefix_tokens, 970_000_000 + 1000 * plan.salt + number) for number in range(_PROMPTS)]
    asked = _Asked(engine, heads, 980_000_000 + 100_000 * plan.salt)
    asked.go_round()
    asked.go_round()
    killer = _Killer(engine, asked, _state_directory(plan.options.agent), Random(plan.salt))
    hit = dict.fromkeys(VICTIMS, 0)
    for number in range(_SPARE * plan.kills):
        for place, victim in enumerate(VICTIMS):
            if hit[victim] == plan.kills:
                continue
            before = asked.requests, asked.answered
            loaded = _loaded_chunks(engine)
            try:
                kill = killer.kill(victim, ("load", "store")[(number + place) % 2])
                again_s = killer.await_loads(victim)
                record.add("killed", victim, 1, run=number, again_s=round(again_s, 1), **kill)
                in_transfer = kill["loads"] + kill["stores"] > 0
                record.add("killed in a transfer", victim, in_transfer, run=number)
                hit[victim] += in_transfer
            finally:
                requests, answered = asked.requests - before[0], asked.answered - before[1]
                record.add("requests beside kills", victim, requests, run=number)
                record.add("failed beside kills", victim, requests - answered, run=number)
            record.add("chunks loaded beside kills", victim, _loaded_chunks(engine) - loaded, run=number)
    counts = engine.call("bench_watched", "")
    record.note("blocks beside kills", counts)
    for verdict in ("equal", "unequal", "unknown"):
        record.add(f"blocks {verdict}", "kvpool", counts[verdict], run=100)
    record.note("counters of kvpool", engine.counters())


class _Asked:
    """Requests of prefixes in turn, half of them with a new one, so that there are stores, too."""

    def __init__(self, engine: Engine, heads: list[list[int]], seed: int) -> None:
        self._engine, self._heads, self._seed = engine, heads, seed
        self._next = 0
        self.requests = self.answered = 0

    def go_round(self) -> None:
        """Ask for each prefix once, two at a time beside two new ones."""
        for _ in range(0, len(self._heads), 2):
            self.go_on()

    def go_on(self) -> None:
        """Ask for the next two prefixes, and two new ones."""
        self._seed += 10
        heads = [self._heads[(self._next + number) % len(self._heads)] for number in range(2)]
        self._next += 2
        tails = [head + prompt(64, self._seed + number) for number, head in enumerate(heads)]
        new = [prompt(len(self._heads[0]), self._seed + 5 + number) for number in range(2)]
        self.requests += 4
        answer = self._engine.ask([*tails, *new], 3)
        self.answered += sum(len(tokens) == 3 for tokens in answer.tokens)


class _Killer:
    """Kills services of a cluster while an engine is asked. The engine's worker does it: it knows when."""

    def __init__(self, engine: Engine, asked: _Asked, cluster: Path, random: Random) -> None:
        self._engine, self._asked, self._cluster, self._random = engine, asked, cluster, random
        self._seen = self._drained()[0]  # of a whole round
        self._killed_pid = 0

    def kill(self, victim: str, what: str) -> dict[str, int]:
        """At a random moment in a load or store; returns how many of both were under way."""
        self._killed_pid = service_pid(self._cluster, victim)
        aim = moment(what, self._seen, self._random)
        for _ in range(_TRIES):
            self._engine.call("bench_kill", self._killed_pid, aim.what, aim.skip, aim.delay_s)
            self._asked.go_round()
            seen, killed_s = self._drained()
            if killed_s is not None:
                return {f"{kind}s": under_way(seen, kind, killed_s) for kind in ("load", "store")}
        raise RuntimeError(f"{_TRIES} rounds without {aim.skip + 1} orders of a {what}")

    def await_loads(self, victim: str) -> float:
        """Ask on until the service runs and the engine has loaded; returns the seconds. raises: RuntimeError."""
        began_s = time.monotonic()
        loaded: float | None = None
        while time.monotonic() - began_s < _BACK_S:
            self._asked.go_on()
            if loaded is None:
                loaded = _loaded_chunks(self._engine) if self._restarted(victim) else None
            elif _loaded_chunks(self._engine) > loaded:
                again_s = time.monotonic() - began_s
                self._drained()
                self._asked.go_round()
                self._seen = self._drained()[0] or self._seen
                return again_s
        raise RuntimeError(f"{victim} was killed, and nothing is loaded {_BACK_S:g} s later")

    def _restarted(self, victim: str) -> bool:
        try:
            pid = service_pid(self._cluster, victim)
            os.kill(pid, 0)
        except (ProcessLookupError, StopIteration):
            return False
        return pid != self._killed_pid

    def _drained(self) -> tuple[list[Transfer], float | None]:
        """What was transferred since the last call, and when the service was killed."""
        self._engine.ask([prompt(40, 96)], 2)  # stores are reported with a step
        calls = self._engine.call("bench_traced")
        killed_s = next((at_s for at_s, what, _, _ in calls if what == "killed"), None)
        return transfers(calls), killed_s


def _loaded_chunks(engine: Engine) -> float:
    return engine.counters().get("kvpool_loaded_chunks", 0.0)


def _state_directory(agent: str) -> Path:
    """Return the state directory of the cluster whose agent this is. Raises ValueError if the endpoint does not say
    it."""
    directory = state_directory(agent)
    if directory is None:
        raise ValueError(f"kills need `--agent unix:DIRECTORY/run/agent-0.sock` of `kvpool cluster up`, not {agent!r}")
    return directory


def service_pid(directory: Path, name: str) -> int:
    """Return the process of a service. Raises StopIteration if the cluster has none."""
    state = read_state(directory)
    return next(process.pid for process in (state.processes if state is not None else ()) if process.name == name)


PHASES: dict[str, Callable[[Plan, Recorder], None]] = {"kills": run_kills}
