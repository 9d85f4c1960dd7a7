"""Requests of a model with several KV cache groups: what is loaded and stored of each, and when that is over."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.engine_work import EngineWork
from kvpool.connectors.vllm.kv_groups import KvCacheGroup
from kvpool.connectors.vllm.orders import LoadEnd, LoadOrder, StepOrders, StoreOrder, packed_blocks
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.worker import WorkerSide
from kvpool.connectors.vllm.worker_stores import WorkerGroup
from tests.unit.connectors.test_vllm_worker import HASHES, Pool
from tests.unit.connectors.vllm_fakes import FakeLink, FakePool, FakeRequest, a_request
from tests.unit.connectors.vllm_worlds import BLOCK, CHUNK, CHUNK_BYTES, World, hashes_of

FULL = KvCacheGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES)
WINDOW = KvCacheGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES, window_tokens=40)
FULL_BLOCKS, WINDOW_BLOCKS = list(range(100, 140)), list(range(200, 240))


def a_world(full_chunks: int = 0, window_chunks: int = 0, **settings: Any) -> World:
    """Of a model with layers of a window, and of full attention."""
    pools = FakePool(window_chunks, hash_key=b"w" * 32), FakePool(full_chunks)
    return World(*pools, groups=[WINDOW, FULL], **{"store": "prefill", "load": "always", **settings})


def blocks_after(skipped: int) -> list[list[int]]:
    """Of a request whose first window blocks vLLM has taken away."""
    return [[0] * skipped + WINDOW_BLOCKS[skipped:], FULL_BLOCKS]


def computed(world: World, request: FakeRequest, token_count: int, *, skipped: int = 0, **more: Any) -> StepOrders:
    """A step that computes so many tokens more."""
    orders = world.side.build({request.request_id: token_count}, (), lambda _: blocks_after(skipped), **more)
    request.num_computed_tokens += token_count
    return orders


def chunks_of(orders: Sequence[LoadOrder | StoreOrder]) -> list[tuple[int, range]]:
    """Group and chunks of each."""
    return [(order.group, range(order.first_chunk, order.end_chunk)) for order in orders]


def test_a_load_has_an_order_for_each_group_of_what_it_reads() -> None:
    world, request = a_world(4, 4), a_request(4 * CHUNK + 5)
    assert world.match(request) == 4 * CHUNK
    # 128 tokens: token 128 reads from 89 on, in the block at 80.
    world.side.allocated(request, blocks_after(5), 4 * CHUNK)
    window, full = world.build().loads
    assert chunks_of([window, full]) == [(0, range(2, 4)), (1, range(4))]
    assert (window.first_token, full.first_token) == (80, 0)
    assert window.block_ids.tolist() == blocks_after(5)[0][:8]
    assert hashes_of(window) != hashes_of(full)


def test_the_boundary_is_one_that_all_groups_have() -> None:
    assert a_world(4, 3).match(a_request(4 * CHUNK + 5)) == 3 * CHUNK
    assert a_world(2, 4).match(a_request(4 * CHUNK + 5)) == 2 * CHUNK
    assert a_world(4, 0).match(a_request(4 * CHUNK + 5)) == 0
    assert a_world(4, 3).match(a_request(4 * CHUNK + 5), 3 * CHUNK) == 0, "the engine holds as much"


def test_chunks_are_stored_while_their_blocks_are_there() -> None:
    world, request = a_world(), a_request(6 * CHUNK)
    assert world.match(request) == 0
    # What has left the window when the step ends is an order of its own: its blocks may be used again at once.
    assert chunks_of(computed(world, request, 4 * CHUNK).stores) == [(0, range(2)), (0, range(2, 4)), (1, range(4))]
    # A part of chunk 4 is gone when its last token is computed.
    assert chunks_of(computed(world, request, 2 * CHUNK, skipped=9).stores) == [(0, range(5, 6)), (1, range(4, 6))]


def test_generated_chunks_of_a_window_are_stored_before_they_leave_it() -> None:
    world, request = a_world(), a_request(2 * CHUNK)
    world.match(request)
    assert chunks_of(computed(world, request, 2 * CHUNK).stores) == [(0, range(2)), (1, range(2))]
    stores = []
    for token in range(CHUNK + 1):
        request.all_token_ids.append(token)
        stores += computed(world, request, 1, skipped=2).stores
    assert chunks_of(stores) == [(0, range(2, 3))]
    assert world.side.finished(request, blocks_after(4), "FINISHED_STOPPED")
    assert chunks_of(world.build().stores) == [(1, range(2, 3))]


def test_windows_are_stored_as_they_are_computed_even_if_the_rest_waits_for_the_end() -> None:
    world, request = a_world(store="finish"), a_request(2 * CHUNK + 1)
    world.match(request)
    assert chunks_of(computed(world, request, 2 * CHUNK + 1).stores) == [(0, range(2))]


def test_a_store_is_not_kept_once_one_of_its_blocks_is_given_out_again() -> None:
    world, request, other = a_world(), a_request(4 * CHUNK), a_request(CHUNK, "other", first_token=900)
    world.match(request)
    gone, kept, full = computed(world, request, 4 * CHUNK).stores
    assert (gone.group, kept.group, full.group) == (0, 0, 1)
    given = computed(world, request, 1, skipped=5, new_blocks=[WINDOW_BLOCKS[3], 300])
    assert given.overwritten == [gone.number]
    # The blocks of a request that vLLM admits, but for those that it found in its own cache.
    world.match(other, BLOCK)
    world.side.not_chosen(other, [[WINDOW_BLOCKS[4], 301], [FULL_BLOCKS[0], WINDOW_BLOCKS[6]]])
    assert computed(world, request, 1, skipped=5).overwritten == [kept.number]
    world.stored(StepOrders(step=1, stores=[gone, kept]))
    assert computed(world, request, 1, skipped=5, new_blocks=WINDOW_BLOCKS).overwritten == []


def test_blocks_that_a_load_fills_are_given_out_again_too() -> None:
    world, request, other = a_world(), a_request(4 * CHUNK), a_request(4 * CHUNK + 5, "other", first_token=900)
    world.match(request)
    gone, *_ = computed(world, request, 4 * CHUNK).stores
    for pool in world.link.pools:
        pool.chunk_count = 4
    tokens = world.match(other)
    assert tokens
    world.side.allocated(other, [[0, 0, 0, 0, 0, 300, 301, WINDOW_BLOCKS[0]], list(range(310, 318))], tokens)
    assert world.build().overwritten == [gone.number]


def test_events_name_a_chunk_once() -> None:
    world, request = a_world(), a_request(2 * CHUNK + 1)
    world.match(request)
    orders = computed(world, request, 2 * CHUNK)
    world.stored(orders)
    (change,) = world.side.take_changes()
    assert change.hashes == hashes_of(orders.stores[-1])


class GroupsWorld:
    """A worker's side with two groups."""

    def __init__(self, *pools: Pool, held: bool = False) -> None:
        self.link = FakeLink(*pools)
        self.link.held = held
        group = WorkerGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES, work=EngineWork(None))
        self.side = WorkerSide(
            VllmSettings(agent="unix:/x", chunk_tokens=CHUNK),
            self.link,  # type: ignore[arg-type]
            [group] * len(pools),
            load_only=False,
            fails_whole=True,
        )

    def load(self) -> None:
        loads = [
            LoadOrder(
                request_id="r",
                group=group,
                hashes=b"".join(HASHES),
                token_count=130,
                block_ids=packed_blocks(blocks[:8]),
                first_chunk=first_chunk,
                end_chunk=4,
                first_token=first_chunk * CHUNK,
                end_token=128,
                timeout_s=1.0,
            )
            for group, (blocks, first_chunk) in enumerate(((WINDOW_BLOCKS, 2), (FULL_BLOCKS, 0)))
        ]
        self.side.start_loads(StepOrders(step=1, loads=loads))


