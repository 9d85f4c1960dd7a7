"""What every NodeDirectory promises about registrations that arrive late, twice, or after an answer was lost."""

import secrets
from dataclasses import replace

import pytest

from kvpool.core.cluster import NodeInfo, NodeKind, NodeLoad, RegistrationAttempt
from kvpool.core.errors import StaleIncarnation
from kvpool_index.ports import IndexStore, NodeGrant
from tests.contract.location_store.conftest import LEASE_MS, Harness, renew


def new_node() -> NodeInfo:
    return NodeInfo(node_id=secrets.token_bytes(16), kind=NodeKind.PAGESTORE, host_id="host", endpoint="host:1")


class Process:
    """One process of a node, which numbers its registrations."""

    def __init__(self, node: NodeInfo) -> None:
        self.node = node
        self.process_id = secrets.token_bytes(16)
        self.number = 0

    def attempt(self) -> RegistrationAttempt:
        self.number += 1
        return RegistrationAttempt(process_id=self.process_id, number=self.number)

    async def register(
        self, store: IndexStore, attempt: RegistrationAttempt | None = None, *, held: int = 0, last: int = 0
    ) -> NodeGrant:
        node = replace(self.node, incarnation=held)
        return await store.nodes.register(
            node, last_incarnation=last, lease_ttl_ms=LEASE_MS, attempt=attempt or self.attempt()
        )


async def test_a_process_that_asks_again_gets_what_it_has(harness: Harness) -> None:
    process = Process(new_node())
    lost = await process.register(harness.store)  # its answer never came
    again = await process.register(harness.peer)
    assert (again.incarnation, again.ordinal) == (lost.incarnation, lost.ordinal)
    assert again.announce_epoch > lost.announce_epoch and not again.is_repeat
    far = lost.incarnation + 10**9
    rolled_back = await process.register(harness.store, last=far)
    assert rolled_back.incarnation == far + 1, "higher than anything the node remembers"


async def test_an_attempt_that_arrives_late_changes_nothing(harness: Harness) -> None:
    process = Process(new_node())
    late = process.attempt()
    granted = await process.register(harness.store)
    fence = await harness.store.nodes.open_stream(
        process.node.node_id, granted.incarnation, granted.announce_epoch, process.process_id
    )
    process.node = replace(process.node, draining=True)
    changed = await process.register(harness.store, held=granted.incarnation)
    process.node = replace(process.node, draining=False)
    for attempt, held in ((late, 0), (RegistrationAttempt(process_id=process.process_id, number=2), 0)):
        answer = await process.register(harness.peer, attempt, held=held)
        assert answer == replace(changed, is_repeat=True)
    (record,) = [one for one in await harness.peer.nodes.snapshot() if one.info.node_id == process.node.node_id]
    assert record.info.draining and record.info.incarnation == granted.incarnation
    assert fence.ordinal == record.ordinal
    await renew(harness.store, process.node.node_id, granted.incarnation, NodeLoad(), lease_ttl_ms=LEASE_MS)


async def test_a_late_attempt_does_not_bring_back_a_node_that_has_left(harness: Harness) -> None:
    process = Process(new_node())
    granted = await process.register(harness.store)
    await harness.store.nodes.end(process.node.node_id, granted.incarnation, process.process_id)
    await process.register(harness.peer, RegistrationAttempt(process_id=process.process_id, number=1))
    (record,) = [one for one in await harness.peer.nodes.snapshot() if one.info.node_id == process.node.node_id]
    assert record.ended and not record.alive


async def test_a_process_that_was_replaced_does_not_come_back(harness: Harness) -> None:
    node = new_node()
    processes = [Process(node) for _ in range(4)]
    grants = [await process.register(harness.store) for process in processes]
    assert [one.incarnation for one in grants] == sorted({one.incarnation for one in grants})
    for process in processes[:-1]:
        with pytest.raises(StaleIncarnation):
            await process.register(harness.peer, RegistrationAttempt(process_id=process.process_id, number=1))
    again = await processes[-1].register(harness.store)
    assert again.incarnation == grants[-1].incarnation


async def test_a_node_that_was_forgotten_starts_afresh(harness: Harness) -> None:
    process = Process(new_node())
    first = await process.register(harness.store)
    await harness.let_leases_end()
    for forget_after_ms in (10**9, 0):
        await harness.store.nodes.declare_dead(process.node.node_id, first.incarnation, forget_after_ms=forget_after_ms)
    attempt = RegistrationAttempt(process_id=process.process_id, number=1)
    again = await process.register(harness.store, attempt, held=first.incarnation)
    assert again.incarnation == first.incarnation and not again.is_repeat


async def test_what_a_process_registered_no_other_process_ends_announces_or_changes(harness: Harness) -> None:
    owner, stranger = Process(new_node()), secrets.token_bytes(16)
    node_id = owner.node.node_id
    granted = await owner.register(harness.store)
    for process_id in (b"", stranger):
        with pytest.raises(StaleIncarnation):
            await harness.peer.nodes.end(node_id, granted.incarnation, process_id)
        with pytest.raises(StaleIncarnation):
            await harness.peer.nodes.open_stream(node_id, granted.incarnation, granted.announce_epoch + 1, process_id)
        with pytest.raises(StaleIncarnation):
            hijack = RegistrationAttempt(process_id=process_id, number=1 if process_id else 0)
            await owner.register(harness.peer, hijack, held=granted.incarnation)
    await harness.store.nodes.open_stream(node_id, granted.incarnation, granted.announce_epoch, owner.process_id)
    assert (await owner.register(harness.store, held=granted.incarnation)).incarnation == granted.incarnation
    await harness.store.nodes.end(node_id, granted.incarnation, owner.process_id)
    assert [record.ended for record in await harness.store.nodes.snapshot() if record.info.node_id == node_id] == [True]
