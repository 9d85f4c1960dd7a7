"""Keyspace policies as the engine serves them."""

from collections.abc import Sequence
from typing import Final

from kvpool.core.errors import InvalidRequest, KeyspaceUnknown
from kvpool.core.keyspace import decode_keyspace, keyspace_id
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.ports import KeyspaceRegistry, NodeDirectory, PolicyRegistry

_VERSION_MAX: Final = 1 << 53  # the store's scripts count in doubles


class PolicyService:
    """Sets policies for operators, hands them to pagestores, and takes back from these what the store has lost."""

    def __init__(self, keyspaces: KeyspaceRegistry, policies: PolicyRegistry, nodes: NodeDirectory) -> None:
        self._keyspaces = keyspaces
        self._policies = policies
        self._nodes = nodes

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

    async def get(self, keyspaces: Sequence[bytes]) -> tuple[list[VersionedPolicy], int]:
        """Policies of keyspaces, and the version of all."""
        version = await self._policies.version()  # first: what is set meanwhile is fetched again, not missed
        return await self._policies.get(keyspaces), version

    async def restore(
        self, tenant: str, node_id: bytes, incarnation: int, kept: Sequence[tuple[bytes, VersionedPolicy]]
    ) -> None:
        """Put back policies of this tenant's keyspaces that the store has lost, from a node that holds its lease.

        kept: each with the encoding of its keyspace. Raises InvalidRequest, LeaseLost, StaleIncarnation.
        """
        own: list[VersionedPolicy] = []
        for index, (encoding, one) in enumerate(kept):
            owner, _ = decode_keyspace(encoding)
            if keyspace_id(encoding) != one.keyspace:
                raise InvalidRequest(f"policy {index}: its keyspace has another encoding", item_index=index)
            if one.version > _VERSION_MAX:
                raise InvalidRequest(f"policy {index}: no index ever gave out version {one.version}", item_index=index)
            if owner == tenant:
                own.append(one)
        await self._nodes.ordinal(node_id, incarnation)
        await self._policies.restore(own)

    async def version(self) -> int:
        """Of all policies."""
        return await self._policies.version()
