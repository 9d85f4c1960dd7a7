"""The pagestore's configuration refuses what cannot work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool_pagestore.config import PROMOTION_SHARE, PageStoreConfig


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"arena_bytes": 0}, "arena_bytes"),
        ({"segment_bytes": 2 << 30}, "segment_bytes"),
        ({"dirty_bytes": 1 << 30}, "dirty_bytes"),
        ({"disk_bytes": -1}, "disk_bytes"),
        ({"heartbeat_interval_ms": 0}, "heartbeat_interval_ms"),
        ({"tenant": ""}, "tenant"),
    ],
)
def test_a_value_that_cannot_work_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PageStoreConfig(data_dir=Path("data"), **changes)


def test_writers_get_half_of_the_arena_and_never_the_share_of_promotion() -> None:
    assert PageStoreConfig(data_dir=Path("data"), arena_bytes=1 << 30).writer_bytes == 1 << 29
    most = (1 << 30) - (1 << 30) // PROMOTION_SHARE
    assert PageStoreConfig(data_dir=Path("data"), arena_bytes=1 << 30, dirty_bytes=most).writer_bytes == most


@pytest.mark.parametrize(
    ("arena_bytes", "size_bytes"),
    [(32 << 20, 4 << 20), (1 << 30, 64 << 20), (8 << 30, 512 << 20), (512 << 30, 1 << 30)],
)
def test_segments_that_are_made_at_the_start_are_few_and_large(
    arena_bytes: int, size_bytes: int, tmp_path: Path
) -> None:
    segment_bytes = min(64 << 20, arena_bytes // 8)
    config = PageStoreConfig(data_dir=tmp_path, arena_bytes=arena_bytes, segment_bytes=segment_bytes)
    assert config.prepared_bytes == size_bytes
    assert replace(config, prepared_segment_bytes=8192).prepared_bytes == 8192
    with pytest.raises(ValueError, match="prepared_segment_bytes"):
        replace(config, prepared_segment_bytes=2 * arena_bytes)
