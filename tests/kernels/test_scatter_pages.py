"""scatter_launch equals its reference bit for bit, and writes nothing else."""

import pytest
import torch
from torch import Tensor

from kvpool_gpuagent.kernels.gather import gather_pages_reference
from kvpool_gpuagent.kernels.scatter import scatter_launch, scatter_pages_reference
from kvpool_gpuagent.kernels.tables import PageColumn
from tests.kernels.paged_caches import (
    PagedCache,
    Pages,
    PayloadPlaces,
    make_pages,
    paged_cache,
    pick_blocks,
    random_bytes,
    start,
)
from tests.kernels.test_gather_pages import CASES, POSITIONS


def filled_pages(cache: PagedCache, count: int, places: PayloadPlaces) -> tuple[Pages, Tensor]:
    """Pages with random payloads, and their rows as the reference takes them."""
    device = str(cache.buffers[0].device)
    pages = make_pages(count, places.start + places.size_bytes, len(cache.views), places.heads, device)
    pages.payloads[:] = random_bytes((count, pages.payload_bytes), device, 7)
    return pages, places.rows_of(pages.payloads)


def check(
    cache: PagedCache,
    pages: Pages,
    places: PayloadPlaces,
    blocks: Tensor,
    skips: list[int],
) -> None:
    """That the kernel leaves every byte of all buffers as the reference does, which is asked to skip so many tokens."""
    before = [buffer.clone() for buffer in cache.buffers]
    scatter_pages_reference(cache.views, blocks, places.rows_of(pages.payloads), torch.tensor(skips))
    expected = [buffer.clone() for buffer in cache.buffers]
    for buffer, old in zip(cache.buffers, before, strict=True):
        buffer.copy_(old)
    planes = cache.planes(places)
    shape = cache.shape(planes, places.positions)
    start(scatter_launch(shape), pages.table.to(blocks.device), blocks, planes)
    for buffer, wanted in zip(cache.buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


@pytest.mark.parametrize(("layout", "block_rows", "heads", "row_bytes"), CASES)
@pytest.mark.parametrize("first_head", [0, 2])
def test_equals_the_reference(
    layout: str, block_rows: int, heads: int, row_bytes: int, first_head: int, device: str
) -> None:
    cache = paged_cache(
        layout, layers=2, blocks=200 // block_rows + 6, block_rows=block_rows, heads=heads, row_bytes=row_bytes,
        device=device, first_head=first_head,
    )  # fmt: skip
    places = cache.payload(POSITIONS, start=16)
    pages, _rows = filled_pages(cache, 2, places)
    blocks = pick_blocks(2, POSITIONS, block_rows, 200 // block_rows + 6, device)
    pages.table[0, PageColumn.SKIP_TOKENS] = 37  # a partial first chunk
    check(cache, pages, places, blocks, [37, 0])


@pytest.mark.parametrize("positions", [1, 15, 16, 63])
def test_sizes_that_fill_no_unit(positions: int, device: str) -> None:
    cache = paged_cache("block-major", layers=3, blocks=20, block_rows=8, heads=2, row_bytes=32, device=device)
    places = cache.payload(positions)
    pages, _rows = filled_pages(cache, 2, places)
    pages.table[1, PageColumn.SKIP_TOKENS] = positions // 2
    check(cache, pages, places, pick_blocks(2, positions, 8, 20, device), [0, positions // 2])


@pytest.mark.parametrize("layout", ["block-major", "nhd", "padded"])
def test_some_heads_of_a_page(layout: str, device: str) -> None:
    cache = paged_cache(layout, layers=2, blocks=16, block_rows=16, heads=2, row_bytes=64, device=device, first_head=1)
    places = cache.payload(POSITIONS, start=16, first_head=2, more_heads=3)
    pages, _rows = filled_pages(cache, 2, places)
    check(cache, pages, places, pick_blocks(2, POSITIONS, 16, 16, device), [0, 0])


def test_pages_of_fewer_heads_than_the_launch_has_room_for(device: str) -> None:
    cache = paged_cache("block-major", layers=1, blocks=8, block_rows=16, heads=4, row_bytes=64, device=device)
    places = cache.payload(POSITIONS)
    pages, rows = filled_pages(cache, 2, places)
    pages.table[1, PageColumn.HEADS] = 3
    blocks = pick_blocks(2, POSITIONS, 16, 8, device)
    rows[1, :, :, 3] = gather_pages_reference(cache.views, blocks, POSITIONS)[1, :, :, 3]
    expected = [view.clone() for view in cache.views]
    scatter_pages_reference(expected, blocks, rows, torch.tensor([0, 0]))
    planes = cache.planes(places)
    start(scatter_launch(cache.shape(planes, POSITIONS)), pages.table.to(device), blocks, planes)
    assert all(torch.equal(view, wanted) for view, wanted in zip(cache.views, expected, strict=True))


@pytest.mark.parametrize("skip_tokens", [1, 15, 16, 63, 64, 1000])
@pytest.mark.parametrize(("block_rows", "row_bytes"), [(1, 578), (16, 2048)])
def test_only_the_last_tokens_of_a_page(skip_tokens: int, block_rows: int, row_bytes: int, device: str) -> None:
    cache = paged_cache(
        "separate", layers=1, blocks=128 // block_rows, block_rows=block_rows, heads=1, row_bytes=row_bytes,
        device=device,
    )  # fmt: skip
    places = cache.payload(POSITIONS, start=16)
    pages, _rows = filled_pages(cache, 1, places)
    pages.table[:, PageColumn.SKIP_TOKENS] = skip_tokens
    check(cache, pages, places, pick_blocks(1, POSITIONS, block_rows, 128 // block_rows, device), [skip_tokens])


def test_absent_pages_leave_the_cache_as_it_is(device: str) -> None:
    cache = paged_cache("nhd", layers=2, blocks=16, block_rows=16, heads=2, row_bytes=64, device=device)
    places = cache.payload(POSITIONS, start=16)
    pages, _rows = filled_pages(cache, 3, places)
    pages.table[1, PageColumn.HEADS] = 0
    check(cache, pages, places, pick_blocks(3, POSITIONS, 16, 16, device), [0, POSITIONS, 0])


def test_planes_beyond_a_pages_own_stay_as_they_are(device: str) -> None:
    cache = paged_cache("nhd", layers=2, blocks=16, block_rows=16, heads=2, row_bytes=64, device=device)
    places = cache.payload(POSITIONS)
    pages, rows = filled_pages(cache, 1, places)
    pages.table[:, PageColumn.FIRST_PLANE], pages.table[:, PageColumn.PLANE_COUNT] = 1, 2
    before = [view.clone() for view in cache.views]
    blocks = pick_blocks(1, POSITIONS, 16, 16, device)
    planes = cache.planes(places)
    start(scatter_launch(cache.shape(planes, POSITIONS)), pages.table.to(device), blocks, planes)
    for nth, (view, old) in enumerate(zip(cache.views, before, strict=True)):
        if nth in (1, 2):
            scatter_pages_reference([old], blocks, rows[:, nth : nth + 1], torch.tensor([0]))
        assert torch.equal(view, old)


def test_scale_planes_are_a_launch_of_their_own(device: str) -> None:
    cache = paged_cache("interleaved", layers=1, blocks=160, block_rows=1, heads=4, row_bytes=6, device=device)
    places = cache.payload(POSITIONS, start=16)
    pages, rows = filled_pages(cache, 2, places)
    pages.table[:, PageColumn.FIRST_PLANE], pages.table[:, PageColumn.PLANE_COUNT] = 1 << 40, 0
    pages.table[:, PageColumn.SCALE_PLANE_COUNT] = torch.tensor([2, 0])
    expected = [view.clone() for view in cache.views]
    blocks = pick_blocks(2, POSITIONS, 1, 160, device)
    scatter_pages_reference(expected, blocks, rows, torch.tensor([0, POSITIONS]))
    planes = cache.planes(places)
    start(scatter_launch(cache.shape(planes, POSITIONS), scales=True), pages.table.to(device), blocks, planes)
    assert all(torch.equal(view, wanted) for view, wanted in zip(cache.views, expected, strict=True))


def test_a_few_programs_do_the_work_of_many(device: str) -> None:
    cache = paged_cache("nhd", layers=2, blocks=32, block_rows=16, heads=8, row_bytes=256, device=device)
    places = cache.payload(POSITIONS)
    pages, rows = filled_pages(cache, 3, places)
    blocks = pick_blocks(3, POSITIONS, 16, 32, device)
    planes = cache.planes(places)
    expected = [view.clone() for view in cache.views]
    scatter_pages_reference(expected, blocks, rows, torch.tensor([0, 0, 0]))
    start(scatter_launch(cache.shape(planes, POSITIONS)), pages.table.to(device), blocks, planes, programs=5)
    assert all(torch.equal(view, wanted) for view, wanted in zip(cache.views, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layout", "block_rows", "heads", "row_bytes"),
    [
        ("nhd", 16, 8, 256),
        ("hnd", 64, 8, 256),
        ("block-major", 16, 8, 256),
        ("interleaved", 1, 8, 256),
        ("padded", 1, 1, 1152),
        ("padded", 1, 1, 578),
    ],
)
def test_large_bursts_equal_the_reference(
    layout: str, block_rows: int, heads: int, row_bytes: int, device: str
) -> None:
    cache = paged_cache(
        layout, layers=16, blocks=8192 // block_rows, block_rows=block_rows, heads=heads, row_bytes=row_bytes,
        device=device,
    )  # fmt: skip
    places = cache.payload(256)
    pages, _rows = filled_pages(cache, 8, places)
    pages.table[5, PageColumn.HEADS] = 0
    pages.table[0, PageColumn.SKIP_TOKENS] = 100
    blocks = pick_blocks(8, 256, block_rows, 8192 // block_rows, device)
    check(cache, pages, places, blocks, [100, 0, 0, 0, 0, 256, 0, 0])
