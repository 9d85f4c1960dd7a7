"""The GPU bench without a GPU: what it asks of its processes, what it makes of their answers, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import bench_gpu, main
from kvpool.cli.bench_gpu import measure_gpu, sections_from_text
from kvpool.cli.bench_gpu_beside import moves_of
from kvpool.cli.bench_gpu_plan import DEEPSEEK, FULL, LLAMA_8B, LLAMA_70B, QUICK, SECTIONS, GpuPlan
from kvpool.cli.bench_gpu_processes import CommandRefused, ProcessFailed
from kvpool.cli.bench_gpu_rig import Rig
from kvpool.cli.bench_gpu_sections import ways_in_words

PLAN = replace(
    QUICK,
    shapes=(DEEPSEEK,),
    way_shapes=(DEEPSEEK,),
    in_flight={1: 4, 64: 2},
    rounds=3,
    beside_rounds=2,
    beside_s=0.0,
    alone_s=0.0,
    run_in_s=0.0,
)
RATES = {"store": 27.0, "load": 45.0, "both": 75.0, "copy-out": 54.0, "copy-in": 50.0, "copy-both": 100.0}
PEER_RATES = {"copy": 400.0, "pull": 380.0}


class FakeProcess:
    """See Process. Moves at RATES; `refuse` names an op that it refuses, `end_at` one at which it ends."""

    def __init__(self) -> None:
        self.commands: list[Mapping[str, Any]] = []
        self.refuse = self.end_at = ""
        self._answers: list[Mapping[str, Any]] = [
            {"device": "H0", "cuda": "13.0", "torch": "2", "triton": "3", "python": "3"}
        ]
        self._busy = False

    def ask(self, command: Mapping[str, Any], timeout_s: float = 1.0) -> Mapping[str, Any]:
        self.tell(command)
        return self.answer()

    def tell(self, command: Mapping[str, Any]) -> None:
        json.dumps(command)
        self.commands.append(command)
        self._answers.append(self._answer(command))

    def answer(self, timeout_s: float = 1.0) -> Mapping[str, Any]:
        (answer,) = self._answers
        self._answers = []
        return answer

    def _answer(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        op, what = command["op"], command.get("what", "")
        if op == self.end_at:
            raise ProcessFailed(f"{op} ended it")
        if op == self.refuse:
            raise CommandRefused(f"no {op}")
        run = {"p50_s": 0.002, "transfer_bytes": 7, "ways": {"bursts": 3, "runs": 1}}
        if op == "run":
            return run | {"bytes_per_s": RATES[what] * 1e9}
        if op == "peer-run":
            return run | {"bytes_per_s": PEER_RATES[what] * 1e9}
        if op == "alloc":
            return {"handles": [["GPU", "00", 0, size, size] for size in command["sizes"]]}
        if op == "map":
            ways = ["engine", "bursts"] if command.get("lent") else ["bursts"]
            return {"ways": ways, "copies_bytes": command["codec"] == "RAW", "run_bytes": 73728}
        return {"batches": 3, "mean_s": 0.01, "p50_s": 0.01} if op == "window" else {}


class Fakes:
    """Both processes, and what was shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int = 1) -> None:
        self.agent, self.engine = FakeProcess(), FakeProcess()
        self.shown: list[str] = []

        @contextmanager
        def running(plan: GpuPlan, device_count: int) -> Iterator[Rig]:
            yield Rig(self.agent, self.engine, plan, device_count, Path("/s"))  # type: ignore[arg-type]

        monkeypatch.setattr(bench_gpu, "running_rig", running)
        monkeypatch.setattr(bench_gpu, "check_gpu", lambda: gpus)

    def measure(self, sections: str, plan: GpuPlan = PLAN) -> Any:
        return measure_gpu(plan, sections_from_text(sections), "kvpool bench gpu", self.shown.append)


