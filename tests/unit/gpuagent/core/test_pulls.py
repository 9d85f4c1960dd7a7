"""Which rows a pull means, and what it may write."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvpool.core.elements import Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.core.pulls import CacheSide, PullCells, SourceName, TokenPull, cells_of, check_writes, peer_planes
from tests.fixtures import layout_presets as presets

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(8, 4, 16),), dtype=Dtype.BF16, chunk_tokens=32)


def layout(layers: range, heads: range, block_tokens: int = 8) -> EngineLayout:
    return presets.vllm_nhd_layout(SPEC, layers, heads, block_tokens, 10)


def pull(source: list[int], destination: list[int], count: int, first: int = 0, own_first: int = 0) -> TokenPull:
    return TokenPull(
        source=SourceName(b"s" * 16, ""),
        source_block_ids=np.array(source, dtype="<i8").tobytes(),
        source_first_token=first,
        destination_block_ids=np.array(destination, dtype="<i8").tobytes(),
        destination_first_token=own_first,
        token_count=count,
    )


def cells(slots: list[int], layers: range = range(8), heads: range = range(4)) -> PullCells:
    both = np.array(slots, dtype=np.int64)
    return PullCells(layers, heads, np.stack([both, both], axis=1))


def test_token_by_token_whatever_the_blocks() -> None:
    own = layout(range(8), range(4), block_tokens=4)
    found = cells_of(0, pull([9, 2, 5], [1, 0, 3, 7], 12, first=6, own_first=1), SPEC, layout(range(8), range(4)), own)
    assert found.slots[:, 0].tolist() == [78, 79, *range(16, 24), 40, 41]
    assert found.slots[:, 1].tolist() == [5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 28]


def test_layers_and_heads_that_both_have_in_common() -> None:
    source, own = layout(range(4, 8), range(1, 4)), layout(range(2, 6), range(2))
    found = cells_of(3, pull([0], [1], 1), SPEC, source, own)
    assert (found.layers, found.heads) == (range(4, 6), range(1, 2))
    with pytest.raises(InvalidRequest, match=r"pulls\[3\].*layers \[4, 8\), the destination \[0, 4\): none in common"):
        cells_of(3, pull([0], [1], 1), SPEC, source, layout(range(4), range(4)))


def test_planes_begin_at_the_first_common_layer_and_head() -> None:
    source, own = layout(range(4, 8), range(1, 4)), layout(range(2, 6), range(2))
    sides = [CacheSide(each, [1000 * (1 + number) for number in range(4)]) for each in (source, own)]
    planes, scales = peer_planes(SPEC, range(4, 6), range(1, 2), *sides)
    assert scales is None
    assert (planes.heads, planes.row_bytes) == (1, 32)
    plane_bytes = [10 * 8 * heads * 32 for heads in (3, 2)]  # K, then V
    assert planes.source[:, 0].tolist() == [1000, 1000 + plane_bytes[0], 2000, 2000 + plane_bytes[0]]
    assert planes.destination[:, 0].tolist() == [3032, 3032 + plane_bytes[1], 4032, 4032 + plane_bytes[1]]
    assert planes.source[0, 1:].tolist() == [8 * 3 * 32, 3 * 32, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("far", [0, 1 << 40])
def test_what_is_written_twice_or_not_at_all(far: int) -> None:
    own = layout(range(8), range(4))

    def check(*parts: PullCells, partial: bool = False) -> None:
        moved = [replace(part, slots=part.slots + far) for part in parts]
        check_writes(moved, own, partial=partial)

    check(cells([1, 5]), cells([2, 3]))
    check(cells([1, 5], heads=range(2)), cells([5, 1], heads=range(2, 4)))
    check(cells([1], range(3)), cells([1], range(3, 8), range(1)), cells([1], range(3, 8), range(1, 4)))
    check(cells([1], range(3)), partial=True)
    with pytest.raises(InvalidRequest, match=rf"pulls\[1\].*slot {far + 5} is written twice"):
        check(cells([1, 5]), cells([2, 5]))
    with pytest.raises(InvalidRequest, match=rf"pulls\[0\].*slot {far + 1} is written twice"):
        check(cells([1, 5, 1]))
    with pytest.raises(InvalidRequest, match=rf"pulls\[3\].*slot {far + 6} is written twice"):
        check(cells([1], range(3)), cells([5]), cells([7, 6], range(2, 4)), cells([6], range(2, 4)), partial=True)
    with pytest.raises(InvalidRequest, match="is written twice"):
        check(cells([6], range(3)), cells([6], range(2, 8), range(1)), partial=True)
    with pytest.raises(InvalidRequest, match=rf"pulls\[1\].*slot {far + 7} would get only 12 of 32"):
        check(cells([1]), cells([7], range(3)))
