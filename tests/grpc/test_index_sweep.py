"""What restarts leave behind in the store goes again, also if no match ever meets it."""

from kvpool.testing import ManualClock, eventually
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.ports import IndexStore
from tests.fixtures.index_node import Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index
from tests.grpc.test_index_reconcile import index as index
from tests.grpc.test_index_reconcile import redis_server as redis_server
from tests.grpc.test_index_reconcile import store as store


async def named(store: IndexStore) -> list[int]:
    """How many nodes each chunk names."""
    return [len(each.ordinals) async for part in store.locations.chunks() for each in part]


async def test_restarts_leave_nothing_behind(index: RunningIndex, store: IndexStore) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    silent = await FakeNode(index.stub).register()
    await silent.announce(chain.added(range(4)))
    for _ in range(3):
        await node.announce(chain.added(range(40)))
        await node.register(new_incarnation=True)
    await node.announce(chain.added(range(8)))
    assert sorted(await named(store)) == [3] * 32 + [4] * 4 + [5] * 4
    assert await index.engine.dead_locations.sweep() == 3 * 40
    assert sorted(await named(store)) == [1] * 4 + [2] * 4
    assert await index.engine.dead_locations.sweep() == 0
    assert index.metric("kvpool_index_dead_locations_removed_total") == 3 * 40


async def test_what_a_node_has_that_registered_elsewhere_stays(index: RunningIndex, store: IndexStore) -> None:
    async with running_index(store) as elsewhere:
        chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(elsewhere.stub).register()
        await node.announce(chain.added(range(40)))
        assert await index.engine.dead_locations.sweep() == 0
    assert await named(store) == [1] * 40


async def test_it_is_done_from_time_to_time() -> None:
    store = MemoryIndexStore(ManualClock())
    async with running_index(store, config=IndexConfig(sweep_interval_s=0.01)) as index:
        chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
        await node.announce(chain.added(range(4)))
        await node.register(new_incarnation=True)
        await eventually(lambda: index.metric("kvpool_index_dead_locations_removed_total") == 4)
