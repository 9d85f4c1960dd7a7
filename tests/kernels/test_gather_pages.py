"""gather_launch equals its reference bit for bit, and writes nothing else."""

import pytest
import torch
from torch import Tensor

from kvpool_gpuagent.kernels.gather import gather_launch, gather_pages_reference
from kvpool_gpuagent.kernels.tables import PageColumn, copy_shape
from tests.kernels.paged_caches import (
    HEADER_BYTES,
    POISON,
    PagedCache,
    make_pages,
    paged_cache,
    pick_blocks,
    random_bytes,
    start,
)

# layout, tokens of a block, heads, bytes of a row
CASES = [
    pytest.param("nhd", 16, 8, 256, id="nhd, 128 x bf16"),
    pytest.param("nhd", 64, 3, 160, id="nhd, 80 x fp16, one block a chunk"),
    pytest.param("hnd", 16, 4, 256, id="hnd, 128 x bf16"),
    pytest.param("hnd", 16, 5, 80, id="hnd, 80 x int8"),
    pytest.param("interleaved", 1, 2, 128, id="interleaved, 64 x bf16"),
    pytest.param("interleaved", 1, 1, 768, id="interleaved, 192 x fp32"),
    pytest.param("separate", 1, 3, 192, id="separate, 192 x fp8"),
    pytest.param("separate", 64, 1, 64, id="separate, 64 x int8"),
    pytest.param("padded", 1, 1, 1152, id="mla, 576 x bf16"),
    pytest.param("padded", 16, 1, 576, id="mla, 576 x fp8"),
    pytest.param("padded", 1, 1, 578, id="mla, fp8 with inline scale"),
    pytest.param("padded", 4, 7, 65, id="odd bytes"),
    pytest.param("nhd", 24, 2, 2304, id="last block in part, 2304 bytes"),
    pytest.param("block-major", 16, 4, 256, id="block-major, 128 x bf16"),
    pytest.param("block-major", 64, 2, 64, id="block-major, one block a chunk"),
]
POSITIONS = 64


def gathered(
    cache: PagedCache, blocks: Tensor, *, positions: int = POSITIONS, first_head: int = 0, more_heads: int = 0
) -> tuple[Tensor, Tensor]:
    """What the kernel made of poisoned pages, whole slots, and what it should be."""
    places = cache.payload(positions, start=16, first_head=first_head, more_heads=more_heads)
    planes = cache.planes(places)
    heads = cache.views[0].shape[2]
    pages = make_pages(len(blocks), 16 + places.size_bytes, len(cache.views), heads, str(blocks.device))
    expected = pages.slots.clone()
    rows = gather_pages_reference(cache.views, blocks, positions)
    places.put(expected[:, HEADER_BYTES : HEADER_BYTES + pages.payload_bytes], rows)
    start(gather_launch(cache.shape(planes, positions)), pages.table.to(blocks.device), blocks, planes)
    return pages.slots, expected


