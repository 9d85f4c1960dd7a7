"""What the scheduler's side of the vLLM connector stores, and for how long blocks are kept for it."""

from __future__ import annotations

import pytest

from tests.unit.connectors.vllm_fakes import FakePool, a_request
from tests.unit.connectors.vllm_worlds import BLOCKS, World, hashes_of


def test_a_finished_requests_chunks_are_stored_and_its_blocks_kept() -> None:
    world = World(FakePool(1))
    request = a_request(100)
    world.match(request)
    request.all_token_ids += list(range(40))
    request.num_computed_tokens = 139
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    jobs = world.build()
    (job,) = jobs.stores
    assert (job.first_chunk, job.end_chunk) == (1, 4)  # the pool was seen to have chunk 0
    assert job.block_ids.tolist() == BLOCKS[:8]
    assert jobs.release == ["r"]


def test_generated_tokens_stay_out_if_so_asked() -> None:
    world = World(FakePool(0), store_generated=False)
    request = a_request(70)
    world.match(request)
    request.all_token_ids += list(range(40))
    request.num_computed_tokens = 109
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert world.build().stores[0].end_chunk == 2


def test_the_last_sampled_token_has_no_kv() -> None:
    world = World(FakePool(0))
    request = a_request(64)
    world.match(request)
    request.num_computed_tokens = 64  # a step that was under way when the request ended
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert world.build().stores[0].end_chunk == 1


def test_tokens_whose_kv_a_drafter_may_write_again_are_not_stored_yet() -> None:
    world = World(FakePool(0), store="prefill", volatile_tokens=1)
    request = a_request(96)
    world.match(request)
    assert world.build({"r": 64}).stores[0].end_chunk == 1
    request.num_computed_tokens = 64
    (job,) = world.build({"r": 32}).stores
    assert (job.first_chunk, job.end_chunk) == (1, 2)
    request.all_token_ids += [1, 2]
    request.num_computed_tokens = 97
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    (job,) = world.build().stores
    assert (job.first_chunk, job.end_chunk) == (2, 3)


@pytest.mark.parametrize("in_flight", [0, 40])
def test_an_aborted_request_is_stored_as_far_as_it_was_computed(in_flight: int) -> None:
    world = World(FakePool(0))
    request = a_request(200)
    world.match(request)
    request.num_computed_tokens, request.num_in_flight_tokens = 100, in_flight
    world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    assert world.build().stores[0].end_chunk == (3 if not in_flight else 1)


def test_a_failed_request_is_not_stored() -> None:
    world = World(FakePool(0))
    request = a_request(200)
    world.match(request)
    request.num_computed_tokens = 199
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_ERROR")


def test_a_request_aborted_during_its_load_leaves_its_blocks_to_the_engine() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    jobs = world.load(request)
    request.num_computed_tokens = 96
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    world.ended(jobs, loaded_chunks=3)
    assert world.build().release == []


def test_a_load_whose_request_is_aborted_is_cancelled_once_and_counts_as_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(FakePool(3))
    request = a_request(120)
    jobs = world.load(request)
    assert jobs.cancel == []
    world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    assert world.build().cancel == ["r"]
    assert world.build().cancel == []
    world.ended(jobs, loaded_chunks=1, cancelled=True, gone=False)
    counted = world.side.counters.take()
    assert (counted["loads"], counted["loaded_chunks"]) == (1, 1)
    assert "failed_loads" not in counted
    assert "failed_load_chunks" not in counted
    assert not caplog.records
    assert world.match(a_request(120, "again")) == 96, "nobody waits for it"


def test_a_load_that_ended_when_its_request_was_aborted_is_not_cancelled_in_the_name_of_another() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    jobs = world.load(request)
    world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    world.ended(jobs, loaded_chunks=3)
    again = world.load(a_request(120))  # under the same name
    assert [job.request_id for job in again.loads] == ["r"]
    assert again.cancel == []


def test_a_request_that_does_not_wait_for_a_load_has_none_to_cancel() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.ended(world.load(request), loaded_chunks=3)
    world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    assert world.build().cancel == []


def test_chunks_are_stored_as_they_are_computed_if_so_asked() -> None:
    world = World(FakePool(0), store="prefill")
    request = a_request(100)
    world.match(request)
    first = world.build({"r": 70})
    assert [(job.first_chunk, job.end_chunk) for job in first.stores] == [(0, 2)]
    request.num_computed_tokens = 70
    second = world.build({"r": 30})
    assert [(job.first_chunk, job.end_chunk) for job in second.stores] == [(2, 3)]
    world.stored(first)
    world.stored(second)
    request.num_computed_tokens = 100
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")  # nothing is left to do


def test_blocks_are_kept_for_stores_that_have_not_ended_on_all_workers() -> None:
    world = World(FakePool(0), store="prefill", workers=2)
    request = a_request(64)
    world.match(request)
    jobs = world.build({"r": 64})
    world.worker_count = 1
    world.stored(jobs)
    request.num_computed_tokens = 64
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert world.build().release == ["r"]


def test_a_preempted_request_is_stored_anew() -> None:
    world = World(FakePool(0), store="prefill")
    request = a_request(64)
    world.match(request)
    world.stored(world.build({"r": 64}), failed_chunks=2)
    assert world.build({}, preempted=["r"]).preempted == ["r"]
    assert len(world.build({"r": 64}).stores) == 1


