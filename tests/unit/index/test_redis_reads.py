"""Commands made for many groups at once are those made one by one."""

import secrets

import pytest

from kvpool.core.cluster import ChainQuery
from kvpool_index.adapters.redis_reads import read_groups, read_whole_groups
from kvpool_index.core.entries import GroupRead, group_read, group_reads, part_reads, whole_groups

KEYSPACE = b"\r\n$8\r\n" + bytes(10)


@pytest.mark.parametrize("count", [0, 1, 2, 33])
def test_whole_groups_are_read_as_any_group(count: int) -> None:
    hashes = secrets.token_bytes(256 * count)
    groups = [
        GroupRead(hashes[at : at + 16], [hashes[each : each + 8] for each in range(at, at + 256, 16)])
        for at in range(0, len(hashes), 256)
    ]
    assert read_whole_groups(b"kv", KEYSPACE, hashes).split() == read_groups(b"kv", KEYSPACE, groups)


@pytest.mark.parametrize("first", [0, 1, 15, 16, 20])
@pytest.mark.parametrize("count", [0, 1, 12, 16, 17, 60])
def test_a_chain_is_cut_where_its_groups_end(first: int, count: int) -> None:
    query = ChainQuery(
        keyspace=KEYSPACE,
        chunk_hashes=secrets.token_bytes(16 * count),
        first_chunk_index=first,
        group_head_hash=bytes(16) if first % 16 else b"",
    )
    start, end = whole_groups(query)
    assert 0 <= start <= end <= count and (end - start) % 16 == 0
    assert (first + start) % 16 == 0 or start == count
    parts = [*part_reads(query, 0, start), *part_reads(query, start, end), *part_reads(query, end, count)]
    assert parts == group_reads(query)
    assert parts == [group_read(query, number) for number in range(len(parts))]
