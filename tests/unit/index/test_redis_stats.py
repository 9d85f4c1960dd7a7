"""What is wrong with a Redis, by what it says about itself."""

from dataclasses import replace

import pytest

from kvpool_index.core.redis_stats import RedisFacts, problems_of

SOUND = RedisFacts(
    version="7.2.4",
    used_bytes=100 << 20,
    maxmemory_bytes=1 << 30,
    maxmemory_policy="noeviction",
    is_append_only=True,
    is_cluster=False,
    replica_count=2,
)


def problems(facts: RedisFacts, *, saves: bool | None = True, topology: str = "single", wait: int = 0) -> set[str]:
    return set(problems_of(facts, saves=saves, topology=topology, wait_replicas=wait))


def test_a_sound_one_has_none() -> None:
    assert problems(SOUND) == problems(SOUND, topology="sentinel", wait=2) == set()
    assert problems(replace(SOUND, is_cluster=True), topology="cluster") == set()


@pytest.mark.parametrize(
    ("policy", "limit_bytes", "found"),
    [("allkeys-lru", 1, {"eviction"}), ("volatile-ttl", 1, {"eviction"}), ("allkeys-lru", 0, set())],
)
def test_eviction_is_one_where_memory_is_limited(policy: str, limit_bytes: int, found: set[str]) -> None:
    assert problems(replace(SOUND, maxmemory_policy=policy, maxmemory_bytes=limit_bytes)) == found


@pytest.mark.parametrize(
    ("share", "policy", "found"),
    [
        (0.89, "noeviction", set()),
        (0.91, "noeviction", {"full"}),
        (1.5, "noeviction", {"full"}),
        (1.0, "lru", {"eviction"}),
    ],
)
def test_so_is_memory_that_is_nearly_used_up(share: float, policy: str, found: set[str]) -> None:
    used_bytes = int(share * SOUND.maxmemory_bytes)
    assert problems(replace(SOUND, used_bytes=used_bytes, maxmemory_policy=policy)) == found
    assert problems(replace(SOUND, used_bytes=used_bytes, maxmemory_bytes=0)) == set()


def test_so_is_losing_everything_on_a_restart() -> None:
    volatile = replace(SOUND, is_append_only=False)
    assert problems(volatile, saves=False) == {"no_persistence"}
    assert problems(volatile, saves=True) == problems(volatile, saves=None) == problems(SOUND, saves=False) == set()


@pytest.mark.parametrize(("version", "found"), [("6.0.9", {"old_version"}), ("6.2.0", set()), ("", {"old_version"})])
def test_so_is_an_old_version(version: str, found: set[str]) -> None:
    assert problems(replace(SOUND, version=version)) == found


def test_so_is_another_topology_than_the_url_says() -> None:
    assert problems(replace(SOUND, is_cluster=True)) == problems(SOUND, topology="cluster") == {"topology"}


def test_so_are_too_few_replicas_to_wait_for() -> None:
    assert problems(SOUND, wait=3) == {"missing_replicas"}
