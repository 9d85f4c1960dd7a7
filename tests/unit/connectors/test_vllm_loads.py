"""What the vLLM connector's scheduler's side learns of loads, and how it goes about those of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.client.engine_items import EngineMatchRun, EngineSource, MatchResult
from kvpool.client.hashing import Prompt
from kvpool.core.load_cost import LoadRun
from tests.unit.connectors.vllm_fakes import FakePool, a_request
from tests.unit.connectors.vllm_jobs import CHUNK, CHUNK_BYTES
from tests.unit.connectors.vllm_worlds import BLOCKS, World


def learned(
    world: World, request_id: str, *, seconds: float, loaded_chunks: int = 3, late: bool = False, **values: Any
) -> None:
    """One load, from its decision until the engine knows of its end."""
    jobs = world.load(a_request(120, request_id, first_token=1000 * sum(request_id.encode())))
    assert jobs.loads
    world.clock.advance(seconds)
    world.ended(jobs, loaded_chunks, late=late, **values)


def a_match(chunks: int) -> tuple[Prompt, int, MatchResult, int]:
    """Of so many chunks on this host."""
    chain = Prompt(CHUNK, 1000, b"".join(bytes([at]) * 16 for at in range(chunks)))
    return chain, 0, MatchResult(chunks, 1000, (EngineMatchRun(chunks, EngineSource.STAGING, 0.0),)), 0


def test_a_load_takes_until_the_engine_knows_of_its_end() -> None:
    world = World(FakePool(3))
    learned(world, "the first one connects", seconds=5.0)
    learned(world, "a", seconds=0.130, copy_s=0.030)
    assert world.side.cost.latency_ms.value == pytest.approx(100)
    run = LoadRun(3, 3 * CHUNK, 3 * CHUNK_BYTES, EngineSource.STAGING)
    assert world.side.cost.load_ms([run]) == pytest.approx(130)


def test_a_load_from_several_places_says_nothing_of_any() -> None:
    world = World(FakePool(3))
    learned(world, "the first one connects", seconds=5.0)
    learned(world, "a", seconds=0.130, remote_chunks=1)
    assert world.side.cost.latency_ms.value is None


def test_after_a_load_that_was_late_others_are_computed_for_a_moment() -> None:
    world = World(FakePool(3))
    learned(world, "damaged", seconds=0.9, loaded_chunks=1)
    learned(world, "late", seconds=0.9, loaded_chunks=1, late=True)
    assert world.side.cost.latency_ms.value is None  # it says nothing of loads that come in
    assert world.match(a_request(120, "now", first_token=5000)) == 0
    world.clock.advance(1.0)
    assert world.match(a_request(120, "soon", first_token=6000)) == 96


def test_pauses_after_late_loads_are_bounded_by_a_few_seconds() -> None:
    world = World(FakePool(3))
    for number in range(20):
        learned(world, f"late {number:02}", seconds=0.9, loaded_chunks=0, late=True)
        world.clock.advance(4.5)
    learned(world, "late again", seconds=0.9, loaded_chunks=0, late=True)
    world.clock.advance(4.5)
    assert world.match(a_request(120, "next", first_token=90_000)) == 96


def test_a_timeout_leaves_a_load_several_times_what_is_expected() -> None:
    world = World(FakePool(3))
    assert world.load(a_request(120, "unknown")).loads[0].timeout_s == 10.0
    world = World(FakePool(3))
    learned(world, "the first one connects", seconds=5.0)
    world.side.cost.note_prefill(1000, 50.0)
    learned(world, "a", seconds=2.0, copy_s=2.0)
    (job,) = world.load(a_request(120, "b", first_token=500)).loads
    assert job.timeout_s == pytest.approx(2 * 96 * 0.05)
    assert job.compute_us_per_token == pytest.approx(50_000)


def test_loads_that_are_late_together_count_as_one() -> None:
    world = World(FakePool(3))
    together = [world.load(a_request(120, f"r{number}", first_token=1000 * number)) for number in range(20)]
    for jobs in together:
        world.ended(jobs, 0, late=True)
    world.clock.advance(1.0)
    assert world.match(a_request(120, "soon", first_token=90_000)) == 96


def test_an_agent_that_lets_loads_be_late_is_asked_now_and_then_only() -> None:
    world = World(FakePool(3), prefix_caching=False)
    loads = 0
    for number in range(600):
        request = a_request(120, f"r{number}")
        tokens = world.match(request)
        if tokens:
            loads += 1
            world.side.allocated(request, [BLOCKS], tokens)
            jobs = world.build()
            world.clock.advance(0.8)
            world.ended(jobs, 0, late=True)
        world.build()
        world.side.request_finished(request, [[]], "FINISHED_ABORTED")
        world.clock.advance(0.2)  # five requests a second
    assert 20 <= loads <= 80  # pauses are jittered


def test_an_operator_who_wants_loads_always_gets_them() -> None:
    world = World(FakePool(3), load="always")
    world.ended(world.load(a_request(120, "late")), 0, late=True)
    assert world.match(a_request(120, "next", first_token=5000)) == 96


def test_only_the_part_is_loaded_that_pays() -> None:
    class TwoRuns(FakePool):
        async def match(self, chain: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
            runs = (EngineMatchRun(2, EngineSource.STAGING, 0.0), EngineMatchRun(1, EngineSource.REMOTE, 0.0))
            return MatchResult(3, chain.usable_tokens(3), runs)

    world = World(TwoRuns())
    for source, seconds in (
        *((EngineSource.STAGING, 9.0), (EngineSource.STAGING, 0.01)),
        *((EngineSource.REMOTE, 9.0), (EngineSource.REMOTE, 1000.0)),
    ):
        world.side.cost.note_load(source, 3 * CHUNK_BYTES, seconds, copy_s=seconds)
    world.side.cost.latency_ms.restart()
    world.side.cost.note_prefill(1000, 2.0)
    assert world.load(a_request(120)).loads[0].end_chunk == 2


def test_a_load_is_tried_again_after_many_that_were_declined() -> None:
    world = World(FakePool(3), prefix_caching=False)
    for seconds in (9.0, 1000.0):
        world.side.cost.note_load(EngineSource.STAGING, 3 * CHUNK_BYTES, seconds, copy_s=seconds)
    world.side.cost.note_prefill(1000, 2.0)
    requests = [a_request(120, f"r{number}", first_token=200 * number) for number in range(32)]
    assert [world.match(request) for request in requests] == [0] * 31 + [96]
    assert world.side.get_num_new_matched_tokens(requests[-1], 0) == 96, "as long as it waits for its blocks"
    assert world.side.counters.take()["declined_chunks"] == 31 * 3


def test_drafts_of_speculative_decoding_are_no_prompts() -> None:
    world = World(FakePool(0))
    requests = [a_request(100, f"r{number}", first_token=200 * number) for number in range(40)]
    for request in requests:
        world.match(request)
        request.num_computed_tokens = 99  # one known token each; the others are guesses
    jobs = world.build({request.request_id: 5 for request in requests})
    world.clock.advance(0.05)
    world.side.on_worker_report(jobs.step, [])
    assert world.side.cost.compute_ms(1) is None


def test_steps_that_wait_for_layers_do_not_say_how_fast_the_engine_computes() -> None:
    world = World(FakePool(3), layerwise=True)
    request = a_request(400)
    tokens = world.match(request)
    assert tokens == 96
    world.side.allocated(request, [BLOCKS], tokens)
    jobs = world.build({"r": 304})
    world.clock.advance(2.0)
    world.ended(jobs, 3)
    assert world.side.cost.compute_ms(1) is None


def test_a_request_that_ends_with_the_step_that_loaded_its_layers_is_stored() -> None:
    world = World(FakePool(3), layerwise=True)
    request = a_request(140)
    world.load(request)
    request.num_computed_tokens = 140
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_LENGTH_CAPPED")  # before the load's end
    assert [(job.first_chunk, job.end_chunk) for job in world.build().stores] == [(3, 4)]


def test_an_ended_load_does_not_let_others_forget_a_running_one_of_the_same_chunk() -> None:
    world = World(FakePool(3))
    first = world.load(a_request(120, "a"))
    world.clock.advance(60.0)  # late: nobody waits for it any more
    world.load(a_request(120, "b"))
    world.ended(first, 3)
    assert world.match(a_request(120, "c")) is None


def test_tokens_are_named_only_if_somebody_asks_for_them() -> None:
    world = World(FakePool(0), publishes_events=False)
    request = a_request(100)
    world.match(request)
    request.num_computed_tokens = 99
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    world.stored(world.build())
    assert world.side.take_events() == []
