"""What the scheduler's side of the vLLM connector lets the engine load."""

from __future__ import annotations

import pytest

from kvpool.client.engine_items import EngineSource
from kvpool.core.errors import ServiceUnavailable
from tests.unit.connectors.vllm_fakes import FakePool, FakeRequest, a_request
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES
from tests.unit.connectors.vllm_worlds import BLOCKS, World


def test_what_the_pool_has_is_loaded_into_the_requests_blocks() -> None:
    world = World(FakePool(3))
    (job,) = world.load(a_request(120)).loads
    assert (job.first_chunk, job.end_chunk, job.first_token, job.end_token) == (0, 3, 0, 96)
    assert job.block_ids.tolist() == BLOCKS[:6]
    assert len(job.hashes) == 3 * 16


def test_workers_hear_whether_their_step_computes() -> None:
    world = World(FakePool(3))
    assert not world.load(a_request(120)).computes
    assert world.build({"r": 24}).computes
    assert world.build().computes, "the step before may still run"
    assert not world.build().computes


def test_a_prompts_last_token_is_always_computed() -> None:
    world = World(FakePool(9))
    (job,) = world.load(a_request(4 * CHUNK)).loads
    assert job.end_token == 4 * CHUNK - 1
    assert job.end_chunk == 4
    assert job.failed_blocks(4, CHUNK, BLOCK) == set()


def test_held_tokens_inside_of_a_chunk_are_left_alone() -> None:
    world = World(FakePool(3))
    (job,) = world.load(a_request(120), held_tokens=48).loads
    assert (job.first_chunk, job.first_token) == (1, 48)
    assert world.connection.pool.asked[0][1] == 0, "it was asked when the request came"


def test_an_answer_holds_also_when_the_engine_has_got_more_since() -> None:
    world = World(FakePool(3, estimated_ms=30.0))
    request = a_request(120)
    assert world.match(request) == 96
    assert world.side.get_num_new_matched_tokens(request, 64) == 32
    world.side.allocated(request, [BLOCKS], 32)
    (job,) = world.build().loads
    assert (job.first_chunk, job.end_chunk, job.first_token, job.end_token) == (2, 3, 64, 96)
    assert len(world.connection.pool.asked) == 1


def test_an_engine_that_has_lost_chunks_since_asks_again() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    assert world.match(request, held_tokens=64) == 32
    world.clock.advance(11.0)
    assert world.side.get_num_new_matched_tokens(request, 64) == 32
    assert world.side.get_num_new_matched_tokens(request, 0) == 96
    assert [held for _, held in world.connection.pool.asked] == [0, 2, 0]


def test_an_answer_that_begins_too_late_is_asked_for_again() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.match(request)
    world.clock.advance(11.0)
    world.connection.held = True
    assert world.side.get_num_new_matched_tokens(request, 64) is None
    world.connection.go()
    world.connection.held = False
    assert world.side.get_num_new_matched_tokens(request, 0) is None
    assert world.side.get_num_new_matched_tokens(request, 0) == 96


def test_a_failure_names_only_blocks_after_the_held_ones() -> None:
    (job,) = World(FakePool(3)).load(a_request(120), held_tokens=48).loads
    assert job.failed_blocks(1, CHUNK, BLOCK) == set(BLOCKS[3:6])
    assert job.failed_blocks(2, CHUNK, BLOCK) == set(BLOCKS[4:6])


def test_nothing_is_said_while_the_lookup_runs() -> None:
    world = World(FakePool(3))
    world.connection.held = True
    request = a_request(120)
    assert world.match(request) is None
    assert world.side.get_num_new_matched_tokens(request, 0) is None
    world.connection.go()
    assert world.side.get_num_new_matched_tokens(request, 0) == 96
    assert len(world.connection.pool.asked) == 1


def test_a_request_without_blocks_is_not_matched_in_every_step() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.match(request)
    assert [world.side.get_num_new_matched_tokens(request, 0) for _ in range(5)] == [96] * 5
    assert len(world.connection.pool.asked) == 1
    assert world.side.counters.take() == {"lookups": 1, "offered_chunks": 3}
    world.clock.advance(11.0)
    assert world.side.get_num_new_matched_tokens(request, 0) == 96
    assert len(world.connection.pool.asked) == 2


