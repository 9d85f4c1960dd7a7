"""Transfers whose pages lie in an arena segment and are summed by worker processes."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import pytest

from kvpool.core import layout_presets
from kvpool.core.elements import Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import HEADER_BYTES, PageFault, PageFaultKind, verify
from kvpool.core.segment import MappedSegment
from kvpool.testing import eventually
from kvpool_gpuagent.adapters.gpu_lane import Lane
from kvpool_gpuagent.core.ways import Way
from tests.fixtures.gpu_caches import host_cache

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.FP32, chunk_tokens=32)


@pytest.mark.parametrize("way", [Way.BURSTS, Way.RUNS])
async def test_pages_in_a_segment_are_sealed_and_verified(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    async with host_cache(SPEC, layout_presets.sglang_layout, sum_processes=1) as one:
        copies = [one.copy(number, 0, [2 * number, 2 * number + 1]) for number in range(3)]
        slot_bytes = len(copies[0].page)
        descriptor = os.memfd_create("arena")
        os.ftruncate(descriptor, 3 * slot_bytes)
        mapping = mmap.mmap(descriptor, 3 * slot_bytes)
        arena = memoryview(mapping)
        undo = one.sums.register(MappedSegment(arena, descriptor))
        os.close(descriptor)
        copies = [
            replace(copy, page=arena[number * slot_bytes : (number + 1) * slot_bytes])
            for number, copy in enumerate(copies)
        ]
        for direction in (one.cache.store, one.cache.load):
            direction.chooser.pin(way)
        await eventually(lambda: one.sums.is_fast)
        monkeypatch.setattr(Lane, "turn_s", 1.0)  # as beside a busy engine: sums are for the CPU

        with monkeypatch.context() as patch:
            patch.setattr("kvpool.core.page._sums", None)  # not for this process
            assert await one.cache.gather(copies, lambda: False)
        assert [verify(copy.page, copy.key) for copy in copies] == [None] * 3
        assert [one.payload(copy) for copy in copies] == [one.expected(copy) for copy in copies]
        copies[1].page[HEADER_BYTES + 5] ^= 1
        with monkeypatch.context() as patch:
            patch.setattr("kvpool.core.page._sums", None)
            faults = await one.cache.scatter(copies)
        assert faults == [None, PageFault(PageFaultKind.BAD_SUM, 0), None]
        undo()
    for view in (*(copy.page for copy in copies), arena):
        view.release()
    mapping.close()  # would raise if anything kept a view
