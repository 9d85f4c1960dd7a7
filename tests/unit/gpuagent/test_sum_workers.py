"""Sums by worker processes: equal to those made here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.page import HEADER_BYTES, PageFault, page_bytes, verify
from kvpool_gpuagent.adapters.page_sums import SummedPage, address_of
from kvpool_gpuagent.adapters.sum_workers import SumWorkers
from tests.unit.gpuagent.sum_pages import BLOCK, CODEC, SIZES, Segment, no_fallback, sealed_here, summed, workers


@pytest.fixture(scope="module")
def shared() -> Iterator[SumWorkers]:
    """For tests that leave the workers as they are."""
    with workers() as sums:
        yield sums


@pytest.fixture
def segment(shared: SumWorkers) -> Iterator[Segment]:
    with closing(Segment()) as one:
        undo = shared.register(one.mapped())
        yield one
        undo()


def test_pages_are_sealed_as_by_one_process(
    shared: SumWorkers, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [sealed_here(page) for page in segment.pages]
    with monkeypatch.context() as patch:
        no_fallback(patch)
        shared.seal_all(segment.pages)
        assert shared.verify_all(segment.pages) == [None] * len(SIZES)
    assert [bytes(page.page) for page in segment.pages] == expected  # nothing beside the pages was written either
    assert [verify(page.page, page.key, CODEC, page.payload_bytes) for page in segment.pages] == [None] * len(SIZES)


def test_nothing_and_pages_without_payload(shared: SumWorkers) -> None:
    shared.seal_all([])
    assert shared.verify_all([]) == []
    with closing(Segment((0, 5))) as one:
        undo = shared.register(one.mapped())
        shared.seal_all(one.pages)
        assert shared.verify_all(one.pages) == [None, None]
        undo()


@pytest.mark.parametrize("page", [0, 4, 5, 6, 7])
@pytest.mark.parametrize("place", ["magic", "key", "length", "digest", "table", "first", "middle", "last"])
def test_faults_are_those_that_the_page_format_names(
    shared: SumWorkers, segment: Segment, page: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = segment.pages[page]
    end = HEADER_BYTES + one.payload_bytes
    at = {
        "magic": 0,
        "key": 8,
        "length": 41,
        "digest": 50,
        "table": end + 3,
        "first": HEADER_BYTES,
        "middle": HEADER_BYTES + one.payload_bytes // 2,
        "last": end - 1,
    }[place]
    shared.seal_all(segment.pages)
    one.page[at] ^= 0x40
    expected = [verify(one.page, one.key, CODEC, one.payload_bytes) for one in segment.pages]
    assert expected[page] is not None
    no_fallback(monkeypatch)
    assert shared.verify_all(segment.pages) == expected


def test_the_first_of_several_bad_blocks_is_named(shared: SumWorkers, segment: Segment) -> None:
    shared.seal_all(segment.pages)
    page = segment.pages[7]
    for block in (8, 2, 5):  # with two workers, in both shares
        page.page[HEADER_BYTES + block * BLOCK] ^= 1
    found = shared.verify_all([page, segment.pages[6]])
    assert found == [verify(page.page, page.key, CODEC, page.payload_bytes), None]
    assert found[0] is not None
    assert found[0].block == 2


def test_another_page_or_codec_is_a_fault(shared: SumWorkers, segment: Segment) -> None:
    shared.seal_all(segment.pages)
    page, other = segment.pages[5], segment.pages[6]
    asked = [
        SummedPage(page.page, other.key, CODEC, page.payload_bytes),
        SummedPage(page.page, page.key, CODEC + 1, page.payload_bytes),
        SummedPage(page.page, page.key, CODEC, page.payload_bytes - 1),
    ]
    expected = [verify(one.page, one.key, one.codec, one.payload_bytes) for one in asked]
    assert None not in expected
    assert shared.verify_all(asked) == expected


def test_segments_are_told_apart(shared: SumWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        segments = [stack.enter_context(closing(Segment(SIZES[number:], seed=number + 2))) for number in range(3)]
        undo = [shared.register(one.mapped()) for one in segments]
        pages = [page for number in range(6) for one in segments for page in one.pages[number : number + 1]]
        with monkeypatch.context() as patch:
            no_fallback(patch)
            shared.seal_all(pages)
        assert [verify(page.page, page.key, CODEC) for page in pages] == [None] * len(pages)
        undo.pop(1)()
        no_longer = segments[1].pages[4]
        with pytest.raises(AssertionError, match="in this process"), monkeypatch.context() as patch:
            no_fallback(patch)
            shared.verify_all([no_longer])
        assert shared.verify_all(pages) == [None] * len(pages)
        for one in undo:
            one()
            one()  # a second time does nothing


def test_workers_let_go_of_a_segment(shared: SumWorkers) -> None:
    def mapped_in() -> list[str]:
        lines = [line for pid in shared.pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        return [line for line in lines if "sum-test" in line]

    with closing(Segment()) as one:
        before_count = len(os.listdir("/proc/self/fd"))
        undo = shared.register(one.mapped())
        maps = mapped_in()
        assert len(maps) == 2
        assert all(" r--s " in line for line in maps)  # they cannot write
        undo()
        assert mapped_in() == []
        assert len(os.listdir("/proc/self/fd")) == before_count


def test_memory_outside_of_segments_is_summed_here(shared: SumWorkers, segment: Segment) -> None:
    bounce = [summed(np.full(page_bytes(size), 7, np.uint8).data, size, number) for number, size in enumerate(SIZES)]
    mixed = [page for pair in zip(bounce, segment.pages, strict=True) for page in pair]
    shared.seal_all(mixed)
    assert [verify(page.page, page.key, CODEC) for page in mixed] == [None] * len(mixed)
    bounce[4].page[HEADER_BYTES] ^= 1
    faults = shared.verify_all(mixed)
    assert faults.pop(8) == verify(bounce[4].page, bounce[4].key, CODEC)
    assert faults == [None] * len(faults)
    sealed = SummedPage(memoryview(bytes(segment.pages[6].page)), segment.pages[6].key, CODEC, SIZES[6])
    assert shared.verify_all([sealed]) == [None]  # memory that cannot be written has no address here


def test_a_slot_that_is_too_short_is_refused(shared: SumWorkers, segment: Segment) -> None:
    page = segment.pages[0]
    short = SummedPage(page.page[: page_bytes(1) - 1], page.key, CODEC, 1)
    with pytest.raises(InvalidRequest):
        shared.seal_all([short])
    page.seal()
    assert shared.verify_all([short]) == [verify(short.page, short.key, CODEC, 1)] != [None]


def test_threads_do_not_take_each_others_answers(shared: SumWorkers) -> None:
    with ExitStack() as stack:
        segments = [stack.enter_context(closing(Segment(seed=seed))) for seed in (11, 12, 13)]
        for one in segments:
            stack.callback(shared.register(one.mapped()))

        def work(one: Segment) -> list[list[PageFault | None]]:
            shared.seal_all(one.pages)
            return [shared.verify_all(one.pages[number % 3 :]) for number in range(20)]

        with ThreadPoolExecutor(3) as threads:
            results = list(threads.map(work, segments))
        assert not any(fault for result in results for faults in result for fault in faults)
        assert all(verify(page.page, page.key, CODEC) is None for one in segments for page in one.pages)


def test_an_address_is_found_only_within_its_segment(shared: SumWorkers, segment: Segment) -> None:
    start = address_of(memoryview(segment.memory))
    find = shared._crew.find
    found = find(start, len(segment.memory))
    assert found is not None
    number = found[0]
    assert find(start + 4096, 64) == (number, 4096)
    assert find(start - 1, 2) is None
    assert find(start + len(segment.memory) - 1, 2) is None
