"""A chain of hashes: as one piece, and one by one."""

import numpy as np

from kvpool.client.hashing import Prompt
from kvpool.core.chunks import ROOT_HASH, chunk_hashes

KEY = bytes(32)
TOKENS = np.arange(40 * 4 + 3, dtype=np.uint32)
HASHES = tuple(chunk_hashes(KEY, TOKENS, 4))


def test_a_chain_is_packed_and_read_one_by_one() -> None:
    chain = Prompt.of(KEY, TOKENS, 4)
    assert chain.hashes == HASHES
    assert chain.packed == b"".join(HASHES)
    assert chain.packed_hashes(3, 6) == b"".join(HASHES[3:6])
    assert (chain.chunk_count, chain.head_hash) == (40, HASHES[0])
    assert (chain.parent_hash(0), chain.parent_hash(7)) == (ROOT_HASH, HASHES[6])


def test_an_extended_chain_is_that_of_the_longer_prompt() -> None:
    chain = Prompt.of(KEY, TOKENS[:42], 4)
    assert chain.extended(KEY, TOKENS) == Prompt.of(KEY, TOKENS, 4)
    assert Prompt.of(KEY, TOKENS[:3], 4).extended(KEY, TOKENS) == Prompt.of(KEY, TOKENS, 4)


def test_heads_are_those_of_the_groups_that_chunks_fall_into() -> None:
    chain = Prompt.of(KEY, TOKENS, 4)
    for first in range(40):
        for count in range(40 - first + 1):
            groups = sorted({chunk // 16 * 16 for chunk in range(first, first + count)})
            assert chain.group_head_hashes(first, count) == tuple(HASHES[group] for group in groups)


def test_a_prompt_without_a_full_chunk_has_no_head() -> None:
    chain = Prompt.of(KEY, TOKENS[:3], 4)
    assert (chain.chunk_count, chain.hashes, chain.head_hash, chain.group_head_hashes(0, 0)) == (0, (), b"", ())
