"""What the scheduler's side leases for requests that wait."""

from __future__ import annotations

import pytest

from kvpool.client.engine_items import EngineSource
from kvpool.connectors.vllm.engine_introspection import WeightsEpoch
from kvpool.connectors.vllm.leases import HOLD_S, LEASES_MAX, RETRY_S
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from tests.unit.connectors.vllm_fakes import FakePool, FakeRequest, a_request
from tests.unit.connectors.vllm_jobs import CHUNK_BYTES
from tests.unit.connectors.vllm_worlds import BLOCKS, World


def waiting(world: World, *, held_tokens: int = 0, name: str = "r") -> FakeRequest:
    """A request that got no blocks in the step that matched it."""
    request = a_request(120, name)
    assert world.match(request, held_tokens)
    world.build()
    return request


def leased(world: World) -> list[range]:
    """Chunks of leases that hold."""
    return [lease.chunks for lease in world.connection.pool.leases if not lease.ended]


def test_a_request_that_is_allocated_at_once_has_no_lease() -> None:
    world = World(FakePool(3))
    world.ended(world.load(a_request(120)), 3)
    world.build()
    assert world.connection.pool.leases == []


def test_a_request_without_blocks_leases_what_it_will_load_until_the_load_has_ended() -> None:
    world = World(FakePool(3))
    request = waiting(world, held_tokens=32)
    assert leased(world) == [range(1, 3)]
    for _ in range(3):
        tokens = world.side.get_num_new_matched_tokens(request, 32)
        world.build()
    assert len(world.connection.pool.leases) == 1
    assert tokens
    world.side.allocated(request, [BLOCKS], tokens)
    jobs = world.build()
    assert leased(world) == [range(1, 3)]
    world.ended(jobs, 2)
    assert leased(world) == []


def test_a_request_that_waits_for_loads_before_it_has_a_lease() -> None:
    world = World(FakePool(3), load_bytes_in_flight_max=5 * CHUNK_BYTES)
    world.load(a_request(120, "a"))
    assert world.match(a_request(120, "b", first_token=500)) is None
    assert leased(world) == []
    world.build()
    assert leased(world) == [range(3)]


@pytest.mark.parametrize(("source", "hold_only"), [(EngineSource.STAGING, True), (EngineSource.DISK, False)])
def test_only_what_is_not_in_memory_is_brought_there(source: EngineSource, hold_only: bool) -> None:
    pool = FakePool(3)
    pool.source = source
    waiting(World(pool))
    assert [lease.hold_only for lease in pool.leases] == [hold_only]


def test_a_request_that_was_not_asked_about_in_a_step_keeps_its_lease() -> None:
    world = World(FakePool(3))
    waiting(world)
    world.build()
    world.build()
    assert leased(world) == [range(3)]


def test_a_lease_ends_when_the_request_is_computed() -> None:
    world = World(FakePool(3))
    request = waiting(world)
    request.skip_reading_prefix_cache = True
    assert world.side.get_num_new_matched_tokens(request, 0) == 0
    assert leased(world) == []


def test_a_lease_ends_when_another_connector_serves_the_request() -> None:
    world = World(FakePool(3))
    request = waiting(world)
    world.side.allocated_without_load(request)
    world.build()
    assert leased(world) == []


def test_a_plan_that_another_connector_served_is_not_leased() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.match(request)
    world.side.allocated_without_load(request)
    world.build()
    assert world.connection.pool.leases == []


@pytest.mark.parametrize("in_step", [True, False])
def test_a_lease_ends_with_its_request(in_step: bool) -> None:
    world = World(FakePool(3))
    request = waiting(world)
    if in_step:
        world.side.get_num_new_matched_tokens(request, 0)
    world.side.request_finished(request, [[]], "FINISHED_ABORTED")
    world.build()
    assert leased(world) == []
    assert len(world.connection.pool.leases) == 1


def test_leases_end_when_the_weights_may_have_changed() -> None:
    world = World(FakePool(3), weights=WeightsEpoch(lambda: None))
    waiting(world)
    world.side.reset_cache()
    assert leased(world) == []


def test_a_lease_that_begins_late_ends_all_the_same() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.match(request)
    world.connection.held = True
    world.build()
    world.side.request_finished(request, [[]], "FINISHED_ABORTED")
    assert world.connection.pool.leases == []
    world.connection.go()
    assert [lease.ended for lease in world.connection.pool.leases] == [True]


def test_leases_together_have_so_many_bytes_leading_chunks_first() -> None:
    world = World(FakePool(3), lease_bytes_max=5 * CHUNK_BYTES + 1)
    for at, name in enumerate("abc"):
        world.match(a_request(120, name, first_token=1000 * at))
    world.build()
    assert leased(world) == [range(3), range(2)]


def test_no_bytes_means_no_leases() -> None:
    world = World(FakePool(3), lease_bytes_max=0)
    waiting(world)
    assert world.connection.pool.leases == []


def test_there_are_only_so_many_leases() -> None:
    world = World(FakePool(3))
    for at in range(LEASES_MAX + 3):
        world.match(a_request(120, str(at), first_token=1000 * at))
    world.build()
    assert len(leased(world)) == LEASES_MAX


def test_a_request_that_waits_long_renews_its_lease() -> None:
    world = World(FakePool(3))
    request = waiting(world)
    world.clock.advance(HOLD_S)
    assert world.side.get_num_new_matched_tokens(request, 0)
    world.build()
    assert [lease.ended for lease in world.connection.pool.leases] == [True, False]


def test_a_lease_that_ended_early_is_asked_for_again_after_a_moment() -> None:
    world = World(FakePool(3))
    request = waiting(world)
    world.connection.pool.leases[0].ended = True
    for _ in range(2):
        assert world.side.get_num_new_matched_tokens(request, 0)
        world.build()
        assert len(world.connection.pool.leases) == 1
    world.clock.advance(RETRY_S)
    assert world.side.get_num_new_matched_tokens(request, 0)
    world.build()
    assert leased(world) == [range(3)]


@pytest.mark.parametrize("error", [ServiceUnavailable("gone"), InvalidRequest("no such chunk")])
def test_a_lease_that_is_refused_costs_nothing(error: InvalidRequest | ServiceUnavailable) -> None:
    world = World(FakePool(3))
    world.connection.pool.lease_error = error
    request = waiting(world)
    tokens = world.side.get_num_new_matched_tokens(request, 0)
    assert tokens == 96
    world.side.allocated(request, [BLOCKS], tokens)
    jobs = world.build()
    world.ended(jobs, 3)
    assert len(jobs.loads) == 1


def test_without_an_agent_nothing_is_leased() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    world.match(request)
    world.connection.pool = None
    world.build()
    assert world.side.get_num_new_matched_tokens(request, 0) == 0
