"""A replica against the history of a store: whatever order events and answers come in, it names no past, and
calls nothing absent that was there.

The model keeps every state that each chunk and each node ever had. Events reach the replica late, twice, and swapped
with the next one (two index replicas write the log); answers of the index, and listings of what it has stored, are read
at one time and learned at another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.core.cluster import (
    ChainMatch,
    ChainQuery,
    ChunkBatch,
    ChunkEvent,
    HeartbeatEvent,
    IndexEvent,
    Location,
    MatchRun,
    NodeEvent,
    NodeInfo,
    NodeKind,
    ResyncEvent,
)
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Tier
from kvpool_server.node.replica import Asked, ReplicaTable
from kvpool_server.node.stored_groups import GroupListing

KEYSPACE = b"k" * 16
GRID = ShardGrid(layers=1, kv_heads=2, layer_groups=1, splits=(1, 2))
WHOLE = 0b001  # the shard of both heads
HEADS = {0b001: 0b11, 0b010: 0b01, 0b100: 0b10}  # of each shard
CHUNKS = range(15, 17)  # of one chain: the end of a group and the beginning of the next
HASHES = [bytes([number + 1]) * 16 for number in range(CHUNKS.stop)]
CAPACITY_BYTES = 1 << 20  # eviction is `forget` here: it must not come at other times, or nothing converges
NODES = [b"a" * 16, b"b" * 16]
CHANGES = st.tuples(
    st.sampled_from(CHUNKS),
    st.sampled_from(NODES),
    st.sampled_from([0, 0b001, 0b010, 0b110, 0b110, 0b011]),
    st.booleans(),
)
Place = tuple[bytes, int, int]  # node, incarnation, shards


@dataclass
class Question:
    """One on its way: asked, then read, then answered."""

    asked: Asked
    query: ChainQuery
    answer: ChainMatch | None = None


@dataclass
class Late:
    """An event in the log that the replica has not got, and what was so just before it."""

    event: ChunkEvent | NodeEvent
    subject: object


class ReplicaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = ReplicaTable(capacity_bytes=CAPACITY_BYTES, max_lag_s=1e9)
        self.time = 100
        self.now: dict[int, dict[bytes, Place]] = {number: {} for number in CHUNKS}
        self.incarnations: dict[bytes, int] = dict.fromkeys(NODES, 1)
        self.alive = set(NODES)
        # What may be said of a subject: all states since the one before its oldest undelivered event.
        self.allowed: dict[object, list[Any]] = {}
        self.chunk_log: list[Late] = []
        self.node_log: list[Late] = []
        self.questions: list[Question] = []
        self.listing: GroupListing | None = None
        self.is_listed = False  # its groups were read
        self.table.open_keyspace(KEYSPACE, GRID)
        self.begin_again()
        self.announce([(number, NODES[0], WHOLE, False) for number in CHUNKS], True)

    def feed(self, event: Any) -> None:
        self.table.apply(IndexEvent(position="", event=event), 0.0)

    def live(self, place: Place) -> bool:
        return place[0] in self.alive and self.incarnations[place[0]] == place[1]

    # What happens at the index.
    @rule(changes=st.lists(CHANGES, min_size=1, max_size=4), deliver=st.booleans())
    def announce(self, changes: list[tuple[int, bytes, int, bool]], deliver: bool) -> None:
        for number, node, shards, swap in changes:
            if node in self.alive:
                self.change(number, node, shards, swap)
        if deliver:
            self.deliver_chunks(len(self.chunk_log), False)

    def change(self, number: int, node: bytes, shards: int, swap: bool) -> None:
        state = self.now[number] = dict(self.now[number])
        state.pop(node, None)
        if shards:
            state[node] = (node, self.incarnations[node], shards)
        self.time += 1
        self.allowed.setdefault(number, [dict(self.now[number])]).append(state)
        event = ChunkEvent(
            keyspace=KEYSPACE,
            chunk_hash=HASHES[number],
            group_head_hash=HASHES[number // 16 * 16],
            locations=tuple(location(place) for place in state.values() if self.live(place)),
            version=self.time,
        )
        self.chunk_log.append(Late(event, number))
        earlier = [at for at, late in enumerate(self.chunk_log[:-1]) if late.subject == number]
        if swap and earlier:
            at = earlier[-1]
            self.chunk_log[-1], self.chunk_log[at] = self.chunk_log[at], self.chunk_log[-1]

    @rule(node=st.sampled_from(NODES), new_incarnation=st.booleans())
    def come_or_go(self, node: bytes, new_incarnation: bool) -> None:
        before = (node in self.alive, self.incarnations[node])
        if node in self.alive:
            self.alive.discard(node)
        else:
            self.alive.add(node)
            self.incarnations[node] += new_incarnation
        after = (node in self.alive, self.incarnations[node])
        self.allowed.setdefault(node, [before]).append(after)
        info = NodeInfo(node_id=node, kind=NodeKind.PAGESTORE, incarnation=self.incarnations[node])
        self.node_log.append(Late(NodeEvent(node=info, alive=node in self.alive), node))

    # What reaches the replica.
    @rule(batch=st.integers(1, 4), twice=st.booleans())
    def deliver_chunks(self, batch: int, twice: bool) -> None:
        some, self.chunk_log = self.chunk_log[:batch], self.chunk_log[batch:]
        events = tuple(late.event for late in some if isinstance(late.event, ChunkEvent))
        for _ in range(1 + twice):
            if events:
                self.feed(ChunkBatch(events=events))
        self.settle()

    @rule()
    def deliver_node(self) -> None:
        if self.node_log:
            self.feed(self.node_log.pop(0).event)
            self.settle()

    @rule(dice=st.integers(0, 3))
    def lose_events(self, dice: int) -> None:
        if not dice:
            self.begin_again()

    @rule(first=st.sampled_from(CHUNKS), shards=st.sampled_from([0, 0b010, 0b100, 0b110]), at_once=st.booleans())
    def ask(self, first: int, shards: int, at_once: bool) -> None:
        if len(self.questions) < 3:
            self.questions.append(Question(self.table.begin(), query(first, shards)))
            if at_once:
                self.read()

    @rule()
    def read(self) -> None:
        for question in self.questions:
            if question.answer is None:
                question.answer = self.truth(question.query)

    @rule(at=st.integers(0, 2))
    def answer(self, at: int) -> None:
        if at < len(self.questions) and (question := self.questions[at]).answer is not None:
            del self.questions[at]
            self.table.learn(question.asked, question.query, question.answer)
            self.table.end()

    @rule(first=st.sampled_from(CHUNKS))
    def forget(self, first: int) -> None:
        self.table.forget(query(first, 0))

    @rule()
    def begin_listing(self) -> None:
        self.listing, self.is_listed = self.table.begin_listing(), False

    @rule()
    def list_groups(self) -> None:
        for number, places in self.now.items():
            if self.listing is not None and places:
                self.listing.filter.add_all(query(number, 0).group_head_hash)
        self.is_listed = True

    @rule()
    def finish_listing(self) -> None:
        if self.listing is not None and self.is_listed:
            self.table.finish_listing(self.listing)
            self.listing = None

    # What must hold.
    @invariant()
    def what_it_calls_absent_was_nowhere(self) -> None:
        for number in CHUNKS:  # each is alone in its group
            if self.table.is_absent(query(number, 0), 0.0):
                assert not all(self.allowed.get(number, [self.now[number]])), number

    @invariant()
    def it_names_no_past(self) -> None:
        for shards in (0, 0b010):
            for first in CHUNKS:
                asked = query(first, shards)
                found = self.table.match(asked, 0.0)
                numbers = iter(range(first, CHUNKS.stop))
                for run in found.runs:
                    for _ in range(run.chunk_count):
                        self.check(next(numbers), run.locations, shards or WHOLE)
        assert self.table.used_bytes <= CAPACITY_BYTES

    @rule()
    def it_converges(self) -> None:
        self.deliver_chunks(len(self.chunk_log), False)
        while self.node_log:
            self.deliver_node()
        for first in CHUNKS:
            asked = self.table.begin()
            self.table.learn(asked, query(first, 0), self.truth(query(first, 0)))
            self.table.end()
            truth, found = self.truth(query(first, 0)), self.table.match(query(first, 0), 0.0)
            assert found.matched_chunks == truth.matched_chunks
            assert [set(run.locations) for run in found.runs] == [set(run.locations) for run in truth.runs]

    def check(self, number: int, places: tuple[Location, ...], wanted: int) -> None:
        union = 0
        for place in places:
            states = self.allowed.get(number, [self.now[number]])
            assert any((place.node_id, place.incarnation, place.shards) in state.values() for state in states), number
            lives = self.allowed.get(place.node_id, [(place.node_id in self.alive, self.incarnations[place.node_id])])
            assert (True, place.incarnation) in lives
            union |= place.shards
        assert not heads(wanted) & ~heads(union)

    def begin_again(self) -> None:
        self.chunk_log, self.node_log = [], []
        nodes = tuple(
            NodeInfo(node_id=node, kind=NodeKind.PAGESTORE, incarnation=self.incarnations[node])
            for node in sorted(self.alive)
        )
        self.feed(ResyncEvent(cause="lost", nodes=nodes))
        self.feed(HeartbeatEvent(age_ms=0))
        self.settle()

    def settle(self) -> None:
        """Forget states that were only allowed because of events that have been delivered now."""
        waiting = [late.subject for late in (*self.chunk_log, *self.node_log)]
        for subject, states in self.allowed.items():
            del states[: max(0, len(states) - 1 - waiting.count(subject))]

    def truth(self, asked: ChainQuery) -> ChainMatch:
        runs: list[MatchRun] = []
        wanted = heads(asked.shards or WHOLE)
        for number in range(asked.first_chunk_index, CHUNKS.stop):
            held = [place for place in self.now[number].values() if self.live(place) and heads(place[2]) & wanted]
            union = 0
            for place in held:
                union |= place[2]
            if wanted & ~heads(union):
                break
            places = tuple(location(place) for place in sorted(held))
            if runs and runs[-1].locations == places:
                runs[-1] = MatchRun(chunk_count=runs[-1].chunk_count + 1, locations=places)
            else:
                runs.append(MatchRun(chunk_count=1, locations=places))
        return ChainMatch(matched_chunks=sum(run.chunk_count for run in runs), runs=tuple(runs))


def heads(shards: int) -> int:
    return reduce(or_, (found for shard, found in HEADS.items() if shards & shard), 0)


def location(place: Place) -> Location:
    return Location(node_id=place[0], incarnation=place[1], tier=Tier.STAGING, shards=place[2])


def query(first: int, shards: int) -> ChainQuery:
    return ChainQuery(
        keyspace=KEYSPACE,
        chunk_hashes=b"".join(HASHES[first:]),
        first_chunk_index=first,
        group_head_hash=HASHES[first // 16 * 16],
        shards=shards,
    )


TestReplica = ReplicaMachine.TestCase
TestReplica.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
