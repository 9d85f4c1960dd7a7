"""How the blocks of pages are shared out among workers."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool_gpuagent.core.sum_frames import Piece, shared_out


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 6), st.integers(1, 8))
def test_each_block_is_in_one_share_and_shares_are_even(counts: list[int], share_count: int, least_blocks: int) -> None:
    shares = shared_out(counts, share_count, least_blocks)
    blocks = [(piece.page, block) for share in shares for piece in share for block in piece.blocks]
    assert blocks == [(page, block) for page, count in enumerate(counts) for block in range(count)]
    sizes = [sum(len(piece.blocks) for piece in share) for share in shares]
    assert len(sizes) <= share_count
    assert all(size == sizes[0] >= least_blocks for size in sizes[:-1])
    assert all(0 < size <= sizes[0] for size in sizes[-1:])


def test_a_page_is_cut_where_a_share_is_full() -> None:
    assert shared_out([3, 5], 2, 1) == [[Piece(0, range(3)), Piece(1, range(1))], [Piece(1, range(1, 5))]]
    assert shared_out([3, 5], 4, 6) == [[Piece(0, range(3)), Piece(1, range(3))], [Piece(1, range(3, 5))]]
    assert shared_out([], 3, 1) == []
