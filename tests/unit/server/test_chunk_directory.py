"""What a directory learns before a node serves comes in short steps, whatever its chunks are."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvpool.core.cluster import LocationChange
from kvpool.core.location_digest import range_of
from kvpool.core.outcome import Tier
from kvpool_server.node.chunk_directory import ChunkDirectory, FixedLocations

CHUNKS, STEP_CHUNKS = 10_000, 2048


@pytest.mark.parametrize("groups", [1, 3, CHUNKS])
def test_few_chunks_are_learnt_in_one_step(groups: int) -> None:
    drawn = random.Random(groups)
    heads = [drawn.randbytes(16) for _ in range(groups)]
    held = [
        LocationChange(b"k" * 16, drawn.randbytes(16), heads[number % groups], Tier.DISK, 1, 0)
        for number in range(CHUNKS)
    ]
    directory = ChunkDirectory(FixedLocations(held))
    ranges = {range_of(head) for head in heads}
    learnt = [0]
    for _ in directory.load():
        learnt.append(sum(map(directory.chunk_count, ranges)))
    assert learnt[-1] == CHUNKS
    assert max(after - before for before, after in pairwise(learnt)) <= STEP_CHUNKS
