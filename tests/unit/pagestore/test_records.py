"""Records of pages in extents, taken apart many at a time."""

from __future__ import annotations

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import PageCorrupt
from kvpool_pagestore.adapters.records import PageRecord, RecordColumns, UsedBlocks
from kvpool_pagestore.core.extents import Extent
from kvpool_pagestore.core.kept_metadata import unpack_metadata

PLAIN = PageMetadata(parent_hash=b"p" * 16, chunk_index=3, group_head_hash=b"g" * 16, ttl_ms=5, priority=-7)


def record(number: int, pieces: int) -> PageRecord:
    return PageRecord(1000 + number, number, tuple(Extent(1, piece * 10, 2) for piece in range(pieces)), PLAIN)


@pytest.mark.parametrize("pieces", [(1, 1), (1, 3, 1), (2,), ()])
def test_what_a_start_needs_of_records_is_what_they_say_one_by_one(pieces: tuple[int, ...]) -> None:
    records = [record(number, count) for number, count in enumerate(pieces)]
    encoded = [each.encode() for each in records]
    page_bytes, metadata, blocks = RecordColumns.of(encoded)
    assert page_bytes.tolist() == [each.page_bytes for each in records]
    assert [unpack_metadata(each.tobytes()) for each in metadata] == [PLAIN] * len(records)
    used = UsedBlocks.joined([blocks, RecordColumns.of(()).used])
    assert list(map(tuple, used.of_file(1).tolist())) == sorted(extent for each in records for extent in each.extents)
    assert len(used.of_file(2)) == 0
    assert used.last_number == max((each.number for each in records), default=0)


def test_a_record_from_before_ends_of_life_has_none() -> None:
    old = record(1, 1).encode()[:-16]
    (metadata,) = RecordColumns.of([record(2, 1).encode(), old]).metadata[1:]
    assert unpack_metadata(metadata.tobytes()) == PLAIN


@pytest.mark.parametrize("damaged", [b"", b"\xff" + record(1, 1).encode()[1:], record(1, 1).encode()[:-1]])
def test_what_no_version_wrote_is_damage(damaged: bytes) -> None:
    with pytest.raises(PageCorrupt):
        RecordColumns.of([record(2, 1).encode(), damaged])