def test_what_was_stored_is_not_offered_again() -> None:
    world = World(FakePool(0), load="never")
    for name, expected in (("a", 1), ("b", 0)):
        request = a_request(64, name)
        world.match(request)
        request.num_computed_tokens, request.all_token_ids = 64, [*request.all_token_ids, 7]
        world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
        jobs = world.build()
        assert len(jobs.stores) == expected
        world.stored(jobs)


def test_never_means_never() -> None:
    world = World(FakePool(0), store="never")
    request = a_request(100)
    world.match(request)
    request.num_computed_tokens = 99
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")


def test_what_came_into_the_pool_is_told_once() -> None:
    world = World(FakePool(1))
    request = a_request(100)
    world.match(request)
    request.num_computed_tokens = 99
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    jobs = world.build()
    assert world.side.take_events() == []
    world.stored(jobs)
    (change,) = world.side.take_events()
    assert change.hashes == hashes_of(jobs.stores[0])[1:]
    assert change.parent_hash == hashes_of(jobs.stores[0])[0]
    assert change.token_ids == tuple(range(32, 96))
    assert world.side.take_events() == []


def test_what_could_not_be_loaded_is_told_to_be_gone() -> None:
    world = World(FakePool(3))
    jobs = world.load(a_request(120))
    world.ended(jobs, loaded_chunks=1)
    (change,) = world.side.take_events()
    assert (change.hashes, change.token_ids) == (hashes_of(jobs.loads[0])[1:], ())


def test_a_store_repeated_after_a_preemption_holds_its_blocks_though_the_first_one_ends() -> None:
    world = World(FakePool(0), store="prefill")
    request = a_request(64)
    world.match(request)
    first = world.build({"r": 64})
    world.build({}, preempted=["r"])
    second = world.build({"r": 64})
    assert [(job.first_chunk, job.end_chunk) for job in (*first.stores, *second.stores)] == [(0, 2)] * 2
    world.stored(first, failed_chunks=2)
    request.num_computed_tokens = 64
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")  # the second one may read them still
    assert world.build().release == ["r"]
    world.stored(second)
    assert [change.hashes for change in world.side.take_events()] == [hashes_of(second.stores[0])]


def test_what_the_pool_has_lost_is_stored_again() -> None:
    world = World(FakePool(3))
    for name, chunks, expected in (("a", 3, []), ("b", 1, [(1, 3)]), ("c", 3, [])):
        world.connection.pool.chunk_count = chunks
        request = a_request(100, name)
        world.match(request)
        request.num_computed_tokens = 99
        world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
        jobs = world.build()
        assert [(job.first_chunk, job.end_chunk) for job in jobs.stores] == expected
        world.stored(jobs)


def test_what_was_not_loaded_for_another_reason_is_not_told_to_be_gone() -> None:
    world = World(FakePool(3))
    world.ended(world.load(a_request(120)), loaded_chunks=1, gone=False)
    assert world.side.take_events() == []


def test_a_request_aborted_while_another_connector_loads_is_not_stored() -> None:
    """vLLM counts the tokens of an asynchronous load as computed from the start, and frees the blocks at its end."""
    world, request = World(FakePool(0)), a_request(200)
    world.match(request)
    world.side.allocated_without_load(request)
    request.num_computed_tokens = 200
    assert world.build().stores == []
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    jobs = world.build()
    assert jobs.stores == []
    assert jobs.release == []


def test_what_another_connector_has_loaded_is_stored_with_the_rest() -> None:
    world, request = World(FakePool(0), store="prefill"), a_request(200)
    world.match(request)
    world.side.allocated_without_load(request)
    request.num_computed_tokens = 128
    world.side.allocated_without_load(request)  # again, as its load has ended
    assert [job.end_chunk for job in world.build({"r": 72}).stores] == [6]


def test_what_another_connector_loads_in_the_step_itself_is_stored_once_it_came_in() -> None:
    """A load that fails is heard of after the step, whose stores would have read what was computed from it."""
    world, request = World(FakePool(0), store="prefill"), a_request(200)
    other = a_request(200, "other")
    world.match(request)
    world.side.allocated_without_load(request)
    world.match(other, 64)  # it finds blocks of that load in vLLM's own cache
    world.side.allocated_without_load(other)
    request.num_computed_tokens, other.num_computed_tokens = 128, 64
    assert world.build({"r": 72, "other": 136}).stores == []
    for one, count in ((request, 72), (other, 136)):
        one.num_computed_tokens += count
        one.num_in_flight_tokens = count
    assert world.build({"r": 1, "other": 1}).stores == [], "its output was not processed yet"
    request.num_computed_tokens, request.num_in_flight_tokens = 32, 0  # the load has failed
    assert world.build({"r": 32}).stores == []
    for one in (request, other):
        one.all_token_ids.append(0)
        one.num_computed_tokens, one.num_in_flight_tokens = 200, 0
    assert [(job.request_id, job.end_chunk) for job in world.build({"r": 1, "other": 1}).stores] == [
        ("r", 6),
        ("other", 6),
    ]


def test_what_another_connector_loaded_for_a_request_of_one_step_is_stored_when_it_ends() -> None:
    world, request = World(FakePool(0)), a_request(200)
    world.match(request)
    world.side.allocated_without_load(request)
    request.num_computed_tokens = 128
    world.build({"r": 72})
    request.all_token_ids.append(0)
    request.num_computed_tokens = 200
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_LENGTH_CAPPED")
    assert [job.end_chunk for job in world.build().stores] == [6]
