"""Launches that an engine must refuse, by the name of what is wrong, and what it may say of those that it ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.core.elements import Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.launches import MOST_LAUNCH_PAGES, Launch, Launched, LaunchKind, LaunchPage, most_pages
from kvpool.core.layout_presets import vllm_nhd_layout
from kvpool.core.page import HEADER_BYTES, PageFault, PageFaultKind, page_bytes
from kvpool.core.plane_table import PlaneTable
from kvpool.wire.convert_launch import launch_from_proto, launch_to_proto, launched_from_proto, launched_to_proto

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.FP32, chunk_tokens=32)
LAYOUT = vllm_nhd_layout(SPEC, range(2), range(2), 8, 12)
TABLE = PlaneTable.of(SPEC, ShardGrid.of(SPEC), LAYOUT, [0] * len(LAYOUT.handle_sizes))
BODY_BYTES = page_bytes(TABLE.shards[0].payload_bytes) - HEADER_BYTES
SCRATCH_BYTES = 64 + BODY_BYTES
PAGE = LaunchPage(shard=0, chunk=1, scratch_offset=64, skip_tokens=31)
GOOD = Launch(7, LaunchKind.SCATTER, (PAGE,), np.array([[0, 1, 2, 3], [8, 9, 10, 11]]), True)


def with_page(**changes: Any) -> Launch:
    return replace(GOOD, pages=(replace(PAGE, **changes),))


def with_block(block: int) -> Launch:
    return replace(GOOD, block_ids=np.array([[0, 1, 2, 3], [8, 9, 10, block]]))


def test_a_launch_that_fits_is_launched() -> None:
    GOOD.check(TABLE, SCRATCH_BYTES)


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        (with_page(shard=5), "shard 5"),
        (with_page(chunk=2), r"pages\[0\].chunk must be one of 2, got 2"),
        (with_page(chunk=-1), r"pages\[0\].chunk"),
        (with_page(scratch_offset=72), r"pages\[0\].scratch_offset must be divisible by 16, got 72"),
        (with_page(scratch_offset=80), f"pages.*but the scratch has {SCRATCH_BYTES}"),
        (with_page(scratch_offset=-16), "but the scratch has"),
        (with_page(skip_tokens=32), r"pages\[0\].skip_tokens must lie in \[0, 32\), got 32"),
        (with_page(skip_tokens=-1), r"pages\[0\].skip_tokens"),
        (with_block(12), "blocks outside of the cache's 12"),
        (with_block(-1), "blocks outside"),
        (replace(GOOD, pages=()), "1 to 1024 pages, got 0"),
        (replace(GOOD, pages=(PAGE,) * (MOST_LAUNCH_PAGES + 1)), "got 1025"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused_naming_why(launch: Launch, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        launch.check(TABLE, SCRATCH_BYTES)


def test_faults_are_those_of_the_pages() -> None:
    assert Launched(7, ((1, 0),)).found([0, 0], TABLE) == [None, PageFault(PageFaultKind.BAD_SUM, 0)]
    for fault in ((2, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(InvalidRequest, match="launch 7 has no block"):
            Launched(7, (fault,)).found([0, 0], TABLE)


def test_launches_and_their_ends_travel_as_they_are() -> None:
    came = launch_from_proto(launch_to_proto(GOOD), 4)
    assert (came.ticket, came.kind, came.pages, came.sums) == (GOOD.ticket, GOOD.kind, GOOD.pages, GOOD.sums)
    assert came.block_ids.tolist() == GOOD.block_ids.tolist()
    for launched in (Launched(7, ((0, 1), (3, 2))), Launched(8, error=InvalidRequest("no"))):
        back = launched_from_proto(launched_to_proto(launched))
        assert (back.ticket, back.faults, type(back.error)) == (launched.ticket, launched.faults, type(launched.error))


def test_block_ids_that_are_no_whole_chunks_are_refused() -> None:
    message = launch_to_proto(GOOD)
    message.block_ids = message.block_ids[:-1]
    with pytest.raises(InvalidRequest, match="block_ids must be little-endian int64, 4 for each chunk"):
        launch_from_proto(message, 4)


def test_a_message_stays_small_whatever_the_layout() -> None:
    assert [most_pages(count) for count in (1, 128, 1 << 10, 1 << 20)] == [1024, 1024, 128, 1]
