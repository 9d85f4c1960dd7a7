"""The demo on a cluster that runs already: which engine goes to which agent, and when it fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from demo.composed import main
from demo.report import PhaseResult, TurnResult
from demo.run import EngineFailed, Engines
from kvpool.client.engine_items import RequestStats

AGENTS = ["--agent", "unix:/a", "--agent", "unix:/b", "--device", "cpu"]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command takes SIGINT and SIGTERM for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def phase(name: str, remote: int, reply: tuple[int, ...] = (1, 2)) -> PhaseResult:
    tokens = RequestStats(remote=remote, recomputed=100 - remote)
    turn = TurnResult(conversation="c", turn=0, ttft_ms=10.0, prompt_tokens=tokens, prompt=(5,), reply=reply)
    return PhaseResult(name=name, turns=(turn,))


@pytest.mark.parametrize(
    ("shared", "code", "complaint"),
    [
        (phase("shared", 90), 0, ""),
        (phase("shared", 0), 1, "not one prompt token came from the cluster"),
        (phase("shared", 90, reply=(1, 3)), 1, "generated tokens differ"),
    ],
)
def test_a_second_engine_on_the_last_agent_has_to_hit_and_to_say_the_same(
    shared: PhaseResult, code: int, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"cold": phase("cold", 0), "shared": shared, "reference": phase("reference", 0)}
    agents: list[tuple[str, str]] = []

    def replay(self: Engines, name: str, agent: str = "") -> PhaseResult:
        agents.append((name, agent))
        return results[name]

    monkeypatch.setattr(Engines, "replay", replay)
    assert main(AGENTS) == code
    assert agents == [("cold", "unix:/a"), ("shared", "unix:/b"), ("reference", "")]
    said = capsys.readouterr()
    assert "reference" in said.out and complaint in said.err


def test_an_engine_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def replay(self: Engines, name: str, agent: str = "") -> PhaseResult:
        raise EngineFailed("engine cold: no agent", 2)

    monkeypatch.setattr(Engines, "replay", replay)
    assert main(AGENTS) == 2
    assert capsys.readouterr().err.endswith("demo: engine cold: no agent\n")
