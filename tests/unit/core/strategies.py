"""What the tests of `kvpool.core` draw."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from kvpool.core.elements import FLOAT_DTYPES
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
chunk_sizes = st.sampled_from([16, 32, 256, 4096])


@st.composite
def groups(draw: st.DrawFn) -> KvGroup:
    layers = draw(st.integers(1, 130))
    if draw(st.booleans()):
        return KvGroup.mla(layers, 8 * draw(st.integers(1, 100)))
    pages = draw(st.sampled_from([1, 1, 5]))
    return KvGroup(layers, draw(st.integers(1, 70)), 8 * draw(st.integers(1, 40)), pages=pages)


@st.composite
def specs(draw: st.DrawFn) -> KeyspaceSpec:
    """Any valid specification."""
    chunk_tokens = draw(chunk_sizes)
    opaque = None
    dtype = draw(st.sampled_from(list(Dtype)))
    codec = draw(st.sampled_from(list(Codec))) if dtype in FLOAT_DTYPES else Codec.RAW
    if draw(st.booleans()):
        codec = Codec.RAW
        block_tokens = draw(st.sampled_from([1, 4, 16]))
        opaque = OpaqueLayout(
            draw(names), draw(names), draw(st.just("") | names), block_tokens, draw(st.integers(1, 9999))
        )
    return KeyspaceSpec(
        draw(names),
        draw(names),
        (draw(groups()),),
        dtype,
        codec,
        chunk_tokens,
        PayloadKind.OPAQUE if opaque else PayloadKind.CANONICAL,
        opaque,
        draw(st.binary(max_size=64)),
    )


def split_at(draw: Callable[[Any], Any], borders: list[int]) -> list[range]:
    """Consecutive ranges that cover [borders[0], borders[-1]) and begin and end on borders."""
    inner = draw(st.sets(st.sampled_from(borders[1:-1]))) if len(borders) > 2 else set()
    edges = [borders[0], *sorted(inner), borders[-1]]
    return [range(first, last) for first, last in pairwise(edges)]


def layer_borders(grid: ShardGrid) -> list[int]:
    return [grid.layers_of_group(group).start for group in range(grid.layer_groups)] + [grid.layers]


def head_borders(grid: ShardGrid) -> list[int]:
    """Of the finest split."""
    return list(range(0, grid.kv_heads + 1, grid.kv_heads // grid.splits[-1]))


@st.composite
def splits_of(draw: st.DrawFn, kv_heads: int) -> tuple[int, ...]:
    """Any splits that a grid of so many heads may have."""
    divisors = [count for count in range(1, kv_heads + 1) if kv_heads % count == 0]
    return tuple(sorted(draw(st.sets(st.sampled_from(divisors), min_size=1))))


@dataclass(frozen=True)
class Fleet:
    """One engine: its layout preset, block size and the (layers, heads) of its ranks."""

    preset: str
    block_tokens: int
    block_count: int
    ranks: list[tuple[range, range]]


@st.composite
def fleets(draw: st.DrawFn, spec: KeyspaceSpec, grid: ShardGrid, presets: tuple[str, ...]) -> Fleet:
    """An engine with any PP and TP that the grid allows, equal or not."""
    block_tokens = spec.opaque.block_tokens if spec.opaque else draw(st.sampled_from([1, 2, 4, 8, 16]))
    ranks = [
        (layers, heads)
        for layers in split_at(draw, layer_borders(grid))
        for heads in split_at(draw, head_borders(grid))
    ]
    return Fleet(draw(st.sampled_from(presets)), block_tokens, spec.chunk_tokens // block_tokens * 2 + 1, ranks)
