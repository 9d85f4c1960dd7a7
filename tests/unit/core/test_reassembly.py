"""Any writer's pages are any reader's KV, whatever TP, PP, block size and engine layout either of them has."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core import page
from kvpool.core.codecs import decode_rows, encode_rows
from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.payload import ShardPayload
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference
from tests.unit.core.engine_caches import EngineCache, make_cache
from tests.unit.core.strategies import Fleet, fleets, splits_of

Bytes = npt.NDArray[np.uint8]
KEYSPACE, CHUNK = bytes(range(16)), bytes(range(16, 32))
MHA_PRESETS = (
    "contiguous",
    "vllm_nhd",
    "vllm_hnd",
    "vllm_blocks_nhd",
    "vllm_blocks_hnd",
    "vllm_lbnhc",
    "vllm_lbhnc",
    "vllm_blhnc",
    "vllm_bhlnc",
    "sglang",
    "lightllm",
)
MLA_PRESETS = ("mla", "sglang_mla", "vllm_mla", "lightllm_deepseek2_fp8")
SCALED_PRESETS = ("lightllm_quantized", "inline_scales", "block_scales")


@dataclass
class World:
    """One chunk's KV of a whole model, [layer, plane, position, head, bytes]."""

    spec: KeyspaceSpec
    data: Bytes
    scales: Bytes

    @classmethod
    def of(cls, spec: KeyspaceSpec, noise: np.random.Generator) -> "World":
        shape = (spec.group.layers, spec.planes, spec.positions, spec.group.kv_heads)
        data = noise.integers(0, 256, (*shape, spec.data_row_bytes), dtype=np.uint8)
        scales = noise.integers(0, 256, (*shape, spec.scale_row_bytes), dtype=np.uint8)
        return cls(spec, data, scales)

    def place(self, cache: EngineCache, block_ids: npt.NDArray[np.int64], first_position: int = 0) -> None:
        """Write the rank's part into its cache the way its engine would."""
        layout, heads = cache.layout, cache.layout.head_range
        rows_of_block = self.spec.positions // len(block_ids)
        for local, layer in enumerate(layout.layer_range):
            for plane in range(self.spec.planes):
                for position in range(first_position, self.spec.positions):
                    block, token = int(block_ids[position // rows_of_block]), position % rows_of_block
                    part = layer, plane, position, slice(heads.start, heads.stop)
                    cache.rows(local, plane, block, token)[...] = self.data[part]
                    if cache.scales is not None:
                        cache.scales(local, plane, block, token)[...] = self.scales[part]


def caches(fleet: Fleet, spec: KeyspaceSpec, noise: np.random.Generator) -> list[EngineCache]:
    return [
        make_cache(fleet.preset, spec, layers, heads, fleet.block_tokens, fleet.block_count, noise)
        for layers, heads in fleet.ranks
    ]


def some_blocks(fleet: Fleet, spec: KeyspaceSpec, noise: np.random.Generator) -> npt.NDArray[np.int64]:
    return noise.permutation(fleet.block_count)[: spec.chunk_tokens // fleet.block_tokens].astype(np.int64)


def write_pages(world: World, grid: ShardGrid, fleet: Fleet, noise: np.random.Generator) -> dict[int, Bytes]:
    """Every rank's pages, sealed in slots, by shard."""
    spec, pages = world.spec, dict[int, Bytes]()
    for cache in caches(fleet, spec, noise):
        block_ids = some_blocks(fleet, spec, noise)
        world.place(cache, block_ids)
        for shard in shards_in(grid.bitmap_for(cache.layout.layer_range, cache.layout.head_range)):
            assert shard not in pages  # exactly one writing rank
            shape = ShardPayload.of(spec, grid, shard)
            slot = np.zeros(shape.slot_bytes, dtype=np.uint8)
            payload = gather_payload_reference(spec, grid, shard, cache.layout, cache.handles, block_ids)
            slot[page.HEADER_BYTES :][: len(payload)] = payload
            page.seal(slot, page.PageKey(KEYSPACE, CHUNK, shard), spec.codec, shape.payload_bytes)
            pages[shard] = slot
    return pages


def check_reader(
    world: World, grid: ShardGrid, fleet: Fleet, pages: dict[int, Bytes], noise: np.random.Generator, skip_tokens: int
) -> None:
    """Every rank's memory ends up as if its own engine had computed the chunk there, and no other byte has changed."""
    spec = world.spec
    for cache in caches(fleet, spec, noise):
        block_ids = some_blocks(fleet, spec, noise)
        before = [handle.copy() for handle in cache.handles]
        world.place(cache, block_ids, skip_tokens * spec.positions // spec.chunk_tokens)
        expected = [handle.copy() for handle in cache.handles]
        for handle, old in zip(cache.handles, before, strict=True):
            handle[:] = old
        wanted_shards = grid.bitmap_for(cache.layout.layer_range, cache.layout.head_range)
        for shard in shards_in(grid.readable(sum(1 << shard for shard in pages), wanted_shards)):
            shape = ShardPayload.of(spec, grid, shard)
            key = page.PageKey(KEYSPACE, CHUNK, shard)
            assert page.verify(pages[shard], key, spec.codec, shape.payload_bytes) is None
            payload = np.asarray(page.payload_view(pages[shard], shape.payload_bytes))
            scatter_payload_reference(spec, grid, shard, cache.layout, cache.handles, block_ids, payload, skip_tokens)
        for handle, wanted in zip(cache.handles, expected, strict=True):
            assert np.array_equal(handle, wanted)


def round_trip(data: st.DataObject, spec: KeyspaceSpec, presets: tuple[str, ...]) -> None:
    layers, kv_heads = spec.group.layers, spec.group.kv_heads
    grid = ShardGrid(layers, kv_heads, data.draw(st.integers(1, layers)), data.draw(splits_of(kv_heads)))
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    world = World.of(spec, noise)
    pages = write_pages(world, grid, data.draw(fleets(spec, grid, presets)), noise)
    block_tokens = spec.opaque.block_tokens if spec.opaque else 1
    skip_tokens = data.draw(st.integers(0, spec.chunk_tokens // block_tokens - 1)) * block_tokens
    check_reader(world, grid, data.draw(fleets(spec, grid, presets)), pages, noise, skip_tokens)


@settings(max_examples=60)
@given(st.data())
def test_any_writer_and_reader_of_multi_head_kv(data: st.DataObject) -> None:
    group = KvGroup(data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 3, 4])), 8)
    dtype = data.draw(st.sampled_from([Dtype.BF16, Dtype.FP8_E4M3, Dtype.INT4]))
    round_trip(data, KeyspaceSpec("m", "r", (group,), dtype, chunk_tokens=16), MHA_PRESETS)


@settings(max_examples=15)
@given(st.data())
def test_any_writer_and_reader_of_latent_kv(data: st.DataObject) -> None:
    group = KvGroup.mla(data.draw(st.integers(1, 5)), 10)
    round_trip(data, KeyspaceSpec("m", "r", (group,), Dtype.BF16, chunk_tokens=16), MLA_PRESETS)


@settings(max_examples=20)
@given(st.data(), st.sampled_from([Codec.INT8_GROUP8, Codec.INT4_GROUP8, Codec.FP8_E4M3]))
def test_scales_of_a_quantized_cache_travel_along(data: st.DataObject, codec: Codec) -> None:
    group = KvGroup(data.draw(st.integers(1, 3)), 2, 16)
    round_trip(data, KeyspaceSpec("m", "r", (group,), Dtype.FP16, codec, chunk_tokens=16), SCALED_PRESETS)


@settings(max_examples=10)
@given(st.data())
def test_scales_of_quantized_latent_kv_travel_along(data: st.DataObject) -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(2, 24),), Dtype.BF16, Codec.FP8_E4M3, chunk_tokens=16)
    round_trip(data, spec, ("lightllm_deepseek2_fp8", "block_scales"))


@settings(max_examples=10)
@given(st.data())
def test_rows_whose_scale_no_codec_has_travel_whole(data: st.DataObject) -> None:
    """LightLLM's Deepseek2 in fp8: 576 elements and 2 bytes of scale."""
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(2, 578),), Dtype.FP8_E4M3, chunk_tokens=16)
    round_trip(data, spec, MLA_PRESETS)


