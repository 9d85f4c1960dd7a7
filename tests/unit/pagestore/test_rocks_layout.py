"""Records of pages: what this version writes, and what an older one wrote."""

from __future__ import annotations

import struct

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import PageCorrupt
from kvpool_pagestore.adapters.rocks_layout import PageRecord

_METADATA = PageMetadata(
    parent_hash=b"p" * 16,
    chunk_index=3,
    group_head_hash=b"g" * 16,
    ttl_ms=5,
    priority=-7,
    pinned_until_us=9,
    prompt_tokens=11,
    expires_us=13,
)


def test_a_record_comes_back_as_it_was() -> None:
    record = PageRecord(1, 2, 3, _METADATA)
    assert PageRecord.decode(record.encode()) == record


def test_a_record_without_prompt_and_expiry_is_read_as_unknown_and_never() -> None:
    old = struct.pack("<BIQQ16sq16sqiq", 1, 1, 2, 3, b"p" * 16, 3, b"g" * 16, 5, -7, 9)
    found = PageRecord.decode(old)
    assert (found.volume, found.position, found.page_bytes) == (1, 2, 3)
    assert (found.metadata.pinned_until_us, found.metadata.prompt_tokens, found.metadata.expires_us) == (9, 0, 0)


@pytest.mark.parametrize("cut", [0, 1, 20, 80, 96])
def test_a_record_that_is_cut_off_is_damage(cut: int) -> None:
    with pytest.raises(PageCorrupt):
        PageRecord.decode(PageRecord(1, 2, 3, _METADATA).encode()[:cut])
