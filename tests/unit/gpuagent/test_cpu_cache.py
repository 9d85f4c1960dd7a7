"""Copies of the CPU device against the slow reference: every layout and grid, any block order, partial first chunks."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core import reference
from kvpool.core.cancel import CancelToken
from kvpool.core.codecs import error_bound
from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import InvalidRequest
from tests.unit.gpuagent.cpu_caches import (
    CHUNK,
    DIM,
    HEADS,
    LAYERS,
    POISON,
    PRESETS,
    Cache,
    make_cache,
    make_cache_async,
)


def noise(cache: Cache, seed: int) -> None:
    random = np.random.default_rng(seed)
    for part in cache.memory:
        part[:] = random.integers(0, 256, part.size, dtype=np.uint8)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_gather_and_scatter_equal_the_reference(preset: str, data: st.DataObject) -> None:
    """Of all shards at once: pages of every split, of which a scatter takes each for itself."""
    block_tokens = 8 if preset == "vllm-cpu" else data.draw(st.sampled_from([1, 2, 8, 16, 32]), "block_tokens")
    layer_groups = data.draw(st.sampled_from([1, 2, 3, 4]), "layer groups")
    splits = data.draw(st.sampled_from([(1,), (2,), (4,), (1, 2), (1, 2, 4)]), "splits")
    cache = make_cache(preset, block_tokens, 2 * CHUNK // block_tokens + 3, layer_groups=layer_groups, splits=splits)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    noise(cache, int(random.integers(1 << 32)))
    wanted = CHUNK // block_tokens
    order = random.permutation(cache.layout.block_count)
    ids = np.sort(order[: 2 * wanted]) if data.draw(st.booleans(), "sorted") else order[: 2 * wanted]
    source, target = ids[:wanted].astype(np.int64), ids[wanted:].astype(np.int64)
    step = block_tokens if preset == "vllm-cpu" else 1
    skip_tokens = data.draw(st.integers(0, (CHUNK - 1) // step), "skip") * step

    pages = [cache.page(shard) for shard in range(cache.grid.shard_count)]
    assert cache.gather(pages, source)
    for page in pages:
        expected = reference.gather_payload_reference(
            cache.spec, cache.grid, page.shard, cache.layout, cache.memory, source
        )
        assert np.array_equal(page.payload, expected)
        assert (page.others == POISON).all()
    for page in pages:
        after = [part.copy() for part in cache.memory]
        reference.scatter_payload_reference(
            cache.spec, cache.grid, page.shard, cache.layout, after, target, page.payload, skip_tokens=skip_tokens
        )
        cache.scatter([page], target, skip_tokens)
        for ours, theirs in zip(cache.memory, after, strict=True):
            assert np.array_equal(ours, theirs)
    asyncio.run(cache.close())


@pytest.mark.parametrize("preset", ["vllm-nhd", "vllm-blhnc", "contiguous-int4"])
def test_ranks_of_other_tp_degrees_read_pages_in_part_or_several(preset: str) -> None:
    """TP 1 writes what TP 2 reads, and the other way round."""
    whole = make_cache(preset, 16, splits=(1, 2))
    halves = [make_cache(preset, 8, splits=(1, 2), heads=range(2 * part, 2 * part + 2)) for part in range(2)]
    noise(whole, 1)
    written, read, back = np.array([3, 1]), np.array([9, 2, 4, 7]), np.array([5, 8])
    page = whole.page(0)
    assert whole.gather([page], written)
    pages = []
    for part, half in enumerate(halves):
        half.scatter([page], read)
        pages.append(half.page(1 + part))
        assert half.gather([pages[part]], read)
    whole.scatter(pages, back)
    again = whole.page(0)
    assert whole.gather([again], back)
    if whole.spec.codec is Codec.RAW:
        assert np.array_equal(again.payload, page.payload)
    else:  # what is quantized again differs by what it was rounded to
        assert np.mean(again.payload == page.payload) > 0.9
    for one in (whole, *halves):
        asyncio.run(one.close())


class CancelledAfter(CancelToken):
    """Is cancelled once it was asked so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    @property
    def cancelled(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_a_stopped_gather_is_not_complete() -> None:
    cache = make_cache("vllm-nhd", 8)
    pages = [cache.page(0) for _ in range(6)]
    assert not cache.gather(pages, np.arange(4), CancelledAfter(3))
    assert sum(not (page.payload == POISON).all() for page in pages) == 3
    asyncio.run(cache.close())


async def test_a_cpu_cache_has_no_device_events() -> None:
    cache = await make_cache_async("mla", 8)
    with pytest.raises(InvalidRequest, match="event"):
        await cache.mapped.event_passed(0)
    await cache.close()


@pytest.mark.parametrize("preset", ["vllm-nhd-int8", "vllm-hnd-fp8", "contiguous-int4"])
def test_a_codec_is_undone_up_to_its_stated_error(preset: str) -> None:
    """What the engine had comes back within the bound, and pages are smaller by what the codec takes."""
    cache = make_cache(preset, 8)
    dtype = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}[cache.spec.dtype]
    before = []
    for seed, part in enumerate(cache.memory):
        values = torch.randn(part.size // dtype.itemsize, generator=torch.Generator().manual_seed(seed))
        part[:] = values.to(dtype).view(torch.uint8).numpy()
        before.append(torch.from_numpy(part.copy()).view(dtype).double().numpy())
    ids, page = np.arange(23, dtype=np.int64)[7:11], cache.page(0)
    assert cache.gather([page], ids)
    for part in cache.memory:
        part[:] = 0
    cache.scatter([page], ids)
    group = cache.spec.codec.format.scale_group_elements(DIM)
    moved = 0
    for part, old in zip(cache.memory, before, strict=True):
        now = torch.from_numpy(part.copy()).view(dtype).double().numpy().reshape(-1, group)
        written = now.any(axis=-1)
        stored = old.reshape(-1, group)[written]
        largest = np.abs(stored).max(axis=-1, keepdims=True)
        assert (np.abs(now[written] - stored) <= error_bound(cache.spec.codec, cache.spec.dtype, largest)).all()
        assert not np.array_equal(now[written], stored)
        moved += int(written.sum()) * group
    assert moved == LAYERS * 2 * CHUNK * HEADS * DIM
    assert page.payload_bytes < moved * dtype.itemsize
    asyncio.run(cache.close())


def test_a_quantized_engines_pages_are_those_of_its_own_rows_and_scales() -> None:
    cache = make_cache("lightllm-int8", 8, splits=(2,))
    noise(cache, 3)
    ids, page = np.array([3, 1, 9, 5]), cache.page(1)
    assert cache.gather([page], ids)
    positions = (ids[:, None] * 8 + np.arange(8)).ravel()
    heads = cache.grid.heads_of(1)
    expected = []
    for part in cache.memory:  # data [L, S, 2H, D], then scales [L, S, 2H, D / 8]
        tensor = part.reshape(LAYERS, -1, 2, HEADS, part.size // (LAYERS * 23 * 8 * 2 * HEADS))
        rows = tensor[:, positions, :, heads.start : heads.stop]  # [layer, token, plane, head, element]
        units = rows.reshape(LAYERS, CHUNK // 16, 16, *rows.shape[2:])
        expected.append(units.transpose(1, 0, 4, 2, 3, 5).tobytes())  # [unit, layer, head, token, plane, element]
    assert page.payload.tobytes() == b"".join(expected)
    asyncio.run(cache.close())
