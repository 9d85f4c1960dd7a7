"""Loads on the fakes: order, progress, the exact failed chunks, and what each failure leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import DeadlineExceeded, LeaseLost, PageCorrupt, PageMissing, ServiceUnavailable, Stopped
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.testing import eventually
from kvpool_gpuagent.core.requests import ChunkSource
from kvpool_gpuagent.core.sources import LoadSource
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still
from tests.fixtures.virtual_time import run_virtually
from tests.unit.gpuagent.runs import RANK, Bench, blocks, key, true_page


def asked_chunks(bench: Bench) -> list[int]:
    return [asked.key.chunk_hash[0] for asked in bench.pool.asked]


async def test_a_load_brings_every_chunk_chunk_by_chunk() -> None:
    bench = Bench(window_pages=8)
    bench.offer(range(5))
    outcome = await bench.load(range(5))
    assert (outcome.loaded_chunks, list(outcome.failed_chunks), outcome.error) == (5, [], None)
    assert outcome.tokens == {LoadSource.STAGING: 5 * 32, LoadSource.DISK: 0, LoadSource.REMOTE: 0, LoadSource.GPU: 0}
    assert all(bench.loaded(number) for number in range(5))
    assert bench.progress == [(2, []), (4, [])]
    assert asked_chunks(bench) == sorted(asked_chunks(bench))
    assert len(bench.pool.asked) == 20
    assert bench.pool.most_reads <= 8
    bench.nothing_is_out()


async def test_an_engine_that_starts_early_gets_layer_group_by_layer_group() -> None:
    bench = Bench(window_pages=8)
    bench.offer(range(5))
    outcome = await bench.load(range(5), by_layer=True)
    assert outcome.loaded_chunks == 5
    assert bench.progress == [(2, []), (4, [])]
    asked = [(one.key.shard // 2, one.key.chunk_hash[0]) for one in bench.pool.asked]
    assert asked == sorted(asked)
    assert len(asked) == 20
    bench.nothing_is_out()


@pytest.mark.parametrize("answer_pages", [1, 3, 16])
async def test_pages_may_settle_in_any_order_and_some_at_once(answer_pages: int) -> None:
    bench = Bench()
    bench.offer(range(4))
    bench.pool.answer_pages, bench.pool.order = answer_pages, lambda pages: pages[::-1]
    assert (await bench.load(range(4))).loaded_chunks == 4
    assert all(bench.loaded(number) for number in range(4))
    assert bench.progress[-1] == (4, [])
    bench.nothing_is_out()


async def test_a_copy_names_the_pages_of_an_answer_their_blocks_and_what_to_skip() -> None:
    bench = Bench()
    bench.offer([3, 4])
    bench.pool.answer_pages, bench.pool.order = 3, lambda pages: [5, 0, 3, *(set(pages) - {5, 0, 3})]
    bench.faults.gates["scatter"] = asyncio.Event()
    loading = asyncio.ensure_future(bench.load([3, 4], skip_tokens=8))
    await eventually(lambda: bench.cache.running == 3)
    leased = {slot.key: slot.address for slot in bench.pool.reads.values()}
    bench.faults.gates["scatter"].set()
    await loading
    first = bench.cache.scatters[0]
    assert first.shards.tolist() == [1, 0, 3]
    assert first.addresses.tolist() == [leased[key(4, 1)], leased[key(3, 0)], leased[key(3, 3)]]
    assert first.block_ids.tolist() == [[16, 17, 18, 19], [12, 13, 14, 15], [12, 13, 14, 15]]
    assert first.skip_tokens.tolist() == [0, 8, 8]
    bench.nothing_is_out()


async def test_first_windows_go_before_all_others_and_these_by_the_age_of_their_load() -> None:
    bench = Bench(window_pages=8)  # windows of four pages
    bench.offer(range(6))
    for number, order in ((0, 1), (3, 2)):
        bench.cache.scatters.clear()
        assert (await bench.load(range(number, number + 3))).loaded_chunks == 3
        orders = [batch.order for batch in bench.cache.scatters for _ in range(batch.count)]
        assert sorted(orders) == [0] * 4 + [order] * 8
    bench.nothing_is_out()


SPLITS = ShardGrid(layers=4, kv_heads=4, layer_groups=2, splits=(1, 2))  # of a group: shard 0 all heads, 1 and 2 halves
WHOLE, HALVES, SECOND_HALF = 0b001001, 0b110110, 0b100100


@pytest.mark.parametrize(
    ("shards", "readable"),
    [
        pytest.param(SECOND_HALF, WHOLE, id="a rank of TP 2 from pages of all heads"),
        pytest.param(WHOLE, HALVES, id="a rank of TP 1 from pages of half of the heads"),
        pytest.param(WHOLE, 0b110001, id="one way in the first layers, another in the last"),
    ],
)
@pytest.mark.parametrize("by_layer", [False, True])
async def test_pages_of_another_split_are_read_where_a_match_says_so(
    shards: int, readable: int, by_layer: bool
) -> None:
    bench = Bench(grid=SPLITS)
    bench.offer(range(3), range(SPLITS.shard_count))
    rank = replace(RANK, grid=SPLITS, shards=shards)
    sources: list[ChunkSource] = [((), shards), ((), readable), ((), readable)]
    outcome = await bench.load(range(3), rank=rank, sources=sources, by_layer=by_layer)
    assert outcome.loaded_chunks == 3
    wanted = {(blocks(0), shard) for shard in shards_in(shards)}
    wanted |= {(blocks(number), shard) for number in (1, 2) for shard in shards_in(readable)}
    assert set(bench.cache.scattered) == wanted
    assert len(bench.cache.scattered) == len(wanted)
    assert bench.progress[-1] == (4, [])
    assert bench.metric("loaded_bytes_total", source="staging") == sum(
        len(true_page(0, shard, SPLITS)) for _, shard in bench.cache.scattered
    )
    bench.nothing_is_out()


async def test_a_half_that_is_missing_fails_its_chunk() -> None:
    bench = Bench(grid=SPLITS)
    bench.offer(range(3), shards_in(HALVES))
    del bench.cluster.pages[key(1, 4)]
    outcome = await bench.load(range(3), rank=replace(RANK, grid=SPLITS, shards=WHOLE), sources=[((), HALVES)] * 3)
    assert (outcome.loaded_chunks, list(outcome.failed_chunks)) == (1, [1, 2])
    assert isinstance(outcome.error, PageMissing)
    bench.nothing_is_out()


def test_the_time_of_copying_is_from_the_first_ones_begin_to_the_last_ones_end() -> None:
    async def load() -> tuple[float, float]:
        bench = Bench(window_pages=16)
        bench.offer(range(2))
        delays_s = {"page 0 0": 5.0, "scatter": 1.0, "page 1 3": 7.0}
        step = bench.faults.step

        async def slow(name: str) -> None:
            await step(name)
            await asyncio.sleep(delays_s.get(name, 0.0))

        bench.faults.step = slow  # type: ignore[method-assign]
        started_s = asyncio.get_running_loop().time()
        outcome = await bench.load(range(2), wait_s=100.0)
        assert outcome.loaded_chunks == 2
        return outcome.copying_s, asyncio.get_running_loop().time() - started_s

    copying_s, duration_s = run_virtually(load())
    assert copying_s == pytest.approx(8.0)
    assert duration_s == pytest.approx(13.0)


def test_time_that_loads_copied_in_together_is_shared_by_their_bytes() -> None:
    async def load() -> list[float]:
        bench = Bench(window_pages=16)
        bench.offer(range(4))
        step = bench.faults.step

        async def slow(name: str) -> None:
            await step(name)
            if name == "scatter":
                await asyncio.sleep(4.0)

        bench.faults.step = slow  # type: ignore[method-assign]
        alone = await bench.load(range(1))
        both = await asyncio.gather(bench.load(range(1, 2)), bench.load(range(2, 4)))
        return [outcome.copying_s for outcome in (alone, *both)]

    # The last one to end knows of all bytes; an engine reckons with the better of several measurements.
    alone_s, first_s, last_s = run_virtually(load())
    assert alone_s == pytest.approx(4.0)
    assert last_s == pytest.approx(4.0 * 2 / 3)
    assert first_s <= 4.0


async def test_a_load_that_copied_nothing_says_so() -> None:
    bench = Bench()
    assert (await bench.load(range(1))).copying_s == 0.0


async def test_progress_of_a_group_comes_before_the_next_group_is_in() -> None:
    bench = Bench(window_pages=4)
    bench.offer(range(2))
    bench.faults.gates["page 1 3"] = asyncio.Event()
    loading = asyncio.ensure_future(bench.load(range(2), by_layer=True))
    await eventually(lambda: bench.progress == [(2, [])])
    assert not loading.done()
    bench.faults.gates["page 1 3"].set()
    await loading
    assert bench.progress[-1] == (4, [])


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("shard", range(4))
async def test_a_chunk_that_misses_a_page_ends_the_prefix_before_it(shard: int, by_layer: bool) -> None:
    bench = Bench(window_pages=4)
    bench.offer(range(6))
    del bench.cluster.pages[key(2, shard)]
    outcome = await bench.load(range(6), by_layer=by_layer)
    assert (outcome.loaded_chunks, list(outcome.failed_chunks)) == (2, [2, 3, 4, 5])
    assert isinstance(outcome.error, PageMissing)
    assert bench.loaded(0)
    assert bench.loaded(1)
    assert bench.progress[-1] == (4, [2, 3, 4, 5])
    later = [one.key for one in bench.pool.asked if not by_layer or one.key.shard // 2 > shard // 2]
    assert not [wanted for wanted in later if wanted.chunk_hash[0] > 4]  # known to have failed: not asked for
    bench.nothing_is_out()


async def test_a_page_that_fails_its_check_ends_the_prefix_before_it() -> None:
    bench = Bench()
    bench.offer(range(3))
    page = bytearray(true_page(1, 2))
    page[70] ^= 1
    bench.cluster.pages[key(1, 2)] = bytes(page)
    outcome = await bench.load(range(3))
    assert outcome.loaded_chunks == 1
    assert isinstance(outcome.error, PageCorrupt)
    assert (blocks(1), 2) not in bench.cache.scattered
    assert bench.metric("verification_failures_total") == 1
    bench.nothing_is_out()


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
            bench.stop.cancel()

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
    bench.stop.cancel()
    outcome = await asyncio.wait_for(loading, PATIENCE_S)
    assert isinstance(outcome.error, Stopped)
    bench.nothing_is_out()


async def test_a_stop_waits_for_a_scatter_that_has_begun() -> None:
    bench = Bench()
    bench.offer(range(1))
    bench.faults.gates["scatter"] = asyncio.Event()
    loading = asyncio.ensure_future(bench.load(range(1)))
    await eventually(lambda: bench.cache.running > 0)
    bench.stop.cancel()
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
    assert bench.pool.asked == []


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
    assert outcome.tokens == {LoadSource.STAGING: 20, LoadSource.DISK: 32, LoadSource.REMOTE: 32, LoadSource.GPU: 0}


async def test_each_chunk_is_asked_of_its_own_sources() -> None:
    bench = Bench()
    bench.offer(range(2))
    source = RemoteSource(node_id=b"r" * 16, incarnation=3, bulk_endpoint="host:1")
    await bench.load(range(2), sources=[((), RANK.shards), ((source,), RANK.shards)])
    assert {one.sources for one in bench.pool.asked if one.key.chunk_hash[0] == 1} == {(source,)}
    assert {one.sources for one in bench.pool.asked if one.key.chunk_hash[0] == 0} == {()}


@pytest.mark.parametrize(("shards", "progress"), [(0b0011, [2]), (0b1100, [2]), (0b0101, [2, 4])])
async def test_a_rank_of_some_layers_and_heads_counts_its_own_layers(shards: int, progress: list[int]) -> None:
    bench = Bench()
    bench.offer(range(2))
    first_layer = 2 if shards == 0b1100 else 0
    layout = replace(RANK.layout, first_layer=first_layer)
    outcome = await bench.load(range(2), rank=replace(RANK, shards=shards, layout=layout))
    assert outcome.loaded_chunks == 2
    assert [layers for layers, _ in bench.progress] == progress
    assert {shard for _, shard in bench.cache.scattered} == {shard for shard in range(4) if shards >> shard & 1}
