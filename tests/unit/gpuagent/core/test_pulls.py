"""Which rows a pull means, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvpool.core.chunks import ChunkRange
from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.core import pulls
from kvpool_gpuagent.core.cached_chunks import FoundChunks, HeldChunks, Share, SourceName
from kvpool_gpuagent.core.pulls import BlockRuns, CacheSide, PeerPlanes, cells_of, peer_planes
from tests.fixtures import layout_presets as presets

Preset = Callable[[KeyspaceSpec, range, range, int, int], EngineLayout]
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(8, 4, 16),), dtype=Dtype.BF16, chunk_tokens=32)


def layout(layers: range, heads: range, block_tokens: int = 8) -> EngineLayout:
    return presets.vllm_nhd_layout(SPEC, layers, heads, block_tokens, 10)


def share(blocks: list[list[int]], positions: list[int], layers: range = range(8), heads: range = range(4)) -> Share:
    """Chunks that a cache holds in these blocks."""
    ids = np.array(blocks, dtype=np.int64)
    found = FoundChunks(np.array(positions, dtype=np.int64), ids, ids)
    held = HeldChunks(source=SourceName(b"s" * 16, ""), layers=layers, heads=heads, scales=False, found=found)
    return Share(held, np.arange(len(positions)))


def span(blocks: list[list[int]], skip_tokens: int = 0) -> ChunkRange:
    return ChunkRange(
        chunk_hashes=b"h" * 16 * len(blocks),
        block_ids=np.array(blocks, dtype=np.int64),
        first_chunk_index=0,
        parent_hash=bytes(16),
        group_head_hashes=(b"h" * 16,),
        skip_tokens=skip_tokens,
    )


def rows(*blocks: int, of: int) -> list[int]:
    return [of * block + row for block in blocks for row in range(of)]


def test_token_by_token_whatever_the_blocks() -> None:
    own, theirs = layout(range(8), range(4), block_tokens=16), layout(range(8), range(4))
    wanted = span([[1, 0], [9, 9], [3, 7]], skip_tokens=21)
    first = cells_of(share([[9, 2, 5, 1], [0, 3, 4, 6]], [0, 2]), wanted, SPEC, theirs, own)
    assert first.slots[:, 0].tolist() == rows(9, 2, 5, 1, 0, 3, 4, 6, of=8)[21:]
    assert first.slots[:, 1].tolist() == rows(1, 0, 3, 7, of=16)[21:]
    later = cells_of(share([[0, 3, 4, 6]], [2]), wanted, SPEC, theirs, own)
    assert later.slots[:, 0].tolist() == rows(0, 3, 4, 6, of=8)
    assert later.slots[:, 1].tolist() == rows(3, 7, of=16)


def test_layers_and_heads_that_both_have_in_common() -> None:
    source, own = layout(range(4, 8), range(1, 4)), layout(range(2, 6), range(2))
    found = cells_of(share([[0, 1, 2, 3]], [0], range(4, 8), range(1, 4)), span([[4, 5, 6, 7]]), SPEC, source, own)
    assert (found.layers, found.heads) == (range(4, 6), range(1, 2))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (share([[0, 1, 2, 10]], [0]), r"blocks of cached chunks must lie in \[0, 10\), got 10"),
        (share([[0, -1, 2, 3]], [0]), "got -1"),
        (share([[0, 1, 2]], [0]), "3 blocks for each chunk, its layout needs 4"),
        (share([[0, 1, 2, 3]], [0], layers=range(9)), r"layers \[0, 9\): its layout has \[0, 8\)"),
        (share([[0, 1, 2, 3]], [0], heads=range(1, 4)), r"heads \[1, 4\): its layout has \[0, 4\)"),
    ],
)
def test_what_was_said_of_a_cache_must_be_true_of_it(wrong: Share, named: str) -> None:
    own = layout(range(8), range(4))
    with pytest.raises(InvalidRequest, match=named):
        cells_of(wrong, span([[4, 5, 6, 7]]), SPEC, own, own)
    scaled = replace(wrong.held, scales=True, layers=range(8), heads=range(4))
    with pytest.raises(InvalidRequest, match="with scales: its layout is not so"):
        cells_of(replace(wrong, held=scaled), span([[4, 5, 6, 7]]), SPEC, own, own)


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


def sides(theirs: Preset, own: Preset, spec: KeyspaceSpec = SPEC, heads: range = range(4)) -> list[CacheSide]:
    """A source with all heads, and a destination. Their handles follow each other without a gap."""
    layouts = theirs(spec, range(8), range(4), 8, 10), own(spec, range(8), heads, 8, 6)
    return [
        CacheSide(each, [base + sum(each.handle_sizes[:number]) for number in range(len(each.handle_sizes))])
        for each, base in zip(layouts, (1 << 40, 1 << 41), strict=True)
    ]


def parts_of(both: list[CacheSide], spec: KeyspaceSpec = SPEC) -> list[PeerPlanes]:
    heads = both[1].layout.head_range
    return [planes for planes in peer_planes(spec, range(8), heads, *both) if planes is not None]


def byte_by_byte(destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> dict[int, int]:
    """From where each byte of the destination comes."""
    return {
        to + at: start + at
        for to, start, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for at in range(size)
    }


INT8 = replace(SPEC, codec=Codec.INT8_GROUP8)
PAIRS = [
    pytest.param(presets.vllm_blhnc_layout, presets.vllm_blhnc_layout, SPEC, range(4), 1, id="block-major"),
    pytest.param(presets.vllm_blhnc_layout, presets.vllm_blhnc_layout, SPEC, range(2, 4), 8, id="half of the heads"),
    pytest.param(presets.vllm_lbnhc_layout, presets.vllm_lbnhc_layout, SPEC, range(4), 8, id="layer-major"),
    pytest.param(presets.vllm_nhd_layout, presets.vllm_nhd_layout, SPEC, range(4), 16, id="K and V apart"),
    pytest.param(presets.vllm_blhnc_layout, presets.vllm_lbnhc_layout, SPEC, range(4), 8 * 8 * 4, id="head by head"),
    pytest.param(presets.block_scales_layout, presets.block_scales_layout, INT8, range(4), None, id="scales"),
]


@pytest.mark.parametrize(("theirs", "own", "spec", "heads", "run_count"), PAIRS)
def test_runs_of_blocks_are_all_their_rows_and_as_long_as_can_be(
    theirs: Preset, own: Preset, spec: KeyspaceSpec, heads: range, run_count: int | None
) -> None:
    both = sides(theirs, own, spec, heads)
    parts = parts_of(both, spec)
    runs = BlockRuns.of(parts)
    assert runs is not None
    blocks = np.array([[9, 0], [2, 5]])
    found = byte_by_byte(*runs.copies(blocks))
    wanted: dict[int, int] = {}
    for planes in parts:
        for source, destination in zip(planes.source.tolist(), planes.destination.tolist(), strict=True):
            for (there, here), head, token in product(blocks.tolist(), range(planes.heads), range(8)):
                start, to = (
                    row[0] + block * row[1] + token * row[2] + head * row[3]
                    for row, block in ((source, there), (destination, here))
                )
                wanted |= {to + at: start + at for at in range(planes.row_bytes)}
    assert found == wanted
    assert sum(runs.sizes_bytes.tolist()) * 2 == len(found)  # no byte twice
    if run_count is not None:
        assert runs.sizes_bytes.size == run_count


def test_blocks_of_other_lengths_have_no_runs() -> None:
    own = CacheSide(presets.vllm_blhnc_layout(SPEC, range(8), range(4), 16, 6), [1 << 41])
    assert BlockRuns.of(parts_of([sides(presets.vllm_blhnc_layout, presets.vllm_blhnc_layout)[0], own])) is None


def test_memory_of_two_handles_is_never_one_run() -> None:
    layout = presets.vllm_lbnhc_layout(SPEC, range(8), range(4), 8, 1)
    assert len(layout.handle_sizes) == 8
    # Addresses that follow each other may belong to allocations of their own.
    addresses = [sum(layout.handle_sizes[:number]) for number in range(8)]
    runs = BlockRuns.of(parts_of([CacheSide(layout, addresses), CacheSide(layout, addresses)]))
    assert runs is not None
    assert runs.sizes_bytes.tolist() == list(layout.handle_sizes)


JOINED = [
    pytest.param([[5, 2], [4, 1], [3, 0], [9, 4], [8, 5]], 3, id="in order, given backwards"),
    pytest.param([[0, 0], [2, 1], [1, 3], [4, 2]], 4, id="on one side alone"),
    pytest.param([[1, 0], [2, 1], [4, 2], [5, 3], [6, 4]], 2, id="a gap in the source"),
]


@pytest.mark.parametrize(("theirs", "own", "spec", "heads", "run_count"), PAIRS)
@pytest.mark.parametrize(("places", "joined"), JOINED)
def test_neighbours_of_many_blocks_are_one_copy_where_a_run_fills_its_block(
    theirs: Preset,
    own: Preset,
    spec: KeyspaceSpec,
    heads: range,
    run_count: int | None,
    places: list[list[int]],
    joined: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = BlockRuns.of(parts_of(sides(theirs, own, spec, heads), spec))
    assert runs is not None
    blocks = np.array(places)
    each = byte_by_byte(*runs.copies(blocks))
    monkeypatch.setattr(pulls, "MANY_BLOCKS", len(blocks))
    copies = runs.copies(blocks)
    assert byte_by_byte(*copies) == each
    assert sum(copies[2].tolist()) == len(each)  # no byte twice
    fills = (runs.source_strides == runs.sizes_bytes) & (runs.destination_strides == runs.sizes_bytes)
    # Never across two handles, though these follow each other here.
    assert copies[0].size == int(fills.sum()) * joined + int((~fills).sum()) * len(blocks)


def test_no_blocks_are_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MANY_BLOCKS", 0)
    runs = BlockRuns.of(parts_of(sides(presets.vllm_blhnc_layout, presets.vllm_blhnc_layout)))
    assert runs is not None
    assert [each.size for each in runs.copies(np.zeros((0, 2), dtype=np.int64))] == [0, 0, 0]