def test_a_request_is_hashed_and_looked_up_once_while_it_waits_for_its_turn() -> None:
    world = World(FakePool(3))
    world.connection.held = True
    request = a_request(120)
    world.side.on_new_request(request)
    world.connection.go()
    assert [held for _, held in world.connection.pool.asked] == [0]
    assert world.side.get_num_new_matched_tokens(request, 0) == 96
    assert len(world.connection.pool.asked) == 1


def test_an_engine_that_only_stores_hashes_prompts_beside_its_own_thread() -> None:
    world = World(FakePool(3), load="never", store="prefill")
    world.connection.held = True
    request = a_request(120)
    world.side.on_new_request(request)
    world.connection.go()
    assert world.side.get_num_new_matched_tokens(request, 0) == 0
    assert world.connection.pool.asked == []
    assert world.build({"r": 120}).stores[0].end_chunk == 3


@pytest.mark.parametrize(
    "request_",
    [
        a_request(120, skip_reading_prefix_cache=True),
        a_request(120, prompt_embeds=object()),
        a_request(120, resumable=True),
        a_request(20),
    ],
)
def test_what_cannot_be_shared_is_not_looked_up(request_: FakeRequest) -> None:
    world = World(FakePool(3))
    assert world.match(request_) == 0
    assert world.connection.pool.asked == []


def test_without_an_agent_everything_is_computed() -> None:
    world = World(None)
    request = a_request(120)
    assert world.match(request) == 0
    request.num_computed_tokens = 119
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")


def test_after_a_failed_lookup_the_pool_is_left_alone_for_a_moment() -> None:
    world = World(FakePool(error=ServiceUnavailable("gone")))
    assert world.match(a_request(120)) == 0
    world.connection.pool.error, world.connection.pool.chunk_count = None, 3
    assert world.match(a_request(120, "b")) == 0
    world.clock.advance(6.0)
    assert world.match(a_request(120, "c")) == 96


def test_a_load_is_not_tried_twice_for_one_request() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.ended(world.load(request), loaded_chunks=0)
    assert world.side.get_num_new_matched_tokens(request, 0) == 0
    request.num_preemptions = 1
    assert world.side.get_num_new_matched_tokens(request, 0) == 96


def test_a_request_waits_for_another_that_loads_the_same_chunk() -> None:
    world = World(FakePool(3))
    jobs = world.load(a_request(120, "a"))
    other = a_request(120, "b")
    assert world.match(other) is None
    world.ended(jobs, loaded_chunks=3)
    assert world.side.get_num_new_matched_tokens(other, 0) == 96


def test_nobody_waits_for_anothers_load_for_ever() -> None:
    world = World(FakePool(3))
    world.load(a_request(120, "a"))
    other = a_request(120, "b")
    assert world.match(other) is None
    world.clock.advance(60.0)
    assert world.side.get_num_new_matched_tokens(other, 0) == 96


def test_an_engine_that_shares_no_blocks_loads_for_each_request() -> None:
    world = World(FakePool(3), prefix_caching=False)
    world.load(a_request(120, "a"))
    assert world.match(a_request(120, "b")) == 96


def knows_slow_loads(world: World) -> None:
    """Of 50 ms, where computing takes 1 ms."""
    world.side.cost.note_prefill(1000, 0.01)
    for _ in range(3):
        world.side.cost.note_load(EngineSource.STAGING, 3 * CHUNK_BYTES, 0.05)


def test_computing_is_chosen_where_it_is_quicker() -> None:
    world = World(FakePool(3))
    knows_slow_loads(world)
    assert world.match(a_request(120)) == 0
    assert world.side.counters.take()["declined_chunks"] == 3


def knows_latency(world: World) -> None:
    """Of 15 ms, and 1 ms for 100 tokens."""
    world.side.cost.note_prefill(1000, 0.01)
    for _ in range(8):
        world.side.cost.note_load(EngineSource.STAGING, 3 * CHUNK_BYTES, 0.015001, copy_s=1e-6)


def test_a_prompt_too_short_for_any_load_to_pay_waits_for_no_answer() -> None:
    pool = FakePool(100)
    world = World(pool)
    knows_latency(world)
    assert world.match(a_request(120)) == 0
    assert not pool.asked
    assert world.match(a_request(3000, "long", first_token=5000)) and pool.asked
    asked = len(pool.asked)
    assert world.match(a_request(3000, "held", first_token=5000), held_tokens=2944) == 0
    assert len(pool.asked) <= asked + 1, "what a new prompt needs is not known before vLLM has looked at its cache"


