"""What caches hold: announcements and their end, and how caches complete each other."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import InvalidRequest
from kvpool_gpuagent.core.cached_chunks import (
    CachedChunks,
    FoundChunks,
    HeldChunks,
    PulledChunks,
    SourceName,
    covering,
    with_pulled,
)
from kvpool_gpuagent.core.requests import LoadOutcome
from kvpool_gpuagent.core.sources import LoadSource, SourceRun, with_cached

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def cached(table: np.ndarray, *entries: tuple[bytes, list[int]]) -> CachedChunks:
    chunks = CachedChunks(table, 2)
    for chunk_hash, blocks in entries:
        ids = np.array(blocks)
        chunks.announce(chunk_hash, ids, table[ids])
    return chunks


def test_what_was_announced_is_found_in_the_order_asked_for() -> None:
    table = np.arange(8)
    found = cached(table, (A, [3, 1]), (B, [4, 7])).find([C, B, A])
    assert found.positions.tolist() == [1, 2]
    assert found.block_ids.tolist() == found.generations.tolist() == [[4, 7], [3, 1]]


def test_a_changed_generation_ends_an_entry_for_good() -> None:
    table = np.zeros(8, dtype=np.int64)
    chunks = cached(table, (A, [0, 1]), (B, [2, 3]))
    table[1] = 1
    assert chunks.find([A, B]).positions.tolist() == [1]
    table[1] = 0
    assert chunks.find([A, B]).positions.tolist() == [1]
    assert len(chunks) == 1


def test_a_generation_that_was_over_when_it_was_announced_is_not_found() -> None:
    table = np.full(8, 5)
    chunks = CachedChunks(table, 2)
    chunks.announce(A, np.array([0, 1]), np.array([5, 4]))
    assert not chunks.find([A]).positions.size


def test_an_announcement_replaces_those_of_its_chunk_and_of_its_blocks() -> None:
    table = np.zeros(8, dtype=np.int64)
    chunks = cached(table, (A, [0, 1]), (B, [2, 3]), (A, [4, 5]), (C, [5, 2]))
    assert chunks.find([A, B, C]).positions.tolist() == [2]
    chunks = cached(table, (A, [0, 1]), (A, [4, 5]), (B, [0, 1]))  # blocks that the first one has left
    assert chunks.find([A, B]).positions.tolist() == [0, 1]


def test_a_chunk_keeps_nothing_of_the_others_that_were_announced_with_it() -> None:
    chunks, blocks, generations = CachedChunks(np.zeros(8, dtype=np.int64), 2), np.arange(4), np.zeros(4, np.int64)
    announced = weakref.ref(blocks), weakref.ref(generations)
    chunks.announce(A + B, blocks, generations)
    del blocks, generations
    assert [one() for one in announced] == [None, None]
    assert chunks.find([A, B]).block_ids.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("hashes", "blocks", "generations"),
    [(A, [0], [0]), (A + b"x", [0, 1], [0, 0]), (A, [0, 1], [0]), (A, [0, 8], [0, 0]), (A, [-1, 0], [0, 0])],
)
def test_what_does_not_fit_is_refused(hashes: bytes, blocks: list[int], generations: list[int]) -> None:
    chunks = CachedChunks(np.zeros(8, dtype=np.int64), 2)
    with pytest.raises(InvalidRequest):
        chunks.announce(hashes, np.array(blocks), np.array(generations))
    assert not len(chunks)


def held(name: int, layers: range, heads: range, positions: list[int], *, scales: bool = False) -> HeldChunks:
    blocks = np.array([[10 * position, 10 * position + 1] for position in positions]).reshape(-1, 2)
    source = SourceName(bytes([name]) * 16, "")
    found = FoundChunks(np.array(positions, dtype=np.int64), blocks, blocks)
    return HeldChunks(source=source, layers=layers, heads=heads, scales=scales, found=found)


ALL = (range(4), range(8))


def chosen(caches: list[HeldChunks], chunk_count: int = 4) -> tuple[list[int], dict[int, list[int]]]:
    complete, shares = covering(caches, *ALL, scales=False, chunk_count=chunk_count)
    return np.flatnonzero(complete).tolist(), {
        share.held.source.session_id[0]: share.positions.tolist() for share in shares
    }


def test_a_whole_cache_comes_before_parts_and_parts_complete_each_other() -> None:
    caches = [
        held(1, range(4), range(4), [0, 1, 2, 3]),
        held(2, range(4), range(4, 8), [0, 1, 2]),
        held(3, range(4), range(8), [1]),
    ]
    assert chosen(caches) == ([0, 1, 2], {1: [0, 2], 2: [0, 2], 3: [1]})


def test_stages_of_a_pipeline_with_ranks_of_heads_make_a_whole() -> None:
    parts = [(range(2), range(4)), (range(2), range(4, 8)), (range(2, 4), range(8))]
    caches = [held(number, *part, [0, 1]) for number, part in enumerate(parts)]
    assert chosen(caches) == ([0, 1], {0: [0, 1], 1: [0, 1], 2: [0, 1]})
    assert chosen(caches[:2]) == ([], {})


def test_replicas_of_the_same_heads_are_taken_once() -> None:
    caches = [held(number, range(4), range(8), [0, 1]) for number in range(3)]
    assert chosen(caches) == ([0, 1], {0: [0, 1]})


def test_caches_that_overlap_in_part_are_not_taken_together() -> None:
    caches = [held(1, range(4), range(5), [0]), held(2, range(4), range(3, 8), [0])]
    assert chosen(caches) == ([], {})


def test_caches_with_other_rows_are_left_out() -> None:
    assert chosen([held(1, range(4), range(8), [0], scales=True)]) == ([], {})


def span(count: int, skip_tokens: int = 0) -> ChunkRange:
    return ChunkRange(
        chunk_hashes=b"".join(bytes([number]) * 16 for number in range(count)),
        block_ids=np.arange(100, 100 + 4 * count).reshape(count, 4),
        first_chunk_index=14,
        parent_hash=b"p" * 16,
        group_head_hashes=(b"g" * 16, bytes([2]) * 16),
        skip_tokens=skip_tokens,
    )


def test_a_part_of_a_range_of_chunks_knows_its_parent_and_its_groups() -> None:
    whole = span(4, skip_tokens=5)
    part = whole.part(range(1, 3))
    assert part.hashes == whole.hashes[1:3]
    assert (part.first_chunk_index, part.parent_hash, part.skip_tokens) == (15, whole.chunk_hash(0), 0)
    assert part.group_head_hashes == whole.group_head_hashes
    assert part.block_ids.tolist() == whole.block_ids[1:3].tolist()
    assert whole.part(range(2)).group_head_hashes == whole.group_head_hashes[:1]
    assert whole.part(range(2, 4)).group_head_hashes == whole.group_head_hashes[1:]
    first = whole.part(range(1))
    assert (first.parent_hash, first.skip_tokens) == (b"p" * 16, 5)


@pytest.mark.parametrize(
    ("pulled", "rest", "loaded", "gpu"),
    [
        ([True, True, True, True], 0, 4, 4 * 32 - 5),
        ([True, False, True, True], 1, 4, 3 * 32 - 5),
        ([True, False, True, True], 0, 1, 32 - 5),
        ([False, True, True, True], 1, 4, 3 * 32),
        ([False, True, True, True], 0, 0, 0),
        ([True, False, True, False], 3, 4, 32 - 5),
        ([True, False, True, False], 1, 2, 32 - 5),
    ],
)
def test_the_outcome_counts_each_chunk_once(pulled: list[bool], rest: int, loaded: int, gpu: int) -> None:
    brought = PulledChunks(np.array(pulled), 1000, 0.5)
    part = LoadOutcome(chunk_count=len(brought.left), loaded_chunks=rest, copying_s=0.25)
    part.tokens[LoadSource.DISK] = 7
    outcome = with_pulled(part, span(4, skip_tokens=5), 32, brought)
    assert (outcome.chunk_count, outcome.loaded_chunks, outcome.copying_s) == (4, loaded, 0.75)
    assert outcome.tokens[LoadSource.GPU] == gpu
    assert outcome.tokens[LoadSource.DISK] == 7


def run(count: int, source: LoadSource) -> SourceRun:
    return SourceRun(chunk_count=count, source=source, readable=1, remote=())


@pytest.mark.parametrize(
    ("cached_at", "expected"),
    [
        ([], [(2, "STAGING"), (2, "DISK")]),
        ([0, 3], [(1, "GPU"), (1, "STAGING"), (1, "DISK"), (1, "GPU")]),
        ([4, 5, 7], [(2, "STAGING"), (2, "DISK"), (2, "GPU")]),
        (list(range(8)), [(8, "GPU")]),
    ],
)
def test_runs_take_what_is_cached_from_there(cached_at: list[int], expected: list[tuple[int, str]]) -> None:
    mask = np.zeros(8, dtype=np.bool_)
    mask[cached_at] = True
    runs = with_cached([run(2, LoadSource.STAGING), run(2, LoadSource.DISK)], mask)
    assert [(each.chunk_count, each.source.name) for each in runs] == expected


def test_a_match_may_name_more_chunks_than_were_asked_for() -> None:
    mask = np.array([True, False])
    assert [each.chunk_count for each in with_cached([run(5, LoadSource.DISK)], mask)] == [1, 1]
