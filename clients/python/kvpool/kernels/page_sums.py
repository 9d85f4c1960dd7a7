"""Sum tables of pages on the device: write them after a gather, check payloads against them before a scatter.

A sum is XXH3_64bits (default secret, seed 0) of 256 KiB of payload, the last block short. XXH3 reads long input in
stripes of 64 bytes, eight u64 lanes each; after every 16 stripes, a group, its eight accumulators are scrambled. What a
group adds does not depend on the accumulators: programs sum up parts of a block side by side, and the one that ends
last runs the chain of scrambles, 256 short steps. So one launch is enough, and one page occupies many multiprocessors.

Only blocks of more than 240 bytes are summed here; XXH3 has other algorithms for shorter input. `can_sum` tells whether
a payload ends in such a block: the page is then for the caller to sum and verify on the CPU.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.kernels import xxh3
from kvpool.kernels.launching import Launch, check_table
from kvpool.kernels.tables import PAGE_COLUMNS, SUM_BLOCK_BYTES, PageColumn

GROUPS_OF_BLOCK = SUM_BLOCK_BYTES // xxh3.GROUP_BYTES
# A part has 32 KiB: with 4 warps each thread has one pair of lanes of one group, and 16 loads of 16 bytes in flight.
GROUPS_OF_PART = 32
_WARPS = 4

# Rows of the key table, [20, 8] u64: one for each stripe of a group, then these.
_SCRAMBLE_ROW, _LAST_ROW, _MERGE_ROW, _INITIAL_ROW = (tl.constexpr(row) for row in range(16, 20))

_PAYLOAD_ADDRESS = tl.constexpr(PageColumn.PAYLOAD_ADDRESS.value)
_PAYLOAD_BYTES = tl.constexpr(PageColumn.PAYLOAD_BYTES.value)
_HEADS = tl.constexpr(PageColumn.HEADS.value)
_PAGE_COLUMNS = tl.constexpr(PAGE_COLUMNS)
_BLOCK_BYTES = tl.constexpr(SUM_BLOCK_BYTES)
_SHORT_BYTES = tl.constexpr(xxh3.SHORT_BYTES)
_GROUPS_OF_BLOCK = tl.constexpr(GROUPS_OF_BLOCK)
_GROUPS_OF_PART = tl.constexpr(GROUPS_OF_PART)
_PARTS = tl.constexpr(GROUPS_OF_BLOCK // GROUPS_OF_PART)
_SCRAMBLE_PRIME = tl.constexpr(xxh3.PRIME32_1)
_LENGTH_PRIME = tl.constexpr(xxh3.PRIME64[0])
_AVALANCHE_PRIME = tl.constexpr(xxh3.AVALANCHE_PRIME)


def can_sum(payload_bytes: int) -> bool:
    """Whether the kernels can sum all blocks of such a payload: the last one must have more than 240 bytes."""
    return (payload_bytes - 1) % SUM_BLOCK_BYTES + 1 > xxh3.SHORT_BYTES


def sum_columns(payload_bytes: int) -> int:
    """Sum blocks of a payload."""
    return -(-payload_bytes // SUM_BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class SumScratch:
    """Device memory between the parts of blocks, 16 KiB a block. Launches that share it must run one after another.

    partials: [S, 2048] int64, in any state: the sums of each group of S blocks.
    arrivals: [S] int32: how many parts of a block are done; zero before and after each launch.
    """

    partials: Tensor
    arrivals: Tensor

    @classmethod
    def allocate(cls, blocks: int, device: torch.device | str) -> Self:
        """Room for launches of pages x columns <= blocks. raises: what torch raises when there is no memory."""
        partials = torch.empty((blocks, GROUPS_OF_BLOCK * xxh3.LANES), dtype=torch.int64, device=device)
        return cls(partials, torch.zeros(blocks, dtype=torch.int32, device=device))

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the key table, the partials and the arrivals."""
        keys = _key_table(self.partials.device)
        return keys.data_ptr(), self.partials.data_ptr(), self.arrivals.data_ptr()


