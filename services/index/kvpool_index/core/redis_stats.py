"""Counters of the connections to Redis, and the checks of a master's settings."""

from dataclasses import dataclass, field
from typing import Final

REDIRECTIONS: Final = ("moved", "ask", "try_again")
RECORDS: Final = ("node", "keyspace", "policy", "event", "location")
PROBLEMS: Final = ("eviction", "full", "no_persistence", "old_version", "topology", "missing_replicas")
MIN_VERSION: Final = (6, 2)
FULL_SHARE: Final = 0.9  # of its memory limit: reported while there is still time to raise it


@dataclass(slots=True)
class RedisStats:
    """Counts since the start, and the state of the masters when last looked at."""

    connects: int = 0  # connections made, the first ones too
    reconnects: int = 0  # connections that were lost and asked for again
    failed_connects: int = 0
    failovers: int = 0  # another server was found to be a master
    redirections: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REDIRECTIONS, 0))
    malformed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RECORDS, 0))  # reads of such a record
    masters: int = 0  # 0 until they are known
    masters_up: int = 0
    problems: frozenset[str] = frozenset()  # of PROBLEMS


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """What a server says about itself."""

    version: str
    used_bytes: int
    maxmemory_bytes: int  # 0: no limit
    maxmemory_policy: str
    is_append_only: bool
    is_cluster: bool
    replica_count: int


def problems_of(facts: RedisFacts, *, saves: bool | None, topology: str, wait_replicas: int) -> dict[str, str]:
    """Which of PROBLEMS a master has, with what to do about each.

    saves: whether it writes snapshots; None if unknown. topology: what the URL says it is.
    """
    found: dict[str, str] = {}
    if facts.maxmemory_bytes and facts.maxmemory_policy != "noeviction":
        found["eviction"] = (
            f"maxmemory-policy is {facts.maxmemory_policy}: it will evict leases and locations alike; set noeviction"
        )
    elif facts.maxmemory_bytes and facts.used_bytes > facts.maxmemory_bytes * FULL_SHARE:
        found["full"] = (
            f"{facts.used_bytes >> 20} of {facts.maxmemory_bytes >> 20} MiB are used: once full it refuses leases too, "
            "and no node is found; raise maxmemory"
        )
    if not facts.is_append_only and saves is False:
        found["no_persistence"] = "neither snapshots nor an append-only file: a restart loses all it knows"
    if _version(facts.version) < MIN_VERSION:
        found["old_version"] = f"version {facts.version} is older than {'.'.join(map(str, MIN_VERSION))}"
    if facts.is_cluster != (topology == "cluster"):
        found["topology"] = (
            "it is a member of a Cluster; use redis+cluster://" if facts.is_cluster else "it is not a Cluster"
        )
    if facts.replica_count < wait_replicas:
        found["missing_replicas"] = (
            f"{facts.replica_count} replicas, but redis_wait_replicas is {wait_replicas}: nothing can be announced"
        )
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
