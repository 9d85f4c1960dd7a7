"""Keyspace policies in memory."""

from collections.abc import Sequence

from kvpool.core.clock import Clock
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.ports import VERSION_AHEAD_US


class MemoryPolicyRegistry:
    """PolicyRegistry over a dict."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._policies: dict[bytes, VersionedPolicy] = {}
        self._version = 0

    async def set(self, keyspace: bytes, policy: KeyspacePolicy) -> int:
        self._version = max(self._version, self._clock.wall_us()) + 1
        self._policies[keyspace] = VersionedPolicy(keyspace=keyspace, policy=policy, version=self._version)
        return self._version

    async def restore(self, policies: Sequence[VersionedPolicy]) -> None:
        for one in policies:
            if one.version > self._clock.wall_us() + VERSION_AHEAD_US:
                continue
            known = self._policies.get(one.keyspace)
            if known is None or known.version < one.version:
                self._policies[one.keyspace] = one
                self._version = max(self._version, one.version)

    async def get(self, keyspaces: Sequence[bytes]) -> list[VersionedPolicy]:
        return [self._policies[keyspace] for keyspace in keyspaces if keyspace in self._policies]

    async def version(self) -> int:
        return self._version
