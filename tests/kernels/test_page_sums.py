"""Sum tables equal those of the page format, and verification finds what was changed."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from kvpool.core import page as page_format
from kvpool.core.page import PageKey
from kvpool.kernels.page_sums import (
    SumScratch,
    can_sum,
    page_sums_reference,
    sum_columns,
    sum_pages,
    verify_pages,
)
from kvpool.kernels.tables import SUM_BLOCK_BYTES, PageColumn
from tests.kernels.paged_caches import POISON, random_bytes

KEY = PageKey(bytes(range(16)), bytes(range(16, 32)), 7)
BLOCK = SUM_BLOCK_BYTES
START = page_format.HEADER_BYTES
SPARE_BYTES = 24  # behind a page: nobody's

# Around the ends of stripes, groups and parts.
SMALL_BYTES = (241, 256, 257, 1024, 1025, 1088, 1089, 2049, 32769, 70001)


class Pages:
    """Pages of random payloads, each in a slot of its own, and the table that names them."""

    def __init__(self, sizes: Sequence[int], device: str, *, sealed: bool) -> None:
        self.sizes, self.device = list(sizes), device
        self.slots = [self._slot(size_bytes, seed, sealed).to(device) for seed, size_bytes in enumerate(sizes)]
        self.columns = max(map(sum_columns, sizes))
        table = torch.zeros((len(sizes), 8), dtype=torch.int64)
        for row, slot, size_bytes in zip(table, self.slots, sizes, strict=True):
            row[PageColumn.PAYLOAD_ADDRESS] = slot.data_ptr() + START
            row[PageColumn.PAYLOAD_BYTES] = size_bytes
            row[PageColumn.PRESENT] = 1
        self.table = table.to(device)

    def _slot(self, size_bytes: int, seed: int, sealed: bool) -> Tensor:
        slot = torch.full((page_format.page_bytes(size_bytes) + SPARE_BYTES,), POISON, dtype=torch.uint8)
        slot[START : START + size_bytes] = random_bytes((size_bytes,), "cpu", seed)
        if sealed:
            page_format.seal(slot.numpy(), KEY, 1, size_bytes)
        return slot

    def scratch(self) -> SumScratch:
        scratch = SumScratch.allocate(len(self.sizes) * self.columns, self.device)
        scratch.partials.fill_(-1)  # whatever an earlier launch left
        return scratch

    def sum(self, programs: int | None = None) -> None:
        scratch = self.scratch()
        sum_pages(self.table, self.columns, scratch, programs=programs)
        assert not scratch.arrivals.any()

    def faults(self, programs: int | None = None) -> list[list[int]]:
        found = torch.full((len(self.sizes), self.columns), 7, dtype=torch.int32, device=self.device)
        verify_pages(self.table, found, self.scratch(), programs=programs)
        rows: list[list[int]] = found.tolist()
        return rows

    def flip(self, page: int, at: int, bit: int = 0) -> None:
        self.slots[page][at] ^= 1 << bit


def expected_slot(slot: Tensor, size_bytes: int) -> Tensor:
    """A slot whose sum table is there, by xxhash."""
    expected = slot.cpu().clone()
    payload = expected[START : START + size_bytes].numpy()
    sums = [xxh3_64_intdigest(payload[at : at + BLOCK].data) for at in range(0, size_bytes, BLOCK)]
    table = torch.from_numpy(np.array(sums, dtype="<u8").view(np.uint8))
    expected[START + size_bytes : START + size_bytes + table.numel()] = table
    return expected


def assert_summed(pages: Pages, programs: int | None = None) -> None:
    expected = [expected_slot(slot, size) for slot, size in zip(pages.slots, pages.sizes, strict=True)]
    pages.sum(programs)
    for slot, wanted, size_bytes in zip(pages.slots, expected, pages.sizes, strict=True):
        assert torch.equal(slot.cpu(), wanted), f"page of {size_bytes} bytes"


@pytest.mark.parametrize("size_bytes", [*SMALL_BYTES[:8], 5000, BLOCK + 300])
def test_the_reference_is_xxh3(size_bytes: int) -> None:
    payload = random_bytes((size_bytes,), "cpu")
    sums = [xxh3_64_intdigest(block.numpy().data) for block in torch.split(payload, BLOCK)]
    assert page_sums_reference(payload).numpy().view(np.uint64).tolist() == sums


def test_sums_of_pages_of_many_sizes_in_one_launch(device: str) -> None:
    assert_summed(Pages(SMALL_BYTES, device, sealed=False))


@pytest.mark.parametrize("size_bytes", [BLOCK - 1, BLOCK, BLOCK + 241, 600 << 10])
def test_sums_of_large_blocks(size_bytes: int, device: str) -> None:
    assert_summed(Pages([size_bytes], device, sealed=False), programs=3)


def test_equals_the_sum_table_of_a_sealed_page(device: str) -> None:
    pages = Pages([BLOCK + 999, 4096], device, sealed=True)
    sealed = [slot.clone() for slot in pages.slots]
    for slot, size_bytes in zip(pages.slots, pages.sizes, strict=True):
        slot[START + size_bytes : page_format.page_bytes(size_bytes)] = POISON
    pages.sum()
    assert all(map(torch.equal, pages.slots, sealed))
    assert page_format.verify(pages.slots[0].cpu().numpy(), KEY, 1, BLOCK + 999) is None


def test_good_pages_have_no_faults_and_stay_as_they_are(device: str) -> None:
    pages = Pages([700, BLOCK + 300, 1024], device, sealed=True)
    sealed = [slot.clone() for slot in pages.slots]
    assert pages.faults(programs=2) == [[0, 7], [0, 0], [0, 7]]  # entries of no block are left alone
    assert all(map(torch.equal, pages.slots, sealed))


FLIPS = [
    (0, "lane 0 of the first stripe"),
    (64 + 8, "lane 1 of the second"),
    (640 + 16, "lane 2 in the middle of a group"),
    (960 + 31, "lane 3 of a group's last stripe"),
    (1024 + 32, "lane 4 of the next group"),
    (1088 + 47, "lane 5"),
    (1152 + 48, "lane 6"),
    (1216 + 63, "lane 7 of the last full stripe"),
    (1299, "the last byte"),
    (1300, "the first byte of the table"),
    (1307, "the last byte of the table"),
]


def test_any_flipped_bit_is_found(device: str) -> None:
    pages = Pages([1300] * (len(FLIPS) + 1), device, sealed=True)
    for number, (at, _place) in enumerate(FLIPS):
        pages.flip(number, START + at, bit=number % 8)
    found = [row == [1] for row in pages.faults()]
    assert [place for (_at, place), bad in zip(FLIPS, found, strict=False) if not bad] == []
    assert not found[-1]  # the one that nobody touched


@pytest.mark.parametrize("at, block", [(BLOCK - 1, 0), (BLOCK, 1)])
def test_a_fault_names_its_block_as_the_page_format_does(at: int, block: int, device: str) -> None:
    pages = Pages([BLOCK + 701], device, sealed=True)
    pages.flip(0, START + at, 3)
    assert pages.faults() == [[int(number == block) for number in range(2)]]
    fault = page_format.verify(pages.slots[0].cpu().numpy(), KEY)
    assert fault is not None and fault.block == block


def test_absent_pages_are_left_out(device: str) -> None:
    pages = Pages([300, 301, 302], device, sealed=False)
    pages.table[1, PageColumn.PRESENT] = 0
    pages.table[1, PageColumn.PAYLOAD_ADDRESS] = 16  # nothing to be read or written
    pages.sum()
    assert bool((pages.slots[1][START + 301 :] == POISON).all())
    assert pages.faults() == [[0], [7], [0]]


def test_faults_are_also_written_to_the_host(device: str) -> None:
    pages = Pages([400, 400], device, sealed=True)
    pages.flip(1, START)
    found = torch.full((2, 1), 7, dtype=torch.int32, device=device)
    host = torch.full((2, 1), 7, dtype=torch.int32, pin_memory=device == "cuda")
    verify_pages(pages.table, found, pages.scratch(), host_faults=host)
    assert found.tolist() == host.tolist() == [[0], [1]]


@pytest.mark.parametrize("rest", [1, 16, 128, 240])
def test_a_short_last_block_is_left_to_the_cpu(rest: int, device: str) -> None:
    assert can_sum(BLOCK) and can_sum(241) and can_sum(BLOCK + 241) and not can_sum(rest) and not can_sum(BLOCK + rest)
    pages = Pages([rest], device, sealed=True)
    assert pages.faults() == [[1]]  # never called good unseen
    sealed = pages.slots[0].clone()
    pages.sum()
    assert torch.equal(pages.slots[0], sealed)


def test_no_pages_are_no_launch(device: str) -> None:
    scratch = SumScratch.allocate(0, device)
    sum_pages(torch.empty((0, 8), dtype=torch.int64, device=device), 4, scratch)


def test_wrong_arguments_are_refused_by_name(device: str) -> None:
    pages = Pages([300, 300], device, sealed=False)
    with pytest.raises(ValueError, match="scratch has room for 1 blocks, 2 are needed"):
        sum_pages(pages.table, 1, SumScratch.allocate(1, device))
    with pytest.raises(ValueError, match="columns must be > 0, got 0"):
        sum_pages(pages.table, 0, pages.scratch())
    with pytest.raises(ValueError, match="pages"):
        sum_pages(pages.table.to(torch.int32), 1, pages.scratch())
    faults = torch.zeros((2, 1), dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="faults"):
        verify_pages(pages.table, faults[:1], pages.scratch())
    with pytest.raises(ValueError, match="host_faults"):
        verify_pages(pages.table, faults, pages.scratch(), host_faults=faults.to(torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [None, 24, 1])
def test_many_large_pages(programs: int | None, device: str) -> None:
    sizes = [2 << 20] * 40 + [1 << 20, (3 << 20) + 12345, 241]
    pages = Pages(sizes, device, sealed=False)
    assert_summed(pages, programs)
    good = pages.faults(programs)
    assert sum(map(sum, good)) == 7 * sum(pages.columns - sum_columns(size) for size in sizes)


@pytest.mark.gpu
def test_launches_that_follow_each_other_never_mix_up_parts(device: str) -> None:
    pages = Pages([2 << 20] * 32, device, sealed=True)
    scratch = pages.scratch()
    found = torch.zeros((200, 32, pages.columns), dtype=torch.int32, device=device)
    for faults in found:
        verify_pages(pages.table, faults, scratch)
    assert not found.any()
    assert not scratch.arrivals.any()


@pytest.mark.gpu
def test_every_flipped_bit_of_a_page_is_found(device: str) -> None:
    size_bytes = 2100
    pages = Pages([size_bytes] * (8 * (size_bytes + 8)), device, sealed=True)
    for number in range(len(pages.slots)):
        pages.slots[number].copy_(pages.slots[0])
        pages.flip(number, START + number // 8, number % 8)
    assert all(row == [1] for row in pages.faults())
