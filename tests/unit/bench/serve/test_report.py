"""Result files, tables and the page."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.__main__ import main
from bench.serve.html import html_report
from bench.serve.plots import plots_of
from bench.serve.record import Outcome, Recorder
from bench.serve.results import About, Result, read_result, result_of, to_document
from bench.serve.tables import render
from kvpool_cli.errors import CommandFailed

HOSTILE = "<script>alert(1)</script> $x_{ & \"'"


def about(**changes: Any) -> About:
    options: dict[str, Any] = {
        "name": "plain",
        "command": "python -m bench serve",
        "started_at": "2026-11-21T00:00:00+00:00",
        "interrupted": False,
        "base_url": "http://host:8000",
        "api": "completions",
        "model": "tiny",
        "open_loop": True,
        "load": {"workload": "shared-prefix"},
        "load_id": "same",
        "warm_up_requests": 4,
        "warm_up_failures": 0,
    }
    return About(**{**options, **changes})


def recorded(ttft_s: float = 0.2, requests: int = 120, turns: int = 2, **errors: int) -> Recorder:
    recorder = Recorder({"ttft": 0.25}, 0.0, 1)
    for number in range(requests):
        start_s = number * 0.5
        first_s = start_s + ttft_s * (1 + number % 3)
        outcome = Outcome(start_s, start_s, number % turns, first_s, first_s + 0.2, first_s + 0.21, [0.1, 0.1])
        outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens = 100 + number, 3, 50
        outcome.counted_by_server = True
        recorder.add(outcome)
    for kind, count in errors.items():
        for _ in range(count):
            recorder.add(Outcome(1.0, 1.0, end_s=2.0, error=kind, detail=HOSTILE))
    return recorder


def document(recorder: Recorder | None = None, tiers: dict[str, float] | None = None, **changes: Any) -> dict[str, Any]:
    return to_document(about(**changes), recorder or recorded(), {"urls": [], "counters": {}}, tiers)


def result(*args: Any, **changes: Any) -> Result:
    made = json.loads(json.dumps(document(*args, **changes)))
    return result_of(made, made["name"])


class PageReader(HTMLParser):
    """Collects what a page holds."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_document_has_all_figures() -> None:
    made = document(recorded(http_500=3), {"own": 30.0, "staging": 50.0, "computed": 20.0})
    assert made["requests"] == {"ok": 120, "failed": 3, "unfinished": 0, "discarded": 0, "abandoned_turns": 0}
    assert made["errors"]["http_500"]["count"] == 3
    assert made["latency_s"]["ttft"]["p50"] == pytest.approx(0.4, rel=0.01)
    assert made["latency_s"]["ttft"]["p99"] == pytest.approx(0.6, rel=0.01)
    assert made["elapsed_s"] == pytest.approx(59.5 + 0.6 + 0.21, rel=0.02)
    assert made["throughput"]["output_tokens_per_s"] == pytest.approx(360 / made["elapsed_s"])
    assert made["goodput"]["requests"] == 40 and made["goodput"]["share"] == pytest.approx(40 / 123)
    assert made["tokens"]["cached"] == 120 * 50
    assert "3 requests failed" in " ".join(made["warnings"])


def test_what_is_unknown_is_not_zero() -> None:
    recorder = Recorder({}, 0.0, 1)
    recorder.add(Outcome(0.0, 0.0, 0, 0.1, 0.1, 0.1))
    made = document(recorder)
    assert made["tokens"]["cached"] is None and made["goodput"] is None and made["tiers"] is None
    row = next(line for line in render([result(recorder)]).splitlines() if line.startswith("cached"))
    assert row.split()[-1] == "-"


def test_warnings_say_what_figures_do_not() -> None:
    recorder = recorded(requests=20)
    recorder.unfinished, recorder.uncounted, recorder.stand_in_answers = 2, 1, 1
    recorder.output_tokens = 1000
    for _ in range(10):
        recorder.latency["loop_lag"].add(0.1)
        recorder.latency["send_lag"].add(5.0)
    metrics = {"went_back": ["x"], "failed": {"http://a": "down"}}
    reported = to_document(about(interrupted=True, warm_up_failures=1), recorder, metrics, None)["warnings"]
    for words in (
        "interrupted", "99th percentile of fewer", "were cut off", "warm-up requests failed", "generator itself",
        "after their time", "without `usage`", "tokens on average", "without token ids", "restarted", "http://a",
    ):  # fmt: skip
        assert any(words in warning for warning in reported), words
    assert document()["warnings"] == []
    assert "No request ended well" in document(Recorder({}, 0.0, 1))["warnings"][0]


