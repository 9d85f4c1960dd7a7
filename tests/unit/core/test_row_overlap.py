from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.layout import RowSet, first_overlap

axes = st.lists(st.tuples(st.integers(1, 24), st.integers(2, 4)), max_size=3).map(
    lambda a: tuple(sorted(a, reverse=True))
)


def starts(rows: RowSet) -> list[int]:
    found = [rows.offset_bytes]
    for stride, count in rows.axes:
        found = [start + step * stride for start in found for step in range(count)]
    return found


def bytes_of(rows: RowSet) -> list[int]:
    return [start + byte for start in starts(rows) for byte in range(rows.row_bytes)]


@given(axes, st.lists(st.tuples(st.integers(0, 1), st.integers(0, 80), st.integers(1, 6)), min_size=1, max_size=4))
def test_agrees_with_counting_every_byte(
    shared_axes: tuple[tuple[int, int], ...], placed: list[tuple[int, int, int]]
) -> None:
    sets = [RowSet(f"{n}", *place, shared_axes) for n, place in enumerate(placed)]
    every_byte = [(rows.handle, byte) for rows in sets for byte in bytes_of(rows)]
    really = len(set(every_byte)) < len(every_byte)
    if all(rows.is_nested for rows in sets):
        assert (first_overlap(sets) is not None) == really
    else:
        assert first_overlap(sets) is not None


@given(st.lists(st.builds(RowSet, st.uuids().map(str), st.just(0), st.integers(0, 300), st.integers(1, 6), axes)))
def test_sets_of_any_axes_never_overlap_unseen(sets: list[RowSet]) -> None:
    every_byte = [byte for rows in sets for byte in bytes_of(rows)]
    if first_overlap(sets) is None:
        assert len(set(every_byte)) == len(every_byte)


def test_sets_behind_one_another_may_have_any_axes() -> None:
    left, right = RowSet("a", 0, 0, 4, ((8, 3),)), RowSet("b", 0, 20, 4, ((6, 2),))
    assert left.end_bytes == right.offset_bytes
    assert first_overlap([right, left]) is None
    assert first_overlap([left, RowSet("c", 0, 4, 4, ((6, 2),))]) == ("a", "c")


def test_rows_of_a_block_and_then_its_scales_are_apart() -> None:
    rows = RowSet("rows", 0, 0, 8, ((100, 5), (16, 3), (8, 2)))  # 3 tokens of 2 heads: bytes [0, 48) of each 100
    for scales, apart in (
        (RowSet("scales", 0, 48, 2, ((100, 5), (4, 3), (2, 2))), True),
        (RowSet("scales", 0, 88, 2, ((100, 5), (4, 3), (2, 2))), True),  # ends where the next block begins
        (RowSet("scales", 0, 47, 2, ((100, 5), (4, 3), (2, 2))), False),
        (RowSet("scales", 0, 89, 2, ((100, 5), (4, 3), (2, 2))), False),
        (RowSet("scales", 0, 48, 2, ((100, 6), (4, 3), (2, 2))), False),  # other blocks: nothing is shared
        (RowSet("scales", 0, 248, 2, ((100, 5),)), True),
        (RowSet("scales", 0, 240, 2, ((100, 5),)), False),
    ):
        assert first_overlap([rows, scales]) == (None if apart else ("rows", "scales"))
