"""Services killed in the middle of an engine's loads and stores: no request fails, and none gets other KV."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.vllm_gpu.engines import Engine, prompt, start_all
from bench.vllm_gpu.phases import Plan
from bench.vllm_gpu.samples import Recorder

VICTIMS = ("agent-0", "pagestore-0", "index-0", "redis")
_KILLS = 3
_BACK_S = 5.0  # `kvpool up` starts it again, at first after a second
_PROMPTS = 12


def run_kills(plan: Plan, record: Recorder) -> None:
    """Prefixes that the GPU cannot hold go round while each service is killed three times, at other moments.

    Every block that was not computed is compared with what was (see BlockWatch).
    """
    engine = start_all(["kvpool"], plan.options)["kvpool"]
    engine.call("bench_watch", "")
    cluster = _cluster(plan.options.agent)
    heads = [prompt(plan.prefix_tokens, 970_000_000 + 1000 * plan.salt + number) for number in range(_PROMPTS)]
    asked = _Asked(engine, heads)
    asked.go_round(1)
    for victim in VICTIMS:
        before = asked.requests, asked.failed
        kills = 0
        for number in range(_KILLS):
            timer = threading.Timer(0.2 + 0.37 * number, _kill, (cluster, victim))
            timer.start()
            asked.go_round(1)
            timer.join()
            kills += 1
            _await_running(cluster, victim)
        record.add("killed", victim, kills)
        record.add("requests beside kills", victim, asked.requests - before[0])
        record.add("failed beside kills", victim, asked.failed - before[1])
    counts = engine.call("bench_watched", "")
    record.note("blocks beside kills", counts)
    for verdict in ("equal", "unequal", "unknown"):
        record.add(f"blocks {verdict}", "kvpool", counts[verdict], run=100)
    record.note("counters of kvpool", engine.counters())


class _Asked:
    """Requests of prefixes in turn, half of them with a new one, so that there are stores, too."""

    def __init__(self, engine: Engine, heads: list[list[int]]) -> None:
        self._engine, self._heads = engine, heads
        self._seed = 980_000_000
        self.requests = self.failed = 0

    def go_round(self, times: int) -> None:
        """Ask for each prefix so many times, four at a time."""
        for _ in range(times):
            for first in range(0, len(self._heads), 2):
                self._seed += 10
                tails = [head + prompt(64, self._seed + n) for n, head in enumerate(self._heads[first : first + 2])]
                new = [prompt(len(self._heads[0]), self._seed + 5 + n) for n in range(2)]
                self.requests += 4
                answered = self._engine.ask([*tails, *new], 3)
                self.failed += sum(len(tokens) != 3 for tokens in answered.tokens)


def _cluster(agent: str) -> Path:
    """The state file of the cluster whose agent this is."""
    return Path(agent.removeprefix("unix:")).parent.parent / "cluster.json"


def _pid(cluster: Path, name: str) -> int:
    processes = json.loads(cluster.read_text())["processes"]
    return int(next(process["pid"] for process in processes if process["name"] == name))


def _kill(cluster: Path, name: str) -> None:
    os.kill(_pid(cluster, name), signal.SIGKILL)


def _await_running(cluster: Path, name: str) -> None:
    deadline_s = time.monotonic() + 4 * _BACK_S
    while time.monotonic() < deadline_s:
        try:
            os.kill(_pid(cluster, name), 0)
        except (ProcessLookupError, StopIteration, ValueError):
            time.sleep(0.1)
            continue
        time.sleep(_BACK_S / 2)  # it is there; it serves soon
        return
    raise RuntimeError(f"{name} was not started again")


PHASES: dict[str, Callable[[Plan, Recorder], None]] = {"kills": run_kills}
