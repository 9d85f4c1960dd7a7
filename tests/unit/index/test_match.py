"""Longest prefixes over values, without any store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.cluster import ChainMatch, Location, NodeInfo, NodeKind
from kvpool.core.coverage import Coverage
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.outcome import Tier
from kvpool_index.core.entries import Entry, TierMasks, encode_entry
from kvpool_index.core.match import MatchCache, Matcher, locations_of
from tests.fixtures.splits import SPLITS, TP1, TP2, TP4, rank

FOUR = ShardGrid(layers=4, kv_heads=1, layer_groups=4, splits=(1,))
GRID = FOUR.all_shards


def node(number: int, host: str = "") -> NodeInfo:
    return NodeInfo(
        node_id=bytes([number]) * 16, kind=NodeKind.PAGESTORE, host_id=host, endpoint="h:1", incarnation=number * 10
    )


WHOLE = Coverage.of(FOUR, 0)
NODES = {1: node(1, "east"), 2: node(2, "west"), 3: node(3, "west")}


def value(entries: dict[int, TierMasks]) -> bytes:
    return b"".join(encode_entry(Entry(ordinal, entries[ordinal]), GRID) for ordinal in sorted(entries))


def matcher(shards: int = 0, host_id: str = "") -> Matcher:
    return Matcher(Coverage.of(FOUR, shards), host_id=host_id, live_node=NODES.get)


def at(number: int, tier: Tier, shards: int = GRID) -> Location:
    return Location(node_id=bytes([number]) * 16, incarnation=number * 10, tier=tier, shards=shards)


def test_it_ends_at_the_first_gap() -> None:
    here = value({1: (0, GRID, 0)})
    found = matcher().match([here, bytes(bytearray(here)), None, here])
    assert found.matched_chunks == 2
    assert [(run.chunk_count, run.locations) for run in found.runs] == [(2, (at(1, Tier.STAGING),))]
    assert found.nodes == {NODES[1].node_id: NODES[1]}
    for nothing in ([], [None, here], [b"", here]):
        assert matcher().match(nothing).matched_chunks == 0


def test_live_nodes_cover_together() -> None:
    split = value({1: (0, 0b0011, 0), 2: (0, 0, 0b1100)})
    found = matcher().match([split])
    assert found.matched_chunks == 1
    assert found.runs[0].locations == (at(1, Tier.STAGING, 0b0011), at(2, Tier.DISK, 0b1100))
    assert matcher().match([value({1: (0, 0b0011, 0), 99: (0, 0, 0b1100)})]).matched_chunks == 0


def test_only_the_shards_asked_for_count() -> None:
    partial = value({1: (0, 0b0011, 0), 2: (0, 0b1100, 0)})
    found = matcher(shards=0b0001).match([partial])
    assert found.matched_chunks == 1
    assert found.runs[0].locations == (at(1, Tier.STAGING, 0b0011),)
    assert set(found.nodes) == {NODES[1].node_id}, "only nodes that the runs name"
    assert matcher(shards=0b0001).match([value({2: (0, 0b1100, 0)})]).matched_chunks == 0


def test_order_of_locations() -> None:
    everywhere = value(dict.fromkeys(NODES, (GRID, GRID, GRID)))
    tiers = [Tier.STAGING, Tier.DISK, Tier.GPU]
    (run,) = matcher(host_id="west").match([everywhere]).runs
    near = [at(number, tier) for tier in tiers for number in (2, 3)]
    assert list(run.locations) == near + [at(1, tier) for tier in tiers]
    (run,) = matcher().match([everywhere]).runs
    assert list(run.locations) == [at(number, tier) for tier in tiers for number in (1, 2, 3)]


def test_runs_are_as_long_as_locations_stay_equal() -> None:
    one, two, dead = value({1: (0, GRID, 0)}), value({2: (0, GRID, 0)}), value({1: (0, GRID, 0), 99: (0, GRID, 0)})
    found = matcher().match([one] * 70 + [two] + [one] * 3 + [dead] * 2 + [one])
    assert [run.chunk_count for run in found.runs] == [70, 1, 6], "a dead node makes no run of its own"
    assert found.matched_chunks == sum(run.chunk_count for run in found.runs) == 77


def test_long_runs_of_every_length() -> None:
    one, two = value({1: (0, GRID, 0)}), value({2: (0, GRID, 0)})
    for length in (1, 63, 64, 65, 127, 128, 129, 200):
        found = matcher().match([one] * length + [two] * 3)
        assert [run.chunk_count for run in found.runs] == [length, 3]


def test_dead_ordinals_are_reported() -> None:
    asked = matcher()
    asked.match([value({1: (0, GRID, 0), 77: (0, GRID, 0)}), value({78: (GRID, 0, 0)})])
    assert asked.dead_ordinals == {77, 78}


def test_bits_outside_of_the_grid_do_not_show() -> None:
    wide = encode_entry(Entry(1, (0, (1 << 64) - 2, 0)), 0)
    assert matcher().match([wide]).matched_chunks == 0
    assert locations_of(wide, whole=WHOLE, live_node=NODES.get) == (at(1, Tier.STAGING, 0b1110),)


def test_all_locations_of_an_event() -> None:
    both = value({2: (0b1, 0, 0b10), 1: (0, GRID, 0), 99: (GRID, 0, 0)})
    assert locations_of(both, whole=WHOLE, live_node=NODES.get) == (
        at(1, Tier.STAGING),
        at(2, Tier.GPU, 0b1),
        at(2, Tier.DISK, 0b10),
    )
    assert locations_of(b"", whole=WHOLE, live_node=NODES.get) == ()


def test_what_is_remembered_of_earlier_requests_holds_while_its_nodes_do() -> None:
    nodes = dict(NODES)
    known = MatchCache()

    def ask(shards: int = 0, host_id: str = "") -> tuple[ChainMatch, set[int]]:
        asked = Matcher(Coverage.of(FOUR, shards), host_id=host_id, live_node=nodes.get, known=known)
        return asked.match([both]), asked.dead_ordinals

    both = value({1: (0, GRID, 0), 2: (0, GRID, 0)})
    first, _ = ask()
    again, dead = ask()
    assert again == first and not dead
    assert again.runs[0].locations is first.runs[0].locations, "so that it need not be serialized again"
    assert ask(host_id="west")[0].runs[0].locations == first.runs[0].locations[::-1]
    assert ask(shards=0b0001)[0] == first
    del nodes[2]
    for _ in range(2):
        found, dead = ask()
        assert [location.node_id for location in found.runs[0].locations] == [NODES[1].node_id]
        assert dead == {2} and list(found.nodes) == [NODES[1].node_id]
    nodes[2] = node(2, "west")
    assert ask()[0] == first
    nodes[2] = node(3, "west")
    assert ask()[0].nodes.keys() == {NODES[1].node_id, NODES[3].node_id}


def test_not_all_is_remembered_for_ever() -> None:
    known = MatchCache()
    for number in range(400):
        for shards in range(15):
            asked = Matcher(Coverage.of(FOUR, shards + 1), host_id=str(number), live_node=NODES.get, known=known)
            asked.match([value({1: (0, GRID, 0)})])
    assert 0 < len(known) <= 4096


def asked_of_splits(wanted: int, held: dict[int, int]) -> ChainMatch:
    """held: what nodes have in staging."""
    packed = b"".join(encode_entry(Entry(at, (0, held[at], 0)), SPLITS.all_shards) for at in sorted(held) if held[at])
    return Matcher(Coverage.of(SPLITS, wanted), host_id="", live_node=NODES.get).match([packed])


@pytest.mark.parametrize(
    ("wanted", "held", "named"),
    [
        (0, {1: TP2}, [1]),
        (0, {1: rank(2, 0), 2: rank(2, 1)}, [1, 2]),
        (0, {1: rank(2, 0)}, []),
        (rank(2, 0), {1: rank(2, 0)}, [1]),
        (rank(4, 2), {1: TP1}, [1]),
        (rank(4, 2), {1: rank(2, 0), 2: rank(2, 1)}, [2]),
        (rank(4, 2), {1: rank(2, 0)}, []),
        (TP4, {1: TP4, 2: TP1}, [1, 2]),  # which of them to read is the reader's choice
        (0, {1: TP1 & 0b1, 2: TP2 & ~0b1111111}, [1, 2]),  # each layer group in a split of its own
        (0, {1: rank(2, 0), 2: rank(4, 2) | rank(4, 3)}, [1, 2]),  # halves of one in two splits
    ],
)
def test_pages_of_another_split_count(wanted: int, held: dict[int, int], named: list[int]) -> None:
    found = asked_of_splits(wanted, held)
    assert found.matched_chunks == bool(named)
    assert [(place.node_id[0], place.shards) for run in found.runs for place in run.locations] == [
        (number, held[number]) for number in named
    ]


def cells(shards: int) -> set[tuple[int, int]]:
    """Layers and heads of shards."""
    return {
        (layer, head)
        for shard in shards_in(shards)
        for layer in SPLITS.layers_of(shard)
        for head in SPLITS.heads_of(shard)
    }


bitmaps = st.one_of(
    st.integers(0, SPLITS.valid_shards),
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3)), max_size=3).map(
        lambda ranks: sum({rank(tp, number % tp) for tp, number in ranks})
    ),
)


@given(wanted=bitmaps, held=st.dictionaries(st.integers(1, 3), bitmaps, max_size=3))
def test_a_chunk_is_complete_if_every_wanted_layer_and_head_is_somewhere(wanted: int, held: dict[int, int]) -> None:
    found = asked_of_splits(wanted, held)
    wanted_cells = cells(wanted or SPLITS.all_shards)
    assert found.matched_chunks == (wanted_cells <= set().union(*map(cells, held.values())))
    if found.matched_chunks:
        useful = {number for number, shards in held.items() if cells(shards) & wanted_cells}
        assert {place.node_id[0] for place in found.runs[0].locations} == useful
