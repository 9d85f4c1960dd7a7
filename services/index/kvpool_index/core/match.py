"""The longest prefix of a chain that live locations cover."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.cluster import TIER_RANK, ChainMatch, Location, MatchRun, NodeInfo
from kvpool.core.coverage import Coverage
from kvpool_index.core.entries import TIERS, decode_value, is_malformed

_BLOCK: Final = 64  # values that are compared at once

LiveNodeOf = Callable[[int], NodeInfo | None]
"""The live node behind an ordinal, or None."""


_CACHED_VALUES: Final = 4096


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """What one value means to one kind of request while the nodes that it names are as they were."""

    locations: tuple[Location, ...]
    covered: bool
    nodes: tuple[NodeInfo, ...]  # those that locations name
    seen: tuple[tuple[int, NodeInfo | None], ...]  # each ordinal of the value, and the live node behind it
    is_malformed: bool


_Asked = tuple[Coverage, str]  # what a request wants, and its host


class MatchCache:
    """What values meant to earlier requests. Values repeat: a chain lies at one place, and is asked for again."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, _Asked], _Evaluated] = {}

    def get(self, value: bytes, asked: _Asked, live_node: LiveNodeOf) -> _Evaluated | None:
        """What it meant, if all its nodes are still what they were."""
        known = self._known.get((value, asked))
        if known is not None:
            for ordinal, node in known.seen:
                now = live_node(ordinal)
                if now is not node and now != node:
                    return None
        return known

    def __len__(self) -> int:
        return len(self._known)

    def put(self, value: bytes, asked: _Asked, judged: _Evaluated) -> None:
        """Keep one; all others are forgotten when there are too many."""
        if len(self._known) >= _CACHED_VALUES:
            self._known.clear()
        self._known[value, asked] = judged


class Matcher:
    """Judges the values of one request. Equal values are judged once, and make one run."""

    def __init__(
        self, coverage: Coverage, *, host_id: str, live_node: LiveNodeOf, known: MatchCache | None = None
    ) -> None:
        self._coverage = coverage
        self._host_id = host_id
        self._live_node = live_node
        self._known = known if known is not None else MatchCache()
        self._judged: dict[bytes, _Evaluated] = {}
        self.dead_ordinals: set[int] = set()
        self.malformed_count = 0  # distinct values that no index wrote

    def match(self, values: Sequence[bytes | None]) -> ChainMatch:
        """values: of consecutive chunks; None for a chunk that no node has."""
        runs: list[MatchRun] = []
        nodes: dict[bytes, NodeInfo] = {}
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
            for node in judged.nodes:
                nodes[node.node_id] = node
            count += same
            at += same
        if count:
            runs.append(MatchRun(chunk_count=count, locations=locations))
        return ChainMatch(matched_chunks=at, runs=tuple(runs), nodes=nodes)

    def _judge(self, value: bytes) -> _Evaluated:
        asked = (self._coverage, self._host_id)
        judged = self._known.get(value, asked, self._live_node)
        if judged is None:
            judged = self._evaluate(value)
            self._known.put(value, asked, judged)
        self.dead_ordinals.update(ordinal for ordinal, node in judged.seen if node is None)
        self.malformed_count += judged.is_malformed
        self._judged[value] = judged
        return judged

    def _evaluate(self, value: bytes) -> _Evaluated:
        coverage = self._coverage
        ranked: list[tuple[tuple[bool, int, bytes], Location]] = []
        nodes: dict[bytes, NodeInfo] = {}
        seen: list[tuple[int, NodeInfo | None]] = []
        union = 0
        for entry in decode_value(value, coverage.all_shards):
            node = self._live_node(entry.ordinal)
            seen.append((entry.ordinal, node))
            if node is None:
                continue
            away = not (self._host_id and node.host_id == self._host_id)
            for tier, held in zip(TIERS, entry.shards, strict=True):
                shards = held & coverage.valid_shards
                if shards & coverage.touching:
                    union |= shards
                    nodes[node.node_id] = node
                    location = Location(node_id=node.node_id, incarnation=node.incarnation, tier=tier, shards=shards)
                    ranked.append(((away, TIER_RANK[tier], node.node_id), location))
        ranked.sort(key=lambda pair: pair[0])
        return _Evaluated(
            locations=tuple(location for _, location in ranked),
            covered=coverage.is_met_by(union),
            nodes=tuple(nodes.values()),
            seen=tuple(seen),
            is_malformed=is_malformed(value),
        )


def _equal_run(values: Sequence[bytes | None], start: int) -> int:
    """How many values from `start` on are equal; by blocks, because most chains lie at one place."""
    value, at = values[start], start
    while (block := values[at : at + _BLOCK]) and block.count(value) == len(block):
        at += len(block)
    while at < len(values) and values[at] == value:
        at += 1
    return at - start


def locations_of(value: bytes | None, *, whole: Coverage, live_node: LiveNodeOf) -> tuple[Location, ...]:
    """All live locations that a value names, by node id and tier. whole: of the keyspace's whole chunks."""
    valid = whole.valid_shards
    found = [
        Location(node_id=node.node_id, incarnation=node.incarnation, tier=tier, shards=held & valid)
        for entry in decode_value(value, whole.all_shards)
        if (node := live_node(entry.ordinal)) is not None
        for tier, held in zip(TIERS, entry.shards, strict=True)
        if held & valid
    ]
    return tuple(sorted(found, key=lambda location: (location.node_id, location.tier)))
