"""Whether the masters answer, and whether they are set up as an index needs them."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from kvpool.core.errors import KvPoolError, StoreUnavailable
from kvpool_index.adapters.redis_lanes import RedisLane
from kvpool_index.adapters.redis_link import RedisLink
from kvpool_index.adapters.redis_wire import checked, pack
from kvpool_index.core.redis_stats import RedisFacts, RedisStats, problems_of

_log = logging.getLogger(__name__)

_LOOKS_BETWEEN_CHECKS: Final = 60


class RedisHealth:
    """Looks at each master; what is wrong with its configuration is logged when it is first seen."""

    def __init__(self, lane: RedisLane, topology: str, stats: RedisStats, *, wait_replicas: int) -> None:
        self._lane = lane
        self._topology = topology
        self._stats = stats
        self._wait_replicas = wait_replicas
        self._checked: dict[str, frozenset[str]] = {}  # by master, what was found
        self._looks = 0

    async def look(self) -> None:
        """One round trip to each master; a whole check of those not seen before, and of all once a minute."""
        self._looks += 1
        if self._looks % _LOOKS_BETWEEN_CHECKS == 0:
            self._checked = {}
        try:
            masters = await self._lane.masters()
        except KvPoolError:
            self._stats.masters_up = 0
            return
        results = await asyncio.gather(*map(self._look_at, masters))
        self._stats.masters_up = results.count(True)
        current = {str(master.server) for master in masters}
        self._checked = {name: found for name, found in self._checked.items() if name in current}
        self._stats.problems = frozenset[str]().union(*self._checked.values())

    async def _look_at(self, master: RedisLink) -> bool:
        try:
            await master.call(b"PING")
            name = str(master.server)
            if name not in self._checked:
                self._checked[name] = await self._check(master)
        except KvPoolError:
            return False
        return True

    async def _check(self, master: RedisLink) -> frozenset[str]:
        """What is wrong with one master. Raises StoreUnavailable; INFO is needed, CONFIG GET is not."""
        info, save = await master.exchange([pack(b"INFO"), pack(b"CONFIG", b"GET", b"save")])
        saves = bool(save[1]) if isinstance(save, list) and len(save) == 2 else None
        found = problems_of(
            _facts(checked(info)), saves=saves, topology=self._topology, wait_replicas=self._wait_replicas
        )
        for problem, text in found.items():
            _log.warning("Redis at %s (%s): %s", master.server, problem, text)
        return frozenset(found)


def _facts(info: bytes) -> RedisFacts:
    lines = [line.partition(":") for line in info.decode(errors="replace").splitlines()]
    facts: Mapping[str, str] = {name: value for name, _, value in lines}
    try:
        return RedisFacts(
            version=facts.get("redis_version", ""),
            used_bytes=int(facts.get("used_memory", "0")),
            maxmemory_bytes=int(facts.get("maxmemory", "0")),
            maxmemory_policy=facts.get("maxmemory_policy", ""),
            is_append_only=facts.get("aof_enabled", "0") == "1",
            is_cluster=facts.get("cluster_enabled", "0") == "1",
            replica_count=int(facts.get("connected_slaves", "0")),
        )
    except ValueError as error:
        raise StoreUnavailable(f"INFO says what is no number: {error}") from error
