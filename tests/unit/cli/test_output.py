"""Tables, sizes and one-line failures."""

import pytest

from kvpool.cli.output import EXIT_USAGE, duration_from_text, fail, size, size_from_text, table
from kvpool.core.errors import StartupFailed


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    text = table(["name", "n"], [["a", 1], ["longer", 10]], right=[1])
    assert text.splitlines() == ["name     n", "------  --", "a        1", "longer  10"]


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
    ("text", "size_bytes"), [("12345", 12345), ("64MiB", 64 << 20), ("1.5GiB", 3 << 29), ("2TiB", 2 << 40)]
)
def test_sizes_are_read_with_binary_units(text: str, size_bytes: int) -> None:
    assert size_from_text(text) == size_bytes


@pytest.mark.parametrize("text", ["", "1GB", "MiB", "ten"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        size_from_text(text)


def test_a_failure_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(StartupFailed("first\n  second"), code=EXIT_USAGE) == EXIT_USAGE
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "kvpool: first second\n")


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert table(["host"], [["\x1b[2Jhost\x00"]]).splitlines()[-1] == "?[2Jhost?"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5m", 90), ("24h", 86_400), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_from_text(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5", "5y", "-1s", "0s", "nans", "1e99d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|float"):
        duration_from_text(text)
