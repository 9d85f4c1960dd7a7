import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.geometry import KvGroup
from kvpool.core.partition import RankPart, rank_part


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 3), st.booleans(), st.integers(1, 5))
def test_every_layer_and_head_is_written_once_and_loaded_by_all_that_have_it(
    layers: int, factor: int, heads: int, replicated: bool, pp_size: int
) -> None:
    """factor times more heads than ranks, or than heads ranks."""
    group = KvGroup(layers, heads if replicated else heads * factor, 8)
    tp_size = heads * factor if replicated else heads
    stages = [len(part) for part in np.array_split(np.arange(layers), min(pp_size, layers))]
    written, loaded = np.zeros((2, layers, group.kv_heads), dtype=np.int64)
    for pp_rank in range(len(stages)):
        for tp_rank in range(tp_size):
            part = rank_part(group, tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_layers=stages)
            cells = np.ix_(part.layers, part.heads)
            loaded[cells] += 1
            written[cells] += not part.load_only
    assert (written == 1).all()
    assert (loaded == max(1, tp_size // group.kv_heads)).all()


def test_known_parts() -> None:
    llama = KvGroup(80, 8, 128)
    assert rank_part(llama) == RankPart(range(80), range(8), False)
    assert rank_part(llama, tp_rank=3, tp_size=4) == RankPart(range(80), range(6, 8), False)
    assert rank_part(llama, tp_rank=4, tp_size=16) == RankPart(range(80), range(2, 3), False)
    assert rank_part(llama, tp_rank=5, tp_size=16) == RankPart(range(80), range(2, 3), True)
    assert rank_part(llama, pp_rank=1, pp_layers=[30, 50]) == RankPart(range(30, 80), range(8), False)
    latent = KvGroup.mla(61, 576)
    assert [rank_part(latent, tp_rank=rank, tp_size=8).load_only for rank in range(8)] == [False] + [True] * 7


def test_bad_parts_are_refused() -> None:
    group = KvGroup(4, 6, 8)
    for tp_size in (4, 9, 5):
        with pytest.raises(PartitionRefused, match=f"6 KV heads cannot be split over {tp_size} TP ranks"):
            rank_part(group, tp_size=tp_size)
    with pytest.raises(InvalidRequest, match="tp_rank"):
        rank_part(group, tp_rank=2, tp_size=2)
    with pytest.raises(InvalidRequest, match="pp_rank"):
        rank_part(group, pp_rank=1)
    with pytest.raises(InvalidRequest, match="pp_layers must add up to the model's 4 layers, got 5"):
        rank_part(group, pp_layers=[2, 3])
    with pytest.raises(InvalidRequest, match=r"pp_layers\[1\]"):
        rank_part(group, pp_layers=[4, 0])
