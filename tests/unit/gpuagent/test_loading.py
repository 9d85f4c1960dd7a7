"""Loads on the fakes: order, progress, the exact failed chunks, and what each failure leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import DeadlineExceeded, LeaseLost, PageCorrupt, PageMissing, ServiceUnavailable, Stopped
from kvpool.testing import eventually
from kvpool_gpuagent.core.bandwidth import LoadSource
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still
from tests.unit.gpuagent.runs import RANK, Bench, key, true_page


async def test_a_load_brings_every_chunk_layer_group_by_layer_group() -> None:
    bench = Bench(window_pages=8)
    bench.offer(range(5))
    outcome = await bench.load(range(5))
    assert (outcome.loaded_chunks, list(outcome.failed_chunks), outcome.error) == (5, [], None)
    assert outcome.tokens == {LoadSource.STAGING: 5 * 32, LoadSource.DISK: 0, LoadSource.REMOTE: 0}
    assert all(bench.loaded(number) for number in range(5))
    assert bench.progress == [(2, []), (4, [])]
    asked = [wish.key.shard // 2 for wish in bench.pool.wishes]
    assert asked == sorted(asked)
    assert bench.pool.most_reads <= 8
    bench.nothing_is_out()


async def test_progress_of_a_group_comes_before_the_next_group_is_in() -> None:
    bench = Bench(window_pages=4)
    bench.offer(range(2))
    bench.faults.gates["page 1 3"] = asyncio.Event()
    loading = asyncio.ensure_future(bench.load(range(2)))
    await eventually(lambda: bench.progress == [(2, [])])
    assert not loading.done()
    bench.faults.gates["page 1 3"].set()
    await loading
    assert bench.progress[-1] == (4, [])


@pytest.mark.parametrize(("step", "reported"), [(0, [2, 4]), (1, [2, 4]), (2, [2, 4]), (3, [4]), (4, [4]), (9, [4])])
async def test_progress_comes_no_more_often_than_asked(step: int, reported: list[int]) -> None:
    bench = Bench(window_pages=4)
    bench.offer(range(3))
    await bench.load(range(3), layers_per_progress=step)
    assert [layers for layers, _ in bench.progress] == reported


@pytest.mark.parametrize("shard", range(4))
async def test_a_chunk_that_misses_a_page_ends_the_prefix_before_it(shard: int) -> None:
    bench = Bench(window_pages=4)
    bench.offer(range(6))
    del bench.cluster.pages[key(2, shard)]
    outcome = await bench.load(range(6))
    assert (outcome.loaded_chunks, list(outcome.failed_chunks)) == (2, [2, 3, 4, 5])
    assert isinstance(outcome.error, PageMissing)
    assert bench.loaded(0)
    assert bench.loaded(1)
    assert bench.progress[-1] == (4, [2, 3, 4, 5])
    later = [wish.key for wish in bench.pool.wishes if wish.key.shard // 2 > shard // 2]
    assert not [wanted for wanted in later if wanted.chunk_hash[0] > 4]  # known to have failed: not asked for
    bench.nothing_is_out()


async def test_a_corrupt_page_is_never_scattered_and_is_reported() -> None:
    bench = Bench()
    bench.offer(range(3))
    page = bytearray(true_page(1, 2))
    page[70] ^= 1
    bench.cluster.pages[key(1, 2)] = bytes(page)
    outcome = await bench.load(range(3))
    assert outcome.loaded_chunks == 1
    assert isinstance(outcome.error, PageCorrupt)
    assert key(1, 2) not in bench.cache.scattered
    assert bench.pool.corrupt == [key(1, 2)]
    assert bench.metric("verification_failures_total") == 1
    bench.nothing_is_out()


async def test_a_page_of_another_chunk_is_never_scattered() -> None:
    bench = Bench()
    bench.offer(range(2))
    bench.cluster.pages[key(1, 0)] = true_page(0, 0)
    outcome = await bench.load(range(2))
    assert outcome.loaded_chunks == 1
    assert key(1, 0) not in bench.cache.scattered


async def test_nothing_is_reported_when_nothing_can_be_loaded() -> None:
    bench = Bench()
    outcome = await bench.load(range(2))
    assert (outcome.loaded_chunks, bench.progress) == (0, [])


@pytest.mark.parametrize("step", ["acquire", "page 1 1", "page 1 3", "scatter"])
@pytest.mark.parametrize("error", [ServiceUnavailable, LeaseLost, RuntimeError])
async def test_whatever_fails_names_the_failed_chunks_and_leaks_nothing(step: str, error: type[Exception]) -> None:
    bench = Bench(window_pages=8)
    bench.offer(range(4))
    count = 0

    def fail(now: str) -> None:
        nonlocal count
        count += now == step
        if now == step and count == (2 if step in ("acquire", "scatter") else 1):
            raise error("gone")

    bench.faults.before = fail
    outcome = await bench.load(range(4))
    assert outcome.error is not None
    assert outcome.error.reason == ("INTERNAL" if error is RuntimeError else error("").reason)  # type: ignore[attr-defined]
    assert all(bench.loaded(number) for number in range(outcome.loaded_chunks))
    assert outcome.loaded_chunks < 4
    if outcome.loaded_chunks:  # what did not fail is reported to its last layer
        assert bench.progress[-1] == (4, list(range(outcome.loaded_chunks, 4)))
    bench.nothing_is_out()


@pytest.mark.parametrize("step", ["acquire", "page 1 1", "page 0 3", "scatter"])
async def test_a_stop_ends_the_load_after_the_copies_that_have_begun(step: str) -> None:
    bench = Bench(window_pages=4)
    bench.offer(range(4))

    def stop(now: str) -> None:
        if now == step:
            bench.stop.set()

    bench.faults.before = stop
    outcome = await bench.load(range(4))
    assert isinstance(outcome.error, Stopped)
    assert all(bench.loaded(number) for number in range(outcome.loaded_chunks))
    bench.nothing_is_out()


async def test_a_stop_does_not_wait_for_a_page_that_does_not_come() -> None:
    bench = Bench()
    bench.offer(range(2))
    bench.faults.gates["page 1 0"] = asyncio.Event()
    loading = asyncio.ensure_future(bench.load(range(2)))
    await eventually(lambda: "page 1 0" in bench.faults.steps)
    bench.stop.set()
    outcome = await asyncio.wait_for(loading, PATIENCE_S)
    assert isinstance(outcome.error, Stopped)
    bench.nothing_is_out()


async def test_a_stop_waits_for_a_scatter_that_has_begun() -> None:
    bench = Bench()
    bench.offer(range(1))
    bench.faults.gates["scatter"] = asyncio.Event()
    loading = asyncio.ensure_future(bench.load(range(1)))
    await eventually(lambda: bench.cache.running > 0)
    bench.stop.set()
    await asyncio.sleep(0)
    assert not loading.done()
    bench.faults.gates["scatter"].set()
    await asyncio.wait_for(loading, PATIENCE_S)
    bench.nothing_is_out()


async def test_the_deadline_ends_the_wait_for_pages() -> None:
    bench = Bench()
    bench.offer(range(2))
    bench.faults.gates["page 1 2"] = asyncio.Event()
    loading = asyncio.ensure_future(bench.load(range(2), wait_s=PATIENCE_S))
    await eventually(lambda: "page 1 2" in bench.faults.steps and bench.loaded(0))
    stood_still(2 * PATIENCE_S)
    outcome = await loading
    assert isinstance(outcome.error, DeadlineExceeded)
    assert outcome.loaded_chunks == 1
    bench.nothing_is_out()


async def test_a_load_whose_time_is_up_asks_for_nothing() -> None:
    bench = Bench()
    bench.offer(range(1))
    outcome = await bench.load(range(1), wait_s=-1.0)
    assert isinstance(outcome.error, DeadlineExceeded)
    assert bench.pool.wishes == []


async def test_loads_that_share_a_session_wait_for_each_others_slots() -> None:
    bench = Bench(window_pages=4)
    bench.offer(range(12))
    spans = [range(first, first + 3) for first in (0, 3, 6, 9)]
    outcomes = await asyncio.gather(*(bench.load(numbers) for numbers in spans))
    assert [outcome.loaded_chunks for outcome in outcomes] == [3, 3, 3, 3]
    assert bench.pool.most_reads <= 4
    bench.nothing_is_out()


async def test_tokens_count_for_the_slowest_source_of_a_chunk_and_not_for_skipped_ones() -> None:
    bench = Bench()
    bench.offer(range(3))
    bench.cluster.sources[key(1, 2)] = LoadSource.DISK
    bench.cluster.sources[key(2, 0)] = LoadSource.DISK
    bench.cluster.sources[key(2, 3)] = LoadSource.REMOTE
    outcome = await bench.load(range(3), skip_tokens=12)
    assert outcome.tokens == {LoadSource.STAGING: 20, LoadSource.DISK: 32, LoadSource.REMOTE: 32}


async def test_each_chunk_is_asked_of_its_own_sources() -> None:
    bench = Bench()
    bench.offer(range(2))
    source = RemoteSource(node_id=b"r" * 16, incarnation=3, bulk_endpoint="host:1")
    await bench.load(range(2), sources=[(), (source,)])
    assert {wish.sources for wish in bench.pool.wishes if wish.key.chunk_hash[0] == 1} == {(source,)}
    assert {wish.sources for wish in bench.pool.wishes if wish.key.chunk_hash[0] == 0} == {()}


@pytest.mark.parametrize(("shards", "progress"), [(0b0011, [2]), (0b1100, [2]), (0b0101, [2, 4])])
async def test_a_rank_of_some_layers_and_heads_counts_its_own_layers(shards: int, progress: list[int]) -> None:
    bench = Bench()
    bench.offer(range(2))
    first_layer = 2 if shards == 0b1100 else 0
    layout = replace(RANK.layout, first_layer=first_layer)
    outcome = await bench.load(range(2), rank=replace(RANK, shards=shards, layout=layout))
    assert outcome.loaded_chunks == 2
    assert [layers for layers, _ in bench.progress] == progress
    assert {page.shard for page in bench.cache.scattered} == {shard for shard in range(4) if shards >> shard & 1}
