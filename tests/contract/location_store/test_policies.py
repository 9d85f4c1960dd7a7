"""What every PolicyRegistry promises."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy
from kvpool.core.retention import Retention
from tests.contract.location_store.conftest import Harness

POLICY = KeyspacePolicy(
    write_policy=WritePolicy.WRITE_THROUGH,
    staging=StagingMode.TRANSIT,
    replication_factor=2,
    quota_bytes=1 << 40,
    retention=Retention(ttl_ms=0x200A0D20, priority=-3),  # bytes that a careless script would take for spaces
)


def new_keyspace() -> bytes:
    return secrets.token_bytes(16)


async def test_nothing_was_ever_set(harness: Harness) -> None:
    assert await harness.store.policies.version() == 0
    assert await harness.store.policies.get([new_keyspace()]) == []
    assert await harness.store.policies.get([]) == []


async def test_a_policy_is_seen_whole_by_all_replicas(harness: Harness) -> None:
    keyspace = new_keyspace()
    version = await harness.store.policies.set(keyspace, POLICY)
    assert version > 0
    reported = VersionedPolicy(keyspace=keyspace, policy=POLICY, version=version)
    assert await harness.peer.policies.get([new_keyspace(), keyspace]) == [reported]
    assert await harness.peer.policies.version() == version


async def test_versions_grow_with_every_change_of_any_keyspace(harness: Harness) -> None:
    one, other = new_keyspace(), new_keyspace()
    versions = [
        await store.policies.set(name, POLICY) for store in (harness.store, harness.peer) for name in (one, other)
    ]
    assert versions == sorted(set(versions))
    together = await asyncio.gather(*(harness.store.policies.set(one, POLICY) for _ in range(8)))
    assert len(set(together)) == 8
    assert await harness.peer.policies.version() == max(together)


async def test_what_the_store_lost_comes_back_and_what_is_newer_stays(harness: Harness) -> None:
    lost, newer = new_keyspace(), new_keyspace()
    version = await harness.store.policies.set(newer, POLICY)
    old = replace(POLICY, quota_bytes=1)
    await harness.peer.policies.restore(
        [
            VersionedPolicy(keyspace=lost, policy=old, version=version + 5),
            VersionedPolicy(keyspace=newer, policy=old, version=version - 1),
        ]
    )
    assert await harness.store.policies.get([lost, newer]) == [
        VersionedPolicy(keyspace=lost, policy=old, version=version + 5),
        VersionedPolicy(keyspace=newer, policy=POLICY, version=version),
    ]
    assert await harness.store.policies.version() == version + 5
    assert await harness.store.policies.set(lost, POLICY) > version + 5, "never a version that was in use"


async def test_no_client_can_put_a_policy_out_of_reach_of_operators(harness: Harness) -> None:
    keyspace = new_keyspace()
    version = await harness.store.policies.set(keyspace, POLICY)
    for beyond in (version + (48 * 3600 * 1_000_000), 1 << 53):
        pinned = VersionedPolicy(keyspace=keyspace, policy=replace(POLICY, quota_bytes=1), version=beyond)
        await harness.peer.policies.restore([pinned])
        reported = VersionedPolicy(keyspace=keyspace, policy=POLICY, version=version)
        assert await harness.store.policies.get([keyspace]) == [reported]
        assert await harness.store.policies.version() == version
