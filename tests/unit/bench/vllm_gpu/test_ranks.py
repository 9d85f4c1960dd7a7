"""The order of things in `ranks` of bench.vllm_gpu, without vLLM."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench.vllm_gpu import ranks
from bench.vllm_gpu.cases import cases
from bench.vllm_gpu.engines import Answer, EngineOptions
from bench.vllm_gpu.phases import TAIL_TOKENS, Plan
from bench.vllm_gpu.samples import Collected, Recorder, Samples

TOKENS = 256
NAMES = ("one engine", "two engines")
PLAN = Plan(kinds=["kvpool"], options=EngineOptions(root=None), count=2, prefix_tokens=TOKENS)  # type: ignore[arg-type]


class Host:
    """Engines whose pool has whatever any of them has computed, and what they were asked for, in order. An engine that
    loads prefers what another one offers: all that it has asked for, until it offers none."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.pool: set[tuple[int, ...]] = set()
        self.engines: list[FakeEngine] = []

    def engine(self, kind: str, options: EngineOptions) -> FakeEngine:
        self.started.append((options.gpus, options.division))
        self.engines.append(FakeEngine(self, f"{options.gpus} {' '.join(options.division)}"))
        return self.engines[-1]


class FakeEngine:
    """Its blocks stay in use for the first two requests to forget."""

    start_seconds = 1.0

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self._own: set[tuple[int, ...]] = set()
        self.offered: set[tuple[int, ...]] = set()
        self._known = False
        self._counts = {"computed": 0, "equal": 0, "unequal": 0, "unknown": 0}
        self._gpu_tokens, self._pool_tokens, self._busy = 0, 0, 2

    def warm(self) -> None:
        self._host.calls.append(("warm", self._name))

    def ask(self, prompts: list[list[int]], new_tokens: int = 1) -> Answer:
        (tokens,) = prompts
        prefix = tuple(tokens[:-TAIL_TOKENS])
        if len(prefix) != TOKENS:
            return Answer(0.0, [[1]], [0])
        held = prefix in self._own
        loaded = not held and prefix in self._host.pool
        self._host.calls.append(("own" if held else "load" if loaded else "compute", self._name))
        if loaded:
            copied = any(prefix in other.offered for other in self._host.engines if other is not self)
            self._gpu_tokens += copied * TOKENS
            self._pool_tokens += (not copied) * TOKENS
            self._counts["equal" if self._known else "unknown"] += 5
        self._own.add(prefix)
        self.offered.add(prefix)
        self._host.pool.add(prefix)
        return Answer(0.0, [[1]], [TOKENS if held or loaded else 0])

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        self._host.calls.append((method, self._name))
        self._known = self._known or method == "bench_learn_heads"
        if method == "bench_offer_none":
            self.offered.clear()
        return [dict(self._counts)]

    def forget(self) -> bool:
        if self._busy:
            self._busy -= 1
            return False
        self._own.clear()
        return True

    def counters(self) -> dict[str, float]:
        return {"kvpool_staging_tokens": float(self._pool_tokens), "kvpool_gpu_tokens": float(self._gpu_tokens)}

    def close(self) -> None:
        self._host.calls.append(("close", self._name))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(ranks, "need_gpus", lambda phase: None)
    monkeypatch.setattr(ranks, "Engine", made.engine)
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: 0.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(ranks, "time", clock)
    return made


def collected(capsys: pytest.CaptureFixture[str]) -> Collected:
    found = Collected()
    for line in capsys.readouterr().out.splitlines():
        assert found.take(line)
    return found


def test_each_engine_is_started_and_watched_once_and_all_live_until_the_end(host: Host) -> None:
    ranks.run_ranks(PLAN, Recorder())
    assert host.started == list(ranks.ENGINES.values())
    done = [call for call, _ in host.calls]
    assert [done.count(call) for call in ("warm", "bench_watch_heads", "bench_learn_heads", "close")] == [4, 4, 4, 4]
    assert done[-4:] == ["close"] * 4


def test_all_is_stored_before_anything_is_loaded_and_nothing_comes_from_a_readers_own_cache(host: Host) -> None:
    ranks.run_ranks(PLAN, Recorder())
    asked = [call for call, _ in host.calls if call in ("compute", "load", "own", "bench_learn_heads")]
    assert asked == ["compute"] * 8 + ["bench_learn_heads"] * 4 + ["load"] * 2 * 4 * 8


def test_verdicts_are_of_one_reader_and_what_it_loaded_of_one_writer(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run_ranks(PLAN, Recorder())
    found = collected(capsys)
    equal = [sample for sample in found.samples if sample.name == "ranks equal"]
    assert [(one.more["source"], one.kind, one.more["writer"]) for one in equal] == [
        (source, reader, writer) for source in ("pool", "any") for reader in ranks.DEGREES for writer in ranks.DEGREES
    ]
    assert {one.value for one in equal} == {2 * 5}
    made = cases(Samples(found.samples), 1)
    assert {made[f"right bytes of ranks {name}"]["value"] for name in ranks.DEGREES} == {2 * 8 * 5}
    assert {made[f"loaded by ranks {name}"]["ratio"] for name in ranks.DEGREES} == {1.0}


def test_first_all_comes_from_the_pool_then_what_another_gpu_has(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run_ranks(PLAN, Recorder())
    samples = collected(capsys).samples

    def tokens(source: str, where: str) -> set[float]:
        name = f"ranks {where} tokens"
        return {one.value for one in samples if one.name == name and one.more["source"] == source}

    assert (tokens("pool", "gpu"), tokens("pool", "pool")) == ({0}, {2 * TOKENS})
    assert (tokens("any", "gpu"), tokens("any", "pool")) == ({2 * TOKENS}, {0})


def test_what_was_compared_before_a_failure_is_kept(
    host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = ranks._load_and_compare

    def fail_second(plan: Plan, record: Recorder, reader: tuple[str, Any], *what: Any, **more: Any) -> None:
        if reader[0] != "one":
            raise RuntimeError("the host is gone")
        compare(plan, record, reader, *what, **more)

    monkeypatch.setattr(ranks, "_load_and_compare", fail_second)
    with pytest.raises(RuntimeError, match="the host is gone"):
        ranks.run_ranks(PLAN, Recorder())
    made = cases(Samples(collected(capsys).samples), 1)
    assert made["right bytes of ranks one"]["value"] == 8 * 5
    assert [call for call, _ in host.calls[-4:]] == ["close"] * 4


def test_an_engine_whose_blocks_stay_in_use_is_not_read_with(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(0, 10_000, 20))
    monkeypatch.setattr(FakeEngine, "forget", lambda self: False)
    monkeypatch.setattr("bench.vllm_gpu.ranks.time.monotonic", lambda: next(now_s))
    with pytest.raises(TimeoutError, match="blocks are in use"):
        ranks.run_ranks(PLAN, Recorder())
    assert "load" not in [call for call, _ in host.calls]


def test_two_engines_record_what_each_round_found_in_a_cache(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run_two_engines(replace(PLAN, prefixes=3, rounds=2, concurrency=(1,)), Recorder())
    samples = collected(capsys).samples
    shares = {(one.name, one.key): one.value for one in samples if one.name.endswith("share")}
    share = pytest.approx(TOKENS / (TOKENS + TAIL_TOKENS))
    assert shares == {(f"{name} press share", key): (0.0, share)[key - 1] for name in NAMES for key in (1, 2)}
    found = cases(Samples(samples), 1)["press of two engines round 2 share"]
    assert (found["value"], found["ratio"]) == (0.8, 1.0)
