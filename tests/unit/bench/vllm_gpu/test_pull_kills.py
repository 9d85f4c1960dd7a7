"""The order of things in `pull-kills` of bench.vllm_gpu, without vLLM."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from bench.vllm_gpu import pull_kills
from bench.vllm_gpu.cases import cases
from bench.vllm_gpu.engines import Answer, EngineOptions
from bench.vllm_gpu.phases import TAIL_TOKENS, Plan
from bench.vllm_gpu.pull_kills import AGENTS, VICTIMS
from bench.vllm_gpu.samples import Collected, Recorder, Samples

TOKENS = 256
FIRST_AGENT_PID, FIRST_ENGINE_PID = 100, 1000


class Host:
    """Two engines. What a kill hits is gone at the reader's next load; an agent is started again at once."""

    def __init__(self) -> None:
        self.dead: list[int] = []
        self.engines: list[FakeEngine] = []
        self.agents = dict.fromkeys(AGENTS.values(), FIRST_AGENT_PID)
        self.is_wrong = False  # some of what comes is not the source's
        self.stuck = False  # the reader never answers after a kill

    def engine(self, kind: str, options: EngineOptions) -> FakeEngine:
        self.engines.append(FakeEngine(self, options.gpus, FIRST_ENGINE_PID + len(self.engines)))
        assert (options.extra["store"], kind) == ("never", "kvpool" if options.gpus == "0" else "reader")
        return self.engines[-1]

    def agent_pid(self, directory: Path, name: str) -> int:
        assert directory == Path("/cluster")
        return self.agents[name] + (name == "agent-1")

    def living(self, gpus: str) -> list[FakeEngine]:
        return [one for one in self.engines if one.gpus == gpus and one.pid not in self.dead]


class FakeEngine:
    start_seconds = 1.0

    def __init__(self, host: Host, gpus: str, pid: int) -> None:
        self._host, self.gpus, self.pid = host, gpus, pid
        self.held: set[tuple[int, ...]] = set()
        self._kill: int | None = None
        self._calls: list[tuple[float, str, str, float]] = []
        self._copied = 0
        self._counts = {"equal": 0, "unequal": 0, "unknown": 0}

    def warm(self) -> None:
        pass

    def ask(self, prompts: list[list[int]], new_tokens: int = 1) -> Answer:
        for tokens in prompts:
            prefix = tuple(tokens[:-TAIL_TOKENS])
            if len(prefix) == TOKENS and self.gpus == "1":
                self._load(prefix)
            self.held.add(prefix)
        if self.pid in self._host.dead or (self._host.stuck and self._host.dead and self.gpus == "1"):
            threading.Event().wait()  # vLLM never stops waiting for an engine that was killed
        return Answer(0.0, [[1] * new_tokens] * len(prompts), [0] * len(prompts))

    def _load(self, prefix: tuple[int, ...]) -> None:
        self._calls += [(1.0, "load asked", "r", 0.0), (2.0, "received", "r", 0.0)]
        if self._kill is not None:
            pid, self._kill = self._kill, None
            self._host.dead.append(pid)
            self._calls.append((1.5, "killed", str(pid), 0.0))
        elif any(prefix in source.held for source in self._host.living("0")):
            self._copied += TOKENS
            self._counts["equal"] += 10
            self._counts["unequal"] += self._host.is_wrong

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "bench_kill":
            self._kill = arguments[0]
        elif method == "bench_traced":
            calls, self._calls = self._calls, []
            return calls
        elif method == "bench_heads_watched":
            return dict(self._counts)
        return self.pid if method == "bench_pid" else None

    def counters(self) -> dict[str, float]:
        return {"kvpool_gpu_tokens": self._copied}


def run(host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Samples:
    monkeypatch.setattr(pull_kills, "Engine", host.engine)
    monkeypatch.setattr(pull_kills, "need_gpus", lambda phase: None)
    monkeypatch.setattr(pull_kills, "service_pid", host.agent_pid)
    monkeypatch.setattr(pull_kills, "_runs", lambda pid: pid not in host.dead)
    monkeypatch.setattr(pull_kills, "_ANNOUNCED_S", 0.0)
    options = EngineOptions(root=Path(), agent="auto:/cluster/run")
    pull_kills.run_pull_kills(Plan(kinds=["kvpool"], options=options, kills=2, prefix_tokens=TOKENS), Recorder())
    found = Collected()
    for line in capsys.readouterr().out.splitlines():
        assert found.take(line)
    return Samples(found.samples)


def test_each_is_killed_in_a_load_and_only_engines_that_were_killed_are_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host()
    samples = run(host, monkeypatch, capsys)
    assert len(host.dead) == 2 * len(VICTIMS)
    assert [one.gpus for one in host.engines] == ["0", "1", "0", "1", "0", "1"]
    made = cases(samples, 1)
    for victim in VICTIMS:
        case = made[f"kills in pulls, {victim}"]
        assert (case["kills"], case["value"]) == (2, 0)
        assert made[f"right bytes of pulls, {victim}"]["ratio"] == 1.0
    asked = {victim: sum(samples.values("requests beside kills of pulls", victim)) for victim in VICTIMS}
    assert asked == {"source agent": 2 * 12, "reader agent": 2 * 12, "source": 2 * 4, "reader": 2 * 8}


def test_a_request_of_an_engine_that_lives_and_does_not_answer_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host()
    monkeypatch.setattr(pull_kills, "_ASKED_S", 0.2)
    host.stuck = True
    with pytest.raises(RuntimeError, match="does not answer"):
        run(host, monkeypatch, capsys)


def test_a_block_of_other_kv_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    host = Host()
    host.is_wrong = True
    made = cases(run(host, monkeypatch, capsys), 1)
    assert all(made[f"right bytes of pulls, {victim}"]["ratio"] < 1.0 for victim in VICTIMS)