def test_all_sections_make_tables_of_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes = Fakes(monkeypatch, gpus=2)
    report = fakes.measure(",".join(SECTIONS))
    assert not report.failed and not report.notes
    assert len(report.sections) == len(fakes.shown) - 1 == len(SECTIONS)
    report.write(tmp_path / "gpu.json")
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["about"]["device"] == "H0" and document["about"]["visible GPUs"] == 2
    cases = document["cases"]
    assert cases["MLA, 64 MiB x 2, store"] == {
        "value": 27.0,
        "unit": "GB/s",
        "baseline": 54.0,
        "ratio": 0.5,
        "against": "memcpy, out",
        "transfer_bytes": 7,
        "in_flight": 2,
        "p50_ms": 2.0,
        "memcpy_p50_ms": 2.0,
        "ways": {"bursts": 3, "runs": 1},
    }
    assert cases["MLA, 1 MiB x 1, load"]["ratio"] == 0.9
    assert cases["8B NHD INT8_GROUP8, 64 MiB x 2, both"]["ratio"] == 0.75
    assert cases["8B NHD, peer pull, by CUDA IPC, 64 MiB x 4"]["ratio"] == 0.95
    assert cases["8B NHD, beside matmul, store by engine"]["memcpy_alone"] == 54.0
    assert cases["8B NHD, beside matmul, load by runs"]["against"] == "memcpy in beside it"
    assert cases["8B NHD, beside decode, copy-out"]["against"] == "without engine"
    assert cases["8B NHD, beside decode, copy-in, engine"]["ratio"] == 1.0
    assert {name for name in cases if "only" in name} == {
        f"MLA, {way} only, {size}, {what}"
        for way in ("bursts", "engine", "runs")
        for size in ("8 MiB x 1", "64 MiB x 4")
        for what in ("store", "load", "both")
    }
    shapes = next(text for text in fakes.shown if "Beside memcpy of the same size" in text)
    row = next(line.split() for line in shapes.splitlines() if line.startswith("MLA"))
    assert row[:9] == ["MLA", "1", "1", "27.0", "0.500", "45.0", "0.900", "75.0", "0.750"]
    assert shapes.splitlines()[-1].endswith("bursts 75%, runs 25%")


def test_every_measurement_stands_between_two_of_its_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    fakes.measure("shapes", replace(PLAN, in_flight={64: 2}, rounds=1))
    ran = [command["what"] for command in fakes.agent.commands if command["op"] == "run"]
    once = ["copy-out", "store", "copy-out", "copy-in", "load", "copy-in", "copy-both", "both", "copy-both"]
    assert ran == once * 2, "one in flight, then two"
    assert [command["op"] for command in fakes.engine.commands] == ["alloc"]


def test_caches_are_allocated_anew_only_for_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    fakes.measure("shapes,codecs", replace(PLAN, shapes=FULL.shapes, rounds=1))
    sizes = [sum(command["sizes"]) for command in fakes.engine.commands if command["op"] == "alloc"]
    wanted = [sum(shape.handle_sizes()) for shape in (LLAMA_8B, LLAMA_70B, DEEPSEEK, LLAMA_8B)]
    assert sizes == wanted
    maps = [command for command in fakes.agent.commands if command["op"] == "map"]
    chunks = [(command["geometry"][0], command["chunk_tokens"]) for command in maps[:6]]
    assert chunks == [(32, 64), (32, 256), (32, 64), (32, 256), (80, 256), (61, 256)]
    assert all(sum(handle[4] for handle in command["handles"]) in wanted for command in maps)


def test_beside_an_engine_each_window_of_it_has_one_alone_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    times_s = iter([0.010] * 1 + [0.010, 0.011, 0.012, *[0.010] * 99])
    answer = fakes.engine._answer

    def timed(command: Mapping[str, Any]) -> Mapping[str, Any]:
        ends = command["op"] == "window" and fakes.engine.commands[-2]["op"] == "window" and fakes.engine._busy
        fakes.engine._busy = command["op"] == "window" and not fakes.engine._busy
        return {"batches": 1, "mean_s": next(times_s), "p50_s": 1.0} if ends else answer(command)

    monkeypatch.setattr(fakes.engine, "_answer", timed)
    report = fakes.measure("beside", replace(PLAN, beside_rounds=1))
    case = report.results["8B NHD, beside matmul, copy-out, engine"]
    assert case.value == pytest.approx(11.0) and case.baseline_value == pytest.approx(11.0)
    assert [command["mode"] for command in fakes.engine.commands if command["op"] == "work"] == [
        *("matmul", "idle", "decode", "idle")
    ]


