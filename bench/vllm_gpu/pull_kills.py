"""Engines and agents killed while one engine copies out of the GPU cache of the other one: no request of an engine that
lives fails, and no block has other KV.

Start `kvpool cluster up --device cuda --agents 2` first, and name its directory: `--agent auto:.kvpool/run`.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil

from bench.vllm_gpu.engines import Engine, prompt
from bench.vllm_gpu.faults import Transfer, moment, service_pid, transfers, under_way
from bench.vllm_gpu.host_usage import state_directory
from bench.vllm_gpu.phases import Plan, tail
from bench.vllm_gpu.ranks import need_gpus
from bench.vllm_gpu.samples import Recorder

GPUS = {"source": "0", "reader": "1"}
AGENTS = {"source agent": "agent-0", "reader agent": "agent-1"}
VICTIMS = (*AGENTS, *GPUS)
_PREFIXES = 4  # of a kill; they are asked for at once
_ASKED_S = 60.0  # for the answers of an engine that lives
_BACK_S = 120.0
_ANNOUNCED_S = 0.3  # the last chunks of a prompt are announced with the step after
_TRIES = 5
_DECODED = 8, 256, 64  # what the source computes meanwhile: requests, tokens in, tokens out


def run_pull_kills(plan: Plan, record: Recorder) -> None:
    """Each of VICTIMS `plan.kills` times at a random moment of the reader's loads of prefixes that only the source's
    GPU has, while the source decodes. Then prefixes are copied again before the next kill."""
    need_gpus("pull-kills")
    with tempfile.TemporaryDirectory(prefix="vllm-pull-kills-") as sums:
        pair = _Pair(plan, record, Path(sums))
        pair.await_copies("nothing")
        for number in range(plan.kills):
            for victim in VICTIMS:
                pair.kill(victim, number)
                pair.record_blocks(victim, number)


class _Asked:
    """Requests of an engine in a thread of their own: those of one that is killed may never return."""

    def __init__(self, engine: Engine, prompts: list[list[int]], new_tokens: int) -> None:
        self.requests, self.answered = len(prompts), 0

        def ask() -> None:
            answer = engine.ask(prompts, new_tokens)
            self.answered = sum(len(tokens) == new_tokens for tokens in answer.tokens)

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Wait for the answers; whether they came, or the engine has said that it cannot."""
        self._thread.join(_ASKED_S)
        return not self._thread.is_alive()


