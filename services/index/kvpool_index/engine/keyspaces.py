"""Keyspaces and their policies."""

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import InvalidRequest, KeyspaceMismatch, KeyspaceUnknown, Overloaded
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import (
    KeyspaceSpec,
    decode_keyspace,
    derive_hash_key,
    differing_fields,
    encode_keyspace,
    keyspace_id,
)
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.ports import BoundKeyspace, KeyspaceRegistry, NodeDirectory, PolicyRegistry

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_CACHE_MAX: Final = 65536  # keyspaces; the cache is cleared beyond this

SecretOf = Callable[[str], bytes]
"""The 32-byte secret of a tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeyspace:
    """A keyspace, with what matches need of it."""

    tenant: str
    name: str
    keyspace_id: bytes
    spec: KeyspaceSpec
    grid: ShardGrid
    all_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedKeyspace:
    """The answer to an open."""

    keyspace: KnownKeyspace
    hash_key: bytes  # 32 bytes
    created: bool


class KeyspaceService:
    """Binds names, and knows the keyspaces that were asked for. A binding never changes, so that it may be cached.

    A keyspace is in use while it is opened or matched, a node names it because it holds chunks of it, or the store has
    chunks of it. One that is not used for `idle_s` and has no policy is forgotten, so that a tenant that has reached
    max_keyspaces has room again. To forget one that is needed later does no harm: its id follows from its content, so
    that an engine that opens it and a node that names it make the same one known again.
    """

    def __init__(
        self,
        registry: KeyspaceRegistry,
        policies: PolicyRegistry,
        secret_of: SecretOf,
        *,
        max_keyspaces: int = 4096,
        idle_s: float = 0.0,
    ) -> None:
        """idle_s: 0 forgets none."""
        self._registry = registry
        self._policies = policies
        self._secret_of = secret_of
        self._max_keyspaces = max_keyspaces
        self._idle_s = idle_s
        self._known: dict[bytes, KnownKeyspace] = {}
        self._matched: set[bytes] = set()  # since `forget_idle` was called last
        self._tenants: set[str] = set()  # that were seen here

    async def open(self, tenant: str, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        """Bind a name to a spec. Raises InvalidRequest, KeyspaceMismatch naming the field."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"name must be 1 to 128 characters of [A-Za-z0-9._:/-], got {name[:160]!r}")
        encoding = encode_keyspace(tenant, spec)
        wanted = BoundKeyspace(tenant=tenant, name=name, keyspace_id=keyspace_id(encoding), encoding=encoding)
        await self._check_room(wanted)
        bound, created = await self._registry.bind(wanted)
        if bound.encoding != encoding:
            _, existing = decode_keyspace(bound.encoding)
            fields = differing_fields(existing, spec)
            raise KeyspaceMismatch(
                f"keyspace {name!r} is bound to another {', '.join(fields)}", field=fields[0] if fields else ""
            )
        self._tenants.add(tenant)
        keyspace = self._remember(bound)
        hash_key = derive_hash_key(self._secret_of(tenant), keyspace.keyspace_id)
        return OpenedKeyspace(keyspace=keyspace, hash_key=hash_key, created=created)

    async def _check_room(self, wanted: BoundKeyspace) -> None:
        """Raise Overloaded if this would be a new name of a tenant that has as many as it may have."""
        count = await self._registry.count(wanted.tenant)
        if count < self._max_keyspaces:
            return
        names = {bound.name for bound in await self._registry.of_tenant(wanted.tenant)}
        is_stored = len(names) < self._max_keyspaces and await self._registry.by_id(wanted.keyspace_id) is not None
        if wanted.name not in names and not is_stored:  # a node may have restored it without its name
            raise Overloaded(f"tenant {wanted.tenant!r} has {count} keyspaces, as many as max_keyspaces allows")

    async def of_tenant(self, tenant: str) -> list[KnownKeyspace]:
        """All of a tenant's, by name."""
        found: list[KnownKeyspace] = []
        for bound in await self._registry.of_tenant(tenant):
            with contextlib.suppress(InvalidRequest):  # opened through an index of a later version
                found.append(_decoded(bound))
        return found

    async def get(self, tenant: str, keyspace: bytes) -> KnownKeyspace:
        """A keyspace of this tenant. Raises KeyspaceUnknown, also for one of another tenant."""
        known = self._known.get(keyspace) or await self.find(keyspace)
        if known is None or known.tenant != tenant:
            raise KeyspaceUnknown(f"keyspace {keyspace.hex()} is not known")
        self._matched.add(keyspace)
        return known

    async def find(self, keyspace: bytes) -> KnownKeyspace | None:
        """Return a keyspace of any tenant, or None."""
        known = self._known.get(keyspace)
        if known is None:
            bound = await self._registry.by_id(keyspace)
            known = self._remember(bound) if bound is not None else None
        return known

    async def restore(self, tenant: str, encodings: Sequence[bytes]) -> None:
        """Store again those of this tenant that the store has lost, with their names as far as this replica knows them.

        No more than the tenant may have; those left out are not matched, and are named again with the node's next
        comparison. Raises InvalidRequest for a malformed encoding.
        """
        own = {keyspace_id(each): each for each in encodings if decode_keyspace(each)[0] == tenant}
        if not own:
            return
        self._tenants.add(tenant)
        in_use: list[BoundKeyspace] = []
        unnamed: list[BoundKeyspace] = []
        for (at, encoding), bound in zip(own.items(), await self._registry.by_ids(list(own)), strict=True):
            known = self._known.get(at)
            name = known.name if known is not None else ""
            in_use.append(BoundKeyspace(tenant=tenant, name=name, keyspace_id=at, encoding=encoding))
            # Another replica that did not know the name may have been first.
            if name and (bound is None or not bound.name):
                unnamed.append(in_use[-1])
        room = self._max_keyspaces - await self._registry.count(tenant) if unnamed else 0
        for each in unnamed[: max(0, room)]:
            await self._registry.bind(each)  # unless the name has been bound to another encoding since
        refused = await self._registry.restore(tenant, in_use, limit=self._max_keyspaces)
        if refused:
            _log.warning("%d keyspaces that a node holds were not restored: max_keyspaces allows no more", refused)

    async def forget_idle(self, with_chunks: Collection[bytes]) -> int:
        """Forget keyspaces that have not been used for long; how many. with_chunks: those that the store has chunks of.

        Of tenants that were seen here. Raises StoreUnavailable.
        """
        used, self._matched = self._matched.union(with_chunks), set()
        if not self._idle_s:
            return 0
        used_by: dict[str, list[bytes]] = {}
        for each in used:
            with contextlib.suppress(InvalidRequest):  # opened through an index of a later version
                if (known := await self.find(each)) is not None:
                    used_by.setdefault(known.tenant, []).append(each)
        for tenant, keyspaces in used_by.items():
            await self._registry.touch(tenant, keyspaces)
        count = 0
        for tenant in self._tenants:
            idle = await self._registry.idle(tenant, self._idle_s)
            kept = {one.keyspace for one in await self._policies.get(idle)}
            found = [bound for bound in await self._registry.of_tenant(tenant) if bound.keyspace_id in idle]
            found += [bound for bound in await self._registry.by_ids(idle) if bound is not None]
            doomed = [bound for bound in found if bound.keyspace_id not in kept]
            forgotten = await self._registry.forget(tenant, doomed, idle_s=self._idle_s)
            for each in forgotten:
                self._known.pop(each, None)
                _log.info("keyspace %s was not used for %g s and is forgotten", each.hex(), self._idle_s)
            count += len(forgotten)
        return count

    def _remember(self, bound: BoundKeyspace) -> KnownKeyspace:
        if len(self._known) >= _CACHE_MAX:
            self._known.clear()
        known = self._known.get(bound.keyspace_id)
        if known is None or not known.name:
            known = self._known[bound.keyspace_id] = _decoded(bound)
        return known


def _decoded(bound: BoundKeyspace) -> KnownKeyspace:
    """Raises InvalidRequest for an encoding that this version cannot read, or that another keyspace or tenant has."""
    tenant, spec = decode_keyspace(bound.encoding)
    if tenant != bound.tenant or keyspace_id(bound.encoding) != bound.keyspace_id:
        raise InvalidRequest(f"keyspace {bound.keyspace_id.hex()} is recorded with the encoding of another one")
    grid = ShardGrid.of(spec)
    return KnownKeyspace(
        tenant=bound.tenant,
        name=bound.name,
        keyspace_id=bound.keyspace_id,
        spec=spec,
        grid=grid,
        all_shards=grid.all_shards,
    )


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
        """Return the policies of those keyspaces that have one, by keyspace."""
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
        """Return the version of all policies."""
        return await self._policies.version()
