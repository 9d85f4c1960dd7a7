"""What a worker's side of the vLLM connector does when a step, its jobs or its GPU go wrong."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.engine_events import EventSlots
from kvpool.client.engine_items import LoadResult
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.connectors.vllm.step_jobs import LoadReport, StepJobs, StoreReport
from kvpool.connectors.vllm.wiring import failing_worker
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, PageMissing, ServiceUnavailable
from kvpool.core.ipc import EngineEvent
from kvpool.testing import ManualClock
from tests.unit.connectors import vllm_jobs
from tests.unit.connectors.test_vllm_worker import BLOCKS, Pool, an_unknown_load
from tests.unit.connectors.vllm_fakes import FakeConnection
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES, a_load

a_store = partial(vllm_jobs.a_store, first_chunk=2)


class LayerTicket:
    """A load that brings one chunk."""

    layers_loaded, done = 0, False

    def __init__(self, first_chunk: int, error: KvPoolError) -> None:
        self._result = LoadResult(first_chunk, 1, tuple(range(first_chunk + 1, first_chunk + 4)), error=error)

    async def wait_layers(self, layers: int) -> bool:
        return True

    async def result(self) -> LoadResult:
        return self._result

    async def wait_released(self) -> None:
        """Nothing writes."""


class LayerPool(Pool):
    """Loads one chunk only."""

    async def start_load(self, chain: Any, blocks: Any, **values: Any) -> Any:
        return LayerTicket(values["first_chunk"], DeadlineExceeded("planted"))


def a_worker(pool: Any, *, events: Any = None, **settings: Any) -> ConnectorWorker:
    return ConnectorWorker(
        VllmSettings(agent="unix:/x", chunk_tokens=CHUNK, **settings),
        FakeConnection(pool),  # type: ignore[arg-type]
        WorkerKvCache(
            groups=[WorkerKvCacheGroup(block_tokens=BLOCK, page_bytes=CHUNK_BYTES, step_events=StepEvents(events))]
        ),
        now_s=ManualClock().monotonic_s,
    )


def stores_of(worker: ConnectorWorker) -> list[tuple[int, int]]:
    """Numbers, and chunks that failed."""
    return [(end.number, end.failed_chunks) for end in worker.take_reports() if isinstance(end, StoreReport)]


@pytest.mark.parametrize("told_first", [False, True])
def test_what_was_computed_from_layers_that_did_not_come_is_not_stored(told_first: bool) -> None:
    pool = LayerPool()
    worker = a_worker(pool, layerwise=True)
    other, apart = (*BLOCKS[:4], 301, 302, 303, 304), range(400, 408)
    jobs = StepJobs(
        step=1,
        loads=[a_load("r", BLOCKS)],
        # Another request has found the same blocks in the engine's own cache; a third one has nothing to do with them.
        stores=[a_store(1, "r", BLOCKS), a_store(2, "other", other), a_store(3, "apart", apart)],
    )
    worker.start_loads(jobs)
    worker.wait_layers(1)
    if told_first:  # with drafts to compute, vLLM ends a step after it has asked what failed
        assert worker.take_failed_blocks() == set(BLOCKS[2:])
    worker.start_stores(jobs)
    assert worker.take_failed_blocks() == (set() if told_first else set(BLOCKS[2:]))
    assert stores_of(worker) == [(1, 2), (2, 2), (3, 0)]
    assert [asked["blocks"] for asked in pool.asked] == [list(apart)]
    later = StepJobs(step=2, stores=[a_store(4, "r", BLOCKS)])
    worker.start_loads(later)
    worker.start_stores(later)
    assert (4, 0) in stores_of(worker)


def test_a_step_that_cannot_begin_its_layerwise_load_computes_its_blocks_again() -> None:
    class Busy:
        slots = EventSlots(())

        def try_record(self) -> EngineEvent | None:
            return None  # all are in use

    pool = LayerPool()
    worker = a_worker(pool, events=Busy(), layerwise=True)
    jobs = StepJobs(step=1, loads=[a_load("r", BLOCKS)], stores=[a_store(1, "r", BLOCKS)])
    worker.start_loads(jobs)
    worker.start_stores(jobs)
    assert worker.take_failed_blocks() == set(BLOCKS)
    assert stores_of(worker) == [(1, 2)]
    assert pool.asked == []


def test_a_load_that_was_late_says_so() -> None:
    worker = a_worker(LayerPool(), layerwise=True)
    worker.start_loads(StepJobs(step=1, loads=[a_load("r", BLOCKS)]))
    worker.take_failed_blocks()
    (end,) = worker.take_reports()
    assert isinstance(end, LoadReport)
    assert (end.timed_out, end.missing, end.result.loaded_chunks, end.failed_chunks) == (True, False, 1, 3)


def test_only_a_damaged_or_missing_chunk_is_gone() -> None:
    class Failing(Pool):
        async def load(self, chain: Any, blocks: Any, **values: Any) -> LoadResult:
            return LoadResult(0, 1, (1, 2, 3), error=self.error)

        error: KvPoolError

    pool = Failing()
    worker = a_worker(pool)
    told = []
    for pool.error in (PageMissing("planted"), PageCorrupt("planted"), ServiceUnavailable("planted")):
        worker.start_loads(StepJobs(step=1, loads=[a_load("r", BLOCKS)]))
        worker.take_finished_recving()
        told += [end.missing for end in worker.take_reports() if isinstance(end, LoadReport)]
    assert told == [True, True, False]


def test_a_gpu_that_cannot_record_costs_each_order_but_loses_none() -> None:
    class Broken:
        slots = EventSlots(())

        def try_record(self) -> EngineEvent | None:
            raise RuntimeError("planted")

    worker = a_worker(Pool(), events=Broken())
    worker.start_loads(StepJobs(step=1, loads=[a_load("a", BLOCKS), a_load("b", range(200, 208))]))
    assert worker.take_finished_recving() == {"a", "b"}
    assert worker.take_failed_blocks() == {*BLOCKS, *range(200, 208)}
    worker.start_stores(StepJobs(step=1, stores=[a_store(1, "c", BLOCKS)], release=["c"]))
    assert worker.take_finished_sending() == {"c"}
    assert stores_of(worker) == [(1, 2)]


def test_a_load_of_which_nothing_is_known_ends() -> None:
    worker = a_worker(Pool())
    worker.start_loads(StepJobs(step=1, loads=[an_unknown_load()]))
    assert (worker.take_finished_recving(), worker.take_failed_blocks()) == ({"r"}, set(BLOCKS))


def test_a_worker_that_cannot_share_ends_what_it_is_ordered() -> None:
    configured = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))
    worker = failing_worker(VllmSettings(agent="unix:/x", chunk_tokens=CHUNK), configured, None)
    assert not worker.ready
    jobs = StepJobs(step=1, loads=[a_load("a", BLOCKS)], stores=[a_store(1, "b", BLOCKS)], release=["b"])
    worker.start_loads(jobs)
    worker.start_stores(jobs)
    assert (worker.take_finished_sending(), worker.take_finished_recving()) == ({"b"}, {"a"})
    assert worker.take_failed_blocks() == set(BLOCKS)
    assert stores_of(worker) == [(1, 2)]
