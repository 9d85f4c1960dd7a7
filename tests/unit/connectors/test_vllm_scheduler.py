"""What the scheduler's side of the vLLM connector lets the engine load and store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.connectors.vllm.orders import LoadEnd, StepOrders, StoreEnd
from kvpool.connectors.vllm.scheduler import SchedulerSide
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import ServiceUnavailable
from kvpool.testing import ManualClock
from tests.unit.connectors.vllm_fakes import FakeLink, FakePool, FakeRequest, a_request

CHUNK, BLOCK, CHUNK_BYTES = 32, 16, 1000
BLOCKS = list(range(100, 200))


class World:
    """A scheduler's side over a scripted pool."""

    def __init__(self, pool: FakePool | None, **settings: Any) -> None:
        self.clock = ManualClock()
        self.link = FakeLink(pool)
        wanted = {"agent": "unix:/x", "chunk_tokens": CHUNK, "min_load_tokens": 1, "lookup_wait_ms": 0.0, **settings}
        self.worker_count, self.shares_blocks = wanted.pop("workers", 1), wanted.pop("shares_blocks", True)
        self.side = SchedulerSide(
            VllmSettings(**wanted),
            self.link,  # type: ignore[arg-type]
            block_tokens=BLOCK,
            chunk_bytes=CHUNK_BYTES,
            worker_count=self.worker_count,
            shares_blocks=self.shares_blocks,
            now_s=self.clock.monotonic_s,
        )

    def match(self, request: FakeRequest, held_tokens: int = 0) -> int | None:
        self.side.on_new_request(request)
        return self.side.matched_tokens(request, held_tokens)

    def load(self, request: FakeRequest, held_tokens: int = 0) -> StepOrders:
        tokens = self.match(request, held_tokens)
        assert tokens
        self.side.allocated(request, BLOCKS, tokens)
        return self.build()

    def build(self, scheduled: dict[str, int] | None = None, preempted: Sequence[str] = ()) -> StepOrders:
        return self.side.build(scheduled or {}, preempted, lambda _: BLOCKS)

    def ended(self, orders: StepOrders, loaded_chunks: int) -> None:
        """The loads of a step bring so many chunks."""
        ends = [
            LoadEnd(
                request_id=order.request_id,
                chunk_count=loaded_chunks,
                failed_chunks=order.end_chunk - order.first_chunk - loaded_chunks,
                duration_s=0.01,
                size_bytes=loaded_chunks * CHUNK_BYTES,
            )
            for order in orders.loads
        ]
        self.side.heard(orders.step, ends)
        self.side.received([order.request_id for order in orders.loads])

    def stored(self, orders: StepOrders, failed_chunks: int = 0) -> None:
        """The stores of a step end on all workers."""
        for order in orders.stores * self.worker_count:
            end = StoreEnd(
                request_id=order.request_id,
                first_chunk=order.first_chunk,
                end_chunk=order.end_chunk,
                stored_chunks=order.end_chunk - order.first_chunk - failed_chunks,
                deduplicated_chunks=0,
                failed_chunks=failed_chunks,
                duration_s=0.01,
                size_bytes=1,
            )
            self.side.heard(orders.step, [end])


def test_what_the_pool_has_is_loaded_into_the_requests_blocks() -> None:
    world = World(FakePool(3))
    (order,) = world.load(a_request(120)).loads
    assert (order.first_chunk, order.end_chunk, order.first_token, order.end_token) == (0, 3, 0, 96)
    assert order.block_ids == tuple(BLOCKS[:6])
    assert len(order.hashes) == 3


def test_a_prompts_last_token_is_always_computed() -> None:
    world = World(FakePool(9))
    (order,) = world.load(a_request(4 * CHUNK)).loads
    assert order.end_token == 4 * CHUNK - 1
    assert order.end_chunk == 4
    assert order.failed_blocks(4, CHUNK, BLOCK) == set()


def test_held_tokens_inside_of_a_chunk_are_left_alone() -> None:
    world = World(FakePool(3))
    (order,) = world.load(a_request(120), held_tokens=48).loads
    assert (order.first_chunk, order.first_token) == (1, 48)
    assert world.link.pool.asked[0][1] == 1


