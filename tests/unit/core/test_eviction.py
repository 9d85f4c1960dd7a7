"""Eviction beyond what all policies promise: what is remembered, learned and replayed."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.core.eviction import ChainPolicy, LruPolicy, PolicyName, Retention, S3FifoPolicy, make_policy
from kvpool.core.eviction.chain_nodes import NONE, ChainNodes
from kvpool.core.eviction.chain_queues import ChainQueues
from kvpool.core.eviction.ghosts import GhostTable
from kvpool.core.eviction.place_values import AGE_BUCKETS, EDGES, age_bucket, age_buckets, place_values
from kvpool.core.eviction.replay import belady, replay
from kvpool.core.eviction.retention import RetentionBook
from kvpool.core.eviction.reuse import ReuseModel

HEATS = 7


def test_ages_fall_into_the_bucket_that_begins_before_them() -> None:
    ages = np.array([*range(3000), *(1 << power for power in range(12, 39))])
    assert [age_bucket(int(age)) for age in ages] == age_buckets(ages).tolist()
    assert (EDGES[age_buckets(ages)] <= ages).all() and (ages < EDGES[age_buckets(ages) + 1]).all()
    assert age_bucket(1 << 60) == AGE_BUCKETS - 1


def counts(reuses: dict[int, tuple[int, int]], lost_age: int = 100_000) -> tuple[np.ndarray, np.ndarray]:
    """Of each rank: so many keys reused at the age, and so many never."""
    reused, lost = np.zeros((4 * HEATS, AGE_BUCKETS)), np.zeros((4 * HEATS, AGE_BUCKETS))
    for rank, (age, percent) in reuses.items():
        reused[rank, age_bucket(age)] += 100 * percent
        lost[rank, age_bucket(lost_age)] += 100 * (100 - percent)
    return reused, lost


def test_before_anything_is_known_the_longest_unused_is_worth_least() -> None:
    values = place_values(*counts({}), HEATS)
    assert (np.diff(values, axis=1) <= 0).all() and (np.diff(values, axis=0) == 0).all()


def test_a_place_is_worth_more_to_what_is_reused_more_often_or_sooner() -> None:
    values = place_values(*counts({7: (1000, 20), 8: (1000, 60), 9: (4000, 60)}), HEATS)
    fresh = age_bucket(10)
    assert values[8, fresh] > 2 * values[7, fresh]
    assert values[8, fresh] > 2 * values[9, fresh]


def test_a_place_is_worth_more_shortly_before_the_usual_time_of_reuse_and_little_after_it() -> None:
    values = place_values(*counts({7: (1000, 50)}), HEATS)[7]
    assert values[age_bucket(900)] > 1.5 * values[age_bucket(10)] > 10 * values[age_bucket(5000)]


def test_values_are_finite_whatever_was_counted() -> None:
    reused = np.zeros((4 * HEATS, AGE_BUCKETS))
    reused[:, 4] = 1e9
    values = place_values(reused, np.zeros_like(reused), HEATS)
    assert np.isfinite(values).all() and (values >= 0).all()


def test_the_model_watches_a_bounded_number_of_keys_and_learns_from_those_that_left_its_sight() -> None:
    model: ReuseModel[int] = ReuseModel(4 * HEATS, HEATS)
    for key in range(50_000):
        model.use(key, key, 7)
    assert len(model.watched) == 8192
    assert 49_999 in model.watched and 1 not in model.watched


def test_ghosts_are_known_until_others_take_their_cells_and_only_once() -> None:
    ghosts = GhostTable()
    ghosts.resize(1 << 14)
    keys = [number.to_bytes(16, "big") for number in range(1000)]
    for number, key in enumerate(keys):
        ghosts.put(key, number % 256)
    notes = [ghosts.take(key) for key in keys]
    found = [(number, note) for number, note in enumerate(notes) if note is not None]
    assert len(found) > 900 and all(note == number % 256 for number, note in found)
    assert all(ghosts.take(key) is None for key in keys)


def test_ghosts_take_no_more_memory_than_a_share_of_the_keys_inside() -> None:
    policy: ChainPolicy[int] = ChainPolicy()
    for key in range(20_000):
        policy.insert(key)
        if len(policy) > 500:
            policy.evict()
    assert policy._ghosts.cell_count <= 4 * 500
    assert len(policy._nodes.keys) <= 502, "nodes are used again"
    queues = policy._queues._queues
    assert sum(len(queue) for shelf in queues for queue in shelf) < 4 * 500 + 64 * len(queues[0])


def test_a_key_that_loses_its_child_just_after_its_use_is_an_end() -> None:
    policy: ChainPolicy[int] = ChainPolicy()
    for key in (1, 2, 3):
        policy.insert(key, key - 1 if key > 1 else None)
    policy.touch(2)
    policy.remove(3)
    assert [policy.evict(), policy.evict(), policy.evict()] == [2, 1, None]


def test_a_key_stays_an_end_if_one_that_names_it_as_parent_has_another_one() -> None:
    policy: ChainPolicy[int] = ChainPolicy()
    policy.insert(2, 1)
    policy.insert(3, 2)
    policy.remove(2)  # still stands between 1 and 3
    policy.insert(4)
    policy.insert(2, 4)
    assert sorted(victim for _ in range(3) if (victim := policy.evict()) is not None) == [2, 3, 4]


def test_touching_again_and_again_leaves_no_trail() -> None:
    policy: ChainPolicy[int] = ChainPolicy()
    for key in range(50):
        policy.insert(key)
    for _ in range(400):
        for key in range(50):
            policy.touch(key)
            policy.hold(key)
            policy.release(key)
    queues = policy._queues._queues
    assert sum(len(queue) for shelf in queues for queue in shelf) < 2000


def test_a_pin_that_is_renewed_again_and_again_leaves_no_trail() -> None:
    book: RetentionBook[int] = RetentionBook()
    for until_us in range(1, 5000):
        book.note(1, Retention(pinned_until_us=until_us))
    assert len(book._due) < 200
    assert book.advance(4998) == [] and book.pinned(1)
    assert book.advance(4999) == [1] and not book.pinned(1)


def test_s3_fifo_remembers_no_more_ghosts_than_it_has_keys() -> None:
    policy: S3FifoPolicy[int] = S3FifoPolicy()
    for key in range(5000):
        policy.insert(key)
        if len(policy) > 100:
            policy.evict()
    (queue,) = policy._queues.values()
    assert len(queue._ghosts) <= 101  # type: ignore[attr-defined]


def test_a_chain_that_comes_back_often_outlives_ones_that_never_do() -> None:
    policy: ChainPolicy[int] = ChainPolicy()
    hits = 0
    for number in range(3000):
        chain = [1, 2, 3, 4] if number % 40 == 0 else [100 + 4 * number + at for at in range(4)]
        hits += chain == [1, 2, 3, 4] and 4 in policy
        for at, key in enumerate(chain):
            policy.insert(key, chain[at - 1] if at else None)
        while len(policy) > 80:  # twenty chains: LRU has forgotten it each time
            policy.evict()
    assert hits > 60  # of 75


def test_replay_counts_leading_blocks_and_belady_is_never_beaten() -> None:
    requests = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [5, 6, 7], [1, 2, 4]]
    assert replay(requests, LruPolicy(), 100).hits == 0 + 2 + 0 + 3 + 2 + 3
    assert replay([], LruPolicy(), 1).hit_rate == 0.0
    for capacity in range(1, 9):
        best = belady(requests, capacity)
        assert (best.requests, best.block_references) == (6, 17)
        for name in PolicyName:
            assert replay(requests, make_policy(name), capacity).hits <= best.hits


@pytest.mark.parametrize("name", list(PolicyName))
def test_the_same_trace_hits_the_same_each_time(name: PolicyName) -> None:
    requests = [[number * 7919 % 50 * 10 + at for at in range(1 + number % 9)] for number in range(2000)]
    assert replay(requests, make_policy(name), 60) == replay(requests, make_policy(name), 60)


def test_a_key_that_left_within_its_request_and_then_stands_for_a_parent_is_used_no_further() -> None:
    """As where a start still shows the policy what it found, while the parent of some of it is given up."""
    policy: ChainPolicy[int] = ChainPolicy()
    for key in (*range(10, 20), 1, 20):  # the model has seen the eleventh use to be of 1
        policy.insert(key)
    policy.touch(1)
    policy.remove(1)
    policy.restore(2, 1)
    policy.insert(21)
    assert 1 not in policy and 2 in policy


def test_a_key_that_was_offered_before_its_first_child_came_is_offered_anew_when_that_goes() -> None:
    """It has another rank by then, and would come to the head of the queue that the child was taken from."""
    nodes: ChainNodes[str] = ChainNodes()
    queues = ChainQueues(nodes, 2)
    assert queues.shelf(0, None) == 0
    values = [[1.0] * AGE_BUCKETS, [0.0] * AGE_BUCKETS]
    parent = nodes.add(NONE, "parent", None, NONE)
    queues.offer(parent, 0)
    child = nodes.add(NONE, "child", "parent", parent)
    queues.offer(child, 1)
    assert queues.take(None, values, 9) == child
    queues.expose(nodes.drop(child), 1, 0)
    assert queues.take(None, values, 9) == parent
