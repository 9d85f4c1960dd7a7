"""Keyspaces and their policies in Redis: a few hashes in one slot."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvpool.core.errors import (
    InvalidRequest,
    KeyspaceMismatch,
)
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.adapters.redis_connections import ConnectionGroup
from kvpool_index.adapters.redis_lua import Script, load_script
from kvpool_index.adapters.redis_wire import Reply, checked, pack
from kvpool_index.core.redis_stats import RedisStats
from kvpool_index.ports import VERSION_AHEAD_US, BoundKeyspace

_log = logging.getLogger(__name__)
_SET: Final = load_script("set_policy")
_AHEAD: Final = b"%d" % VERSION_AHEAD_US


class RedisPolicyRegistry:
    """PolicyRegistry over one hash of policies and one counter."""

    def __init__(self, connections: ConnectionGroup, stats: RedisStats, *, key_prefix: bytes) -> None:
        self._connections = connections
        self._stats = stats
        self._policies = key_prefix + b":{k}:policies"
        self._version = key_prefix + b":{k}:policy-version"

    async def set(self, keyspace: bytes, policy: KeyspacePolicy) -> int:
        return int(
            await self._connections.run(_SET, [self._policies, self._version], keyspace, policy.encode(), b"0", _AHEAD)
        )

    async def restore(self, policies: Sequence[VersionedPolicy]) -> None:
        for one in policies:
            keys = [self._policies, self._version]
            await self._connections.run(_SET, keys, one.keyspace, one.policy.encode(), b"%d" % one.version, _AHEAD)

    async def get(self, keyspaces: Sequence[bytes]) -> list[VersionedPolicy]:
        if not keyspaces:
            return []
        entries = await self._connections.call(self._policies, b"HMGET", self._policies, *keyspaces)
        found = (self._policy(keyspace, entry) for keyspace, entry in zip(keyspaces, entries, strict=True))
        return [one for one in found if one is not None]

    async def version(self) -> int:
        found = await self._connections.call(self._version, b"GET", self._version)
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
            _log.debug("the policy of keyspace %s is skipped: %s", keyspace.hex(), error)
            return None


_BIND: Final = load_script("bind_keyspace")
_KEEP: Final = load_script("keep_keyspaces")
_FORGET: Final = load_script("forget_keyspaces")
_KEYSPACES_AT_ONCE: Final = 256  # in one script, for which all other commands wait


class RedisKeyspaceRegistry:
    """KeyspaceRegistry over one hash of names and one set of times of use a tenant, and one hash by id, in one slot."""

    def __init__(self, connections: ConnectionGroup, stats: RedisStats, *, key_prefix: bytes) -> None:
        self._connections = connections
        self._stats = stats
        self._slot = key_prefix + b":{k}:"
        self._ids = self._slot + b"ids"

    async def bind(self, keyspace: BoundKeyspace) -> tuple[BoundKeyspace, bool]:
        name, meaning = keyspace.name.encode(), keyspace.keyspace_id + keyspace.encoding
        by_id = b"\0".join((keyspace.tenant.encode(), name, keyspace.encoding))
        keys = [self._names(keyspace.tenant), self._ids, self._used(keyspace.tenant)]
        created, bound = await self._connections.run(_BIND, keys, name, meaning, by_id)
        found = self._decoded_or_none(keyspace.keyspace_id, lambda: _bound(keyspace.tenant, name, bound))
        if found is None:
            raise KeyspaceMismatch(
                f"keyspace {keyspace.name!r} is bound to bytes that no index wrote; remove it from the store", field=""
            )
        return found, bool(created)

    async def restore(self, tenant: str, keyspaces: Sequence[BoundKeyspace], *, limit: int) -> int:
        entries = [
            (each.keyspace_id, b"\0".join((tenant.encode(), each.name.encode(), each.encoding))) for each in keyspaces
        ]
        replies = await self._run_parts(_KEEP, [self._ids, self._used(tenant)], limit, entries)
        return sum(map(int, replies))

    async def touch(self, tenant: str, keyspace_ids: Sequence[bytes]) -> None:
        await self._run_parts(_KEEP, [self._ids, self._used(tenant)], 0, [(each, b"") for each in keyspace_ids])

    async def idle(self, tenant: str, idle_s: float) -> list[bytes]:
        key = self._used(tenant)
        seconds, _ = await self._connections.call(key, b"TIME")
        latest_ms = (int(seconds) - idle_s) * 1e3
        found: list[bytes] = await self._connections.call(key, b"ZRANGEBYSCORE", key, b"-inf", b"%d" % latest_ms)
        return found

    async def forget(self, tenant: str, keyspaces: Sequence[BoundKeyspace], *, idle_s: float) -> list[bytes]:
        keys = [self._names(tenant), self._ids, self._used(tenant)]
        named = sorted((each.keyspace_id, each.name.encode()) for each in keyspaces)
        return [each for reply in await self._run_parts(_FORGET, keys, int(idle_s * 1e3), named) for each in reply]

    async def _run_parts(
        self, script: Script, keys: list[bytes], number: int, pairs: Sequence[tuple[bytes, bytes]]
    ) -> list[Reply]:
        """Run a script over pairs of arguments, some at a time, so that others have their turn."""
        return [
            await self._connections.run(
                script, keys, b"%d" % number, *(word for pair in pairs[at : at + _KEYSPACES_AT_ONCE] for word in pair)
            )
            for at in range(0, len(pairs), _KEYSPACES_AT_ONCE)
        ]

    async def by_id(self, keyspace_id: bytes) -> BoundKeyspace | None:
        (bound,) = await self.by_ids([keyspace_id])
        return bound

    async def by_ids(self, keyspace_ids: Sequence[bytes]) -> list[BoundKeyspace | None]:
        if not keyspace_ids:
            return []
        entries = await self._connections.call(self._ids, b"HMGET", self._ids, *keyspace_ids)
        return [
            None if entry is None else self._decoded_or_none(at, partial(_by_id, at, entry))
            for at, entry in zip(keyspace_ids, entries, strict=True)
        ]

    async def count(self, tenant: str) -> int:
        names, used = self._names(tenant), self._used(tenant)
        commands = [pack(b"HLEN", names), pack(b"ZCARD", used)]
        return max(map(int, map(checked, await self._connections.exchange(commands, [names, used]))))

    async def of_tenant(self, tenant: str) -> list[BoundKeyspace]:
        names = self._names(tenant)
        flat = await self._connections.call(names, b"HGETALL", names)
        pairs = sorted(zip(flat[::2], flat[1::2], strict=True))
        found = (self._decoded_or_none(meaning[:16], partial(_bound, tenant, name, meaning)) for name, meaning in pairs)
        return [bound for bound in found if bound is not None]

    def _decoded_or_none(self, keyspace: bytes, read: Callable[[], BoundKeyspace]) -> BoundKeyspace | None:
        try:
            return read()
        except ValueError as error:
            self._stats.malformed["keyspace"] += 1
            _log.debug("the record of keyspace %s is skipped: %s", keyspace.hex(), error)
            return None

    def _used(self, tenant: str) -> bytes:
        return self._slot + b"used:" + tenant.encode()

    def _names(self, tenant: str) -> bytes:
        return self._slot + b"names:" + tenant.encode()


def _by_id(keyspace_id: bytes, entry: bytes) -> BoundKeyspace:
    tenant, name, encoding = entry.split(b"\0", 2)
    return _bound(tenant.decode(), name, keyspace_id + encoding)


def _bound(tenant: str, name: bytes, meaning: bytes) -> BoundKeyspace:
    """Raises ValueError for what no index wrote."""
    if len(meaning) <= 16:
        raise ValueError(f"{len(meaning)} bytes are no id and encoding")
    return BoundKeyspace(tenant=tenant, name=name.decode(), keyspace_id=meaning[:16], encoding=meaning[16:])
