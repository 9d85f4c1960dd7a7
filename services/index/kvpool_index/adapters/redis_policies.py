"""Keyspace policies in Redis: one hash, and the version of them all, in the slot of the keyspaces' names."""

import logging
from collections.abc import Sequence
from typing import Final

from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.adapters.redis_lanes import RedisLane
from kvpool_index.adapters.redis_lua import load_script
from kvpool_index.core.redis_stats import RedisStats
from kvpool_index.ports import VERSION_AHEAD_US

_log = logging.getLogger(__name__)
_SET: Final = load_script("set_policy")
_AHEAD: Final = b"%d" % VERSION_AHEAD_US


class RedisPolicyRegistry:
    """PolicyRegistry over one hash of policies and one counter."""

    def __init__(self, lane: RedisLane, stats: RedisStats, *, key_prefix: bytes) -> None:
        self._lane = lane
        self._stats = stats
        self._policies = key_prefix + b":{k}:policies"
        self._version = key_prefix + b":{k}:policy-version"

    async def set(self, keyspace: bytes, policy: KeyspacePolicy) -> int:
        return int(await self._lane.run(_SET, [self._policies, self._version], keyspace, policy.encode(), b"0", _AHEAD))

    async def restore(self, policies: Sequence[VersionedPolicy]) -> None:
        for one in policies:
            keys = [self._policies, self._version]
            await self._lane.run(_SET, keys, one.keyspace, one.policy.encode(), b"%d" % one.version, _AHEAD)

    async def get(self, keyspaces: Sequence[bytes]) -> list[VersionedPolicy]:
        if not keyspaces:
            return []
        entries = await self._lane.call(self._policies, b"HMGET", self._policies, *keyspaces)
        found = (self._policy(keyspace, entry) for keyspace, entry in zip(keyspaces, entries, strict=True))
        return [one for one in found if one is not None]

    async def version(self) -> int:
        found = await self._lane.call(self._version, b"GET", self._version)
        if found is None or not found.isdigit():
            self._stats.malformed["policy"] += found is not None
            return 0
        return min(int(found), (1 << 64) - 1)

    def _policy(self, keyspace: bytes, entry: bytes | None) -> VersionedPolicy | None:
        if entry is None:
            return None
        try:
            version, encoded = entry.split(b" ", 1)
            return VersionedPolicy(keyspace=keyspace, policy=KeyspacePolicy.decode(encoded), version=int(version))
        except (ValueError, InvalidRequest) as error:
            # Or written by a newer index: its nodes know it, those of this version go on with what they have.
            self._stats.malformed["policy"] += 1
            _log.debug("the policy of keyspace %s is passed over: %s", keyspace.hex(), error)
            return None
