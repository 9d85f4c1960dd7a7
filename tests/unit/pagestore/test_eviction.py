"""Eviction beyond what the contract says: what is remembered, how it adapts, and that no step is long."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kvpool.core.chunks import page_hashes
from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.key_rows import NO_ROW, PackedRows
from kvpool_pagestore.core.retained import Retention

EVERYTHING = 1 << 62


class CountedRows(PackedRows):
    """Rows that count what they are asked."""

    def __init__(self) -> None:
        super().__init__(16)
        self.calls = 0

    def find(self, key: bytes) -> int:
        self.calls += 1
        return super().find(key)

    def key(self, row: int) -> bytes:
        self.calls += 1
        return super().key(row)


def name(number: int) -> bytes:
    return number.to_bytes(8) + (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8)


def test_the_first_victim_after_a_start_takes_no_more_than_any_other() -> None:
    """All that was found is restored; a first victim that ranked it all took 47 s for ten million chunks."""
    rows = CountedRows()
    policy: EvictionPolicy[bytes] = EvictionPolicy(rows)
    for number in range(20_000):  # heads first: all but the last of each 100 have a child by now
        policy.restore(name(number), name(number - 1) if number % 100 else None)
    steps: list[int] = []
    place = policy._place

    def counted(row: int) -> None:
        steps.append(row)
        place(row)

    policy._place = counted  # type: ignore[method-assign]
    for _ in range(300):
        rows.calls = 0
        steps.clear()
        assert policy.evict() is not None
        assert rows.calls < 8 and len(steps) < 4


def test_a_victim_costs_the_same_with_thousands_of_domains() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    for number in range(6000):
        policy.insert(number, domain=number % 3000)
    asked: list[Any] = []

    class Watched(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            asked.append(key)
            return super().get(key, default)

    policy._shelves = Watched(policy._shelves)
    for left in range(6000, 0, -1):
        asked.clear()
        assert policy.evict() is not None and len(policy) == left - 1
        assert len(asked) < 12
    assert not policy._shelves and not policy._shelf_of, "a domain without keys is forgotten"


def test_a_victim_of_some_domains_costs_the_same_with_thousands_of_them() -> None:
    steps: list[int] = []

    class Watched(set[int]):
        def __iter__(self) -> Iterator[int]:
            for domain in super().__iter__():
                steps.append(domain)
                yield domain

    policy: EvictionPolicy[int] = EvictionPolicy()
    for number in range(6000):
        policy.insert(number, domain=number % 3000)
    some = Watched(range(2000))
    gone = [policy.evict(domains=some) for _ in range(1000)]
    assert len(steps) <= 2000, "the domains are walked through once, not for each victim"
    assert len(set(gone)) == 1000 and all(number is not None and number % 3000 < 2000 for number in gone)
    some.add(2500)
    policy.touch(2999)
    left = set(range(6000)) - set(gone)
    while (victim := policy.evict(domains=some)) is not None:
        left.remove(victim)
        if victim < 6000 and victim % 1000 == 7:  # some come back
            policy.insert(victim + 6000, domain=victim % 3000)
            left.add(victim + 6000)
    assert {number % 3000 for number in left} == {*range(2000, 2500), *range(2501, 3000)}


def test_what_is_remembered_is_a_share_of_the_keys_inside() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    for key in range(20_000):
        policy.insert(key, domain=key % 7)
        policy.touch(key - 3)
        if len(policy) > 500:
            policy.evict()
    assert len(policy._ghosts._cells) <= 2 * 501
    assert len(policy._flags) <= 1024, "rows are used again"
    assert len(policy._window._is_last) <= 8 * (501 + 256)
    assert len(policy._heap) <= 2 * 7 + 256


def test_a_pin_that_is_renewed_again_and_again_leaves_no_trail() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    policy.insert(1)
    for until_us in range(1, 5000):
        policy.retain(1, Retention(pinned_until_us=until_us))
    assert len(policy._due) < 10
    assert policy.evict(4998) is None
    assert policy.evict(4999) == 1


def test_many_pins_that_end_at_once_are_worked_off_a_part_at_a_time() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    for key in range(2000):
        policy.insert(key, retention=Retention(pinned_until_us=10))
    assert policy.evict(9) is None
    assert policy.evict(10) is not None
    assert len(policy._due) > 1000
    assert sum(policy.evict(11) is not None for _ in range(2000)) == 1999


def test_a_key_that_loses_its_child_just_after_its_use_is_an_end() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    for key in (1, 2, 3):
        policy.insert(key, key - 1 if key > 1 else None)
    policy.touch(2)
    policy.remove(3)
    assert [policy.evict(), policy.evict(), policy.evict()] == [2, 1, None]


def test_a_key_stays_an_end_if_one_that_names_it_as_parent_has_another_one() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    policy.insert(2, 1)
    policy.insert(3, 2)
    policy.remove(2)  # still stands between 1 and 3
    policy.insert(4)
    policy.insert(2, 4)
    assert sorted(victim for _ in range(3) if (victim := policy.evict()) is not None) == [2, 3, 4]


def test_a_chain_that_comes_back_often_outlives_ones_that_never_do() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    hits = 0
    for number in range(3000):
        chain = [1, 2, 3, 4] if number % 40 == 0 else [100 + 4 * number + at for at in range(4)]
        hits += chain == [1, 2, 3, 4] and 4 in policy
        for at, key in enumerate(chain):
            policy.insert(key, chain[at - 1] if at else None)
        while len(policy) > 140:  # 35 chains: LRU has forgotten it each time
            policy.evict()
    assert hits > 50  # of 75


def test_packed_rows_find_what_was_added_while_they_grow_and_shrink() -> None:
    rows, kept = PackedRows(16), dict[bytes, int]()
    for number in range(5000):
        row = rows.add(name(number))
        assert row not in kept.values() if number % 500 == 0 else True
        kept[name(number)] = row
        if number % 3 == 0:
            rows.remove(kept.pop(name(number)))
    assert all(rows.find(key) == row and rows.key(row) == key for key, row in kept.items())
    assert all(rows.find(name(number)) == NO_ROW for number in (*range(0, 5000, 3), 5001))
    assert len(rows) == len(kept) + 1 or len(rows) == len(kept), "rows are used again"


@pytest.mark.parametrize("parent", [1, 2])
def test_a_key_that_names_itself_as_parent_can_go(parent: int) -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    policy.insert(1, parent)
    assert policy.evict() == 1


def test_a_domain_in_which_nothing_could_go_for_a_while_gives_up_its_keys_later() -> None:
    policy: EvictionPolicy[tuple[str, int]] = EvictionPolicy()
    for number in range(600):
        policy.insert(("chain", number), ("chain", number - 1) if number else None, domain="chain")
    policy.insert(("held", 0), domain="held")
    policy.hold(("held", 0))
    assert policy.evict() == ("chain", 599)
    for number in reversed(range(599)):  # each end of the chain that is left ranks lower than all before it
        assert policy.evict(domains=["chain"]) == ("chain", number)
    policy.release(("held", 0))
    assert policy.evict() == ("held", 0)


class CountedLinks(array):  # type: ignore[type-arg]  # the generic form is no class at run time
    """Links of rows that count how many were followed."""

    followed = 0

    def __getitem__(self, at: Any) -> Any:
        self.followed += 1
        return super().__getitem__(at)


def test_keys_that_a_client_made_alike_are_found_in_as_few_steps_as_others() -> None:
    rows = PackedRows(16)
    keys = [number.to_bytes(8) + bytes(8) for number in range(4000)]
    for key in keys:
        rows.add(key)
    rows._next = links = CountedLinks("i", rows._next)
    for key in keys:
        assert rows.find(key) != NO_ROW
    assert links.followed < 4 * len(keys)


def test_an_unlikely_key_goes_first_unless_it_is_used_or_known_from_before() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    for key in range(100):
        policy.insert(key, is_unlikely=key >= 96)
    policy.touch(98)
    assert [policy.evict() for _ in range(4)] == [96, 97, 99, 0]
    for key in (97, 100):  # 97 was evicted, and somebody has computed it again
        policy.insert(key, is_unlikely=True)
    victims = [policy.evict() for _ in range(98)]
    assert victims.index(100) < 5 and victims.index(97) > 90 and victims.index(98) > 90


def test_an_unlikely_key_that_is_used_right_after_it_came_is_not_unlikely_any_more() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    for key in range(2000):
        policy.insert(key)
    for key in (5000, 5001):
        policy.insert(key, is_unlikely=True)
    policy.touch(5000)  # among so many keys another use just now would be the same one
    assert 5001 in [policy.evict() for _ in range(10)]
    assert 5000 in policy


def test_copies_and_gaps_are_those_that_a_walk_over_all_keys_finds() -> None:
    random, now_us, found_count = Random(1), 0, 0
    policy: EvictionPolicy[int] = EvictionPolicy()
    inside: dict[int, tuple[bool, bool, int]] = {}  # is it a copy, is it held, until when is it pinned

    def above(key: int) -> set[int]:
        return {key >> bits for bits in range(1, key.bit_length())}

    def free(domains: set[int], *, only_copies: bool) -> tuple[set[int], set[int]]:
        """Ends of chains, and gaps."""
        may_go = {
            key
            for key, (is_copy, is_held, until_us) in inside.items()
            if key % 3 in domains and not is_held and until_us <= now_us and (is_copy or not only_copies)
        }
        kept = set().union(*map(above, inside))
        return may_go - kept, may_go & kept

    for _ in range(4000):
        key, what = random.randrange(1, 64), random.randrange(-9, 7)
        domains, only_copies = {key % 3, random.randrange(3)}, random.random() < 0.5
        if what < 2 and key not in inside and (key == 1 or key >> 1 in inside):
            until_us = now_us + random.choice([0, 0, 5])
            policy.insert(key, key >> 1 or None, domain=key % 3, retention=Retention(pinned_until_us=until_us))
            inside[key] = (False, False, until_us)
        elif what == 2 and key in inside:
            is_copy, is_held, until_us = not inside[key][0], random.random() < 0.2, inside[key][2]
            policy.mark_row(policy._rows.find(key), is_copy=is_copy)
            (policy.hold if is_held else policy.release)(key)
            inside[key] = (is_copy, is_held, until_us)
        elif what == 3 and random.random() < 0.2:
            policy.remove(key)
            inside.pop(key, None)
        elif what == 4:
            policy.touch(key)
        elif what == 5:
            now_us += 1
            victim = policy.evict(now_us, domains=domains, only_copies=only_copies)
            ends, gaps = free(domains, only_copies=only_copies)
            assert victim in ends if ends else victim is None
            if victim is None:
                found = [policy._rows.key(row) for row in policy.gaps(domains, only_copies=only_copies)]
                assert sorted(found) == sorted(gaps)
                found_count += len(found)
            else:
                del inside[victim]
    assert found_count > 100 and len(policy) == len(inside)


def test_a_search_for_gaps_goes_on_where_the_one_before_has_stopped() -> None:
    policy: EvictionPolicy[int] = EvictionPolicy()
    for number in range(20_000):
        policy.insert(number, number - 1 if number else None, domain="a")
    policy.hold(19_999)
    assert policy.evict(domains=["a"]) is None
    found = [policy._rows.key(next(policy.gaps(["a"]))) for _ in range(5)]
    assert found == [0, 1, 2, 3, 4]
    assert len(list(policy.gaps(["a"]))) == 19_999
    assert not list(policy.gaps(["a"], only_copies=True)) and not list(policy.gaps(["b"]))


def test_uses_of_all_pages_of_a_chunk_are_remembered() -> None:
    keyspace, chunk = b"k" * 16, bytes(range(16))
    pages = page_hashes(chunk, 3)
    names = [keyspace + pages[at : at + 16] for at in range(0, len(pages), 16)]
    policy: EvictionPolicy[bytes] = EvictionPolicy(PackedRows(32))
    for number in range(64):
        policy.insert(keyspace + name(number), domain=keyspace)
    for one in names:
        policy.insert(one, domain=keyspace)
    for number in range(64, 124):
        for one in names:
            policy.touch(one)
        policy.insert(keyspace + name(number), domain=keyspace)
    while any(one in policy for one in names):
        assert policy.evict() is not None
    for one in names:
        policy.insert(one, domain=keyspace)
    uses = [policy._uses[policy._find(one)] for one in names]
    assert min(uses) == max(uses) > 1
