import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.grid import LARGEST_PAGE_BYTES, MAX_SHARDS, MAX_SPLIT, ShardGrid, shards_in
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.payload import payload_bytes
from tests.unit.core.strategies import head_borders, layer_borders, specs, split_at

LLAMA_8B = ShardGrid(layers=32, kv_heads=8, layer_groups=4, splits=(1, 2, 4, 8))


def spec_of(
    group: KvGroup, dtype: Dtype = Dtype.BF16, codec: Codec = Codec.RAW, chunk_tokens: int = 256
) -> KeyspaceSpec:
    return KeyspaceSpec("m", "r", (group,), dtype, codec, chunk_tokens)


@pytest.mark.parametrize(
    "group, layer_groups, splits, page_kib, chunk_mib",
    [
        (KvGroup(32, 8, 128), 4, (1, 2, 4, 8), (1024, 8192), 32),  # Llama 8B
        (KvGroup(80, 8, 128), 4, (2, 4, 8), (2560, 10240), 80),  # Llama 70B
        (KvGroup(32, 32, 128), 2, (4, 8, 16), (4096, 16384), 128),  # multi-head 7B
        (KvGroup(28, 2, 128), 2, (1, 2), (1792, 3584), 7),  # two KV heads
        (KvGroup.mla(61, 576), 4, (1,), (4320, 4608), 61 * 576 * 512 / 2**20),  # DeepSeek
        (KvGroup(40, 40, 128), 2, (8, 10), (10240, 12800), 200),  # 13B: at the bound of 64 shards pages grow
        (KvGroup(8, 8, 64), 1, (1, 2, 4, 8), (512, 4096), 4),
        (KvGroup(12, 8, 64), 2, (1, 2, 4, 8), (384, 3072), 6),  # could be one page, but PP 2 is usual
        (KvGroup(2, 2, 16), 1, (1,), (64, 64), 1 / 16),  # tiny: one page
        (KvGroup(2, 4, 32), 1, (1, 2, 4), (64, 256), 1 / 4),  # tiny: parts of just 64 KiB
        (KvGroup(1, 1, 8), 1, (1,), (8, 8), 1 / 128),
        (KvGroup(4, 7, 64), 1, (1, 7), (256, 1792), 7 / 4),
        (KvGroup(4, 17, 64), 2, (1,), (2176, 2176), 17 / 4),
    ],
)
def test_shapes_of_known_models(
    group: KvGroup, layer_groups: int, splits: tuple[int, ...], page_kib: tuple[int, int], chunk_mib: float
) -> None:
    spec = spec_of(group)
    grid = ShardGrid.of(spec)
    pages = [payload_bytes(spec, grid, shard) for shard in range(grid.shard_count)]
    assert (grid.layer_groups, grid.splits) == (layer_groups, splits), grid.describe()
    assert (min(pages), max(pages)) == (page_kib[0] << 10, page_kib[1] << 10)
    for split in splits:
        assert sum(pages[shard] for shard in shards_in(grid.whole_chunk(split))) == chunk_mib * 2**20


def test_layer_groups_begin_at_the_ceiling_of_equal_parts() -> None:
    grid = ShardGrid.of(spec_of(KvGroup.mla(61, 576)))
    assert layer_borders(grid) == [0, 16, 31, 46, 61]


