"""Keyspaces: those that a tenant may have, and those that are forgotten when they are used no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.core.errors import KeyspaceUnknown, Overloaded
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, Dtype, KeyspaceSpec, KvGroup, encode_keyspace
from kvpool.core.policy import KeyspacePolicy
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.engine.keyspaces import KeyspaceService

DAY_S = 24 * 3600.0
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 2, 64),), dtype=Dtype.FP32, chunk_tokens=32)


def spec(number: int) -> KeyspaceSpec:
    return replace(SPEC, model_revision=f"r{number}")


class Replicas:
    """Two replicas of an index over one store."""

    def __init__(self, *, max_keyspaces: int = 8, idle_s: float = 7 * DAY_S) -> None:
        self.clock = ManualClock()
        self.store = MemoryIndexStore(self.clock)
        self.one, self.other = (
            KeyspaceService(
                self.store.keyspaces,
                self.store.policies,
                lambda tenant: PUBLISHED_TENANT_SECRET,
                max_keyspaces=max_keyspaces,
                idle_s=idle_s,
            )
            for _ in range(2)
        )

    async def open(self, number: int) -> bytes:
        opened = await self.one.open("t", f"n{number}", spec(number))
        return opened.keyspace.keyspace_id

    async def names(self) -> list[str]:
        return [each.name for each in await self.other.of_tenant("t")]


async def test_nodes_restore_no_more_keyspaces_than_a_tenant_may_have() -> None:
    replicas = Replicas(max_keyspaces=2)
    named = [encode_keyspace("t", spec(number)) for number in range(50)]
    await replicas.one.restore("t", named[:1])
    await replicas.one.restore("t", named)
    assert await replicas.store.keyspaces.count("t") == 2
    await replicas.open(0)
    with pytest.raises(Overloaded):
        await replicas.open(40)


async def test_names_come_back_for_no_more_keyspaces_than_a_tenant_may_have() -> None:
    replicas = Replicas(max_keyspaces=2)
    for number in range(2):
        await replicas.open(number)
    replicas.store.keyspaces.__init__(replicas.clock)  # type: ignore[misc]  # it loses all it has
    await replicas.one.restore("t", [encode_keyspace("t", spec(number)) for number in (3, 4)])
    await replicas.one.restore("t", [encode_keyspace("t", spec(number)) for number in (0, 1)])
    assert await replicas.store.keyspaces.count("t") == 2


async def test_a_keyspace_that_is_not_used_makes_room_for_another() -> None:
    replicas = Replicas(max_keyspaces=1)
    keyspace = await replicas.open(0)
    with pytest.raises(Overloaded):
        await replicas.open(1)
    replicas.clock.advance(7 * DAY_S + 1)
    assert await replicas.one.forget_idle(()) == 1
    await replicas.open(1)
    assert await replicas.names() == ["n1"]
    with pytest.raises(KeyspaceUnknown):
        await replicas.one.get("t", keyspace)


@pytest.mark.parametrize("use", ["opened", "matched", "matched elsewhere", "held by a node", "with chunks"])
async def test_a_keyspace_that_is_used_is_kept(use: str) -> None:
    replicas = Replicas()
    keyspace = await replicas.open(0)
    for _ in range(3):
        replicas.clock.advance(6 * DAY_S)
        if use == "opened":
            await replicas.open(0)
        elif use == "matched":
            await replicas.one.get("t", keyspace)
        elif use == "matched elsewhere":
            await replicas.other.get("t", keyspace)
            await replicas.other.forget_idle(())
        elif use == "held by a node":
            await replicas.other.restore("t", [encode_keyspace("t", spec(0))])
        assert await replicas.one.forget_idle([keyspace] if use == "with chunks" else []) == 0
    assert await replicas.names() == ["n0"]


async def test_a_keyspace_with_a_policy_is_kept() -> None:
    replicas = Replicas()
    await replicas.store.policies.set(await replicas.open(0), KeyspacePolicy(replication_factor=1))
    replicas.clock.advance(8 * DAY_S)
    assert await replicas.one.forget_idle(()) == 0
    assert await replicas.names() == ["n0"]


async def test_a_node_that_still_holds_pages_makes_a_forgotten_keyspace_known_again() -> None:
    replicas = Replicas()
    keyspace = await replicas.open(0)
    replicas.clock.advance(8 * DAY_S)
    assert await replicas.one.forget_idle(()) == 1
    await replicas.one.restore("t", [encode_keyspace("t", spec(0))])
    assert (await replicas.one.get("t", keyspace)).keyspace_id == keyspace
    assert await replicas.open(0) == keyspace, "its name and its hash key are as before"
    assert await replicas.names() == ["n0"]


async def test_idle_time_0_forgets_nothing() -> None:
    replicas = Replicas(idle_s=0)
    await replicas.open(0)
    replicas.clock.advance(1000 * DAY_S)
    assert await replicas.one.forget_idle(()) == 0
