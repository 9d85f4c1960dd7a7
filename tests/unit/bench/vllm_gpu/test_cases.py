"""The cases that samples of bench.vllm_gpu make."""

from collections.abc import Mapping

import pytest

from bench.vllm_gpu.cases import cases
from bench.vllm_gpu.samples import Sample, Samples

TOKEN_BYTES = 131_072


def of(values: Mapping[tuple[str, str], list[float]], key: int = 0) -> list[Sample]:
    """Samples by (name, kind), a run each."""
    return [
        Sample(name=name, kind=kind, value=value, key=key, run=run)
        for (name, kind), several in values.items()
        for run, value in enumerate(several)
    ]


def test_nothing_measured_makes_no_case() -> None:
    assert cases(Samples([]), TOKEN_BYTES) == {}


def test_a_loaded_prompt_may_take_its_own_caches_time_and_the_copy() -> None:
    samples = of({("ttft computed", "plain"): [200.0], ("ttft own cache", "plain"): [14.0]}, key=8192)
    samples += of({("ttft loaded", "kvpool"): [40.0, 44.0, 42.0]}, key=8192) + of({("memcpy in", "plain"): [50.0]})
    found = cases(Samples(samples), TOKEN_BYTES)["ttft 8192 loaded"]
    assert found["ratio"] == 0.21
    assert found["value_limit"] == pytest.approx(14 + 1.25 * 8192 * TOKEN_BYTES / 50e9 * 1e3 + 8, abs=0.1)


def test_press_is_beside_the_better_offload_and_the_control() -> None:
    rates = {("press", "kvpool"): [150.0], ("press", "offload"): [100.0], ("press", "simple"): [125.0]}
    samples = of(rates, key=2) + of({("press", "control"): [300.0]}, key=2)
    found = cases(Samples(samples), TOKEN_BYTES)
    assert (found["press round 2"]["ratio"], found["press round 2"]["least"]) == (1.2, 1.2)
    assert (found["press control round 2"]["ratio"], found["press control round 2"]["least"]) == (0.5, 0.6)


@pytest.mark.parametrize("name", ["press of 24", "press closed 4"])
def test_other_ways_of_asking_have_cases_of_their_own(name: str) -> None:
    samples = of({(name, "kvpool"): [180.0], (name, "offload"): [120.0], (name, "control"): [200.0]}, key=3)
    found = cases(Samples(samples), TOKEN_BYTES)
    assert {case: values["ratio"] for case, values in found.items()} == {
        f"{name} round 3": 1.5,
        f"{name} control round 3": 0.9,
    }


def test_decode_compares_runs_that_followed_each_other() -> None:
    samples = of({("decode", "plain"): [100.0, 50.0, 100.0], ("decode", "kvpool"): [99.0, 50.0, 98.0]})
    found = cases(Samples(samples), TOKEN_BYTES)["decode"]
    assert (found["value"], found["baseline"]) == (98.0, 100.0)
    assert (found["ratio"], found["runs"], found["least"]) == (0.99, 3, 0.99)


def test_the_store_rate_is_beside_copies_out_of_the_same_engine() -> None:
    samples = of({("memcpy out", "plain"): [90.0], ("memcpy out", "kvpool"): [50.0, 54.0]})
    samples += of({("store rate", "kvpool"): [39.0, 39.0], ("store rate failed chunks", "kvpool"): [0.0, 2.0]})
    found = cases(Samples(samples), TOKEN_BYTES)["store rate"]
    assert found == {
        "value": 39.0,
        "unit": "GB/s",
        "baseline": 52.0,
        "ratio": 0.75,
        "least": 0.7,
        "failed_chunks": 2.0,
    }


def test_kills_count_requests_that_failed_and_kills_that_hit() -> None:
    samples = of(
        {
            ("killed", "redis"): [1, 1, 1],
            ("killed in a transfer", "redis"): [1, 0, 1],
            ("requests beside kills", "redis"): [20, 24, 20],
            ("failed beside kills", "redis"): [0, 4, 0],
            ("chunks loaded beside kills", "redis"): [8, 0, 16],
        }
    )
    found = cases(Samples(samples), TOKEN_BYTES)["kills redis"]
    assert (found["value"], found["baseline"], found["limit"]) == (4, 64, 0.0)
    assert (found["kills"], found["in_a_transfer"], found["loaded_chunks"]) == (3, 2, 24)


def test_right_bytes_are_equal_blocks_of_all_that_were_compared() -> None:
    samples = of({("blocks equal", "kvpool"): [90, 9], ("blocks unequal", "kvpool"): [0, 1]})
    samples += of({("blocks unknown", "kvpool"): [5]})
    found = cases(Samples(samples), TOKEN_BYTES)["right bytes"]
    assert (found["ratio"], found["least"], found["not_compared"]) == (0.99, 1.0, 5)


def test_ranks_are_held_to_equal_bytes_and_pulls_to_a_tenth_of_computing() -> None:
    samples = of({("ranks equal", "tp2"): [99], ("ranks unequal", "tp2"): [1], ("ranks unknown", "tp2"): [3]})
    samples += of({("ranks loaded share", "tp2"): [1.0, 0.5], ("ranks gpu tokens", "tp2"): [0, 64]})
    samples += of({("ranks pool tokens", "tp2"): [128, 64]})
    samples += [
        Sample(name=name, kind="reader", value=value, key=16384)
        for name, value in (("pull ttft", 40.0), ("pull computed", 500.0), ("pull share", 0.99))
    ]
    samples += of({("pull decode", "kvpool"): [96.0], ("pull decode alone", "kvpool"): [100.0]})
    for key, rate in ((4, 355.0), (1, 310.0)):
        samples.append(Sample(name="peer pull", kind="MLA", value=rate, key=key))
        samples += [Sample(name="memcpy between GPUs", kind="MLA", value=value, key=key) for value in (370.0, 390.0)]
    for name, rate in (("two engines", 90.0), ("one engine", 50.0)):
        samples.append(Sample(name=f"{name} press", kind="kvpool", value=rate, key=2))
        samples.append(Sample(name=f"{name} press share", kind="kvpool", value=rate / 100, key=2))
    found = cases(Samples(samples), TOKEN_BYTES)
    two = found["press of two engines round 2"]
    assert (two["ratio"], two["least"]) == (1.8, 1.8)
    share = found["press of two engines round 2 share"]
    assert (share["value"], share["baseline"]) == (0.9, 0.5)
    right = found["right bytes of ranks tp2"]
    assert (right["ratio"], right["least"], right["not_compared"]) == (0.99, 1.0, 3)
    assert (right["gpu_tokens"], right["pool_tokens"]) == (64, 192)
    assert found["loaded by ranks tp2"]["value"] == 0.5
    assert (found["pull 16384"]["ratio"], found["pull 16384"]["limit"]) == (0.08, 0.1)
    assert found["pull 16384 share"]["value"] == 0.99
    assert (found["decode of a source"]["ratio"], found["decode of a source"]["least"]) == (0.96, 0.97)
    four, alone = (found[f"MLA, peer pull, 512 MiB x {count}"] for count in (4, 1))
    assert (four["ratio"], four["least"]) == (0.934, 0.93)
    assert (alone["ratio"], alone["least"]) == (0.816, 0.85)


def test_a_connector_must_not_cost_an_engine_its_cache() -> None:
    found = cases(Samples(of({("cache tokens", "plain"): [1000], ("cache tokens", "kvpool"): [985]})), TOKEN_BYTES)
    assert (found["KV cache"]["ratio"], found["KV cache"]["least"]) == (0.985, 0.99)