@settings(max_examples=15)
@given(st.data())
def test_opaque_cells_travel_whole(data: st.DataObject) -> None:
    opaque = OpaqueLayout("vllm-cpu", "amx", "x86_64", data.draw(st.sampled_from([4, 8, 16])), 51)
    group = KvGroup(data.draw(st.integers(1, 3)), 2, 16)
    spec = KeyspaceSpec("m", "r", (group,), Dtype.BF16, chunk_tokens=32, payload=PayloadKind.OPAQUE, opaque=opaque)
    round_trip(data, spec, ("vllm_cpu_opaque",))


SPEC = KeyspaceSpec("m", "r", (KvGroup(2, 2, 8),), Dtype.BF16, chunk_tokens=16)
GRID = ShardGrid(2, 2, 2, (2,))


def test_the_canonical_order() -> None:
    """[unit of 16 tokens][layer][head][token][K, V][element], then the scales in the same order."""
    spec = KeyspaceSpec("m", "r", (KvGroup(3, 4, 16),), Dtype.BF16, Codec.INT8_GROUP8, chunk_tokens=32)
    noise = np.random.default_rng(4)
    world = World.of(spec, noise)
    cache = make_cache("lightllm_quantized", spec, range(3), range(4), 4, 9, noise)
    block_ids = noise.permutation(9)[:8].astype(np.int64)
    world.place(cache, block_ids)
    grid = ShardGrid(3, 4, 1, (1, 2))
    for shard, heads in ((0, slice(0, 4)), (2, slice(2, 4))):
        expected = [
            part[:, :, :, heads]
            .reshape(3, 2, 2, 16, heads.stop - heads.start, -1)
            .transpose(2, 0, 4, 3, 1, 5)
            .tobytes()
            for part in (world.data, world.scales)
        ]
        payload = gather_payload_reference(spec, grid, shard, cache.layout, cache.handles, block_ids)
        assert payload.tobytes() == b"".join(expected)