@pytest.mark.parametrize(
    "tp, first_group", [(1, [0]), (2, [1, 2]), (4, [3, 4, 5, 6]), (8, [7, 8, 9, 10, 11, 12, 13, 14])]
)
def test_each_tp_degree_writes_a_split_of_its_own(tp: int, first_group: list[int]) -> None:
    assert ShardGrid.of(spec_of(KvGroup(32, 8, 128))) == LLAMA_8B
    ranks = [range(rank * 8 // tp, (rank + 1) * 8 // tp) for rank in range(tp)]
    for rank, heads in enumerate(ranks):
        written = list(shards_in(LLAMA_8B.bitmap_for(range(32), heads)))
        assert written == [group * 15 + first_group[rank] for group in range(4)]
        assert all(LLAMA_8B.heads_of(shard) == heads for shard in written)
    assert sum(LLAMA_8B.bitmap_for(range(32), heads) for heads in ranks) == LLAMA_8B.whole_chunk(tp)


def test_a_stage_of_a_pipeline_has_its_layer_groups() -> None:
    assert list(shards_in(LLAMA_8B.bitmap_for(range(8, 24), range(8)))) == [15, 30]
    assert list(shards_in(LLAMA_8B.bitmap_for(range(24, 32), range(4, 8)))) == [47]


def whole(tp: int, layers: range = range(32)) -> int:
    """What all ranks of a TP degree write for some layers."""
    return sum(LLAMA_8B.bitmap_for(layers, range(part * 8 // tp, (part + 1) * 8 // tp)) for part in range(tp))


def test_a_reader_takes_what_it_would_write_else_the_fewest_pages() -> None:
    rank = LLAMA_8B.bitmap_for(range(32), range(4))  # TP 2, rank 0
    assert LLAMA_8B.readable(LLAMA_8B.valid_shards, rank) == rank
    assert LLAMA_8B.readable(whole(1), rank) == whole(1)  # a page of all heads, of which half is needed
    assert LLAMA_8B.readable(whole(4), rank) == LLAMA_8B.bitmap_for(range(32), range(2)) | LLAMA_8B.bitmap_for(
        range(32), range(2, 4)
    )
    assert LLAMA_8B.readable(whole(1) | whole(8), rank) == whole(1)
    assert LLAMA_8B.readable(whole(4) | whole(8), LLAMA_8B.all_shards) == whole(4)
    # The least that is not needed: a rank of TP 8 reads a page of two heads rather than one of all.
    last = LLAMA_8B.bitmap_for(range(32), range(7, 8))
    assert LLAMA_8B.readable(whole(1) | whole(4), last) == LLAMA_8B.bitmap_for(range(32), range(6, 8))


def test_each_layer_group_is_looked_at_by_itself() -> None:
    present = whole(1, range(16)) | whole(2, range(16, 24)) | whole(8, range(24, 32))
    assert LLAMA_8B.readable(present, LLAMA_8B.all_shards) == present
    assert LLAMA_8B.covers(present, LLAMA_8B.all_shards)
    missing = present & ~LLAMA_8B.bitmap_for(range(24, 32), range(5, 6))
    assert LLAMA_8B.readable(missing, LLAMA_8B.all_shards) == 0 and not LLAMA_8B.covers(missing, LLAMA_8B.all_shards)
    assert LLAMA_8B.covers(missing, LLAMA_8B.bitmap_for(range(24), range(8)))
    assert LLAMA_8B.covers(missing, LLAMA_8B.bitmap_for(range(32), range(4)))


def test_pages_of_several_splits_make_up_a_layer_group_together() -> None:
    """Of two engines that each lost a part."""
    layers = range(32)
    present = LLAMA_8B.bitmap_for(layers, range(4)) | LLAMA_8B.bitmap_for(layers, range(4, 6))
    assert not LLAMA_8B.covers(present, LLAMA_8B.all_shards)
    present |= LLAMA_8B.bitmap_for(layers, range(6, 7)) | LLAMA_8B.bitmap_for(layers, range(7, 8))
    assert LLAMA_8B.readable(present, LLAMA_8B.all_shards) == present


def test_a_chunk_is_whole_for_no_one_without_its_pages() -> None:
    assert not LLAMA_8B.covers(0, LLAMA_8B.all_shards)
    assert LLAMA_8B.covers(0, 0)
    assert LLAMA_8B.touching(LLAMA_8B.all_shards) == LLAMA_8B.valid_shards
    rank = LLAMA_8B.bitmap_for(range(8), range(6, 8))
    assert list(shards_in(LLAMA_8B.touching(rank))) == [0, 2, 6, 13, 14]


def split_of(grid: ShardGrid, shard: int) -> int:
    """Parts of the split that the shard is one of."""
    return grid.kv_heads // len(grid.heads_of(shard))


@given(specs())
def test_every_grid_keeps_the_rules(spec: KeyspaceSpec) -> None:
    grid = ShardGrid.of(spec)
    pages = [payload_bytes(spec, grid, shard) for shard in range(grid.shard_count)]
    assert 1 <= grid.shard_count <= MAX_SHARDS and grid.valid_shards == 2**grid.shard_count - 1
    assert list(grid.splits) == sorted(set(grid.splits)) and grid.splits[-1] <= MAX_SPLIT
    assert grid.layer_groups & (grid.layer_groups - 1) == 0
    for split in grid.splits:
        assert grid.kv_heads % split == 0
        shards = list(shards_in(grid.whole_chunk(split)))
        assert all(split_of(grid, shard) == split for shard in shards)
        cells = [(layer, head) for shard in shards for layer in grid.layers_of(shard) for head in grid.heads_of(shard)]
        assert len(cells) == len(set(cells)) == grid.layers * grid.kv_heads
        assert sum(pages[shard] for shard in shards) == grid.layers * grid.kv_heads * spec.head_bytes
    if max(pages) > LARGEST_PAGE_BYTES:  # only where the bound on shards or the layers stop it
        assert len(grid.splits) == 1
        assert grid.layer_groups * 2 > grid.layers or grid.shard_count * 2 > MAX_SHARDS
    assert grid.bitmap_for(range(grid.layers), range(grid.kv_heads)) == grid.all_shards


@given(specs())
def test_shards_are_numbered_by_layer_group_split_and_part(spec: KeyspaceSpec) -> None:
    grid = ShardGrid.of(spec)
    places = [
        (group, split, part) for group in range(grid.layer_groups) for split in grid.splits for part in range(split)
    ]
    assert [grid.shard(*place) for place in places] == list(range(grid.shard_count))
    for shard, (group, split, part) in enumerate(places):
        assert (grid.layer_group_of(shard), split_of(grid, shard)) == (group, split)
        heads = grid.kv_heads // split
        assert grid.heads_of(shard) == range(part * heads, (part + 1) * heads)
        assert grid.layers_of(shard) == grid.layers_of_group(group)


@given(specs(), st.data())
def test_the_ranks_of_a_partition_write_each_head_and_layer_once(spec: KeyspaceSpec, data: st.DataObject) -> None:
    grid = ShardGrid.of(spec)
    cells: list[tuple[int, int]] = []
    for layers in split_at(data.draw, layer_borders(grid)):
        for heads in split_at(data.draw, head_borders(grid)):
            shards = list(shards_in(grid.bitmap_for(layers, heads)))
            own = [
                (layer, head) for shard in shards for layer in grid.layers_of(shard) for head in grid.heads_of(shard)
            ]
            assert sorted(own) == [(layer, head) for layer in layers for head in heads]
            coarser = [split for split in grid.splits if split < split_of(grid, shards[0])]
            assert all(
                heads.start % (grid.kv_heads // split) or len(heads) % (grid.kv_heads // split) for split in coarser
            )
            cells += own
    assert sorted(cells) == [(layer, head) for layer in range(grid.layers) for head in range(grid.kv_heads)]


@given(specs(), st.data())
def test_every_head_and_layer_is_read_once_from_any_writer(spec: KeyspaceSpec, data: st.DataObject) -> None:
    """What the ranks of any partition wrote, the ranks of any other read, each head and layer of theirs once."""
    grid = ShardGrid.of(spec)
    present = 0
    for layers in split_at(data.draw, layer_borders(grid)):
        for heads in split_at(data.draw, head_borders(grid)):
            present |= grid.bitmap_for(layers, heads)
    assert grid.covers(present, grid.all_shards)
    for layers in split_at(data.draw, layer_borders(grid)):
        for heads in split_at(data.draw, head_borders(grid)):
            wanted = grid.bitmap_for(layers, heads)
            chosen = grid.readable(present, wanted)
            assert chosen and chosen & present == chosen == chosen & grid.touching(wanted)
            cells = [
                (layer, head)
                for shard in shards_in(chosen)
                for layer in grid.layers_of(shard)
                for head in grid.heads_of(shard)
                if head in heads
            ]
            assert sorted(cells) == [(layer, head) for layer in layers for head in heads]


@given(specs(), st.data())
def test_what_can_be_read_is_what_a_search_finds(spec: KeyspaceSpec, data: st.DataObject) -> None:
    grid = ShardGrid.of(spec)
    present = data.draw(st.integers(0, grid.valid_shards))
    heads = data.draw(st.sampled_from(split_at(data.draw, head_borders(grid))))
    layers = data.draw(st.sampled_from(split_at(data.draw, layer_borders(grid))))
    wanted = grid.bitmap_for(layers, heads)

    def can_read(group: int, head: int) -> bool:
        """Heads from this one on, by trying every shard that begins here, cut to the rank's heads."""
        if head >= heads.stop:
            return True
        here = [s for s in shards_in(present) if grid.layer_group_of(s) == group and head in grid.heads_of(s)]
        fitting = [s for s in here if max(grid.heads_of(s).start, heads.start) == head]
        return any(can_read(group, grid.heads_of(shard).stop) for shard in fitting)

    groups = [group for group in range(grid.layer_groups) if grid.layers_of_group(group).start in layers]
    assert grid.covers(present, wanted) == all(can_read(group, heads.start) for group in groups)
    assert grid.covers(present, wanted) == (grid.readable(present, wanted) != 0)


@given(specs(), st.data())
def test_what_is_no_union_of_shards_is_refused(spec: KeyspaceSpec, data: st.DataObject) -> None:
    grid = ShardGrid.of(spec)
    layers = range(data.draw(st.integers(0, grid.layers)), data.draw(st.integers(0, grid.layers)))
    heads = range(data.draw(st.integers(0, grid.kv_heads)), data.draw(st.integers(0, grid.kv_heads)))
    on_borders = {layers.start, layers.stop} <= set(layer_borders(grid)) and {heads.start, heads.stop} <= set(
        head_borders(grid)
    )
    if len(layers) and len(heads) and on_borders:
        assert grid.bitmap_for(layers, heads)
    else:
        with pytest.raises(PartitionRefused, match="grid of"):
            grid.bitmap_for(layers, heads)


@pytest.mark.parametrize(
    "layers, heads, words",
    [
        (range(4), range(8), r"layers \[0, 4\) .* \(layer borders 0, 8, 16, 24, 32\) x 8 KV heads in 1, 2, 4, 8 parts"),
        (range(32), range(9), r"KV heads \[0, 9\)"),
        (range(33), range(8), r"layers \[0, 33\)"),
        (range(-16, 16), range(8), r"layers \[-16, 16\)"),
        (range(0, 32, 2), range(8), "layers"),
        (range(32), range(3, 3), "KV heads"),
    ],
)
def test_a_refusal_names_the_grid(layers: range, heads: range, words: str) -> None:
    with pytest.raises(PartitionRefused, match=words):
        LLAMA_8B.bitmap_for(layers, heads)


def test_shards_and_bitmaps_outside_of_the_grid_are_refused() -> None:
    grid = ShardGrid(layers=4, kv_heads=2, layer_groups=2, splits=(1, 2))
    assert [grid.shard(*place) for place in ((0, 1, 0), (0, 2, 1), (1, 1, 0), (1, 2, 1))] == [0, 2, 3, 5]
    assert grid.check_bitmap(0) == grid.all_shards == 0b001001
    assert grid.check_bitmap(0b110110) == 0b110110
    for call in (
        lambda: grid.shard(2, 1, 0),
        lambda: grid.shard(0, 3, 0),
        lambda: grid.shard(0, 2, 2),
        lambda: grid.layers_of(6),
        lambda: grid.heads_of(-1),
        lambda: grid.check_bitmap(1 << 6),
        lambda: grid.check_bitmap(-1),
    ):
        with pytest.raises(InvalidRequest, match="outside of"):
            call()


def test_shards_in_a_bitmap() -> None:
    assert list(shards_in(0)) == []
    assert list(shards_in(1 << 63 | 0b1010)) == [1, 3, 63]
