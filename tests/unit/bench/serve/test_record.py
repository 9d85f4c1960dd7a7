"""What all outcomes come to, in bounded memory."""

from __future__ import annotations

import pytest

from bench.serve.record import Outcome, Recorder, Timeline


def outcome(start_s: float, **changes: object) -> Outcome:
    made = Outcome(start_s, start_s, first_s=start_s + 0.1, last_s=start_s + 0.3, end_s=start_s + 0.3)
    made.gaps_s, made.prompt_tokens, made.output_tokens, made.counted_by_server = [0.1, 0.1], 10, 3, True
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_memory_is_bounded_over_many_requests_kinds_and_hours() -> None:
    recorder = Recorder({}, 0.0, 1)
    for number in range(12_000):
        error = f"http_{number}" if number % 100 == 0 else ""
        recorder.add(outcome(number * 3.0, error=error, detail=str(number), turn=number % 40))
    assert len(recorder.sample) == 2_000 and len(recorder.timeline.bins) <= 400
    assert len(recorder.errors) == 51 and recorder.errors["other"] == 120 - 50
    assert all(len(examples) <= 3 for examples in recorder.examples.values())
    assert len(recorder.ttft_by_turn) == 16
    assert recorder.ok == 12_000 - 120
    # The sample is an even choice, not the beginning.
    starts = [row[0] or 0.0 for row in recorder.sample]
    assert 0.45 < sum(start < 18_000 for start in starts) / 2_000 < 0.55


def test_a_timeline_keeps_its_sums_when_it_gets_coarser() -> None:
    timeline = Timeline()
    for second in range(1_000):
        timeline.add(float(second), "started")
        timeline.add(float(second), "ttft_max_s", second / 1000)
    assert timeline.bin_s > 1 and len(timeline.bins) <= 400
    assert sum(row[0] for row in timeline.bins) == 1_000
    assert max(row[-1] for row in timeline.bins) == 0.999


def test_tokens_are_spread_from_the_first_to_the_last() -> None:
    recorder = Recorder({}, 0.0, 1)
    recorder.add(outcome(0.0, first_s=1.0, last_s=3.0, end_s=3.5, output_tokens=80))
    tokens = [row[3] for row in recorder.timeline.bins]
    assert sum(tokens) == pytest.approx(80)
    assert sum(tokens[: round(1 / recorder.timeline.bin_s)]) == 0
    assert tokens[round(1 / recorder.timeline.bin_s)] == pytest.approx(10)


def test_a_single_token_has_no_time_per_token() -> None:
    assert outcome(0.0, output_tokens=1).tpot_s is None
    assert outcome(0.0).tpot_s == pytest.approx(0.1)


def test_lines_of_the_log() -> None:
    line = outcome(5.0, error="timeout", detail="x", first_s=None).to_line(begin_s=1.0)
    assert line["intended_s"] == 4.0 and line["ttft_s"] is None and line["error"] == "timeout"
