import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.grid import LARGEST_PAGE_BYTES, ShardGrid, shards_in
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.payload import payload_bytes
from tests.unit.core.strategies import head_borders, layer_borders, specs, split_at


def spec_of(
    group: KvGroup, dtype: Dtype = Dtype.BF16, codec: Codec = Codec.RAW, chunk_tokens: int = 256
) -> KeyspaceSpec:
    return KeyspaceSpec("m", "r", (group,), dtype, codec, chunk_tokens)


@pytest.mark.parametrize(
    "group, shape, largest_page_bytes, chunk_mib",
    [
        (KvGroup(32, 8, 128), (2, 8), 2 << 20, 32),  # Llama 8B
        (KvGroup(80, 8, 128), (8, 8), 1280 << 10, 80),  # Llama 70B
        (KvGroup(32, 32, 128), (4, 16), 2 << 20, 128),  # multi-head 7B
        (KvGroup(28, 2, 128), (2, 2), 1792 << 10, 7),  # two KV heads
        (KvGroup.mla(61, 576), (16, 1), 1152 << 10, 61 * 576 * 512 / 2**20),  # DeepSeek
        (KvGroup(40, 40, 128), (4, 10), 5 << 20, 200),  # 13B: at the bound of 64 shards pages grow
        (KvGroup(8, 8, 64), (1, 8), 512 << 10, 4),
        (KvGroup(2, 2, 16), (1, 1), 64 << 10, 1 / 16),  # tiny: one page
        (KvGroup(2, 4, 32), (1, 4), 64 << 10, 1 / 4),  # tiny: head groups of just 64 KiB
        (KvGroup(1, 1, 8), (1, 1), 8 << 10, 1 / 128),
        (KvGroup(4, 7, 64), (1, 7), 256 << 10, 7 / 4),
        (KvGroup(4, 17, 64), (4, 1), 1088 << 10, 17 / 4),
    ],
)
def test_shapes_of_known_models(
    group: KvGroup, shape: tuple[int, int], largest_page_bytes: int, chunk_mib: float
) -> None:
    spec = spec_of(group)
    grid = ShardGrid.of(spec)
    pages = [payload_bytes(spec, grid, shard) for shard in range(grid.shard_count)]
    assert (grid.layer_groups, grid.head_groups) == shape, grid.describe()
    assert max(pages) == largest_page_bytes
    assert sum(pages) == chunk_mib * 2**20


def test_layer_groups_begin_at_the_ceiling_of_equal_parts() -> None:
    grid = ShardGrid.of(spec_of(KvGroup.mla(61, 576)))
    assert layer_borders(grid) == [0, 4, 8, 12, 16, 20, 23, 27, 31, 35, 39, 42, 46, 50, 54, 58, 61]


