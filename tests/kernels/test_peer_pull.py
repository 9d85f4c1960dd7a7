"""pull_rows equals its reference bit for bit, and writes nothing else."""

import pytest
import torch
from torch import Tensor

from kvpool_gpuagent.kernels.peer_pull import PullPlanes, pull_rows, pull_rows_reference, pull_shape
from tests.kernels.paged_caches import PagedCache, paged_cache

TOKENS = 150  # of each cache, and a little more where blocks are not filled


def own_cache(layout: str, block_rows: int, heads: int, row_bytes: int, device: str, *, layers: int = 2) -> PagedCache:
    return paged_cache(
        layout, layers=layers, blocks=TOKENS // block_rows + 1, block_rows=block_rows, heads=heads,
        row_bytes=row_bytes, device=device,
    )  # fmt: skip


def planes_between(sources: list[Tensor], destinations: list[Tensor]) -> PullPlanes:
    """Tables of these views, in order."""
    tables = [
        torch.tensor([[view.data_ptr(), *view.stride()[:3], 0, 0, 0, 0] for view in views], dtype=torch.int64)
        for views in (sources, destinations)
    ]
    shape = pull_shape(
        tables[0].tolist(),
        tables[1].tolist(),
        heads=sources[0].shape[2],
        row_bytes=sources[0].shape[3],
        source_block_rows=sources[0].shape[1],
        destination_block_rows=destinations[0].shape[1],
    )
    source, destination = (table.to(sources[0].device) for table in tables)
    return PullPlanes(source, destination, shape)


