"""Many requests, slow answers and ends that are lost: what the vLLM connector's scheduler's side does in one step."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpool.client.engine_items import MatchResult
from kvpool.client.hashing import Prompt
from kvpool.client.sync import BackgroundLoop
from kvpool.connectors.vllm.load_plans import LoadPlans
from kvpool.connectors.vllm.request_chain import request_chains
from kvpool.connectors.vllm.scheduler import ConnectorScheduler
from kvpool.core.errors import ServiceUnavailable
from kvpool.testing import eventually_sync
from tests.unit.connectors.vllm_fakes import FakeConnection, FakePool, a_request
from tests.unit.connectors.vllm_jobs import CHUNK_BYTES
from tests.unit.connectors.vllm_worlds import BLOCKS, World, hashes_of

_HASHING = "kvpool.connectors.vllm.scheduler.request_chains"


@pytest.mark.parametrize(("computing", "most_s"), [(["r0"], 0.003), (["gone"], 0.015), ([], 0.015)])
def test_however_many_requests_wait_a_step_waits_once_and_longer_if_nothing_is_computed(
    computing: list[str], most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(FakePool(3), lookup_wait_ms=3.0)
    world.connection.held = True
    waited: list[float] = []

    def wait(futures: list[Future[Any]], timeout_s: float) -> None:
        waited.append(timeout_s)
        world.clock.advance(timeout_s)

    monkeypatch.setattr("concurrent.futures.wait", wait)
    requests = [a_request(120, f"r{number}", first_token=200 * number) for number in range(30)]
    for request in requests:
        world.side.on_new_request(request)
    world.build(dict.fromkeys(computing, 1))
    assert [world.side.get_num_new_matched_tokens(request, 0) for request in requests] == [None] * 30
    assert sum(waited) == pytest.approx(most_s)
    world.build(dict.fromkeys(computing, 1))
    world.side.get_num_new_matched_tokens(requests[0], 0)
    assert sum(waited) == pytest.approx(2 * most_s)


def test_so_many_lookups_are_asked_at_once() -> None:
    class Loop(FakeConnection):
        def start(self, work: Any, trace: Any = None) -> Any:
            return background.start(work)

    class Counting(FakePool):
        running = most = 0

        async def match(self, chain: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
            self.running += 1
            self.most = max(self.most, self.running)
            await all_asked.wait()
            self.running -= 1
            return await super().match(chain, held_chunks=held_chunks)

    async def go_on() -> None:
        all_asked.set()

    background, all_asked = BackgroundLoop("test lookups"), asyncio.Event()
    try:
        pool = Counting(3)
        world = World(None, connection=Loop(pool), lookup_wait_ms=5000.0)
        requests = [a_request(120, f"r{number}", first_token=200 * number) for number in range(100)]
        for request in requests:
            world.side.on_new_request(request)
        eventually_sync(lambda: pool.running == 32)
        background.run(go_on)
        eventually_sync(lambda: len(pool.asked) == 100)
        assert pool.most == 32
        assert [world.side.get_num_new_matched_tokens(request, 0) for request in requests] == [96] * 100
    finally:
        background.stop()


def test_a_long_prompt_is_hashed_on_no_loop_and_not_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed_on: list[str] = []

    def count(*arguments: Any) -> tuple[Prompt, ...]:
        hashed_on.append(threading.current_thread().name)
        return request_chains(*arguments)

    monkeypatch.setattr(_HASHING, count)
    world = World(FakePool(3))
    assert world.match(a_request(20_000)) == 96
    assert len(hashed_on) == 1
    assert hashed_on[0].startswith("asyncio_")


def test_a_lookup_that_is_never_answered_costs_a_moment_only(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FakePool(3))
    world.connection.held = True
    request = a_request(120)
    assert world.match(request) is None
    world.clock.advance(1.0)
    assert world.side.get_num_new_matched_tokens(request, 0) is None
    world.clock.advance(0.5)
    assert world.side.get_num_new_matched_tokens(request, 0) == 0
    assert world.side.counters.take()["failed_lookups"] == 1
    assert "never answered" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("planted"), TimeoutError(), ServiceUnavailable("gone")])
def test_a_lookup_that_ends_in_any_error_is_no_match(error: Exception) -> None:
    class Broken(FakePool):
        async def match(self, chain: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
            raise error

    world = World(Broken(3))
    assert world.match(a_request(120)) == 0
    assert world.side.counters.take()["failed_lookups"] == 1


def test_failures_of_many_requests_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FakePool(error=ServiceUnavailable("gone")), chunk_tokens=16)
    for number in range(50):
        world.match(a_request(120, f"r{number}"))
        world.clock.advance(0.2)
    assert caplog.text.count("nothing is looked up") == 1
    world.clock.advance(10.0)
    world.match(a_request(120, "last"))
    assert caplog.text.count("nothing is looked up") == 2
    assert "more like it" in caplog.text


def test_a_load_that_was_never_planned_ends_all_the_same() -> None:
    world = World(FakePool(3))
    world.match(a_request(120))
    world.side.allocated(a_request(120, "unknown"), [BLOCKS[:4]], 64)
    (job,) = world.build().loads
    assert (job.first_chunk, job.end_chunk) == (0, 0)
    assert job.failed_blocks(0, 32, 16) == set(BLOCKS[:4])


@pytest.mark.parametrize("planted", [(LoadPlans, "begin"), (ConnectorScheduler, "_note_new_blocks")])
def test_a_load_that_cannot_be_ordered_ends_all_the_same(
    planted: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("planted")

    world = World(FakePool(3))
    request = a_request(120)
    tokens = world.match(request)
    assert tokens == 96
    monkeypatch.setattr(*planted, fail)
    world.side.allocated(request, [BLOCKS[:6]], tokens)
    jobs = world.build()
    assert [(job.request_id, job.failed_blocks(0, 32, 16)) for job in jobs.loads] == [("r", set(BLOCKS[:6]))]
    assert "planted" in caplog.text
    world.ended(jobs, 0)
    assert world.side.get_num_new_matched_tokens(request, 0) == 0, "it is not tried again"


def test_what_another_connector_loads_is_not_planned_here_any_more() -> None:
    world = World(FakePool(3))
    request = a_request(120)
    assert world.match(request) == 96
    world.side.allocated_without_load(request)
    world.side.allocated_without_load(a_request(120, "unknown"))
    world.side.allocated(request, [BLOCKS[:6]], 96)
    (job,) = world.build().loads
    assert not job.hashes


def test_while_a_worker_cannot_reach_its_agent_nothing_is_loaded_or_stored() -> None:
    world = World(FakePool(3))
    world.side.on_worker_report(world.build().step, [], ready=False)
    request = a_request(120)
    assert world.match(request) == 0
    request.num_computed_tokens = 119
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert world.build().stores == []
    world.clock.advance(1.5)  # an idle engine hears of its recovery with a request only
    assert world.match(a_request(120, "b")) == 96


def test_one_request_whose_store_cannot_be_ordered_costs_no_others_orders(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(FakePool(0), store="prefill")

    def fail(request: Any, *others: Any) -> tuple[Prompt, ...]:
        if request.request_id == "bad":
            raise RuntimeError("planted")
        return request_chains(request, *others)

    monkeypatch.setattr(_HASHING, fail)
    for name in ("bad", "good"):
        world.side.on_new_request(a_request(64, name))
    jobs = world.build({"bad": 64, "good": 64})
    assert [job.request_id for job in jobs.stores] == ["good"]
    assert "planted" in caplog.text


def test_a_request_whose_adapter_is_being_read_computes_and_is_stored_later(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    world = World(FakePool(3))
    world.connection.held = True
    lora = SimpleNamespace(lora_int_id=1, lora_name="l", lora_path=str(tmp_path))
    request = a_request(120, lora_request=lora)
    assert world.match(request) == 0
    world.connection.go()
    world.connection.held = False
    request.num_computed_tokens = 119
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")


def test_after_a_reset_the_pool_is_anothers() -> None:
    world = World(FakePool(3))
    request, begun, loading = a_request(120, "new"), a_request(120, "begun"), a_request(120, "loading", first_token=500)
    world.load(loading)
    for one in (request, begun):
        world.match(one)
    begun.num_computed_tokens = 64
    world.side.reset_cache()
    assert world.side.get_num_new_matched_tokens(begun, 0) == 0  # its blocks may be of both kinds of weights
    world.connection.pool.chunk_count = 0
    world.side.get_num_new_matched_tokens(request, 0)
    asked = [chain.hashes for chain, _ in world.connection.pool.asked]
    assert not set(asked[-1]) & {one for hashes in asked[:-1] for one in hashes}
    request.num_computed_tokens = begun.num_computed_tokens = 119
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert not world.side.request_finished(begun, [BLOCKS], "FINISHED_STOPPED")
    (job,) = world.build().stores
    assert (job.request_id, hashes_of(job)) == ("new", asked[-1])


def reachable_count(root: object) -> int:
    """How often containers that can be reached from an object hold one, those of code and modules left out."""
    seen, left, count = {id(root)}, [root], 0
    while left:
        for one in gc.get_referents(left.pop()):
            count += 1
            if id(one) not in seen and gc.is_tracked(one) and not isinstance(one, type | ModuleType | FunctionType):
                seen.add(id(one))
                left.append(one)
    return count


def test_nothing_of_a_request_is_kept_when_it_has_gone() -> None:
    world, counts = World(FakePool(3), load_bytes_in_flight_max=3 * CHUNK_BYTES), []
    for turn in range(3):
        for number in range(5):
            request = a_request(200, f"r{turn} {number}", first_token=1000 * number)
            world.ended(world.load(request), loaded_chunks=3)  # which waits if any byte is still in flight
            request.num_computed_tokens = 199
            world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
            jobs = world.build()
            assert jobs.stores
            world.stored(jobs)
        world.side.take_events()
        world.side.counters.take()
        world.connection.pool.asked.clear()
        world.connection.traces.clear()
        counts.append(reachable_count(world.side))
    assert counts == [counts[0]] * 3, "what is known of chunks stays, and there are no others after the first turn"


def test_a_real_lookup_waits_no_longer_than_it_takes() -> None:
    class Loop(FakeConnection):
        def start(self, work: Any, trace: Any = None) -> Any:
            return background.start(work)

    class Slow(FakePool):
        async def match(self, chain: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
            await asyncio.Event().wait()
            raise AssertionError

    background = BackgroundLoop("test lookups")
    try:
        world = World(None, connection=Loop(FakePool(3)), lookup_wait_ms=5000.0)
        assert world.match(a_request(120)) == 96
        world = World(None, connection=Loop(Slow(3)), lookup_wait_ms=0.2)
        request = a_request(120, "b", first_token=300)
        assert world.match(request) is None
        world.side.request_finished(request, [[]], "FINISHED_ABORTED")
    finally:
        background.stop()
