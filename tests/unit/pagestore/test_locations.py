"""What is announced: the last word on each shard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.outcome import Tier
from kvpool_pagestore.core.locations import LocationBuffer
from tests.fixtures.pagestore import KEYSPACE, metadata, page_key


def test_changes_of_a_chunk_are_merged_and_named_by_their_group() -> None:
    buffer = LocationBuffer()
    buffer.note(page_key(17), metadata(17).group_head_hash, Tier.STAGING, True)
    buffer.note(page_key(17, shard=1), metadata(17).group_head_hash, Tier.STAGING, True)
    buffer.note(page_key(17), metadata(17).group_head_hash, Tier.DISK, True)
    staging, disk = buffer.take()
    assert (staging.added_shards, staging.removed_shards, staging.tier) == (0b11, 0, Tier.STAGING)
    assert staging.group_head_hash == page_key(16).chunk_hash
    assert (disk.added_shards, disk.tier) == (0b1, Tier.DISK)
    assert not buffer and buffer.take() == []


def test_a_dropped_keyspace_leaves_nothing_pending() -> None:
    buffer = LocationBuffer()
    buffer.note(page_key(1), metadata(1).group_head_hash, Tier.DISK, True)
    buffer.note(page_key(1, keyspace=b"o" * 16), metadata(1).group_head_hash, Tier.DISK, True)
    buffer.forget_keyspace(KEYSPACE)
    assert [change.keyspace for change in buffer.take()] == [b"o" * 16]


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()))))
def test_whoever_applies_the_changes_knows_the_truth(rounds: list[list[tuple[int, bool]]]) -> None:
    buffer, truth, known = LocationBuffer(), 0, 0
    for steps in rounds:
        for shard, present in steps:
            buffer.note(page_key(1, shard=shard), metadata(1).group_head_hash, Tier.STAGING, present)
            truth = truth | 1 << shard if present else truth & ~(1 << shard)
        for change in buffer.take():
            assert not change.added_shards & change.removed_shards
            known = (known | change.added_shards) & ~change.removed_shards
        assert known == truth