def test_a_failure_names_only_blocks_after_the_held_ones() -> None:
    (order,) = World(FakePool(3)).load(a_request(120), held_tokens=48).loads
    assert order.failed_blocks(1, CHUNK, BLOCK) == set(BLOCKS[3:6])
    assert order.failed_blocks(2, CHUNK, BLOCK) == set(BLOCKS[4:6])


def test_nothing_is_said_while_the_lookup_runs() -> None:
    world = World(FakePool(3))
    world.link.held = True
    request = a_request(120)
    assert world.match(request) is None
    assert world.side.matched_tokens(request, 0) is None
    world.link.go()
    assert world.side.matched_tokens(request, 0) == 96
    assert len(world.link.pool.asked) == 1


def test_a_request_without_blocks_is_not_matched_in_every_step() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.match(request)
    assert [world.side.matched_tokens(request, 0) for _ in range(5)] == [96] * 5
    assert len(world.link.pool.asked) == 1
    world.clock.advance(2.0)
    assert world.side.matched_tokens(request, 0) == 96
    assert len(world.link.pool.asked) == 2


@pytest.mark.parametrize(
    "request_",
    [
        a_request(120, skip_reading_prefix_cache=True),
        a_request(120, prompt_embeds=object()),
        a_request(20),
    ],
)
def test_what_cannot_be_shared_is_not_looked_up(request_: FakeRequest) -> None:
    world = World(FakePool(3))
    assert world.match(request_) == 0
    assert world.link.pool.asked == []


def test_without_an_agent_everything_is_computed() -> None:
    world = World(None)
    request = a_request(120)
    assert world.match(request) == 0
    request.num_computed_tokens = 119
    assert not world.side.finished(request, BLOCKS, "FINISHED_STOPPED")


def test_after_a_failed_lookup_the_pool_is_left_alone_for_a_moment() -> None:
    world = World(FakePool(error=ServiceUnavailable("gone")))
    assert world.match(a_request(120)) == 0
    world.link.pool.error, world.link.pool.chunk_count = None, 3
    assert world.match(a_request(120, "b")) == 0
    world.clock.advance(6.0)
    assert world.match(a_request(120, "c")) == 96


def test_a_load_is_not_tried_twice_for_one_request() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.ended(world.load(request), loaded_chunks=0)
    assert world.side.matched_tokens(request, 0) == 0
    request.num_preemptions = 1
    assert world.side.matched_tokens(request, 0) == 96


def test_a_request_waits_for_another_that_loads_the_same_chunk() -> None:
    world = World(FakePool(3))
    orders = world.load(a_request(120, "a"))
    other = a_request(120, "b")
    assert world.match(other) is None
    world.ended(orders, loaded_chunks=3)
    assert world.side.matched_tokens(other, 0) == 96


def test_nobody_waits_for_anothers_load_for_ever() -> None:
    world = World(FakePool(3))
    world.load(a_request(120, "a"))
    other = a_request(120, "b")
    assert world.match(other) is None
    world.clock.advance(60.0)
    assert world.side.matched_tokens(other, 0) == 96


def test_an_engine_that_shares_no_blocks_loads_for_each_request() -> None:
    world = World(FakePool(3), shares_blocks=False)
    world.load(a_request(120, "a"))
    assert world.match(a_request(120, "b")) == 96


def test_computing_is_chosen_where_it_is_quicker() -> None:
    world = World(FakePool(3, estimated_ms=50.0))
    world.side.cost.note_prefill(1000, 0.01)
    assert world.match(a_request(120)) == 0
    assert world.side.tally.take()["declined_chunks"] == 3


def test_bytes_in_flight_are_bounded() -> None:
    world = World(FakePool(3), load_bytes_in_flight_max=5 * CHUNK_BYTES)
    world.load(a_request(120, "a"))
    assert world.match(a_request(120, "b", first_token=500)) == 0


def test_the_first_steps_teach_how_fast_the_engine_computes() -> None:
    world = World(FakePool(0))
    request = a_request(1000)
    world.match(request)
    orders = world.build({"r": 1000})
    world.clock.advance(2.0)
    world.side.heard(orders.step, [])
    assert world.side.cost.compute_ms(1000) == pytest.approx(2000)


