"""The order of the stages, with engines that compute nothing: what each of them could have found in a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.vllm_gpu.engines import Answer, Engine, EngineOptions
from bench.vllm_gpu.samples import Recorder, Sample, Samples
from bench.vllm_tier.cases import cases
from bench.vllm_tier.stages import Plan, TierStages
from bench.vllm_tier.store import TierStores

HEAD = 64  # tokens that name a prefix


class Kept(Recorder):
    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.notes: dict[str, Any] = {}

    def add(self, name: str, kind: str, value: float, *, key: int = 0, run: int = 0, **more: Any) -> None:
        self.samples.append(Sample(name=name, kind=kind, value=value, key=key, run=run, more=more))

    def note(self, name: str, value: Any) -> None:
        self.notes[name] = value


class PlayedStores(TierStores):
    """Both tiers: prefixes by name. memory: of the pool only."""

    def __init__(self, files: Path) -> None:
        super().__init__(files, {}, files)
        self.pool: set[tuple[int, ...]] = set()
        self.memory: set[tuple[int, ...]] = set()
        self.written: set[tuple[int, ...]] = set()

    def make_cold(self) -> None:
        self.memory.clear()

    def read_rate(self) -> float:
        return 1.0

    def file_count(self) -> int:
        return len(self.written)


class PlayedEngine:
    """A request takes 10 s, 3 s with its prefix on a disk of the file tier, 2 s on the pool's, 1 s in a memory."""

    def __init__(self, stores: PlayedStores, kind: str, options: EngineOptions) -> None:
        self.kind, self.start_seconds = kind, 1.0
        self._stores, self._options = stores, options
        self._region: set[tuple[int, ...]] = set()
        self._summed = 0  # requests of more than one step since the watch began
        self.closed = False

    def ask(self, prompts: list[list[int]], new_tokens: int = 1) -> Answer:
        seconds, cached = 0.0, []
        self._summed += len(prompts) * (new_tokens > 1)
        for tokens in prompts:
            name, tiers = tuple(tokens[:HEAD]), [one["type"] for one in self._options.tiers.get(self.kind, [])]
            took_s = 10.0
            if name in self._region or ("KvPoolTier" in tiers and name in self._stores.memory):
                took_s = 1.0
            elif "KvPoolTier" in tiers and name in self._stores.pool:
                took_s = 2.0
            elif "fs" in tiers and name in self._stores.written:
                took_s = 3.0
            cached.append(len(tokens) - HEAD if took_s < 10 else 0)
            seconds += took_s
            self._region.add(name)
            if "KvPoolTier" in tiers:
                self._stores.pool.add(name)
                self._stores.memory.add(name)
            if "fs" in tiers:
                self._stores.written.add(name)
        return Answer(seconds, [[0] for _ in prompts], cached)

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "bench_watch":
            self._summed = 0
        return {
            "bench_tier": {"storing": 0},
            "bench_watch": None,
            "bench_watched": {"equal": self._summed, "unequal": 0, "unknown": 1},
        }[method]

    def forget(self, *, cpu_region: bool = False) -> None:
        if cpu_region:
            self._region.clear()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Kept, list[PlayedEngine]]:
    monkeypatch.setattr("bench.vllm_tier.stages._SETTLE_S", 0.0)
    stores, record, engines = PlayedStores(tmp_path), Kept(), list[PlayedEngine]()

    def start(kind: str, options: EngineOptions) -> Engine:
        engines.append(PlayedEngine(stores, kind, options))
        return engines[-1]  # type: ignore[return-value]

    plan = Plan(options=EngineOptions(root=tmp_path), tokens=512, prefix_tokens=256, prefixes=4, runs=3, budget_s=1e6)
    TierStages(plan, stores, record, start).run(lambda: None)
    return record, engines


def test_every_place_is_measured_beside_its_baseline(measured: tuple[Kept, list[PlayedEngine]]) -> None:
    found = cases(Samples(measured[0].samples))
    memory, disk = found["ttft 512 from the pool's memory"], found["ttft 512 from the pool's disk"]
    assert (memory["value"], memory["baseline"], memory["ratio"]) == (1e3, 10e3, 0.1)
    assert (disk["value"], disk["baseline"], disk["ratio"]) == (2e3, 3e3, 0.667)
    assert found["ttft 512 computed with the tier"]["ratio"] == 1.0
    assert found["least share loaded from memory, tier"]["ratio"] == 1.0
    assert found["ttft 512 from vLLM's CPU region"]["value"] == 1e3
    assert (found["right bytes"]["ratio"], found["right bytes"]["value"]) == (1.0, 4), "both prompts, stored and loaded"


def test_press_is_compared_by_runs_in_which_the_first_round_computes(
    measured: tuple[Kept, list[PlayedEngine]],
) -> None:
    found = cases(Samples(measured[0].samples))
    assert found["press beside tiering"]["ratio"] == 1.0
    assert found["press beside tiering"]["runs"] == 3
    shares = [one.more["cached"] for one in measured[0].samples if one.name == "press round" and one.kind == "tier"]
    assert [share > 0.5 for share in shares] == [False, True, True] * 3


def test_at_most_two_engines_live_at_once(measured: tuple[Kept, list[PlayedEngine]]) -> None:
    assert [(one.kind, one.closed) for one in measured[1]] == [
        ("writer", True),
        ("fs", True),
        ("tier", False),
        ("tiering", False),
    ]


def test_no_run_of_press_begins_that_would_pass_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.vllm_tier.stages._SETTLE_S", 0.0)
    stores, record = PlayedStores(tmp_path), Kept()
    plan = Plan(options=EngineOptions(root=tmp_path), tokens=512, prefix_tokens=256, prefixes=2, runs=3, budget_s=0.0)
    stages = TierStages(plan, stores, record, lambda kind, options: PlayedEngine(stores, kind, options))  # type: ignore[arg-type,return-value]
    stages.run(lambda: None)
    assert [one.run for one in record.samples if one.name == "press" and one.kind == "tier"] == [0]
