"""Copies of the CPU device against the slow reference: every layout and grid, any block order, partial first chunks."""

import asyncio
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core import reference
from kvpool.core.codecs import error_bound
from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.page import HEADER_BYTES, PageFaultKind, PageKey, seal, verify
from kvpool_gpuagent.ports import PageCopy
from tests.unit.gpuagent.cpu_caches import (
    CHUNK,
    DIM,
    HEADS,
    KEYSPACE,
    LAYERS,
    PRESETS,
    make_cache,
    make_cache_async,
)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_gather_and_scatter_equal_the_reference(preset: str, data: st.DataObject) -> None:
    block_tokens = 8 if preset == "vllm-cpu" else data.draw(st.sampled_from([1, 2, 8, 16, 32]), "block_tokens")
    cuts = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 1), (1, 4), (3, 4)]), "cuts")
    cache = make_cache(preset, block_tokens, 2 * CHUNK // block_tokens + 3, cuts)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    for part in cache.memory:
        part[:] = random.integers(0, 256, part.size, dtype=np.uint8)
    wanted = CHUNK // block_tokens
    order = random.permutation(cache.layout.block_count)
    ids = np.sort(order[: 2 * wanted]) if data.draw(st.booleans(), "sorted") else order[: 2 * wanted]
    source, target = ids[:wanted].astype(np.int64), ids[wanted:].astype(np.int64)
    step = block_tokens if preset == "vllm-cpu" else 1
    skip_tokens = data.draw(st.integers(0, (CHUNK - 1) // step), "skip") * step

    for shard in range(cache.grid.shard_count):
        slot = cache.slot(shard)
        assert cache.gather([PageCopy(key=cache.key(shard), page=slot, block_ids=source)])
        assert verify(slot, cache.key(shard), cache.spec.codec) is None
        expected = reference.gather_payload_reference(cache.spec, cache.grid, shard, cache.layout, cache.memory, source)
        assert bytes(slot[HEADER_BYTES : HEADER_BYTES + expected.size]) == expected.tobytes()

        after = [part.copy() for part in cache.memory]
        reference.scatter_payload_reference(
            cache.spec, cache.grid, shard, cache.layout, after, target, expected, skip_tokens=skip_tokens
        )
        into = PageCopy(key=cache.key(shard), page=slot, block_ids=target, skip_tokens=skip_tokens)
        assert cache.scatter(into) == [None]
        for ours, theirs in zip(cache.memory, after, strict=True):
            assert np.array_equal(ours, theirs)
    asyncio.run(cache.close())


def test_a_page_that_fails_in_its_last_block_moves_nothing() -> None:
    cache = make_cache("vllm-nhd", 8, cuts=(1, 2))
    ids = np.arange(4, dtype=np.int64)
    good, bad = cache.slot(0), cache.slot(1)
    cache.memory[0][:] = 7
    assert cache.gather(
        [
            PageCopy(key=cache.key(0), page=good, block_ids=ids),
            PageCopy(key=cache.key(1), page=bad, block_ids=ids),
        ]
    )
    bad[-9 - 8 * (len(bad) // (64 << 10))] ^= 1  # the last payload byte
    cache.memory[0][:] = 0
    faults = cache.scatter(
        PageCopy(key=cache.key(1), page=bad, block_ids=ids), PageCopy(key=cache.key(0), page=good, block_ids=ids)
    )
    assert [fault and fault.kind for fault in faults] == [PageFaultKind.BAD_SUM, None]
    written = cache.memory[0].reshape(2, -1, HEADS, DIM * 2)[:, :CHUNK, :]
    heads = cache.grid.heads_of(0)
    assert (written[:, :, heads.start : heads.stop] == 7).all()
    rest = [head for head in range(HEADS) if head not in heads]
    assert not written[:, :, rest].any()
    asyncio.run(cache.close())


@pytest.mark.parametrize("wrong", ["key", "length", "short slot"])
def test_a_page_of_another_key_or_length_moves_nothing(wrong: str) -> None:
    cache = make_cache("mla", 8)
    ids, slot = np.arange(4, dtype=np.int64), cache.slot(0)
    page, key = slot, cache.key(0)
    assert cache.gather([PageCopy(key=key, page=slot, block_ids=ids)])
    if wrong == "key":
        key = PageKey(KEYSPACE, b"d" * 16, 0)
    elif wrong == "length":
        seal(slot, key, Codec.RAW, 64)
    else:
        page = slot[:-1]
    before = [part.copy() for part in cache.memory]
    (fault,) = cache.scatter(PageCopy(key=key, page=page, block_ids=ids[::-1].copy()))
    assert fault is not None
    assert fault.kind in (PageFaultKind.WRONG_KEY, PageFaultKind.WRONG_LENGTH)
    for ours, theirs in zip(cache.memory, before, strict=True):
        assert np.array_equal(ours, theirs)
    asyncio.run(cache.close())


def test_a_stopped_gather_is_not_complete() -> None:
    cache = make_cache("vllm-nhd", 8)
    ids = np.arange(4, dtype=np.int64)
    copies = [PageCopy(key=cache.key(0), page=cache.slot(0), block_ids=ids) for _ in range(6)]
    asked = count()
    assert not cache.gather(copies, lambda: next(asked) >= 3)
    sealed = [bytes(copy.page[:4]) == b"KVPG" for copy in copies]
    assert sum(sealed) == 3
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
    ids, slot = np.arange(23, dtype=np.int64)[7:11], cache.slot(0)
    copy = PageCopy(key=cache.key(0), page=slot, block_ids=ids)
    assert cache.gather([copy])
    for part in cache.memory:
        part[:] = 0
    assert cache.scatter(copy) == [None]
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
    assert len(slot) < moved * dtype.itemsize
    asyncio.run(cache.close())


def test_a_quantized_engines_pages_are_those_of_its_own_rows_and_scales() -> None:
    cache = make_cache("lightllm-int8", 8, cuts=(1, 2))
    for seed, part in enumerate(cache.memory):
        part[:] = np.random.default_rng(seed).integers(0, 256, part.size, dtype=np.uint8)
    ids, slot = np.array([3, 1, 9, 5]), cache.slot(1)
    assert cache.gather([PageCopy(key=cache.key(1), page=slot, block_ids=ids)])
    positions = (ids[:, None] * 8 + np.arange(8)).ravel()
    heads = cache.grid.heads_of(1)
    expected = []
    for part in cache.memory:  # data [L, S, 2H, D], then scales [L, S, 2H, D / 8]
        tensor = part.reshape(LAYERS, -1, 2, HEADS, part.size // (LAYERS * 23 * 8 * 2 * HEADS))
        expected.append(tensor[:, positions, :, heads.start : heads.stop].transpose(0, 2, 1, 3, 4).tobytes())
    assert bytes(slot[HEADER_BYTES:]).startswith(b"".join(expected))
    asyncio.run(cache.close())