def test_now_and_then_a_short_prompt_is_looked_up_and_then_one_loaded_to_see_what_loads_take() -> None:
    pool = FakePool(3)
    world = World(pool, prefix_caching=False)
    knows_latency(world)
    requests = [a_request(120, f"r{number}", first_token=200 * number) for number in range(34)]
    too_short = [a_request(CHUNK - 1, f"s{number}", first_token=9000 + 200 * number) for number in range(40)]
    assert not any(world.match(request) for request in too_short)
    assert [world.match(request) for request in requests[:32]] == [0] * 32
    assert len(pool.asked) == 1, "of those that could load something at all"
    world.clock.advance(10.0)
    assert world.match(requests[32]) == 96
    assert world.side.get_num_new_matched_tokens(requests[32], 0) == 96, "as long as it waits for its blocks"
    assert world.match(requests[33]) == 0 and len(pool.asked) == 2


@pytest.mark.parametrize(("load", "tokens"), [("always", 96), ("never", 0), ("quicker", 0)])
def test_an_operator_may_decide_instead(load: str, tokens: int) -> None:
    world = World(FakePool(3), load=load)
    knows_slow_loads(world)
    assert world.match(a_request(120)) == tokens


def test_a_load_waits_while_as_many_bytes_as_may_be_are_in_flight() -> None:
    world = World(FakePool(3), load_bytes_in_flight_max=5 * CHUNK_BYTES)
    jobs = world.load(a_request(120, "a"))
    second = a_request(120, "b", first_token=500)
    assert world.match(second) is None
    assert world.side.counters.declined_chunks == 0
    world.ended(jobs, 3)
    assert world.side.get_num_new_matched_tokens(second, 0) == 96


def test_a_large_load_that_waits_is_not_overtaken() -> None:
    world = World(FakePool(3), load_bytes_in_flight_max=5 * CHUNK_BYTES)
    jobs = world.load(a_request(120, "a"))
    large, small = a_request(120, "b", first_token=500), a_request(40, "c", first_token=900)
    assert world.match(large) is None
    assert world.match(small) is None  # it would fit
    world.build()
    world.ended(jobs, 3)
    assert world.side.get_num_new_matched_tokens(large, 0) == 96


def test_bytes_of_an_aborted_requests_load_are_in_flight_until_another_of_its_name() -> None:
    world = World(FakePool(3), load_bytes_in_flight_max=6 * CHUNK_BYTES)
    first = a_request(120, "a")
    world.load(first)
    world.side.request_finished(first, [BLOCKS], "FINISHED_ABORTED")
    jobs = world.load(a_request(120, "a", first_token=500))
    world.ended(jobs, 3)
    for number, name in enumerate(("b", "c")):  # as many bytes as may be in flight
        assert world.load(a_request(120, name, first_token=1000 * (number + 1))).loads


def test_a_load_larger_than_all_that_may_be_in_flight_is_loaded_alone() -> None:
    world = World(FakePool(3), load_bytes_in_flight_max=CHUNK_BYTES)
    jobs = world.load(a_request(120, "a"))
    assert world.match(a_request(120, "b", first_token=500)) is None
    world.ended(jobs, 3)
    assert world.match(a_request(120, "c", first_token=900)) == 96


@pytest.mark.parametrize("load", ["quicker", "always"])
def test_loads_that_do_not_end_are_not_waited_for_beyond_their_time(load: str) -> None:
    """As those of an agent that answers, but whose copies hang: what would wait for their bytes is computed."""
    world = World(FakePool(3), load_bytes_in_flight_max=CHUNK_BYTES, load=load)
    jobs = world.load(a_request(120, "a"))
    waiting = a_request(120, "b", first_token=500)
    assert world.match(waiting) is None
    world.clock.advance(jobs.loads[0].timeout_s + 0.5)
    world.build()
    assert world.side.get_num_new_matched_tokens(waiting, 0) is None
    world.clock.advance(1.0)
    world.build()
    assert world.side.get_num_new_matched_tokens(waiting, 0) == 0
    world.ended(jobs, 3)
    assert world.match(a_request(120, "c", first_token=900)) == 96


def test_the_first_steps_teach_how_fast_the_engine_computes() -> None:
    world = World(FakePool(0))
    request = a_request(1000)
    world.match(request)
    jobs = world.build({"r": 1000})
    world.clock.advance(2.0)
    world.side.on_worker_report(jobs.step, [])
    assert world.side.cost.compute_ms(1000) == pytest.approx(2000)
