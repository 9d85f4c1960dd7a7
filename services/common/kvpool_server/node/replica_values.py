"""What a replica keeps of a chunk, and what that means to one kind of question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvpool.core.cluster import TIER_RANK, Location, NodeInfo
from kvpool.core.coverage import Coverage

_VALUE_BYTES = 200  # of one distinct value, and of each location in it; measured, see test_replica_memory
_LOCATION_BYTES = 230
_JUDGED_MAX = 4096


class SharedValue:
    """Locations that many chunks share. Compared by identity: equal locations are one value."""

    __slots__ = ("locations", "size_bytes", "uses")

    def __init__(self, locations: tuple[Location, ...]) -> None:
        self.locations = locations  # by node id and tier
        self.uses = 0
        self.size_bytes = _VALUE_BYTES + _LOCATION_BYTES * len(locations)


class SharedValues:
    """All values in use, each once."""

    def __init__(self) -> None:
        self._values: dict[tuple[Location, ...], SharedValue] = {}
        self.used_bytes = 0

    def hold(self, locations: Iterable[Location]) -> SharedValue:
        """The value of these locations, with one more use. Its user gives it back with `release`."""
        ordered = tuple(sorted(locations, key=lambda each: (each.node_id, each.tier)))
        value = self._values.get(ordered)
        if value is None:
            value = self._values[ordered] = SharedValue(ordered)
            self.used_bytes += value.size_bytes
        value.uses += 1
        return value

    def release(self, value: SharedValue) -> None:
        """One use less; a value without any is forgotten."""
        value.uses -= 1
        if not value.uses:
            del self._values[value.locations]
            self.used_bytes -= value.size_bytes

    def clear(self) -> None:
        """Forget all; none may be used any more."""
        self._values.clear()
        self.used_bytes = 0


class Lens:
    """One kind of question: what must be covered, asked from one host, while the nodes stay as they are."""

    __slots__ = ("_coverage", "_host_id", "_judged", "_nodes")

    def __init__(self, coverage: Coverage, host_id: str, nodes: Mapping[bytes, NodeInfo]) -> None:
        """nodes: those alive, by id; it must not change in the life of the lens."""
        self._coverage, self._host_id, self._nodes = coverage, host_id, nodes
        self._judged: dict[SharedValue, tuple[Location, ...]] = {}

    def judge(self, value: SharedValue) -> tuple[Location, ...]:
        """Live locations with something wanted, best first, as a match lists them; () unless they cover all of it."""
        found = self._judged.get(value)
        if found is None:
            if len(self._judged) >= _JUDGED_MAX:
                self._judged.clear()
            found = self._judged[value] = self._judge(value)
        return found

    def _judge(self, value: SharedValue) -> tuple[Location, ...]:
        ranked: list[tuple[tuple[bool, int, bytes], Location]] = []
        union, touching = 0, self._coverage.touching
        for location in value.locations:
            node = self._nodes.get(location.node_id)
            if node is None or node.incarnation != location.incarnation or not location.shards & touching:
                continue
            union |= location.shards
            away = not (self._host_id and node.host_id == self._host_id)
            ranked.append(((away, TIER_RANK[location.tier], node.node_id), location))
        if not self._coverage.is_met_by(union):
            return ()
        ranked.sort(key=lambda pair: pair[0])
        return tuple(location for _, location in ranked)


def merged(known: SharedValue | None, answer: tuple[Location, ...], coverage: Coverage) -> list[Location]:
    """What is known after an answer about what `coverage` wants: it says nothing of places that have none of that."""
    if known is None:
        return list(answer)
    named = {(location.node_id, location.tier) for location in answer}
    silent = [
        location
        for location in known.locations
        if not location.shards & coverage.touching and (location.node_id, location.tier) not in named
    ]
    return [*answer, *silent]


@dataclass(slots=True)
class View:
    """What a part of a chain within one group is to one lens: runs of chunks from its first on."""

    runs: tuple[tuple[int, tuple[Location, ...]], ...]
    matched: int  # chunks in them