def test_a_rank_is_not_asked_for_a_shard_it_does_not_own() -> None:
    cache = make_cache("contiguous", SPEC, range(1), range(2), 16, 1, np.random.default_rng(1))
    with pytest.raises(PartitionRefused, match=r"layers range\(1, 2\) are not in the rank's .* grid of 2 layer groups"):
        gather_payload_reference(SPEC, GRID, 3, cache.layout, cache.handles, np.zeros(1, dtype=np.int64))


def test_a_page_of_heads_that_the_rank_has_in_part_is_read_but_not_written() -> None:
    grid = ShardGrid(2, 2, 1, (1, 2))
    cache = make_cache("contiguous", SPEC, range(2), range(1, 2), 16, 1, np.random.default_rng(1))
    ids = np.zeros(1, dtype=np.int64)
    with pytest.raises(PartitionRefused, match="needs head 0, which the rank does not have"):
        gather_payload_reference(SPEC, grid, 0, cache.layout, cache.handles, ids)
    payload = np.random.default_rng(2).integers(0, 256, ShardPayload.of(SPEC, grid, 0).payload_bytes, dtype=np.uint8)
    scatter_payload_reference(SPEC, grid, 0, cache.layout, cache.handles, ids, payload)
    rows = payload.reshape(2, 2, 16, 2, 16)  # layer, head, token, plane
    for layer in range(2):
        for plane in range(2):
            for token in range(16):
                assert np.array_equal(cache.rows(layer, plane, 0, token)[0], rows[layer, 1, token, plane])
    with pytest.raises(PartitionRefused, match="are not of the rank's"):
        scatter_payload_reference(SPEC, grid, 1, cache.layout, cache.handles, ids, payload)


@pytest.mark.parametrize("block_ids", [[0], [0, 1, 2], [0, 3], [-1, 0]])
def test_block_ids_are_checked(block_ids: list[int]) -> None:
    cache = make_cache("contiguous", SPEC, range(2), range(2), 8, 3, np.random.default_rng(1))
    with pytest.raises(InvalidRequest, match="block_ids"):
        gather_payload_reference(SPEC, GRID, 0, cache.layout, cache.handles, np.array(block_ids, dtype=np.int64))


@pytest.mark.parametrize("codec", [Codec.INT8_GROUP8, Codec.INT4_GROUP8, Codec.FP8_E4M3])
def test_a_codec_stands_between_a_cache_and_its_pages(codec: Codec) -> None:
    """Data and then scales of each row, as the codec makes them; back they come where the engine has them."""
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 2, 16),), Dtype.FP16, codec, chunk_tokens=16)
    noise = np.random.default_rng(2)
    cache = make_cache("vllm_nhd", spec, range(2), range(2), 8, 3, noise)
    block_ids, skip_tokens = np.array([2, 0]), 5
    rows = np.empty((16, 2, 32), dtype=np.uint8)  # of one layer and head
    for plane in range(2):
        for position in range(16):
            block, token = int(block_ids[position // 8]), position % 8
            rows[position, plane] = cache.rows(1, plane, block, token)[1]
    payload = gather_payload_reference(spec, GRID, 3, cache.layout, cache.handles, block_ids)
    data, scales = encode_rows(codec, Dtype.FP16, rows)
    assert payload.tobytes() == data.tobytes() + scales.tobytes()

    expected = [handle.copy() for handle in cache.handles]
    scatter_payload_reference(spec, GRID, 3, cache.layout, cache.handles, block_ids, payload, skip_tokens)
    decoded = decode_rows(codec, Dtype.FP16, data, scales)
    view = expected[1].reshape(2, 3, 8, 2, 32)  # layer 0 is another shard's
    for plane in range(2):
        for position in range(skip_tokens, 16):
            view[plane, block_ids[position // 8], position % 8, 1] = decoded[position, plane]
    for handle, wanted in zip(cache.handles, expected, strict=True):
        assert np.array_equal(handle, wanted)
