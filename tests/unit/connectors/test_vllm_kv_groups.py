"""The deepest boundary that all KV cache groups of a model have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.client.engine_items import EngineMatchRun, EngineSource, MatchResult
from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.kv_groups import BoundarySearch, KvCacheGroup, first_held_chunk, first_held_token

CHUNK = 32


def group(window_tokens: int = 0, block_tokens: int = 16) -> KvCacheGroup:
    return KvCacheGroup(block_tokens=block_tokens, chunk_bytes=1, window_tokens=window_tokens)


STATE = KvCacheGroup(block_tokens=CHUNK, chunk_bytes=1, recurrent=True)


def a_prompt(token_count: int) -> Prompt:
    return Prompt(CHUNK, token_count, bytes(16 * (token_count // CHUNK)))


def searched(
    groups: Sequence[KvCacheGroup], prompt: Prompt, held_chunks: int, present: Sequence[set[int]], rounds: int = 1000
) -> tuple[BoundarySearch, int]:
    """A search over groups that have `present`, and how many rounds of questions it took."""
    search = BoundarySearch(groups, prompt, held_chunks)
    for asked in range(rounds):
        asks = search.asks()
        if not asks:
            return search, asked
        for number, first in asks:
            end = first
            while end in present[number] and not (groups[number].recurrent and end > first):
                end += 1
            runs = (EngineMatchRun(end - first, EngineSource.STAGING, 0.0),) if end > first else ()
            search.found(number, first, MatchResult(end, runs=runs))
    return search, rounds


def tokens_read(group: KvCacheGroup, end_tokens: int) -> range:
    """Before token `end_tokens`, in vLLM's blocks: those that its sliding-window manager does not count as skipped; of
    recurrent layers the last one, where the state is."""
    if group.recurrent:
        return range(end_tokens - 1, end_tokens)
    if not group.window_tokens:
        return range(end_tokens)
    window_start = next((t for t in range(end_tokens + 1) if end_tokens - t < group.window_tokens), end_tokens)
    return range(window_start - window_start % group.block_tokens, end_tokens)


def have(
    groups: Sequence[KvCacheGroup], prompt: Prompt, held_chunks: int, present: Sequence[set[int]], end: int
) -> bool:
    """Whether all groups have what the token at a boundary reads. Token by token."""
    if any(group.recurrent for group in groups) and end * CHUNK >= prompt.token_count:
        return False  # a token must be computed, and no state is of the token before the boundary
    return all(
        token // CHUNK in chunks or token < held_chunks * CHUNK
        for group, chunks in zip(groups, present, strict=True)
        for token in tokens_read(group, min(end * CHUNK, prompt.token_count - 1))
    )


GROUPS = st.lists(
    st.builds(
        group,
        window_tokens=st.sampled_from([0, 1, 2, 16, 17, 32, 33, 64, 65, 100, 400]),
        block_tokens=st.sampled_from([8, 16, 32]),
    )
    | st.just(STATE),
    min_size=1,
    max_size=3,
)


@given(GROUPS, st.integers(1, 12 * CHUNK), st.integers(0, 6), st.data())
@example([group(), group(33)], 4 * CHUNK, 0, None)
def test_the_boundary_is_the_deepest_that_all_groups_have(
    groups: list[KvCacheGroup], token_count: int, held_chunks: int, data: st.DataObject | None
) -> None:
    prompt = a_prompt(token_count)
    held_chunks = min(held_chunks, prompt.chunk_count)
    drawn = [data.draw(st.sets(st.integers(0, 12))) if data is not None else {0, 1, 2, 3} for _ in groups]
    present = [{chunk for chunk in chunks if chunk < prompt.chunk_count} for chunks in drawn]
    ends = range(prompt.chunk_count, held_chunks, -1)
    expected = next((end for end in ends if have(groups, prompt, held_chunks, present, end)), held_chunks)
    search, _ = searched(groups, prompt, held_chunks, present)
    assert search.boundary == expected
    assert search.match.matched_chunks == expected
    for rounds in (1, 2, 3):  # what is known by then is right, if not the deepest
        early, _ = searched(groups, prompt, held_chunks, present, rounds)
        assert held_chunks <= early.boundary <= expected
        assert have(groups, prompt, held_chunks, present, early.boundary) or early.boundary == held_chunks


def test_what_was_stored_chunk_by_chunk_is_found_in_two_rounds() -> None:
    groups, present = [group(), group(64), group(64)], [set(range(9))] * 3
    search, rounds = searched(groups, a_prompt(20 * CHUNK), 0, present)
    assert (search.boundary, rounds) == (9, 2)


def test_what_only_groups_that_keep_all_tokens_lack_is_asked_of_no_other() -> None:
    search = BoundarySearch([STATE, group(), group(64), group()], a_prompt(20 * CHUNK), 0)
    assert search.asks() == [(1, 0), (3, 0)]
    search.found(1, 0, MatchResult(7))
    search.found(3, 0, MatchResult(0))
    assert search.asks() == [] and search.boundary == 0


def test_windows_and_states_are_found_in_one_round_where_no_group_keeps_all_tokens() -> None:
    search = BoundarySearch([STATE, group(64)], a_prompt(20 * CHUNK + 1), 0)
    assert search.asks() == [(0, 19), (1, 0)]


def test_a_window_that_lost_its_first_chunks_is_found_in_two_rounds() -> None:
    groups, present = [group(), group(64)], [set(range(9)), {7, 8}]
    search, rounds = searched(groups, a_prompt(20 * CHUNK), 0, present)
    assert (search.boundary, rounds) == (9, 2)


def test_a_boundary_far_below_the_branch_is_found_in_few_rounds() -> None:
    """A full pool keeps the windows at the ends of earlier prompts alone."""
    groups, windows = [group(), group(2 * CHUNK), group(2 * CHUNK)], {8, 9, 18, 19, 58, 59}
    search, rounds = searched(groups, a_prompt(70 * CHUNK), 0, [set(range(55)), windows, windows])
    assert search.boundary == 20 and rounds <= 5


@pytest.mark.parametrize(
    ("states", "boundary", "rounds"),
    [({29}, 30, 2), ({28, 5}, 29, 4), ({5}, 6, 5), (set(), 0, 4)],
    ids=["of the whole prompt", "close to its end", "far from it", "none"],
)
def test_states_are_found_wherever_they_are(states: set[int], boundary: int, rounds: int) -> None:
    groups, present = [STATE, group(), STATE], [states, set(range(40)), states]
    search, asked = searched(groups, a_prompt(30 * CHUNK + 1), 0, present)
    assert (search.boundary, asked) == (boundary, rounds)


def test_no_state_is_of_the_token_before_a_boundary() -> None:
    present = [set(range(9))] * 2
    assert searched([STATE, group()], a_prompt(4 * CHUNK), 0, present)[0].boundary == 3
    assert searched([STATE, group()], a_prompt(4 * CHUNK + 1), 0, present)[0].boundary == 4
    assert searched([STATE, group()], a_prompt(4 * CHUNK), 3, present)[0].boundary == 3
    assert searched([STATE], a_prompt(CHUNK), 0, [{0}])[0].boundary == 0
    assert STATE.first_chunk(4 * CHUNK, CHUNK) == 3


@pytest.mark.parametrize(
    "window_tokens, end_tokens, first_chunk",
    [
        (0, 1000, 0),
        (64, 64, 0),
        (64, 94, 0),  # token 94 reads from 31 on
        (64, 95, 1),
        (64, 128, 2),  # from 65 on, whose block begins at 64
        (64, 127, 2),
        (65, 128, 2),
        (66, 128, 1),  # from 63 on, in the block at 48
        (1, 128, 4),
    ],
)
def test_the_first_chunk_that_a_window_needs(window_tokens: int, end_tokens: int, first_chunk: int) -> None:
    assert group(window_tokens).first_chunk(end_tokens, CHUNK) == first_chunk


def test_several_groups_count_as_one_run_from_the_farthest_source() -> None:
    search = BoundarySearch([group(), group(33)], a_prompt(5 * CHUNK), 1)
    staging, disk = (EngineMatchRun(2, source, 0.0) for source in (EngineSource.STAGING, EngineSource.DISK))
    assert search.asks() == [(0, 1)]
    search.found(0, 1, MatchResult(5, runs=(staging, staging)))
    search.found(1, 1, MatchResult(5, runs=(disk, staging)))  # what is on disk has left the window
    assert search.match.runs == (EngineMatchRun(4, EngineSource.STAGING, 0.0),)
    search = BoundarySearch([group(), group(33)], a_prompt(5 * CHUNK), 1)
    search.found(0, 1, MatchResult(5, runs=(staging, staging)))
    search.found(1, 1, MatchResult(5, runs=(staging, disk)))
    assert search.match.runs == (EngineMatchRun(4, EngineSource.DISK, 0.0),)


def test_one_group_of_full_attention_keeps_its_own_runs() -> None:
    search = BoundarySearch([group()], a_prompt(5 * CHUNK), 0)
    match = MatchResult(
        3, 96, (EngineMatchRun(2, EngineSource.STAGING, 1.0), EngineMatchRun(1, EngineSource.DISK, 2.0))
    )
    search.found(0, 0, match)
    assert search.match is match


def test_blocks_that_have_left_the_window() -> None:
    assert first_held_chunk(np.array([0, 0, 0, 7, 8, 9]), 0, 3) == 2
    assert first_held_chunk(np.array([0, 0, 6, 7, 8, 9]), 0, 3) == 1
    assert first_held_chunk(np.array([1, 2, 6, 7]), 0, 2) == 0
    assert first_held_chunk(np.array([0, 0, 0, 0]), 1, 2) == 2
    assert first_held_chunk(np.array([1, 0, 2, 3, 4, 0]), 2, 3) == 3, "of a later member"
    assert first_held_token([0, 0, 5, 6], 0, 16) == 32
    assert first_held_token([0, 0, 5, 6], 48, 16) == 48
    assert first_held_token([0, 0], 0, 16) == 32