class _Pair:
    """A source, and a reader that copies from it; the pool stores nothing."""

    def __init__(self, plan: Plan, record: Recorder, sums: Path) -> None:
        """sums: a directory for what the blocks of the source sum up to. raises: ValueError without a cluster."""
        cluster = state_directory(plan.options.agent)
        if cluster is None:
            raise ValueError(f"pull-kills needs `--agent auto:DIRECTORY/run` of a cluster, not {plan.options.agent!r}")
        self._plan, self._record, self._sums, self._cluster = plan, record, sums, cluster
        self._random, self._seed = Random(plan.salt), 890_000_000 + 100_000 * plan.salt
        self._seen: list[Transfer] = []
        self._dead: list[Engine] = []  # kept: to end one that is gone may wait for it
        self._counted: dict[str, int] = {}  # of the reader's blocks
        self._engines = {name: self._start(name) for name in GPUS}

    def kill(self, victim: str, number: int) -> None:
        """raises: RuntimeError if no load of the reader comes, or nothing is copied any more afterwards."""
        for _ in range(_TRIES):
            if self._kill(victim, number):
                break
        else:
            raise RuntimeError(f"{_TRIES} times the reader loaded nothing while {victim} was to be killed")
        if victim in GPUS:
            self._dead.append(self._engines[victim])
            self._engines[victim] = self._start(victim)
        again_s = self.await_copies(victim)
        self._record.add("seconds to copy again", victim, again_s, run=number)

    def await_copies(self, victim: str) -> float:
        """Ask until tokens come from the source's GPU; returns the seconds. raises: RuntimeError."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < _BACK_S:
            before = self._copied_tokens()
            asked = self._ask_reader(self._offered())
            if not asked.ended() or asked.answered < asked.requests:
                raise RuntimeError(f"after the kill of {victim} the reader does not answer")
            self._seen = transfers(self._engines["reader"].call("bench_traced")) or self._seen
            if self._copied_tokens() > before:
                return time.monotonic() - began_s
        raise RuntimeError(f"{victim} was killed, and nothing is copied {_BACK_S:g} s later")

    def record_blocks(self, victim: str, number: int) -> None:
        """What the reader has loaded since the last time, compared with what the source had computed."""
        counts = self._engines["reader"].call("bench_heads_watched", "")
        for verdict in ("equal", "unequal", "unknown"):
            found = counts[verdict] - self._counted.get(verdict, 0)
            self._record.add(f"pulled blocks {verdict}", victim, found, run=number)
        self._counted = counts

    def _start(self, name: str) -> Engine:
        options = replace(
            self._plan.options, gpus=GPUS[name], extra={**self._plan.options.extra, "store": "never", "load": "always"}
        )
        engine = Engine("kvpool" if name == "source" else "reader", options)
        engine.warm()
        engine.call("bench_watch_heads")
        engine.call("bench_trace")
        if name == "reader":
            self._counted = {}
        self._record.note(f"pid of {name}", engine.call("bench_pid"))
        return engine

    def _kill(self, victim: str, number: int) -> bool:
        """False if the reader has ordered no load, so that nothing was killed."""
        source, reader = self._engines["source"], self._engines["reader"]
        heads = self._offered()
        pid = (
            service_pid(self._cluster, AGENTS[victim]) if victim in AGENTS else self._engines[victim].call("bench_pid")
        )
        aim = moment("load", self._seen, self._random)
        reader.call("bench_kill", pid, aim.what, aim.skip, aim.delay_s)
        requests, tokens, new_tokens = _DECODED
        asked = {
            "source": _Asked(source, [self._prompt(tokens) for _ in range(requests)], new_tokens),
            "reader": self._ask_reader(heads),
        }
        living = {name: one for name, one in asked.items() if name != victim}
        for one in living.values():
            one.ended()
        if _runs(pid):
            return False
        for one in living.values():
            self._record.add("requests beside kills of pulls", victim, one.requests, run=number)
            self._record.add("failed beside kills of pulls", victim, one.requests - one.answered, run=number)
        under = -1  # not known of the reader: its trace went with it
        if victim != "reader":
            calls = reader.call("bench_traced")
            killed_s = next(at_s for at_s, what, _, _ in calls if what == "killed")
            under = under_way(transfers(calls), "load", killed_s)
        self._record.add("killed in pulls", victim, 1, run=number, loads=under)
        return True

    def _offered(self) -> list[list[int]]:
        """New prefixes that the source's GPU has, and the reader knows the sums of."""
        heads = [self._prompt(self._plan.prefix_tokens) for _ in range(_PREFIXES)]
        self._engines["source"].ask([head + tail(self._plan, 0, 0, 18) for head in heads], 2)
        time.sleep(_ANNOUNCED_S)
        for path in self._sums.iterdir():
            path.unlink()
        self._engines["source"].call("bench_heads_watched", str(self._sums))
        self._engines["reader"].call("bench_learn_heads", str(self._sums))
        return heads

    def _ask_reader(self, heads: list[list[int]]) -> _Asked:
        return _Asked(self._engines["reader"], [head + tail(self._plan, 1, 0, 19) for head in heads], 3)

    def _copied_tokens(self) -> float:
        return self._engines["reader"].counters().get("kvpool_gpu_tokens", 0.0)

    def _prompt(self, count: int) -> list[int]:
        self._seed += 1
        return prompt(count, self._seed)


def _runs(pid: int) -> bool:
    """A process that was killed stays a zombie until its parent asks for it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


PHASES: dict[str, Callable[[Plan, Recorder], None]] = {"pull-kills": run_pull_kills}