def some_slots(count: int, device: str, seed: int = 3) -> Tensor:
    """[count, 2]: sources with repeats, destinations without, in no order."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randint(0, TOKENS, (count,), generator=generator)
    return torch.stack([sources, torch.randperm(TOKENS, generator=generator)[:count]], dim=1).to(device)


def check(pulls: list[tuple[list[Tensor], list[Tensor]]], own: PagedCache, slots: Tensor, programs: int = 24) -> None:
    """That one pull of data (and scales) leaves every byte of the own cache as the reference does."""
    before = [buffer.clone() for buffer in own.buffers]
    for sources, destinations in pulls:
        pull_rows_reference(slots, sources, destinations)
    expected = [buffer.clone() for buffer in own.buffers]
    for buffer, old in zip(own.buffers, before, strict=True):
        buffer.copy_(old)
    pull_rows(slots, *(planes_between(*pull) for pull in pulls), programs=programs)
    for buffer, wanted in zip(own.buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


@pytest.mark.parametrize(
    ("peer", "peer_rows", "own", "own_rows", "heads", "row_bytes"),
    [
        pytest.param("nhd", 16, "nhd", 16, 8, 256, id="same layout"),
        pytest.param("interleaved", 1, "separate", 1, 2, 256, id="lightllm to sglang"),
        pytest.param("hnd", 16, "nhd", 64, 3, 160, id="hnd to nhd, other blocks, 80 x bf16"),
        pytest.param("nhd", 24, "hnd", 16, 5, 80, id="nhd to hnd, 80 x int8"),
        pytest.param("padded", 1, "padded", 16, 1, 1152, id="mla, 576 x bf16"),
        pytest.param("padded", 1, "padded", 1, 1, 578, id="mla, fp8 with inline scale"),
        pytest.param("separate", 1, "interleaved", 16, 3, 65, id="odd bytes"),
        pytest.param("separate", 1, "interleaved", 16, 1, 2304, id="2304 bytes"),
        pytest.param("separate", 1, "interleaved", 1, 1, 4, id="rows of 4 bytes"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 63, 150])
def test_equals_the_reference(
    peer: str, peer_rows: int, own: str, own_rows: int, heads: int, row_bytes: int, tokens: int, device: str
) -> None:
    theirs = own_cache(peer, peer_rows, heads, row_bytes, device)
    ours = own_cache(own, own_rows, heads, row_bytes, device)
    check([(list(theirs.views), list(ours.views))], ours, some_slots(tokens, device), programs=5)


@pytest.mark.parametrize("programs", [1, 3, 50])
def test_any_number_of_programs_share_the_work(programs: int, device: str) -> None:
    theirs, ours = (own_cache("nhd", 16, 8, 256, device, layers=3) for _ in range(2))
    check([(list(theirs.views), list(ours.views))], ours, some_slots(TOKENS, device), programs)


def test_heads_that_both_ranks_have_come_from_two_ranks_of_another_tp(device: str) -> None:
    # Four heads here, of which two sources hold two each (TP=2 inside the neighbour); the last two of theirs are ours.
    theirs = [own_cache("hnd", 16, 4, 128, device) for _ in range(2)]
    ours = own_cache("nhd", 16, 4, 128, device)
    sources = [view[:, :, 2:] for cache in theirs for view in cache.views]
    destinations = [view[:, :, first : first + 2] for first in (0, 2) for view in ours.views]
    check([(sources, destinations)], ours, some_slots(70, device))


def test_scales_travel_in_the_same_launch(device: str) -> None:
    theirs, ours = (own_cache("separate", 1, 4, 128, device) for _ in range(2))
    their_scales, our_scales = (own_cache("interleaved", rows, 4, 2, device) for rows in (1, 16))
    both = PagedCache((), ours.buffers + our_scales.buffers)
    data = (list(theirs.views), list(ours.views))
    check([data, (list(their_scales.views), list(our_scales.views))], both, some_slots(100, device))


def test_slots_beyond_four_gib_are_found(device: str) -> None:
    # Only what is written of such an allocation takes memory, at least on the CPU.
    theirs = own_cache("separate", 1, 1, 64, device)
    token_stride = (1 << 31) // 64 + 64
    buffer = torch.empty(TOKENS * token_stride, dtype=torch.uint8, device=device)
    far = buffer.as_strided((TOKENS, 1, 1, 64), (token_stride, 64, 64, 1))
    slots = torch.tensor([[5, 149], [6, 1], [7, 70]], device=device)
    pull_rows(slots, planes_between([theirs.views[0]], [far]))
    for source, destination in slots.tolist():
        assert torch.equal(far[destination], theirs.views[0][source])


@pytest.mark.parametrize("row_bytes", [16, 48, 80, 1152, 21 * 16, 4096, 3 * 65536])
def test_a_tile_has_room_for_all_tokens_that_it_touches(row_bytes: int) -> None:
    constants = pull_shape([], [], **(SIZES | {"row_bytes": row_bytes})).constants()
    tile_bytes, tiles = constants["TILE"] * 8, 1000
    touched = [((tile + 1) * tile_bytes - 1) // row_bytes - tile * tile_bytes // row_bytes + 1 for tile in range(tiles)]
    assert max(touched) <= constants["TILE_TOKENS"] <= 512


def test_nothing_to_do_launches_nothing(device: str) -> None:
    cache = own_cache("separate", 1, 1, 64, device)
    none = PullPlanes(*(torch.zeros((0, 8), dtype=torch.int64, device=device),) * 2, pull_shape([], [], **SIZES))
    pull_rows(torch.zeros((0, 2), dtype=torch.int64, device=device), planes_between([cache.views[0]], [cache.views[1]]))
    pull_rows(some_slots(3, device), none)


SIZES = {"heads": 1, "row_bytes": 64, "source_block_rows": 1, "destination_block_rows": 1}


def test_wrong_tables_are_refused_by_name(device: str) -> None:
    def table(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    shape = pull_shape([], [], **SIZES)
    good = PullPlanes(table(2, 8), table(2, 8), shape)
    with pytest.raises(ValueError, match=r"^slots must"):
        pull_rows(table(2, 3), good)
    with pytest.raises(ValueError, match=r"^slots must"):
        pull_rows(table(2, 2, dtype=torch.int32), good)
    with pytest.raises(ValueError, match=r"^data.destination must"):
        pull_rows(table(2, 2), PullPlanes(table(2, 8), table(3, 8), shape))
    with pytest.raises(ValueError, match=r"^scales.source must"):
        pull_rows(table(2, 2), good, PullPlanes(table(2, 7), table(2, 8), shape))
    with pytest.raises(ValueError, match="programs > 0"):
        pull_rows(table(2, 2), good, programs=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "heads", "row_bytes"), [("nhd", 8, 256), ("hnd", 8, 256), ("padded", 1, 578)])
def test_large_pulls_equal_the_reference(layout: str, heads: int, row_bytes: int, device: str) -> None:
    # From the neighbour where there is one whose memory can be read, else from the same GPU.
    caches = [
        paged_cache(layout, layers=32, blocks=512, block_rows=16, heads=heads, row_bytes=row_bytes, device=device)
        for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(1)
    slots = torch.stack([torch.randperm(512 * 16, generator=generator)[:5000] for _ in range(2)], dim=1).to(device)
    check([(list(caches[0].views), list(caches[1].views))], caches[1], slots)
