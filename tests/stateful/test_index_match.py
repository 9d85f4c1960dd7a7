"""The index over its in-memory store against a model that knows only sets, and shares no code with it."""

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from kvpool.core.cluster import ChainQuery, Location, LocationChange, NodeInfo, NodeKind, NodeLoad, StaleLocation
from kvpool.core.elements import Dtype
from kvpool.core.errors import LeaseLost, StaleIncarnation
from kvpool.core.geometry import AttentionKind, KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Tier
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.nodes import Renewal
from kvpool_index.engine.announce import AnnounceStream
from kvpool_index.engine.index import IndexEngine
from kvpool_index.metrics import IndexMetrics
from tests.fixtures.virtual_time import VirtualTimeLoop

ResultT = TypeVar("ResultT")

TTL_S = 5.0
CHUNKS = 36  # two whole groups of a chain and a part of a third
SPLITS, LAYER_GROUPS, HEADS = (1, 2, 4, 8), 4, 8
# What each shard has, by number: a layer group and some heads of it.
CELLS = [
    {(group, head) for head in range(part * HEADS // split, (part + 1) * HEADS // split)}
    for group in range(LAYER_GROUPS)
    for split in SPLITS
    for part in range(split)
]
SHARDS = len(CELLS)
WHOLE = {shard for shard, cells in enumerate(CELLS) if len(cells) == HEADS}
NODES = 3
TENANT = "t"
SPEC = KeyspaceSpec(
    model_id="m", model_revision="r", groups=(KvGroup(32, 8, 128, AttentionKind.FULL),), dtype=Dtype.BF16
)

chunk_numbers = st.integers(0, CHUNKS - 1)
node_numbers = st.integers(0, NODES - 1)
ranks = st.sampled_from([(split, part) for split in SPLITS for part in range(split)])
of_a_rank = ranks.map(
    lambda rank: {
        shard
        for shard, cells in enumerate(CELLS)
        if {head * rank[0] // HEADS for _, head in cells} == {rank[1]} and len(cells) * rank[0] == HEADS
    }
)
shard_sets = st.one_of(st.just(WHOLE), of_a_rank, st.sets(st.integers(0, SHARDS - 1), max_size=4))
changes = st.tuples(
    st.integers(0, 2), st.integers(1, 17), st.sampled_from(list(Tier)), shard_sets, shard_sets, st.booleans()
)


def chunk_hash(number: int) -> bytes:
    return number.to_bytes(8, "big") * 2


def cells_of(shards: set[int]) -> set[tuple[int, int]]:
    return set().union(*(CELLS[shard] for shard in shards))


def bitmap(shards: set[int]) -> int:
    return sum(1 << shard for shard in shards)


@dataclass
class ModelNode:
    """What the model knows of a node: one process at a time, and what that one holds."""

    incarnation: int = 0
    expires_at_s: float = 0.0
    ended: bool = True
    held: dict[tuple[int, Tier], set[int]] = field(default_factory=dict)
    stream: AnnounceStream | None = None
    sequence: int = 0


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.clock = ManualClock()
        self.store = MemoryIndexStore(self.clock)
        self.engine = IndexEngine(
            store=self.store,
            config=IndexConfig(lease_ttl_ms=int(TTL_S * 1000)),
            clock=self.clock,
            metrics=IndexMetrics(CollectorRegistry()),
            secret_of=lambda tenant: bytes(32),
            version="test",
        )
        self.nodes = [ModelNode() for _ in range(NODES)]
        self.keyspace = b""

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self.loop.run_until_complete(coroutine)

    def teardown(self) -> None:
        self.run(self.engine.close())
        self.loop.close()

    @initialize()
    def open_keyspace(self) -> None:
        opened = self.run(self.engine.keyspaces.open(TENANT, "chat", SPEC))
        assert opened.keyspace.grid.valid_shards == (1 << SHARDS) - 1
        assert opened.keyspace.all_shards == bitmap(WHOLE)
        self.keyspace = opened.keyspace.keyspace_id

    def alive(self, number: int) -> bool:
        node = self.nodes[number]
        return not node.ended and node.expires_at_s > self.clock.monotonic_s()

    @rule(number=node_numbers, new_incarnation=st.booleans())
    def register(self, number: int, new_incarnation: bool) -> None:
        node = self.nodes[number]
        held = 0 if new_incarnation or node.ended else node.incarnation
        info = NodeInfo(
            node_id=bytes([number]) * 16,
            kind=NodeKind.PAGESTORE,
            host_id=f"host{number % 2}",
            endpoint="h:1",
            incarnation=held,
        )
        lease = self.run(self.engine.nodes.register(info, node.incarnation))
        assert lease.incarnation == held if held else lease.incarnation > node.incarnation
        if not held:
            node.held.clear()
        node.incarnation, node.ended = lease.incarnation, False
        node.expires_at_s = self.clock.monotonic_s() + TTL_S
        node.stream = self.run(self.engine.open_announce(info.node_id, lease.incarnation, lease.announce_epoch))
        node.sequence = 0

    @rule(number=node_numbers)
    def renew(self, number: int) -> None:
        node = self.nodes[number]
        expected = self.alive(number)
        try:
            lease = Renewal(node_id=bytes([number]) * 16, incarnation=node.incarnation, load=NodeLoad())
            refused = self.run(self.engine.leases.renew([lease]))[0]
            if refused[0] is not None:
                raise refused[0]
        except LeaseLost:
            assert not expected
        else:
            assert expected
            node.expires_at_s = self.clock.monotonic_s() + TTL_S

    @rule(number=node_numbers)
    def end(self, number: int) -> None:
        node = self.nodes[number]
        self.run(self.engine.nodes.end(bytes([number]) * 16, node.incarnation))
        node.ended = True
        node.held.clear()

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.9, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: any(node.stream for node in self.nodes))
    @rule(number=node_numbers, batch=st.lists(changes, max_size=5), again=st.booleans())
    def announce(self, number: int, batch: list[tuple[int, int, Tier, set[int], set[int], bool]], again: bool) -> None:
        """Runs of chunks; `again` sends the batch twice, as after a lost acknowledgement."""
        node = self.nodes[number]
        if node.stream is None:
            return
        sent: list[LocationChange] = []
        after = {key: set(shards) for key, shards in node.held.items()}
        for start, length, tier, added, removed, is_removal in batch:
            for chunk in range(start * 16, min(CHUNKS, start * 16 + length)):
                gone = removed if is_removal else set()
                sent.append(self.location_change(chunk, tier, added, gone))
                after[chunk, tier] = (after.get((chunk, tier), set()) | added) - gone
        try:
            for _ in range(2 if again else 1):
                node.sequence += 1
                assert self.run(node.stream.apply(node.sequence, sent)) == node.sequence
        except (LeaseLost, StaleIncarnation):
            assert not self.alive(number)
            node.stream = None
        else:
            assert self.alive(number)
            node.held = after

    def location_change(self, chunk: int, tier: Tier, added: set[int], removed: set[int]) -> LocationChange:
        return LocationChange(
            keyspace=self.keyspace,
            chunk_hash=chunk_hash(chunk),
            group_head_hash=chunk_hash(chunk // 16 * 16),
            tier=tier,
            added_shards=bitmap(added),
            removed_shards=bitmap(removed),
        )

    @rule(number=node_numbers, chunk=chunk_numbers, tier=st.sampled_from(list(Tier)), shards=shard_sets)
    def report_stale(self, number: int, chunk: int, tier: Tier, shards: set[int]) -> None:
        node = self.nodes[number]
        location = Location(
            node_id=bytes([number]) * 16, incarnation=node.incarnation, tier=tier, shards=bitmap(shards)
        )
        stale = StaleLocation(
            keyspace=self.keyspace,
            chunk_hash=chunk_hash(chunk),
            group_head_hash=chunk_hash(chunk // 16 * 16),
            location=location,
        )
        there = bool(node.held.get((chunk, tier), set()) & shards)
        assert self.run(self.engine.announcements.report_stale(TENANT, [stale])) == [there]
        if there:
            node.held[chunk, tier] -= shards

    @rule(number=st.one_of(st.none(), node_numbers))
    def drop(self, number: int | None) -> None:
        dropped = [number] if number is not None else range(NODES)
        touched = {chunk for each in dropped for (chunk, _), shards in self.nodes[each].held.items() if shards}
        node_id = bytes([number]) * 16 if number is not None else b""
        count = self.run(self.engine.announcements.drop(TENANT, self.keyspace, node_id))
        # Without a node, what ended or older processes left behind goes too; the model has forgotten it.
        assert count == len(touched) if number is not None else count >= len(touched)
        for each in dropped:
            self.nodes[each].held.clear()

    @rule(first=chunk_numbers, shards=shard_sets, host=st.sampled_from(["", "host0", "host1"]))
    def match(self, first: int, shards: set[int], host: str) -> None:
        self.check_match(first, shards, host)

    @invariant()
    def whole_chain(self) -> None:
        if self.keyspace:
            self.check_match(0, set(), "")

    def check_match(self, first: int, shards: set[int], host: str) -> None:
        query = ChainQuery(
            keyspace=self.keyspace,
            chunk_hashes=b"".join(map(chunk_hash, range(first, CHUNKS))),
            first_chunk_index=first,
            group_head_hash=chunk_hash(first // 16 * 16),
            shards=bitmap(shards),
            host_id=host,
        )
        found = self.run(self.engine.matches.match(TENANT, query))
        expected: list[list[tuple[int, Tier, int]]] = []
        for chunk in range(first, CHUNKS):
            places = self.model_places(chunk, cells_of(shards or WHOLE), host)
            if places is None:
                break
            expected.append(places)
        assert found.matched_chunks == len(expected)
        flat = [
            [(place.node_id[0], place.tier, place.shards) for place in run.locations]
            for run in found.runs
            for _ in range(run.chunk_count)
        ]
        assert flat == expected
        assert {node_id[0] for node_id in found.nodes} == {number for places in expected for number, _, _ in places}

    def model_places(self, chunk: int, wanted: set[tuple[int, int]], host: str) -> list[tuple[int, Tier, int]] | None:
        """Live places that hold wanted heads, in the order of the API; None if they do not cover them."""
        covered: set[tuple[int, int]] = set()
        places: list[tuple[int, Tier, int]] = []
        near = [number for number in range(NODES) if f"host{number % 2}" == host]
        for part in (near, [number for number in range(NODES) if number not in near]):
            for tier in (Tier.STAGING, Tier.DISK, Tier.GPU):
                for number in part:
                    held = self.nodes[number].held.get((chunk, tier), set()) if self.alive(number) else set()
                    if cells_of(held) & wanted:
                        places.append((number, tier, bitmap(held)))
                        covered |= cells_of(held)
        return places if covered >= wanted else None


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
