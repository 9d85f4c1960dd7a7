"""Keyspace policies as the engine serves them."""

from collections.abc import Sequence
from typing import Final

from kvpool.core.errors import InvalidRequest, KeyspaceUnknown
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.ports import KeyspaceRegistry, PolicyRegistry

_VERSION_MAX: Final = 1 << 53  # the store's scripts count in doubles


class PolicyService:
    """Sets policies for operators, hands them to pagestores, and takes back from these what the store has lost."""

    def __init__(self, keyspaces: KeyspaceRegistry, policies: PolicyRegistry) -> None:
        self._keyspaces = keyspaces
        self._policies = policies

    async def set(self, tenant: str, name: str, policy: KeyspacePolicy) -> VersionedPolicy:
        """Replace the policy of a keyspace of this tenant. Raises KeyspaceUnknown, InvalidRequest."""
        policy.check()
        if not name:
            raise InvalidRequest("a keyspace name must not be empty")
        named = [bound for bound in await self._keyspaces.of_tenant(tenant) if bound.name == name]
        if not named:
            raise KeyspaceUnknown(f"the tenant has no keyspace {name!r}")
        keyspace = named[0].keyspace_id
        return VersionedPolicy(keyspace=keyspace, policy=policy, version=await self._policies.set(keyspace, policy))

    async def of(self, keyspaces: Sequence[bytes]) -> dict[bytes, VersionedPolicy]:
        """By keyspace, those that have one."""
        return {one.keyspace: one for one in await self._policies.get(keyspaces)}

    async def exchange(
        self, keyspaces: Sequence[bytes], known: Sequence[VersionedPolicy]
    ) -> tuple[list[VersionedPolicy], int]:
        """Policies of keyspaces, and the version of all, once what the node knows is there again.

        Raises InvalidRequest.
        """
        for index, one in enumerate(known):
            if one.version > _VERSION_MAX:
                raise InvalidRequest(f"known {index}: no index ever gave out version {one.version}", item_index=index)
        if known:
            await self._policies.restore(known)
        version = await self._policies.version()  # first: what is set meanwhile is fetched again, not missed
        return await self._policies.get(keyspaces), version

    async def version(self) -> int:
        """Of all policies."""
        return await self._policies.version()
