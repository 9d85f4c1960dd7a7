"""Moments at which bench.vllm_gpu kills services, and what was under way then."""

from random import Random

from bench.vllm_gpu.faults import Transfer, moment, transfers, under_way

CALLS = [
    (1.0, "load asked", "a", 0.0),
    (1.1, "load ordered", "a", 0.0),
    (1.2, "store ordered", "7", 3.0),
    (2.0, "killed", "1234", 0.0),
    (2.5, "received", "a", 0.0),
    (3.0, "store ordered", "8", 1.0),
    (9.0, "store ended", "7", 500.0),
    (9.0, "store ended", "6", 500.0),  # was ordered before
]


def test_transfers_last_from_their_order_to_their_end() -> None:
    assert transfers(CALLS) == [
        Transfer("load", 1.0, 2.5),
        Transfer("store", 1.2, 1.7),
        Transfer("store", 3.0, float("inf")),
    ]


def test_under_way_is_what_had_begun_and_not_ended() -> None:
    seen = transfers(CALLS)
    assert [under_way(seen, "load", at_s) for at_s in (0.9, 1.0, 2.0, 2.6)] == [0, 1, 1, 0]
    assert [under_way(seen, "store", at_s) for at_s in (1.1, 1.5, 2.0, 99.0)] == [0, 1, 0, 1]


def test_moments_are_before_the_end_of_most_transfers_and_come_from_the_seed() -> None:
    seen = [Transfer("load", 0.0, duration_s) for duration_s in (0.9, 0.1, 0.5, 0.7)] + [Transfer("store", 0.0, 9.0)]
    found = [moment("load", seen, Random(seed)) for seed in range(50)]
    assert found == [moment("load", seen, Random(seed)) for seed in range(50)]
    assert {one.skip for one in found} == {0, 1}
    assert all(0.0 <= one.delay_s <= 0.5 for one in found)
    assert len({one.delay_s for one in found}) > 40


def test_without_a_measure_the_first_order_is_the_moment() -> None:
    found = moment("store", [Transfer("store", 0.0, float("inf"))], Random(1))
    assert (found.what, found.skip, found.delay_s) == ("store", 0, 0.0)