def test_tables_put_runs_side_by_side() -> None:
    tiers = {"own": 10.0, "staging": 70.0, "computed": 20.0}
    text = render([result(name="plain"), result(recorded(0.05), tiers, name="kvpool")])
    line = next(line for line in text.splitlines() if line.startswith("time to first token, p50"))
    assert line.split()[-5:] == ["399", "ms", "99.8", "ms", "0.25"] or line.split()[-1] == "0.25"
    assert re.search(r"from staging +- +70\.0%", text)
    assert "not of the same load" not in text
    assert "not of the same load" in render([result(), result(load_id="other")])


@pytest.mark.parametrize("runs", [1, 9])
@pytest.mark.slow
def test_the_page_stands_alone(runs: int) -> None:
    tiers = {"own": 10.0, "staging": 70.0, "computed": 20.0}
    results = [result(recorded(0.1 * (at + 1), 30, http_500=1), tiers, name=f"run {at}") for at in range(runs)]
    page = html_report(results)
    reader = PageReader(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "img", "object", "embed"}
    for tag, attributes in reader.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action"):
                assert (value or "").startswith("#"), (tag, name, value)
            assert not name.startswith("on")
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids)), "ids of several plots collide"
    references = set(re.findall(r"url\(#([^)]+)\)", page)) | {
        (attributes.get("xlink:href") or "#")[1:] for tag, attributes in reader.tags if tag == "use"
    }
    assert references <= set(ids)
    assert len(page) < 400_000 * runs


def test_every_plot_is_drawn_and_is_xml() -> None:
    plots = plots_of([result(recorded(requests=10), {"own": 1.0, "computed": 1.0})])
    assert [plot.title for plot in plots] == [
        "Where the prompts' KV came from",
        "Time to first token",
        "End to end",
        "Inter-token latency",
        "Time to first token by turn",
        "Time to first token by prompt",
        "Time to first token over the run",
        "Output tokens a second",
    ]
    for plot in plots:
        assert ElementTree.fromstring(plot.svg).tag.endswith("svg")


def test_a_run_of_nothing_but_errors_has_a_page_too() -> None:
    recorder = Recorder({}, 0.0, 1)
    recorder.add(Outcome(0.0, 0.0, end_s=1.0, error="connect", detail="refused"))
    page = html_report([result(recorder), result(Recorder({}, 0.0, 1))])
    assert page == html_report([result(recorder), result(Recorder({}, 0.0, 1))])
    assert "refused" in page and "No request ended well" in page


def test_requests_that_took_no_time_are_drawn() -> None:
    recorder = Recorder({}, 0.0, 1)
    recorder.add(Outcome(0.0, 0.0, 0, 0.0, 0.0, 0.0, [0.0], prompt_tokens=1, output_tokens=2))
    assert plots_of([result(recorder)])


def test_hostile_words_stay_words() -> None:
    made = json.loads(json.dumps(document(recorded(http_500=1), name=HOSTILE, model=HOSTILE, base_url=HOSTILE)))
    made["warnings"] = [HOSTILE]
    made["errors"] = {HOSTILE: {"count": HOSTILE, "examples": [HOSTILE]}}
    made["load"]["workload"] = HOSTILE
    made["tiers"] = {HOSTILE: 1.0}
    made["started_at"] = HOSTILE
    made["metrics"]["counters"] = {HOSTILE: 1}
    page = html_report([result_of(made, HOSTILE)])
    assert "script" not in {tag for tag, _ in PageReader(page).tags}
    assert "<script" not in page


def test_files_that_are_no_results(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    good = document()
    damaged: list[tuple[Any, str]] = [
        ("nonsense", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "is no result"),
        (json.dumps({"kind": "other"}), "is no result"),
        (json.dumps({**good, "version": 99}), "has version 99"),
    ]
    for key in ("latency_s", "ttft_by_turn_s", "requests", "throughput", "timeline", "sample", "warnings", "tiers"):
        damaged.append((json.dumps({**good, key: 5}), "is damaged"))
        damaged.append((json.dumps({name: value for name, value in good.items() if name != key}), "is damaged"))
    for text, says in damaged:
        file.write_text(text)
        with pytest.raises(CommandFailed, match=says):
            read_result(file)
    with pytest.raises(CommandFailed, match="cannot be read"):
        read_result(tmp_path / "absent")


def test_serve_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document(name="")))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    page = tmp_path / "out.html"
    assert main(["serve-report", *files, "--names", "without,with", "--html", str(page)]) == 0
    assert "with / without" in capsys.readouterr().out
    assert "with / without" in page.read_text()
    assert main(["serve-report", *files]) == 0
    assert "b / a" in capsys.readouterr().out
    assert main(["serve-report", *files, "--names", "one"]) == 1
    assert "--names wants 2" in capsys.readouterr().err
    assert main(["serve-report", *files, "--html", str(tmp_path / "absent" / "x.html")]) == 1


def test_a_machine_that_stands_still_while_it_draws_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib says that legends are slow to place when a second has passed, unless the place was asked for."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr("matplotlib.legend.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert plots_of([result(recorded(requests=2)), result(recorded(requests=2))])
