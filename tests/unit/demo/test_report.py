"""The table, the result file and the verdict."""

import json
from pathlib import Path

import pytest

from demo.report import DemoReport, PhaseResult, TurnResult, phase_from_document, phase_to_document
from kvpool.client.engine_items import RequestStats

COLD = RequestStats(own=10, recomputed=90)
HIT = RequestStats(own=10, remote=80, recomputed=10)


def phase(name: str, tokens: RequestStats, ttfts_ms: tuple[float, ...], reply: tuple[int, ...] = (1, 2)) -> PhaseResult:
    """First turns with these TTFTs, and a second turn of each conversation that no median may count."""
    turns = []
    for number, ttft_ms in enumerate(ttfts_ms):
        for turn in (0, 1):
            turns.append(
                TurnResult(
                    conversation=f"c{number}",
                    turn=turn,
                    ttft_ms=ttft_ms if turn == 0 else 1e6,
                    prompt_tokens=tokens,
                    prompt=(5, 6, 7),
                    reply=reply,
                )
            )
    return PhaseResult(name=name, turns=tuple(turns))


def report(**changes: PhaseResult) -> DemoReport:
    phases = {
        "cold": phase("cold", COLD, (900.0, 1000.0, 1700.0)),
        "shared": phase("shared", HIT, (90.0, 100.0, 110.0)),
        "restart": phase("restart", HIT, (200.0, 250.0, 300.0)),
        "reference": phase("reference", RequestStats(recomputed=100), (990.0, 990.0, 990.0)),
        **changes,
    }
    return DemoReport(tuple(phases.values()))


def test_the_result_file_has_the_agreed_form(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "demo.json"
    report().write(path)
    document = json.loads(path.read_text())
    assert [entry["name"] for entry in document["phases"]] == ["cold", "shared", "restart", "reference"]
    assert document["phases"][1] == {
        "name": "shared",
        "ttft_ms_median": 100.0,
        "prompt_tokens": {"own": 60, "staging": 0, "disk": 0, "remote": 480, "recomputed": 60},
        "tokens_equal": True,
    }
    assert sorted(path.parent.iterdir()) == [path]


def test_the_table_compares_with_cold() -> None:
    lines = report().render().splitlines()
    assert lines[0].split() == (
        ["phase", "own", "staging", "disk", "remote", "recomputed", "TTFT", "ms", "x", "cold", "tokens", "equal"]
    )
    assert lines[3].split() == ["shared", "60", "0", "0", "480", "60", "100.0", "0.10", "yes"]


def test_a_good_run_has_no_complaints() -> None:
    assert report().complaints() == []


@pytest.mark.parametrize("name", ["cold", "shared", "restart"])
def test_a_differing_token_is_a_failure(name: str) -> None:
    tokens = COLD if name == "cold" else HIT
    bad = report(**{name: phase(name, tokens, (1.0, 1.0, 1.0), reply=(1, 3))})
    assert bad.complaints() == [f"{name}: generated tokens differ from the reference"]
    assert "NO" in bad.render()
    assert [entry["tokens_equal"] for entry in bad.document()["phases"]].count(False) == 1


@pytest.mark.parametrize("name", ["shared", "restart"])
def test_a_phase_that_hits_nothing_is_a_failure(name: str) -> None:
    bad = report(**{name: phase(name, COLD, (1.0, 1.0, 1.0))})
    assert bad.complaints() == [f"{name}: not one prompt token came from the cluster"]


def test_missing_turns_are_not_equal() -> None:
    assert report(shared=phase("shared", HIT, (1.0, 1.0))).complaints() != []


def test_phases_survive_their_file() -> None:
    before = phase("cold", HIT, (1.5,))
    document = json.loads(json.dumps(phase_to_document(list(before.turns))))
    assert phase_from_document("cold", document) == before
