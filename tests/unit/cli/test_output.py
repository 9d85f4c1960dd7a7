"""Tables, sizes and one-line failures."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import pytest

from kvpool.core.errors import StartupFailed
from kvpool_cli import output
from kvpool_cli.errors import EXIT_USAGE, NotConfirmed
from kvpool_cli.main import run_command as main
from kvpool_cli.output import as_text, confirm, fail, stack, table
from kvpool_cli.quantities import duration, duration_from_text, size


def test_a_table_has_a_line_for_each_row() -> None:
    text = as_text(table(["name", "n"], [["a", 1], ["longer", 10]], right=[1]))
    head, _, *rows = text.splitlines()
    assert (head.split(), [row.split() for row in rows]) == (["name", "n"], [["a", "1"], ["longer", "10"]])
    assert len({len(row) for row in rows}) == 1, "numbers end in one column"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_sizes_are_shown_in_their_largest_unit(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["cache", "pin", "tokens", "--for", "5"], "'5' is not a duration; write 500ms"),
        (["doctor", "--arena-bytes", "1gb"], "'1gb' is not a size; write a whole number"),
    ],
)
def test_a_value_that_is_not_understood_is_reported_with_what_would_be(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "is_agreed"), [("y\n", True), ("Yes\n", True), ("\n", False), ("", False)])
def test_a_person_is_asked_beside_the_output_and_an_ended_terminal_is_a_no(
    typed: str, is_agreed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    if is_agreed:
        confirm("Really?", yes=False)
    else:
        with pytest.raises(NotConfirmed, match="nothing was changed"):
            confirm("Really?", yes=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Really? [y/N] ")


def test_without_a_terminal_only_yes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    confirm("Really?", yes=True)
    with pytest.raises(NotConfirmed, match="--yes"):
        confirm("Really?", yes=False)


def test_a_failure_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(StartupFailed("first\n  second"), code=EXIT_USAGE) == EXIT_USAGE
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "kvpool: first second\n")


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert as_text(table(["host"], [["\x1b[2Jhost\x00"]])).splitlines()[-1] == "?[2Jhost?"
    assert as_text(stack("\x1b[2J[red]host", table(["host"], []))).splitlines()[0] == "?[2J[red]host", "no markup"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("90s", 90), ("1.5m", 90), ("24h", 86_400), ("7d", 604_800), ("2w", 1_209_600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_from_text(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.009, "9 ms"), (90, "90 s"), (120, "2 m"), (604_800, "7 d"), (86_401, "86401 s"), (0, "0 ms")],
)
def test_durations_are_shown_in_a_unit_that_can_be_typed(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert not seconds or duration_from_text(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5", "5y", "-1s", "0s", "nans", "1e99d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write"):
        duration_from_text(text)


def test_control_characters_never_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.show("first \x1b[2Jline\nhost é \x07\x9b31m")
    output.say("\x1b]0;title\x07")
    shown = capsys.readouterr()
    assert shown.out == "first ?[2Jline\nhost é ??31m\n"
    assert shown.err == "kvpool: ?]0;title?\n"


def test_no_command_prints_past_the_one_place_that_looks_for_control_characters() -> None:
    for path in Path(output.__file__).parent.rglob("*.py"):
        if path.name != "output.py":
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"], path
