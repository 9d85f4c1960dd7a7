"""What the phases of bench.vllm_gpu print is taken in again, and selected from."""

import json
from dataclasses import asdict

import pytest

from bench.vllm_gpu.samples import Collected, Recorder, Sample, Samples


def test_a_recorders_lines_are_collected_and_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    recorder.add("press", "kvpool", 1.23456, key=2, run=1, cached=0.5)
    recorder.note("blocks", {"equal": 3})
    collected = Collected()
    taken = [collected.take(line) for line in capsys.readouterr().out.splitlines()]
    assert taken == [True, True]
    assert not any(collected.take(line) for line in ("INFO vLLM", '{"started": "plain"}', "3", ""))
    assert collected.samples == [Sample(name="press", kind="kvpool", value=1.2346, key=2, run=1, more={"cached": 0.5})]
    assert collected.notes == {"blocks": {"equal": 3}}


def test_a_sample_survives_its_line() -> None:
    sample = Sample(name="decode", kind="plain", value=3.0, run=4)
    collected = Collected()
    assert collected.take(json.dumps({"sample": asdict(sample)}))
    assert collected.samples == [sample]


def test_pairs_are_of_the_same_run() -> None:
    plain = [Sample(name="decode", kind="plain", value=value, run=run) for run, value in enumerate([100.0, 50.0, 80.0])]
    kvpool = [Sample(name="decode", kind="kvpool", value=value, run=run) for run, value in enumerate([99.0, 49.0])]
    assert Samples([*kvpool, *plain]).paired("decode", "kvpool", "plain") == pytest.approx(0.985)
    assert Samples(plain).paired("decode", "kvpool", "plain") is None


def test_names_that_begin_alike() -> None:
    samples = Samples(
        Sample(name=name, kind="kvpool", value=1.0) for name in ("press", "press of 24", "press closed 4")
    )
    assert samples.names("press of ") | samples.names("press closed ") == {"press of 24", "press closed 4"}
