"""The table of nodes is kept fresh, however many nodes register meanwhile."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvpool.core.cluster import UNNUMBERED, NodeInfo, NodeKind
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.adapters.memory_nodes import MemoryNodeDirectory
from kvpool_index.config import IndexConfig
from kvpool_index.core.nodes import NodeRecord
from kvpool_index.engine.nodes import NodeService
from kvpool_index.metrics import IndexMetrics


def info(number: int) -> NodeInfo:
    return NodeInfo(node_id=number.to_bytes(16, "big"), kind=NodeKind.PAGESTORE, endpoint="h:1")


class BusyDirectory(MemoryNodeDirectory):
    """While a snapshot is on its way, a node registers here and another one ends its lease."""

    service: NodeService
    snapshots = 0

    async def snapshot(self) -> list[NodeRecord]:
        found = await super().snapshot()
        self.snapshots += 1
        await self.service.register(info(100 + self.snapshots), 0, UNNUMBERED)
        last = await self.service.register(info(1000), 0, UNNUMBERED)
        await self.service.end(info(1000).node_id, last.incarnation, b"")
        return found


async def test_registrations_meanwhile_neither_put_a_refresh_off_nor_are_lost_with_it() -> None:
    clock = ManualClock()
    directory = BusyDirectory(clock, MemoryIndexStore(clock).events)
    service = directory.service = NodeService(directory, IndexConfig(), clock, IndexMetrics(CollectorRegistry()))
    for number in range(3):  # registered through another replica
        await directory.register(info(number), last_incarnation=0, lease_ttl_ms=60_000)
    for count in range(1, 4):
        await service.refresh()
        assert directory.snapshots == count, "one read each"
        known = {int.from_bytes(node.info.node_id, "big") for node in service.live_nodes_now()}
        assert known == {0, 1, 2, *range(101, 101 + count)}


class RestartedDirectory(MemoryNodeDirectory):
    """While a snapshot is read, a node ends its lease here and its next process registers through another replica."""

    service: NodeService
    ended_incarnation = 0

    async def snapshot(self) -> list[NodeRecord]:
        if self.ended_incarnation:
            await self.service.end(info(1).node_id, self.ended_incarnation, b"")
            await self.register(info(1), last_incarnation=0, lease_ttl_ms=60_000)
            self.ended_incarnation = 0
        return await super().snapshot()


async def test_the_end_of_a_lease_does_not_hide_a_newer_registration_of_the_node() -> None:
    clock = ManualClock()
    directory = RestartedDirectory(clock, MemoryIndexStore(clock).events)
    service = directory.service = NodeService(directory, IndexConfig(), clock, IndexMetrics(CollectorRegistry()))
    lease = await service.register(info(1), 0, UNNUMBERED)
    directory.ended_incarnation = lease.incarnation
    await service.refresh()
    (node,) = service.live_nodes_now()
    assert node.info.incarnation > lease.incarnation
