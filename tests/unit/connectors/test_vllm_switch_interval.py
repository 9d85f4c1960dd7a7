"""How long kvpool's threads wait for the engine's: only briefly while a request waits for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.connectors.vllm.step_jobs import StepJobs
from kvpool.connectors.vllm.switch_interval import switch_interval
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from tests.unit.connectors.test_vllm_worker import Pool
from tests.unit.connectors.vllm_fakes import FakeConnection, FakePool, a_request
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES, a_load, a_store
from tests.unit.connectors.vllm_worlds import BLOCKS, World

USUAL_S, SHORT_S = 0.005, 0.00005


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before_s)


def is_short() -> bool:
    interval_s = sys.getswitchinterval()
    assert interval_s in (pytest.approx(USUAL_S), pytest.approx(SHORT_S))
    return interval_s == pytest.approx(SHORT_S)


def test_it_is_short_until_all_that_shortened_it_have_ended() -> None:
    first, second = Future[None](), Future[None]()
    switch_interval.shorten_until(first)
    switch_interval.shorten_until(second)
    first.set_exception(RuntimeError("planted"))
    assert is_short()
    second.cancel()
    assert not is_short()


def test_one_that_is_shorter_stays() -> None:
    sys.setswitchinterval(0.00002)
    switch_interval.shorten()
    assert sys.getswitchinterval() == pytest.approx(0.00002)
    switch_interval.restore()
    assert sys.getswitchinterval() == pytest.approx(0.00002)


def test_it_is_short_while_a_lookup_runs() -> None:
    connection = FakeConnection(FakePool())
    connection.held = True
    world = World(None, connection=connection)
    world.side.on_new_request(a_request(4 * CHUNK))
    assert is_short()
    connection.go()
    assert not is_short()


@pytest.mark.parametrize("loads", [True, False])
def test_it_is_short_beside_loads_and_not_beside_stores(loads: bool) -> None:
    connection = FakeConnection(Pool())
    connection.held = True
    group = WorkerKvCacheGroup(block_tokens=BLOCK, page_bytes=CHUNK_BYTES, step_events=StepEvents(None))
    side = ConnectorWorker(
        VllmSettings(agent="unix:/x", chunk_tokens=CHUNK),
        connection,  # type: ignore[arg-type]
        WorkerKvCache(groups=[group]),
    )
    jobs = StepJobs(step=1)
    if loads:
        jobs.loads.append(a_load("r", BLOCKS[:8]))
    else:
        jobs.stores.append(a_store(1, "r", BLOCKS[:8]))
    side.start_loads(jobs)
    side.start_stores(jobs)
    assert is_short() is loads
    connection.go()
    assert not is_short()