def test_a_finished_requests_chunks_are_stored_and_its_blocks_kept() -> None:
    world = World(FakePool(1))
    request = a_request(100)
    world.match(request)
    request.all_token_ids += list(range(40))
    request.num_computed_tokens = 139
    assert world.side.finished(request, BLOCKS, "FINISHED_STOPPED")
    orders = world.build()
    (order,) = orders.stores
    assert (order.first_chunk, order.end_chunk) == (1, 4)  # the pool was seen to have chunk 0
    assert order.block_ids == tuple(BLOCKS[:8])
    assert orders.release == ["r"]


def test_generated_tokens_stay_out_if_so_asked() -> None:
    world = World(FakePool(0), store_generated=False)
    request = a_request(70)
    world.match(request)
    request.all_token_ids += list(range(40))
    request.num_computed_tokens = 109
    world.side.finished(request, BLOCKS, "FINISHED_STOPPED")
    assert world.build().stores[0].end_chunk == 2


def test_the_last_sampled_token_has_no_kv() -> None:
    world = World(FakePool(0))
    request = a_request(64)
    world.match(request)
    request.num_computed_tokens = 64  # a step that was under way when the request ended
    world.side.finished(request, BLOCKS, "FINISHED_STOPPED")
    assert world.build().stores[0].end_chunk == 1


@pytest.mark.parametrize("in_flight", [0, 40])
def test_an_aborted_request_is_stored_as_far_as_it_was_computed(in_flight: int) -> None:
    world = World(FakePool(0))
    request = a_request(200)
    world.match(request)
    request.num_computed_tokens, request.num_in_flight_tokens = 100, in_flight
    world.side.finished(request, BLOCKS, "FINISHED_ABORTED")
    assert world.build().stores[0].end_chunk == (3 if not in_flight else 1)


def test_a_failed_request_is_not_stored() -> None:
    world = World(FakePool(0))
    request = a_request(200)
    world.match(request)
    request.num_computed_tokens = 199
    assert not world.side.finished(request, BLOCKS, "FINISHED_ERROR")


def test_a_request_aborted_during_its_load_leaves_its_blocks_to_the_engine() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    orders = world.load(request)
    request.num_computed_tokens = 96
    assert not world.side.finished(request, BLOCKS, "FINISHED_ABORTED")
    world.ended(orders, loaded_chunks=3)
    assert world.build().release == []


def test_chunks_are_stored_as_they_are_computed_if_so_asked() -> None:
    world = World(FakePool(0), store="prefill")
    request = a_request(100)
    world.match(request)
    first = world.build({"r": 70})
    assert [(order.first_chunk, order.end_chunk) for order in first.stores] == [(0, 2)]
    request.num_computed_tokens = 70
    second = world.build({"r": 30})
    assert [(order.first_chunk, order.end_chunk) for order in second.stores] == [(2, 3)]
    world.stored(first)
    world.stored(second)
    request.num_computed_tokens = 100
    assert not world.side.finished(request, BLOCKS, "FINISHED_STOPPED")  # nothing is left to do


def test_blocks_are_kept_for_stores_that_have_not_ended_on_all_workers() -> None:
    world = World(FakePool(0), store="prefill", workers=2)
    request = a_request(64)
    world.match(request)
    orders = world.build({"r": 64})
    world.worker_count = 1
    world.stored(orders)
    request.num_computed_tokens = 64
    assert world.side.finished(request, BLOCKS, "FINISHED_STOPPED")
    assert world.build().release == ["r"]


def test_a_preempted_request_is_stored_anew() -> None:
    world = World(FakePool(0), store="prefill")
    request = a_request(64)
    world.match(request)
    world.stored(world.build({"r": 64}), failed_chunks=2)
    assert world.build({}, preempted=["r"]).preempted == ["r"]
    assert len(world.build({"r": 64}).stores) == 1


def test_what_was_stored_is_not_offered_again() -> None:
    world = World(FakePool(0))
    for name, expected in (("a", 1), ("b", 0)):
        request = a_request(64, name)
        world.match(request)
        request.num_computed_tokens, request.all_token_ids = 64, [*request.all_token_ids, 7]
        world.side.finished(request, BLOCKS, "FINISHED_STOPPED")
        orders = world.build()
        assert len(orders.stores) == expected
        world.stored(orders)


def test_never_means_never() -> None:
    world = World(FakePool(0), store="never")
    request = a_request(100)
    world.match(request)
    request.num_computed_tokens = 99
    assert not world.side.finished(request, BLOCKS, "FINISHED_STOPPED")