def test_each_way_is_held_to_while_it_is_measured_beside_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    report = fakes.measure("beside", replace(PLAN, beside_rounds=1, beside_shapes=(LLAMA_8B, DEEPSEEK)))
    way, moved = "", []
    for command in fakes.agent.commands:
        way = command["way"] if command["op"] == "way" else way
        moved += [(way, command["what"])] if command.get("what") in ("store", "load", "both") else []
    once = [(way, what) for way in ("bursts", "engine", "runs") for what in ("store", "load", "both")]
    assert moved == once * 4, "two shapes beside two kinds of work"
    rows = [row[:4] for row in report.sections[0].rows[:6]]
    assert rows[2:5] == [
        ["8B NHD", "matmul", *each]
        for each in (("memcpy both", "-"), *zip(("store", "load"), ("bursts", "bursts"), strict=True))
    ]
    lend = next(command for command in fakes.engine.commands if command["op"] == "lend")
    listen = next(command for command in fakes.agent.commands if command["op"] == "listen")
    assert lend["socket"] == listen["socket"] == "/s" and lend["layout"] == "vllm_nhd"


def test_short_runs_are_not_measured_beside_an_engine() -> None:
    mapped = {"ways": ["engine", "runs", "bursts"], "copies_bytes": True, "run_bytes": 256}
    assert {move.way for move in moves_of(mapped)} == {"", "bursts", "engine"}
    assert {move.way for move in moves_of(mapped | {"run_bytes": 65536})} == {"", "bursts", "engine", "runs"}


def test_an_engine_that_cannot_launch_leaves_the_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    fakes.engine.refuse = "lend"
    report = fakes.measure("beside,ways", replace(PLAN, beside_rounds=1))
    left_out = "kernels launched by the engine are left out: no lend"
    assert report.failed and report.notes == [f"8B NHD: {left_out}", f"MLA: {left_out}"]
    assert "8B NHD, beside matmul, both by bursts" in report.results.document()
    assert not any("by engine" in name or "engine only" in name for name in report.results.document())


def test_time_that_is_over_leaves_the_rest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    report = fakes.measure("shapes,ways", replace(PLAN, deadline_s=0.0))
    assert report.notes == ["after 0 s nothing new was begun: the end of shapes is left out, ways"]
    assert not report.failed
    assert "nothing was measured" in fakes.shown[1]


def test_a_refused_section_is_no_end_and_an_ended_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    fakes.agent.refuse = "way"
    report = fakes.measure("link,codecs,ways")
    assert report.failed and report.notes == ["ways failed: no way"]
    assert len(report.results.document()) > 5
    fakes = Fakes(monkeypatch)
    fakes.agent.end_at = "map"
    report = fakes.measure("link,shapes,ways")
    assert report.failed and report.notes == ["shapes failed: map ended it; nothing was measured after it"]


def test_one_gpu_has_no_peer_and_short_runs_are_not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    answer = fakes.agent._answer
    short: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda command: (  # noqa: E731
        {**answer(command), "run_bytes": 256} if command["op"] == "map" else answer(command)
    )
    monkeypatch.setattr(fakes.agent, "_answer", short)
    report = fakes.measure("peer,ways")
    assert report.notes == [
        "peer: one GPU is visible; a pull wants two",
        "ways: runs of MLA have 256 bytes and are left out",
    ]


@pytest.mark.parametrize(
    ("ways", "words"),
    [({}, ""), ({"runs": 4}, "runs"), ({"runs": 1, "bursts": 199}, "bursts 100%, runs 0%")],
)
def test_ways_in_words(ways: dict[str, int], words: str) -> None:
    assert ways_in_words(ways) == words


def test_sections_keep_their_order_and_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert sections_from_text("ways,link") == ["link", "ways"]
    with pytest.raises(SystemExit):
        main.main(["bench", "gpu", "--only", "link,nothing"])
    assert "'nothing' is not one of link, shapes, beside, codecs, peer, ways" in capsys.readouterr().err