def test_a_request_goes_on_when_all_groups_are_in() -> None:
    pools = Pool(), Pool()
    world = GroupsWorld(*pools)
    world.load()
    assert [pool.asked[0]["first_chunk"] for pool in pools] == [2, 0]
    assert [pool.asked[0]["blocks"][0] for pool in pools] == [WINDOW_BLOCKS[0], FULL_BLOCKS[0]]
    assert world.side.take_received() == {"r"}
    assert world.side.take_failed_requests() == set()
    ends = [end for end in world.side.take_ends() if isinstance(end, LoadEnd)]
    assert [(end.group, end.result.loaded_chunks) for end in ends] == [(0, 2), (1, 4)]


def test_nothing_is_said_of_a_request_while_a_group_may_still_be_written() -> None:
    world = GroupsWorld(Pool(), Pool(), held=True)
    world.load()
    (_, future), *others = world.link._waiting
    world.link._waiting = others
    future.set_exception(RuntimeError("planted"))
    assert (world.side.take_received(), world.side.take_failed_requests()) == (set(), set())
    world.link.go()
    assert (world.side.take_received(), world.side.take_failed_requests()) == ({"r"}, {"r"})


@pytest.mark.parametrize("failing", [0, 1])
def test_a_group_that_fails_fails_the_load(failing: int) -> None:
    pools = Pool(), Pool()
    pools[failing].loaded = 1
    world = GroupsWorld(*pools)
    world.load()
    assert world.side.take_arrived() == ()
    assert (world.side.take_received(), world.side.take_failed_requests()) == ({"r"}, {"r"})
    assert world.side.take_failed_blocks() == set(), "block ids end an engine with several groups"


def test_loads_of_all_groups_arrive_together_in_one_process() -> None:
    world = GroupsWorld(Pool(), Pool())
    assert world.side.take_arrived() == ()
    world.load()
    assert [end.group for end in world.side.take_arrived()] == [0, 1]
    assert world.side.take_received() == set()


@pytest.mark.parametrize(
    ("orders", "kept"),
    [
        (StepOrders(step=2, overwritten=[1]), False),
        (StepOrders(step=2, overwritten=[7]), True),
        (StepOrders(step=0), False),  # nothing is known of that step
    ],
)
def test_what_was_not_read_of_blocks_that_are_used_again_is_not_stored(orders: StepOrders, kept: bool) -> None:
    pool = Pool()
    world = GroupsWorld(pool, Pool())
    pool.before_kept = lambda: world.side.before_step(orders)
    order = StoreOrder(
        number=1,
        request_id="r",
        hashes=b"".join(HASHES),
        token_count=130,
        block_ids=packed_blocks(WINDOW_BLOCKS[:8]),
        first_chunk=1,
        end_chunk=4,
    )
    world.side.start_stores(StepOrders(step=1, stores=[order]))
    assert pool.kept == [kept]


def test_blocks_of_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.connectors import vllm_modules

    vllm_modules.install(monkeypatch)
    from kvpool.connectors.vllm import connector

    running = SimpleNamespace(
        req_ids=["a", "b", "c"],
        new_block_ids=[([1], [2, 3]), None, ([4], [5])],
        resumed_req_ids={"c"},  # admitted: vLLM has named them before
    )
    assert connector._blocks_of_running(SimpleNamespace(scheduled_cached_reqs=running)) == [1, 2, 3]
