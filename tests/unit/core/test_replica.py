"""The table of a replica: what it answers, what it forgets first, what it weighs."""

import gc
import secrets
import tracemalloc

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
from kvpool_server.node.replica import NOTHING, ReplicaTable
from kvpool_server.node.stored_groups import GroupFilter
from tests.fixtures.splits import SPLITS, TP1, TP2, TP4, rank

KEYSPACE = b"k" * 16
SIXTEEN = ShardGrid(layers=16, kv_heads=1, layer_groups=16, splits=(1,))
GRID = SIXTEEN.all_shards
A = NodeInfo(node_id=b"a" * 16, kind=NodeKind.PAGESTORE, host_id="east", incarnation=5)
B = NodeInfo(node_id=b"b" * 16, kind=NodeKind.PAGESTORE, host_id="west", incarnation=7)


class Replica:
    """A table that is current, with nodes A and B alive."""

    def __init__(self, capacity_bytes: int = 1 << 24, grid: ShardGrid = SIXTEEN) -> None:
        self.table = ReplicaTable(capacity_bytes=capacity_bytes, max_lag_s=3.0)
        self.version = 0
        self.table.open_keyspace(KEYSPACE, grid)
        self.feed(ResyncEvent(cause="begins", nodes=(A, B)))
        self.feed(HeartbeatEvent(age_ms=0))

    def feed(self, event: ResyncEvent | HeartbeatEvent | NodeEvent | ChunkBatch, now_s: float = 0.0) -> None:
        self.table.apply(IndexEvent(position="", event=event), now_s)

    def hold(self, hashes: bytes, *where: Location, keyspace: bytes = KEYSPACE) -> None:
        """Events that say where each chunk is now."""
        self.version += 1
        self.feed(
            ChunkBatch(
                events=tuple(
                    ChunkEvent(
                        keyspace=keyspace,
                        chunk_hash=hashes[at : at + 16],
                        group_head_hash=hashes[at // 256 * 256 : at // 256 * 256 + 16],
                        locations=where,
                        version=self.version,
                    )
                    for at in range(0, len(hashes), 16)
                )
            )
        )

    def hold_below(self, head: bytes, hashes: bytes, *where: Location) -> None:
        """The same for chunks of one group, without its first chunk."""
        self.version += 1
        for start in range(0, len(hashes), 16):
            event = ChunkEvent(
                keyspace=KEYSPACE,
                chunk_hash=hashes[start : start + 16],
                group_head_hash=head,
                locations=where,
                version=self.version,
            )
            self.feed(ChunkBatch(events=(event,)))

    def learn(self, query: ChainQuery, *runs: MatchRun) -> None:
        asked = self.table.begin()
        found = ChainMatch(matched_chunks=sum(run.chunk_count for run in runs), runs=runs)
        self.table.learn(asked, query, found)
        self.table.end()

    def matched(self, hashes: bytes, now_s: float = 0.0, shards: int = 0) -> int:
        return self.table.match(ask(hashes, shards=shards), now_s).matched_chunks


def at(node: NodeInfo, tier: Tier = Tier.STAGING, shards: int = GRID) -> Location:
    return Location(node_id=node.node_id, incarnation=node.incarnation, tier=tier, shards=shards)


def ask(hashes: bytes, *, first: int = 0, shards: int = 0, host_id: str = "") -> ChainQuery:
    head = hashes[first // 16 * 256 : first // 16 * 256 + 16]
    return ChainQuery(
        keyspace=KEYSPACE,
        chunk_hashes=hashes[first * 16 :],
        first_chunk_index=first,
        group_head_hash=head,
        shards=shards,
        host_id=host_id,
    )


def chain(count: int = 40) -> bytes:
    return secrets.token_bytes(16 * count)


def test_known_chains_are_answered_as_the_index_would() -> None:
    replica, hashes = Replica(), chain()
    replica.hold(hashes, at(A), at(B, Tier.DISK), at(B))
    replica.hold(hashes[:64], at(A))
    found = replica.table.match(ask(hashes, host_id="west"), 0.0)
    assert found.matched_chunks == 40
    assert found.runs == (
        MatchRun(chunk_count=4, locations=(at(A),)),
        MatchRun(chunk_count=36, locations=(at(B), at(B, Tier.DISK), at(A))),
    )
    assert found.nodes == {A.node_id: A, B.node_id: B}
    assert replica.table.match(ask(hashes, first=21), 0.0).matched_chunks == 19


def test_what_is_known_ends_where_a_chunk_is_not() -> None:
    replica, hashes = Replica(), chain()
    replica.hold(hashes[: 20 * 16], at(A))
    assert replica.matched(hashes) == 20
    replica.hold(hashes, at(A))
    replica.hold(hashes[:16], at(A, shards=0xFF))
    assert replica.matched(hashes) == 0, "not all shards"
    assert replica.matched(hashes, shards=0xF) == 40
    assert replica.matched(secrets.token_bytes(160)) == 0


def test_chains_that_fork_within_a_group_are_distinguished() -> None:
    replica, hashes = Replica(), chain(16)
    fork = hashes[:80] + secrets.token_bytes(11 * 16)
    replica.hold(hashes, at(A))
    replica.hold(fork, at(B))
    replica.hold(hashes[80:], at(A))
    assert replica.matched(fork) == 16
    assert replica.table.match(ask(fork), 0.0).runs == (MatchRun(chunk_count=16, locations=(at(B),)),)


def test_nothing_is_used_without_a_heartbeat_that_is_young_enough() -> None:
    replica, hashes = Replica(), chain()
    replica.hold(hashes, at(A))
    assert (replica.matched(hashes, 3.0), replica.matched(hashes, 3.1)) == (40, 0)
    replica.feed(HeartbeatEvent(age_ms=500), now_s=10.0)
    assert (replica.matched(hashes, 12.5), replica.matched(hashes, 12.6)) == (40, 0)


def test_a_resync_empties_it_until_the_next_heartbeat() -> None:
    replica, hashes = Replica(), chain()
    replica.hold(hashes, at(A))
    replica.feed(ResyncEvent(cause="behind", nodes=(A,)))
    replica.feed(HeartbeatEvent(age_ms=0))
    assert (replica.matched(hashes), replica.table.group_count, replica.table.used_bytes) == (0, 0, 0)


def test_before_the_first_resync_nothing_is_kept() -> None:
    table, hashes = ReplicaTable(capacity_bytes=1 << 20, max_lag_s=3.0), chain()
    table.open_keyspace(KEYSPACE, SIXTEEN)
    table.apply(IndexEvent(position="", event=HeartbeatEvent(age_ms=0)), 0.0)
    asked = table.begin()
    table.learn(asked, ask(hashes), ChainMatch(matched_chunks=40, runs=(MatchRun(chunk_count=40, locations=(at(A),)),)))
    assert table.match(ask(hashes), 0.0) == NOTHING


def test_dead_nodes_leave_at_once_and_other_incarnations_never_count() -> None:
    replica, hashes = Replica(), chain()
    replica.hold(hashes, at(A))
    replica.feed(NodeEvent(node=A, alive=False))
    assert replica.matched(hashes) == 0
    replica.feed(NodeEvent(node=A, alive=True))
    assert replica.matched(hashes) == 40, "its lease had only run out"
    later = NodeInfo(node_id=A.node_id, kind=A.kind, incarnation=6)
    replica.feed(NodeEvent(node=later, alive=True))
    assert replica.matched(hashes) == 0
    replica.feed(NodeEvent(node=A, alive=False))  # of the process before
    replica.hold(hashes, at(later))
    assert replica.matched(hashes) == 40


def test_answers_for_some_shards_do_not_undo_what_is_known_of_others() -> None:
    replica, hashes = Replica(), chain(4)
    low, high = at(A, shards=0x00FF), at(B, shards=0xFF00)
    replica.learn(ask(hashes, shards=0xFF), MatchRun(chunk_count=4, locations=(low,)))
    replica.learn(ask(hashes, shards=0xFF00), MatchRun(chunk_count=4, locations=(high,)))
    assert [replica.matched(hashes, shards=shards) for shards in (0xFF, 0xFF00, 0)] == [4, 4, 4]


def test_an_answer_is_not_learned_where_an_event_came_in_between() -> None:
    replica, hashes = Replica(), chain(32)
    asked = replica.table.begin()
    replica.hold(hashes[:16])  # gone: and perhaps after the index looked
    found = ChainMatch(matched_chunks=32, runs=(MatchRun(chunk_count=32, locations=(at(A),)),))
    replica.table.learn(asked, ask(hashes), found)
    replica.table.end()
    assert replica.matched(hashes) == 0
    assert replica.table.match(ask(hashes, first=16), 0.0).matched_chunks == 16, "the other group was left alone"


def test_an_event_from_before_what_was_forgotten_adds_nothing() -> None:
    replica, hashes = Replica(), chain(1)
    replica.hold(hashes, at(A))
    replica.hold(hashes)  # removed
    replica.version = 0
    replica.hold(hashes, at(A))  # the first event once more
    assert replica.matched(hashes) == 0
    replica.learn(ask(hashes), MatchRun(chunk_count=1, locations=(at(B),)))
    assert replica.matched(hashes) == 1
    replica.version = 1
    replica.hold(hashes, at(A))  # cannot be ordered against the answer: the index is to be asked
    assert replica.matched(hashes) == 0


def test_pages_of_another_split_count() -> None:
    replica, hashes = Replica(grid=SPLITS), chain(4)
    replica.hold(hashes, at(A, shards=TP2))
    assert [replica.matched(hashes, shards=shards) for shards in (0, TP1, TP4, rank(4, 3), TP2)] == [4] * 5
    replica.hold(hashes, at(A, shards=rank(2, 0)))
    assert [replica.matched(hashes, shards=shards) for shards in (0, rank(4, 3), rank(4, 1), rank(2, 0))] == [
        0, 0, 4, 4,
    ]  # fmt: skip
    replica.hold(hashes, at(A, shards=rank(2, 0)), at(B, shards=rank(2, 1)))
    found = replica.table.match(ask(hashes), 0.0)
    assert [run.locations for run in found.runs] == [(at(A, shards=rank(2, 0)), at(B, shards=rank(2, 1)))]
    (run,) = replica.table.match(ask(hashes, shards=rank(4, 3)), 0.0).runs
    assert run.locations == (at(B, shards=rank(2, 1)),), "the other one has nothing of it"
    replica.hold(hashes, at(A, shards=TP1))
    assert replica.matched(hashes, shards=rank(4, 3)) == 4
    assert replica.table.match(ask(hashes, shards=SPLITS.valid_shards + 1), 0.0) == NOTHING


def test_an_answer_speaks_of_all_places_with_something_of_what_was_asked_for() -> None:
    """A place with pages of another split that an answer does not name has them no more."""
    replica, hashes = Replica(grid=SPLITS), chain(4)
    replica.learn(ask(hashes, shards=TP1), MatchRun(chunk_count=4, locations=(at(A, shards=TP1),)))
    replica.learn(ask(hashes, shards=rank(2, 0)), MatchRun(chunk_count=4, locations=(at(B, shards=rank(2, 0)),)))
    assert [replica.matched(hashes, shards=shards) for shards in (0, rank(2, 0), rank(2, 1))] == [0, 4, 0]
    replica.learn(ask(hashes, shards=rank(2, 1)), MatchRun(chunk_count=4, locations=(at(A, shards=rank(2, 1)),)))
    assert [replica.matched(hashes, shards=shards) for shards in (0, rank(2, 0), rank(2, 1))] == [4, 4, 4]


def test_what_misled_is_forgotten() -> None:
    replica, hashes = Replica(), chain()
    replica.hold(hashes, at(A))
    replica.table.forget(ask(hashes[: 20 * 16], first=16))
    assert replica.matched(hashes) == 16


def test_keyspaces_that_were_never_opened_take_nothing() -> None:
    replica, hashes = Replica(), chain()
    replica.hold(hashes, at(A), keyspace=b"o" * 16)
    assert replica.table.used_bytes == 0
    assert replica.table.match(ChainQuery(keyspace=b"o" * 16, chunk_hashes=hashes), 0.0) == NOTHING


def test_it_stays_within_its_bytes_and_forgets_ends_of_chains_first() -> None:
    replica = Replica(capacity_bytes=200_000)
    asked = [chain(64) for _ in range(12)]
    for hashes in asked:
        replica.learn(ask(hashes), MatchRun(chunk_count=64, locations=(at(A),)))
        assert replica.matched(hashes) == 64
        assert replica.table.used_bytes <= 200_000
    left = [replica.matched(hashes) for hashes in reversed(asked)]
    assert left[0] == 64 and left[-1] < 64
    assert all(count % 16 == 0 for count in left)
    assert any(0 < count < 64 for count in left) or left.count(64) > 1


def test_what_is_only_announced_does_not_push_out_what_is_asked_for() -> None:
    replica, hot = Replica(capacity_bytes=200_000), chain(64)
    replica.hold(hot, at(A))
    replica.matched(hot)
    for _ in range(50):
        replica.hold(chain(64), at(B))
    assert replica.matched(hot) == 64


def test_a_group_with_endless_forks_stays_small() -> None:
    replica, head = Replica(capacity_bytes=1 << 30), secrets.token_bytes(16)
    for _ in range(1100):
        replica.hold(head + secrets.token_bytes(16), at(A))
    assert replica.table.group_count == 1
    assert replica.table.used_bytes < 300_000


def test_the_first_chunk_that_all_chains_share_is_not_forgotten() -> None:
    """Of very many chains below one head the latest are answered; of the others what the index is to go on from."""
    replica, head = Replica(), chain(1)
    chains = [head + chain(3) for _ in range(1000)]
    replica.hold(head, at(A))
    for hashes in chains:
        replica.hold_below(head, hashes[16:], at(A))
    assert [replica.matched(hashes) for hashes in chains[-300:]] == [4] * 300
    assert [replica.matched(hashes) for hashes in chains[:300]] == [1] * 300


def test_replica_memory_is_weighed_about_right() -> None:
    replica = Replica(capacity_bytes=1 << 30)
    replica.hold(chain(64), at(A))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    counted = replica.table.used_bytes
    for number in range(20):
        hashes = chain(64)
        replica.hold(hashes, at(A), at(B, shards=number + 1))
        replica.matched(hashes)
    measured = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert measured < replica.table.used_bytes - counted < 2 * measured


def test_an_answer_from_before_a_resync_is_not_learned() -> None:
    replica, hashes = Replica(), chain(16)
    asked = replica.table.begin()
    replica.feed(ResyncEvent(cause="gap", nodes=(A,)))
    replica.feed(HeartbeatEvent(age_ms=0))
    found = ChainMatch(matched_chunks=16, runs=(MatchRun(chunk_count=16, locations=(at(A),)),))
    replica.table.learn(asked, ask(hashes), found)
    replica.table.end()
    assert replica.matched(hashes) == 0


def listed(replica: Replica, *chains: bytes) -> None:
    """A listing of what the index has stored: the groups of these chains."""
    listing = replica.table.begin_listing()
    assert listing is not None
    for hashes in chains:
        listing.filter.add_all(b"".join(hashes[at : at + 16] for at in range(0, len(hashes), 256)))
    assert replica.table.finish_listing(listing)


def test_a_group_that_neither_a_listing_nor_an_event_names_is_absent() -> None:
    replica, stored, announced, other = Replica(), chain(), chain(), chain()
    assert not replica.table.is_absent(ask(other), 0.0), "nothing was listed yet"
    replica.hold(announced[:16], at(A))
    listed(replica, stored, announced)
    assert replica.table.is_absent(ask(other), 1.5)
    assert replica.table.is_absent(ask(stored[:512] + other), 0.0) is False
    assert replica.table.is_absent(ask(stored[:512] + other, first=32), 0.0)
    assert not any(replica.table.is_absent(ask(hashes), 0.0) for hashes in (stored, announced))
    assert not replica.table.is_absent(ask(stored, first=37), 0.0)
    replica.hold(other[:16], at(A))
    assert not replica.table.is_absent(ask(other), 0.0)


def test_absence_is_not_claimed_without_a_recent_heartbeat() -> None:
    replica = Replica()
    listed(replica)
    assert replica.table.is_absent(ask(chain()), 1.5) and not replica.table.is_absent(ask(chain()), 1.51)
    replica.feed(HeartbeatEvent(age_ms=1400), 2.0)
    assert replica.table.is_absent(ask(chain()), 2.1) and not replica.table.is_absent(ask(chain()), 2.11)


def test_a_resync_ends_what_is_known_to_be_absent_and_a_listing_that_goes_on() -> None:
    replica, hashes = Replica(), chain()
    listed(replica)
    listing = replica.table.begin_listing()
    replica.feed(ResyncEvent(cause="lost", nodes=(A, B)))
    replica.feed(HeartbeatEvent(age_ms=0))
    assert not replica.table.is_absent(ask(hashes), 0.0)
    assert listing is not None and not replica.table.finish_listing(listing), "events of what it read may be lost"
    assert not replica.table.is_absent(ask(hashes), 0.0)
    listed(replica)
    assert replica.table.is_absent(ask(hashes), 0.0)


def test_what_comes_while_groups_are_listed_is_not_absent() -> None:
    replica, early, late, own, misled = Replica(), chain(), chain(), chain(), chain()
    listing = replica.table.begin_listing()
    replica.hold(early[:16], at(A))
    assert listing is not None and replica.table.finish_listing(listing)
    listing = replica.table.begin_listing()
    replica.hold(late[:16])  # held by nodes that are not alive just now
    replica.table.note_stored(ask(own))
    replica.table.forget(ask(misled))
    for _ in range(2):
        assert not any(replica.table.is_absent(ask(each), 0.0) for each in (late, own, misled, own[:512], own[256:]))
        assert listing is not None
        replica.table.finish_listing(listing)
    assert replica.table.is_absent(ask(early), 0.0), "it was listed again, and is gone"


def test_nothing_is_absent_from_a_keyspace_that_was_opened_after_the_listing() -> None:
    replica, hashes, keyspace = Replica(), chain(), b"n" * 16
    query = ChainQuery(keyspace=keyspace, chunk_hashes=hashes, group_head_hash=hashes[:16])
    listed(replica)
    assert not replica.table.is_absent(query, 0.0)
    listing = replica.table.begin_listing()
    replica.table.open_keyspace(keyspace, SIXTEEN)
    assert listing is not None and replica.table.finish_listing(listing)
    assert not replica.table.is_absent(query, 0.0), "its events were dropped when the listing began"
    listed(replica)
    assert replica.table.is_absent(query, 0.0)


def test_the_filter_of_groups_takes_few_absent_ones_for_present() -> None:
    groups = GroupFilter(1 << 14)
    heads = secrets.token_bytes(16 * 8192)  # 16 bits each
    groups.add_all(heads)
    assert all(heads[at : at + 16] in groups for at in range(0, len(heads), 16))
    assert sum(secrets.token_bytes(16) in groups for _ in range(20_000)) < 200  # 50 are expected
    one = secrets.token_bytes(16)
    groups.add(one)
    assert one in groups
