"""What the eviction policy promises."""

import pytest

from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.retained import Retention


@pytest.fixture
def policy() -> EvictionPolicy[int]:
    return EvictionPolicy()


def all_victims(policy: EvictionPolicy[int], now_us: int = 0, domain: str | None = None) -> list[int]:
    victims = []
    while (victim := policy.evict(now_us, domains=None if domain is None else (domain,))) is not None:
        victims.append(victim)
    return victims


def test_all_keys_come_out_once(policy: EvictionPolicy[int]) -> None:
    for key in range(100):
        policy.insert(key, key - 1 if key % 10 else None)
    assert len(policy) == 100 and 42 in policy
    assert sorted(all_victims(policy)) == list(range(100))
    assert len(policy) == 0 and 42 not in policy
    assert policy.evict() is None


def test_the_longest_unused_of_equals_goes_first(policy: EvictionPolicy[int]) -> None:
    for key in range(20):
        policy.insert(key)
    assert all_victims(policy) == list(range(20))


def test_what_is_unknown_is_ignored(policy: EvictionPolicy[int]) -> None:
    for change in (policy.touch, policy.hold, policy.release, policy.remove):
        change(7)
    policy.retain(7, Retention(priority=5))
    assert len(policy) == 0 and policy.evict() is None


def test_what_was_removed_does_not_come_out(policy: EvictionPolicy[int]) -> None:
    for key in range(6):
        policy.insert(key)
    policy.remove(0)
    policy.remove(3)
    assert all_victims(policy) == [1, 2, 4, 5]


def test_inserting_again_is_a_use(policy: EvictionPolicy[int]) -> None:
    policy.insert(1)
    policy.insert(1)
    assert len(policy) == 1
    assert all_victims(policy) == [1]


def test_restored_keys_are_inside_in_whatever_order_they_come(policy: EvictionPolicy[int]) -> None:
    for key in (3, 1, 0, 2, 5, 4):
        policy.restore(key, key - 1 if key % 3 else None, domain="d")
    policy.restore(4, 3, domain="d")
    policy.restore(9, retention=Retention(pinned_until_us=10))
    assert len(policy) == 7 and 9 in policy
    assert sorted(all_victims(policy)) == list(range(6))
    assert all_victims(policy, now_us=10) == [9]


def test_what_is_held_stays(policy: EvictionPolicy[int]) -> None:
    for key in range(4):
        policy.insert(key)
    policy.hold(0)
    policy.hold(0)
    policy.hold(2)
    policy.touch(2)
    assert all_victims(policy) == [1, 3]
    policy.release(0)
    assert all_victims(policy) == [0]
    policy.remove(2)
    policy.insert(2)  # another stay: not held
    assert all_victims(policy) == [2]


def test_what_is_pinned_stays_until_the_pin_ends(policy: EvictionPolicy[int]) -> None:
    policy.insert(1, retention=Retention(pinned_until_us=1000))
    policy.insert(2)
    assert all_victims(policy, now_us=999) == [2]
    assert all_victims(policy, now_us=1000) == [1]


def test_a_pin_may_come_and_go_later(policy: EvictionPolicy[int]) -> None:
    for key in (1, 2):
        policy.insert(key)
    policy.retain(1, Retention(pinned_until_us=50))
    policy.retain(2, Retention(pinned_until_us=50))
    policy.retain(2, Retention())
    assert all_victims(policy, now_us=10) == [2]
    policy.retain(1, Retention(pinned_until_us=90))
    assert all_victims(policy, now_us=60) == []
    assert all_victims(policy, now_us=90) == [1]


def test_lower_priorities_go_first(policy: EvictionPolicy[int]) -> None:
    policy.insert(1, retention=Retention(priority=-100))
    policy.insert(2, retention=Retention(priority=100))
    policy.insert(3)
    policy.insert(4, retention=Retention(priority=-1))
    for _ in range(3):
        policy.touch(1)
    assert all_victims(policy) == [1, 4, 3, 2]


def test_what_has_expired_goes_before_all_else(policy: EvictionPolicy[int]) -> None:
    policy.insert(1, retention=Retention(priority=-100))
    policy.insert(2, retention=Retention(priority=100, expires_us=500))
    policy.insert(3)
    assert policy.evict(499) == 1
    assert policy.evict(500) == 2
    assert all_victims(policy, 501) == [3]


def test_a_pin_holds_what_has_expired(policy: EvictionPolicy[int]) -> None:
    policy.insert(1, retention=Retention(pinned_until_us=900, expires_us=500))
    assert all_victims(policy, 600) == []
    assert all_victims(policy, 900) == [1]


def test_what_is_spared_comes_next_time(policy: EvictionPolicy[int]) -> None:
    for key in range(5):
        policy.insert(key)
    assert policy.evict(spare=lambda key: key < 3) == 3
    assert policy.evict(spare=lambda key: True) is None
    assert all_victims(policy) == [0, 1, 2, 4]


def test_victims_can_be_of_one_domain_only(policy: EvictionPolicy[int]) -> None:
    for key in range(6):
        policy.insert(key, domain="odd" if key % 2 else "even")
    assert all_victims(policy, domain="odd") == [1, 3, 5]
    assert all_victims(policy, domain="none") == []
    assert all_victims(policy) == [0, 2, 4]


def test_a_key_that_comes_back_has_the_domain_and_retention_of_its_return(policy: EvictionPolicy[int]) -> None:
    policy.insert(1, domain="a", retention=Retention(pinned_until_us=10**9))
    policy.remove(1)
    policy.insert(1, domain="b")
    assert policy.evict(domains=("a",)) is None
    assert policy.evict(domains=("b", "c")) == 1
