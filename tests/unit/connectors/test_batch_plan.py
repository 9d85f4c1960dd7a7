"""Every row is complete up to the cut, and no more is computed than has to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.connectors.batch_plan import PASS_TOKENS, BatchPlan, RowPlan, common_prefixes, plan_batch


def row(length: int, *, shared: int = 0, seed: int = 1) -> np.ndarray:
    """The first `shared` tokens are those of all rows, the others differ by seed."""
    return np.array([0] * shared + [seed] * (length - shared), dtype=np.int64)


def test_common_prefixes_are_counted_in_tokens() -> None:
    rows = [row(10, shared=6, seed=1), row(8, shared=4, seed=2), row(6, shared=6)]
    assert common_prefixes(rows).tolist() == [[0, 0, 0], [4, 0, 0], [6, 4, 0]]


def test_rows_with_nothing_in_common_are_computed_together() -> None:
    rows = [row(400, seed=1), row(400, seed=2)]
    assert plan_batch(rows, [0, 0], 400) == BatchPlan(0, (RowPlan(0, 0, None), RowPlan(0, 0, None)))


def test_known_prefixes_end_where_the_first_of_them_does() -> None:
    rows = [row(400, seed=1), row(370, seed=2)]  # the second has 30 columns of padding
    assert plan_batch(rows, [320, 320], 400) == BatchPlan(320, (RowPlan(320, 0, None), RowPlan(290, 0, None)))


def test_a_prefix_that_is_new_is_computed_once() -> None:
    rows = [row(1000, shared=900, seed=seed) for seed in range(1, 5)]
    plan = plan_batch(rows, [0] * 4, 1000)
    assert plan == BatchPlan(900, (RowPlan(0, 900, None), *(RowPlan(900, 0, 0),) * 3))


def test_a_row_that_is_new_does_not_spoil_what_the_others_have() -> None:
    rows = [row(1000, seed=1), row(1000, seed=2), row(1000, seed=3)]
    plan = plan_batch(rows, [960, 0, 960], 1000)
    assert plan == BatchPlan(960, (RowPlan(960, 0, None), RowPlan(0, 960, None), RowPlan(960, 0, None)))


def test_a_pass_for_few_tokens_is_not_worth_it() -> None:
    rows = [row(200, seed=1), row(200, seed=2)]
    assert plan_batch(rows, [PASS_TOKENS - 32, 0], 200).cut == 0


def test_one_column_is_left_though_all_is_known() -> None:
    assert plan_batch([row(64), row(64)], [63, 63], 64).cut == 63


@pytest.mark.parametrize("width", [64, 80])  # 80: all rows have padding
def test_padding_is_not_computed(width: int) -> None:
    plan = plan_batch([row(64, shared=48), row(4, seed=2)], [48, 0], width)
    assert plan == BatchPlan(width - 16, (RowPlan(48, 0, None), RowPlan(0, 0, None)))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5))
def test_every_row_is_complete_up_to_the_cut(sizes: list[tuple[int, int, int]]) -> None:
    rows = [row(10 * n, shared=min(10 * n, 10 * s), seed=i + 1) for i, (n, s, _) in enumerate(sizes)]
    known = [min(10 * k, len(r) - 1) for (_, _, k), r in zip(sizes, rows, strict=True)]
    width = max(map(len, rows))
    plan = plan_batch(rows, known, width)
    assert 0 <= plan.cut < width
    for number, (tokens, one) in enumerate(zip(rows, plan.rows, strict=True)):
        assert one.ready + one.computed == max(0, plan.cut - (width - len(tokens)))
        if one.copied_from is None:
            assert one.ready <= known[number]
        else:
            source = plan.rows[one.copied_from]
            assert one.copied_from < number
            assert one.ready <= source.ready + source.computed
            assert (rows[one.copied_from][: one.ready] == tokens[: one.ready]).all()


def test_where_a_pass_costs_more_fewer_rows_are_completed_alone() -> None:
    rows = [np.arange(700), np.arange(1000, 1600), np.arange(2000, 2700)]
    cheap, dear = (plan_batch(rows, [600, 0, 600], 700, pass_tokens) for pass_tokens in (32, 4096))
    assert [row.computed for row in cheap.rows] == [0, 500, 0]
    assert dear.cut == 100
    assert not any(row.computed for row in dear.rows)
