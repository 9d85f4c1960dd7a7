"""The longest prefix of a chain that live locations cover."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.cluster import TIER_RANK, ChainMatch, Location, MatchRun, NodeInfo
from kvpool_index.core.entries import TIERS, decode_value

_BLOCK: Final = 64  # values that are compared at once

LiveNodeOf = Callable[[int], NodeInfo | None]
"""The live node behind an ordinal, or None."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """What one value means to one request."""

    locations: tuple[Location, ...]
    covered: bool


class Matcher:
    """Judges the values of one request. Equal values are judged once, and make one run."""

    def __init__(self, *, grid: int, shards: int, host_id: str, live_node: LiveNodeOf) -> None:
        """grid: the bitmap of the keyspace's whole grid; shards: what must be covered, 0 for the grid."""
        self._grid = grid
        self._wanted = shards or grid
        self._host_id = host_id
        self._live_node = live_node
        self._judged: dict[bytes, _Judged] = {}
        self._nodes: dict[bytes, NodeInfo] = {}
        self.dead_ordinals: set[int] = set()

    def match(self, values: Sequence[bytes | None]) -> ChainMatch:
        """values: of consecutive chunks; None for a chunk that nobody has."""
        runs: list[MatchRun] = []
        count = at = 0
        locations: tuple[Location, ...] = ()
        while at < len(values):
            value = values[at]
            judged = (self._judged.get(value) or self._judge(value)) if value else None
            if judged is None or not judged.covered:
                break
            same = _equal_run(values, at)
            if count and judged.locations != locations:
                runs.append(MatchRun(chunk_count=count, locations=locations))
                count = 0
            locations = judged.locations
            count += same
            at += same
        if count:
            runs.append(MatchRun(chunk_count=count, locations=locations))
        named = {location.node_id for run in runs for location in run.locations}
        return ChainMatch(
            matched_chunks=at,
            runs=tuple(runs),
            nodes={node_id: node for node_id, node in self._nodes.items() if node_id in named},
        )

    def _judge(self, value: bytes) -> _Judged:
        ranked: list[tuple[tuple[bool, int, bytes], Location]] = []
        union = 0
        for entry in decode_value(value):
            node = self._live_node(entry.ordinal)
            if node is None:
                self.dead_ordinals.add(entry.ordinal)
                continue
            self._nodes[node.node_id] = node
            away = not (self._host_id and node.host_id == self._host_id)
            for tier, held in zip(TIERS, entry.shards, strict=True):
                shards = held & self._grid
                if shards & self._wanted:
                    union |= shards
                    location = Location(node_id=node.node_id, incarnation=node.incarnation, tier=tier, shards=shards)
                    ranked.append(((away, TIER_RANK[tier], node.node_id), location))
        ranked.sort(key=lambda pair: pair[0])
        judged = _Judged(tuple(location for _, location in ranked), union & self._wanted == self._wanted)
        self._judged[value] = judged
        return judged


def _equal_run(values: Sequence[bytes | None], start: int) -> int:
    """How many values from `start` on are equal; by blocks, because most chains lie at one place."""
    value, at = values[start], start
    while (block := values[at : at + _BLOCK]) and block.count(value) == len(block):
        at += len(block)
    while at < len(values) and values[at] == value:
        at += 1
    return at - start


def locations_of(value: bytes | None, *, grid: int, live_node: LiveNodeOf) -> tuple[Location, ...]:
    """All live locations that a value names, by node id and tier; grid as in Matcher."""
    found = [
        Location(node_id=node.node_id, incarnation=node.incarnation, tier=tier, shards=held & grid)
        for entry in decode_value(value)
        if (node := live_node(entry.ordinal)) is not None
        for tier, held in zip(TIERS, entry.shards, strict=True)
        if held & grid
    ]
    return tuple(sorted(found, key=lambda location: (location.node_id, location.tier)))