def test_tp_of_a_usual_model_is_a_union_of_shards() -> None:
    grid = ShardGrid.of(spec_of(KvGroup(80, 8, 128)))
    for tp in (1, 2, 4, 8):
        ranks = [range(rank * 8 // tp, (rank + 1) * 8 // tp) for rank in range(tp)]
        bitmaps = [grid.bitmap_for(range(80), heads) for heads in ranks]
        assert sum(bitmaps) == grid.all_shards and {bitmap.bit_count() for bitmap in bitmaps} == {64 // tp}


@given(specs())
def test_every_grid_keeps_the_rules(spec: KeyspaceSpec) -> None:
    grid = ShardGrid.of(spec)
    cells = {
        (layer, head)
        for shard in range(grid.shard_count)
        for layer in grid.layers_of(shard)
        for head in grid.heads_of(shard)
    }
    pages = [payload_bytes(spec, grid, shard) for shard in range(grid.shard_count)]
    assert 1 <= grid.shard_count <= 64 and grid.all_shards == 2**grid.shard_count - 1
    assert len(cells) == spec.group.layers * spec.group.kv_heads
    assert sum(len(grid.layers_of(s)) * len(grid.heads_of(s)) for s in range(grid.shard_count)) == len(cells)
    assert sum(pages) == spec.group.layers * spec.group.kv_heads * spec.head_bytes
    assert grid.layer_groups & (grid.layer_groups - 1) == 0
    assert grid.kv_heads % grid.head_groups == 0 and grid.head_groups <= 16
    if max(pages) > LARGEST_PAGE_BYTES:  # only where the bound on shards or the layers stop it
        assert grid.layer_groups * 2 > grid.layers or grid.shard_count * 2 > 64
    assert grid.bitmap_for(range(grid.layers), range(grid.kv_heads)) == grid.all_shards


@given(specs(), st.data())
def test_the_ranks_of_a_partition_share_out_the_shards(spec: KeyspaceSpec, data: st.DataObject) -> None:
    grid = ShardGrid.of(spec)
    rest = grid.all_shards
    for layers in split_at(data.draw, layer_borders(grid)):
        for heads in split_at(data.draw, head_borders(grid)):
            bitmap = grid.bitmap_for(layers, heads)
            assert bitmap and bitmap & rest == bitmap
            rest ^= bitmap
            for shard in shards_in(bitmap):
                assert set(grid.layers_of(shard)) <= set(layers) and set(grid.heads_of(shard)) <= set(heads)
    assert rest == 0


@given(specs(), st.data())
def test_what_is_no_union_of_shards_is_refused(spec: KeyspaceSpec, data: st.DataObject) -> None:
    grid = ShardGrid.of(spec)
    layers = range(data.draw(st.integers(0, grid.layers)), data.draw(st.integers(0, grid.layers)))
    heads = range(data.draw(st.integers(0, grid.kv_heads)), data.draw(st.integers(0, grid.kv_heads)))
    union = {
        shard
        for shard in range(grid.shard_count)
        if set(grid.layers_of(shard)) <= set(layers) and set(grid.heads_of(shard)) <= set(heads)
    }
    cells = sum(len(grid.layers_of(shard)) * len(grid.heads_of(shard)) for shard in union)
    if union and cells == len(layers) * len(heads):
        assert set(shards_in(grid.bitmap_for(layers, heads))) == union
    else:
        with pytest.raises(PartitionRefused, match="grid of"):
            grid.bitmap_for(layers, heads)


@pytest.mark.parametrize(
    "layers, heads, words",
    [
        (range(8), range(8), r"layers \[0, 8\) .* \(layer borders 0, 16, 32; every 1 of 8 KV heads"),
        (range(32), range(9), r"KV heads \[0, 9\)"),
        (range(33), range(8), r"layers \[0, 33\)"),
        (range(-16, 16), range(8), r"layers \[-16, 16\)"),
        (range(0, 32, 2), range(8), "layers"),
        (range(32), range(3, 3), "KV heads"),
    ],
)
def test_a_refusal_names_the_grid(layers: range, heads: range, words: str) -> None:
    with pytest.raises(PartitionRefused, match=words):
        ShardGrid.of(spec_of(KvGroup(32, 8, 128))).bitmap_for(layers, heads)


def test_shards_and_bitmaps_outside_of_the_grid_are_refused() -> None:
    grid = ShardGrid(layers=4, kv_heads=2, layer_groups=2, head_groups=2)
    assert [grid.shard(*group) for group in ((0, 0), (0, 1), (1, 0), (1, 1))] == [0, 1, 2, 3]
    assert grid.check_bitmap(0) == grid.check_bitmap(0b1111) == 0b1111
    assert grid.check_bitmap(0b0101) == 0b0101
    for call in (
        lambda: grid.shard(2, 0),
        lambda: grid.layers_of(4),
        lambda: grid.heads_of(-1),
        lambda: grid.check_bitmap(0b10000),
        lambda: grid.check_bitmap(-1),
    ):
        with pytest.raises(InvalidRequest, match="outside of"):
            call()


def test_shards_in_a_bitmap() -> None:
    assert list(shards_in(0)) == []
    assert list(shards_in(1 << 63 | 0b1010)) == [1, 3, 63]