@pytest.mark.parametrize(("layout", "block_rows", "heads", "row_bytes"), CASES)
@pytest.mark.parametrize("first_head", [0, 2])
def test_equals_the_reference(
    layout: str, block_rows: int, heads: int, row_bytes: int, first_head: int, device: str
) -> None:
    cache = paged_cache(
        layout, layers=2, blocks=200 // block_rows + 6, block_rows=block_rows, heads=heads, row_bytes=row_bytes,
        device=device, first_head=first_head,
    )  # fmt: skip
    blocks = pick_blocks(2, POSITIONS, block_rows, 200 // block_rows + 6, device)
    result, expected = gathered(cache, blocks)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("positions", [1, 15, 16, 63])
def test_sizes_that_fill_no_unit(positions: int, device: str) -> None:
    cache = paged_cache("block-major", layers=3, blocks=20, block_rows=8, heads=2, row_bytes=32, device=device)
    result, expected = gathered(cache, pick_blocks(2, positions, 8, 20, device), positions=positions)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("layout", ["block-major", "nhd", "padded"])
def test_other_heads_of_a_page_stay_as_they_are(layout: str, device: str) -> None:
    cache = paged_cache(layout, layers=2, blocks=16, block_rows=16, heads=2, row_bytes=64, device=device, first_head=1)
    result, expected = gathered(cache, pick_blocks(2, POSITIONS, 16, 16, device), first_head=2, more_heads=3)
    assert torch.equal(result, expected)


def test_repeated_blocks_and_heads_are_read_again(device: str) -> None:
    cache = paged_cache("hnd", layers=1, blocks=4, block_rows=16, heads=1, row_bytes=128, device=device)
    # A head that two shards hold (replicated KV heads) is a stride of zero.
    cache = PagedCache(tuple(view.expand(-1, -1, 4, -1) for view in cache.views), cache.buffers)
    blocks = torch.tensor([[3, 3, 0, 3], [1, 0, 1, 0]], device=device)
    result, expected = gathered(cache, blocks)
    assert torch.equal(result, expected)


def test_absent_pages_and_planes_and_heads_beyond_a_pages_own_stay_poisoned(device: str) -> None:
    cache = paged_cache("separate", layers=2, blocks=320, block_rows=1, heads=3, row_bytes=64, device=device)
    places = cache.payload(POSITIONS)
    planes = cache.planes(places)
    pages = make_pages(5, places.size_bytes, 4, 3, device)
    blocks = pick_blocks(5, POSITIONS, 1, 320, device)
    pages.table[1, PageColumn.HEADS] = 0
    pages.table[2, PageColumn.PLANE_COUNT] = 1
    pages.table[3, PageColumn.FIRST_PLANE], pages.table[3, PageColumn.PLANE_COUNT] = 2, 2
    pages.table[4, PageColumn.HEADS] = 2
    rows = gather_pages_reference(cache.views, blocks, POSITIONS)
    rows[1], rows[2, 1:], rows[3, :2], rows[4, :, :, 2] = POISON, POISON, POISON, POISON
    expected = torch.full_like(pages.payloads, POISON)
    places.put(expected, rows)
    start(gather_launch(cache.shape(planes, POSITIONS)), pages.table.to(device), blocks, planes)
    assert torch.equal(pages.payloads, expected)


def test_scale_planes_are_a_launch_of_their_own(device: str) -> None:
    data = paged_cache("interleaved", layers=2, blocks=160, block_rows=1, heads=4, row_bytes=64, device=device)
    scales = paged_cache("interleaved", layers=2, blocks=160, block_rows=1, heads=4, row_bytes=2, device=device)
    of_data = data.payload(POSITIONS)
    of_scales = scales.payload(POSITIONS, start=of_data.size_bytes)
    planes = torch.cat([data.planes(of_data), scales.planes(of_scales)])
    pages = make_pages(2, of_data.size_bytes + of_scales.size_bytes, 4, 4, device)
    pages.table[:, PageColumn.FIRST_SCALE_PLANE] = 4
    pages.table[:, PageColumn.SCALE_PLANE_COUNT] = torch.tensor([4, 0])
    blocks = pick_blocks(2, POSITIONS, 1, 160, device)
    expected = torch.full_like(pages.payloads, POISON)
    of_data.put(expected, gather_pages_reference(data.views, blocks, POSITIONS))
    of_scales.put(expected[:1], gather_pages_reference(scales.views, blocks[:1], POSITIONS))
    start(gather_launch(data.shape(planes[:4], POSITIONS)), pages.table.to(device), blocks, planes)
    start(gather_launch(scales.shape(planes[4:], POSITIONS), scales=True), pages.table.to(device), blocks, planes)
    assert torch.equal(pages.payloads, expected)


def test_a_few_programs_do_the_work_of_many(device: str) -> None:
    cache = paged_cache("nhd", layers=2, blocks=32, block_rows=16, heads=8, row_bytes=256, device=device)
    places = cache.payload(POSITIONS)
    planes = cache.planes(places)
    pages = make_pages(3, places.size_bytes, 4, 8, device)
    blocks = pick_blocks(3, POSITIONS, 16, 32, device)
    start(gather_launch(cache.shape(planes, POSITIONS)), pages.table.to(device), blocks, planes, programs=5)
    assert torch.equal(places.rows_of(pages.payloads), gather_pages_reference(cache.views, blocks, POSITIONS))


def test_blocks_beyond_four_gib_are_found(device: str) -> None:
    # Only what is written of such an allocation takes memory, at least on the CPU.
    block_stride = (2 << 30) + 4096
    buffer = torch.empty(2 * block_stride + 4096, dtype=torch.uint8, device=device)
    view = buffer.as_strided((3, 16, 2, 64), (block_stride, 128, 64, 1))
    for block in range(3):
        view[block] = random_bytes((16, 2, 64), device, block)
    result, expected = gathered(PagedCache((view,), (buffer,), 1), torch.tensor([[2, 0, 1, 2]], device=device))
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("shift_bytes", "unit_bytes"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_the_unit_fits_the_alignment_of_the_planes(shift_bytes: int, unit_bytes: int, device: str) -> None:
    buffer = random_bytes((65 * 256 + 16,), device)
    view = buffer[shift_bytes : shift_bytes + 65 * 256].view(65, 1, 2, 128)
    cache = PagedCache((view,), (buffer,), 1)
    assert cache.shape(cache.planes(cache.payload(POSITIONS)), POSITIONS).unit_bytes == unit_bytes
    blocks = torch.arange(64, 0, -1, device=device)[None]
    result, expected = gathered(cache, blocks)
    assert torch.equal(result, expected)


def test_nothing_to_do_launches_nothing(device: str) -> None:
    empty = torch.zeros((0, 8), dtype=torch.int64, device=device)
    shape = copy_shape(
        [], positions=64, block_rows=16, most_heads=1, row_bytes=64, most_planes=2, row_planes=1, unit_rows=16
    )
    start(gather_launch(shape), empty, torch.zeros((0, 4), dtype=torch.int64, device=device), empty)


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
    planes = cache.planes(places)
    shape = cache.shape(planes, 256)
    pages = make_pages(8, places.size_bytes, len(cache.views), heads, device)
    blocks = pick_blocks(8, 256, block_rows, 8192 // block_rows, device)
    expected = gather_pages_reference(cache.views, blocks, 256)
    for table in (pages.table.to(device), pages.table.pin_memory()):
        pages.payloads.fill_(POISON)
        start(gather_launch(shape), table, blocks, planes)
        assert torch.equal(places.rows_of(pages.payloads), expected)