@triton.jit
def _product(words: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """What words multiply to: low half times high half of each, keyed; u64."""
    keyed = words ^ keys
    return keyed.to(tl.uint32).to(tl.uint64) * (keyed >> 32).to(tl.uint32).to(tl.uint64)


@triton.jit
def _bytes_to_words(first: tl.tensor, lanes: tl.tensor) -> tl.tensor:
    """u64 words, little endian, at pointer `first` to u8, which need not be aligned."""
    words = tl.zeros([8], tl.uint64)
    for byte in tl.static_range(8):
        words |= tl.load(first + lanes * 8 + byte).to(tl.uint64) << (8 * byte)
    return words


@triton.jit
def _add_up_groups(block: tl.tensor, stripe_count: tl.tensor, first_group: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """What the stripes of a part add to the accumulators, [_GROUPS_OF_PART, 8] u64.

    block: pointer to the block's words; stripe_count: of the block, without its last, which may overlap others.
    """
    lanes = tl.arange(0, 8)[None, :]
    groups = first_group + tl.arange(0, _GROUPS_OF_PART)[:, None]
    products = tl.zeros([_GROUPS_OF_PART, 8], tl.uint64)
    sums = tl.zeros([_GROUPS_OF_PART, 8], tl.uint64)
    for stripe in tl.static_range(16):
        number = groups * 16 + stripe
        exists = number < stripe_count
        words = tl.load(block + (number * 8 + lanes), mask=exists, other=0)
        products += tl.where(exists, _product(words, tl.load(keys + stripe * 8 + lanes)), 0)
        sums += words
    # A lane's words themselves go to the accumulator of its neighbour.
    even, odd = tl.split(tl.reshape(sums, [_GROUPS_OF_PART, 4, 2]))
    return products + tl.reshape(tl.join(odd, even), [_GROUPS_OF_PART, 8])


@triton.jit
def _finish_block(payload: tl.tensor, block_bytes: tl.tensor, partials: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """The sum of a block, u64, from what its groups add. payload: pointer to the block's u8."""
    lanes = tl.arange(0, 8)
    scramble = tl.load(keys + _SCRAMBLE_ROW * 8 + lanes)
    accumulators = tl.load(keys + _INITIAL_ROW * 8 + lanes)
    full_groups = (block_bytes - 1) // 1024
    # Other multiprocessors wrote the partials: read them from the L2 cache, many at once (a full block has 5 x 51).
    for group in tl.range(0, full_groups, loop_unroll_factor=51):
        accumulators += tl.load(partials + group * 8 + lanes, cache_modifier=".cg")
        accumulators = (accumulators ^ (accumulators >> 47) ^ scramble) * tl.full([8], _SCRAMBLE_PRIME, tl.uint64)
    accumulators += tl.load(partials + full_groups * 8 + lanes, cache_modifier=".cg")
    last = payload + (block_bytes - 64)
    accumulators += _product(_bytes_to_words(last, lanes), tl.load(keys + _LAST_ROW * 8 + lanes))
    accumulators += _bytes_to_words(last, lanes ^ 1)

    keyed = accumulators ^ tl.load(keys + _MERGE_ROW * 8 + lanes)
    even, odd = tl.split(tl.reshape(keyed, [4, 2]))
    digest = tl.sum((even * odd) ^ tl.umulhi(even, odd)) + block_bytes.to(tl.uint64) * _LENGTH_PRIME
    digest = (digest ^ (digest >> 37)) * tl.full([], _AVALANCHE_PRIME, tl.uint64)
    return digest ^ (digest >> 32)


@triton.jit
def _write_fault(
    faults: tl.tensor, host_faults: tl.tensor, entry: tl.tensor, fault: tl.tensor, HOST_FAULTS: tl.constexpr
) -> None:
    tl.store(faults.to(tl.pointer_type(tl.int32)) + entry, fault)
    if HOST_FAULTS:
        tl.store(host_faults.to(tl.pointer_type(tl.int32)) + entry, fault)


@triton.jit(do_not_specialize=["pages", "faults", "host_faults", "keys", "partials", "arrivals", "items"])
def page_sums_kernel(
    pages: tl.int64,
    faults: tl.int64,
    host_faults: tl.int64,
    keys: tl.int64,
    partials: tl.int64,
    arrivals: tl.int64,
    items: tl.int32,
    COLUMNS: tl.constexpr,
    VERIFY: tl.constexpr,
    HOST_FAULTS: tl.constexpr,
) -> None:
    key_words = tl.multiple_of(keys.to(tl.pointer_type(tl.uint64)), 16)
    for number in range(tl.program_id(0), items, tl.num_programs(0)):
        item = tl.cast(number, tl.int32)  # in the interpreter it is a plain int
        part, nth_block = item % _PARTS, item // _PARTS
        column = nth_block % COLUMNS
        page = pages.to(tl.pointer_type(tl.int64)) + (nth_block // COLUMNS).to(tl.int64) * _PAGE_COLUMNS
        address, payload_bytes = tl.load(page + _PAYLOAD_ADDRESS), tl.load(page + _PAYLOAD_BYTES)
        start = column.to(tl.int64) * _BLOCK_BYTES
        block_bytes = tl.minimum(payload_bytes - start, _BLOCK_BYTES).to(tl.int32)
        groups = (block_bytes - 1) // 1024 + 1
        # The address is looked at here so that all of the row comes in one trip over the host link.
        exists = (tl.load(page + _HEADS) != 0) & (payload_bytes > start) & (address != 0)
        if exists & (part * _GROUPS_OF_PART < groups) & (block_bytes > _SHORT_BYTES):
            words = tl.multiple_of((address + start).to(tl.pointer_type(tl.uint64)), 16)
            added = _add_up_groups(words, (block_bytes - 1) // 64, part * _GROUPS_OF_PART, key_words)
            own = tl.multiple_of(partials.to(tl.pointer_type(tl.uint64)), 16)
            own += nth_block.to(tl.int64) * (_GROUPS_OF_BLOCK * 8)
            rows = part * _GROUPS_OF_PART + tl.arange(0, _GROUPS_OF_PART)[:, None]
            tl.store(own + (rows * 8 + tl.arange(0, 8)[None, :]), added)
            # All threads' stores come before the arrival, and the last to arrive sees those of all parts.
            tl.debug_barrier()
            arrived = arrivals.to(tl.pointer_type(tl.int32)) + nth_block
            if tl.atomic_add(arrived, 1, sem="acq_rel") == (groups - 1) // _GROUPS_OF_PART:
                tl.store(arrived, 0)
                payload = address.to(tl.pointer_type(tl.uint8))
                digest = _finish_block(payload + start, block_bytes, own, key_words)
                entry = payload + (payload_bytes + column * 8)
                if VERIFY:
                    bytes_ = tl.arange(0, 8)
                    differs = tl.load(entry + bytes_) != (digest >> (bytes_ * 8)).to(tl.uint8)
                    fault = tl.max(differs.to(tl.int32))
                    _write_fault(faults, host_faults, nth_block, fault, HOST_FAULTS)
                else:
                    bytes_ = tl.arange(0, 8)
                    tl.store(entry + bytes_, (digest >> (bytes_ * 8)).to(tl.uint8))
        elif VERIFY and exists & (part == 0):  # too short for this algorithm: never called good
            _write_fault(faults, host_faults, nth_block, 1, HOST_FAULTS)


def page_sums_reference(payload: Tensor) -> Tensor:
    """The sum table of a payload, [bytes] uint8 on the CPU: [blocks] int64, the bits of each u64."""
    sums = [xxh3.xxh3_64_reference(block) for block in torch.split(payload, SUM_BLOCK_BYTES)]
    return torch.tensor([value - (value >> 63 << 64) for value in sums], dtype=torch.int64)


def sum_pages(pages: Tensor, columns: int, scratch: SumScratch, *, programs: int | None = None) -> None:
    """Write the sum table of every present page behind its payload, in one launch.

    pages:    [N, 8] int64: see kvpool.kernels.tables; PAYLOAD_ADDRESS is divisible by 16, PAYLOAD_BYTES any number > 0.
              On the device or in pinned memory, unchanged until the launch has run.
    columns:  sum blocks of the largest page, or more.
    scratch:  room for N * columns blocks, on the device.
    programs: at most so many; None takes one for each 32 KiB.
    raises:   ValueError naming the argument, before any launch.

    A block of 240 bytes or fewer (see `can_sum`) leaves its entry as it was. Reads the payloads once, moves 1/16 of
    them to scratch and back. Runs on the current stream.
    """
    _launch(pages, None, None, columns, scratch, programs)


def verify_pages(
    pages: Tensor,
    faults: Tensor,
    scratch: SumScratch,
    *,
    host_faults: Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Compare every present page with the sum table behind its payload, in one launch.

    pages, scratch, programs: as for `sum_pages`.
    faults:      [N, F] int32, on the device; F is at least the sum blocks of the largest page. Entries of the blocks of
                 present pages become 0 (good) or 1 (bad); all others stay as they are.
    host_faults: gets the same, in pinned memory: there when the launch has run, so that nothing has to be copied.
    raises:      ValueError naming the argument, before any launch.

    A block of 240 bytes or fewer (see `can_sum`) is called bad. Whether the sum table is the one that was sealed is
    the header digest's to say, which is not looked at here.
    """
    _launch(pages, faults, host_faults, faults.shape[-1], scratch, programs)


def _launch(
    pages: Tensor,
    faults: Tensor | None,
    host_faults: Tensor | None,
    columns: int,
    scratch: SumScratch,
    programs: int | None,
) -> None:
    count, blocks = pages.shape[0], pages.shape[0] * columns
    tables = [check_table("pages", pages, torch.int64, PAGE_COLUMNS)]
    for name, table in (("faults", faults), ("host_faults", host_faults)):
        tables.append(0 if table is None else check_table(name, table, torch.int32, columns, count))
    if columns <= 0:
        raise ValueError(f"columns must be > 0, got {columns}")
    if scratch.arrivals.numel() < blocks:
        raise ValueError(f"scratch has room for {scratch.arrivals.numel()} blocks, {blocks} are needed")
    started = sums_launch(columns, verify=faults is not None, host_faults=host_faults is not None)
    started.start(count, *tables, *scratch.addresses, programs=programs)


@lru_cache
def sums_launch(columns: int, *, verify: bool, host_faults: bool) -> Launch:
    """What is launched: start it with the addresses of pages, faults, host faults (0 for none), and a SumScratch's."""
    constants = {"COLUMNS": columns, "VERIFY": verify, "HOST_FAULTS": host_faults}
    return Launch(page_sums_kernel, constants, _WARPS, columns * (GROUPS_OF_BLOCK // GROUPS_OF_PART))


@lru_cache
def _key_table(device: torch.device) -> Tensor:
    """[20, 8] int64, the bits of each u64: what keys the stripes of a group, then the rows named above."""
    offsets = [*range(0, 8 * 16, 8), xxh3.SCRAMBLE_OFFSET, xxh3.LAST_OFFSET, xxh3.MERGE_OFFSET]
    rows = [*map(xxh3.secret_words, offsets), list(xxh3.INITIAL)]
    signed = [[word - (word >> 63 << 64) for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int64).to(device)
