"""Stores on the fakes: windows, holds, dedupe, and what each failure leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvpool.core.errors import ArenaFull, LeaseLost, ServiceUnavailable, Stopped
from kvpool.testing import eventually
from tests.fixtures.patience import PATIENCE_S
from tests.unit.gpuagent.runs import RANK, SHARDS, Bench, chunk_hash, content, key, true_page


async def test_a_store_makes_every_page_of_every_chunk_visible() -> None:
    bench = Bench()
    bench.compute(range(3))
    outcome = await bench.store(range(3))
    assert (outcome.stored_chunks, outcome.deduplicated_chunks, outcome.failed) == (3, 0, {})
    for number in range(3):
        for shard in SHARDS:
            assert bench.cluster.pages[key(number, shard)] == true_page(number, shard)
    assert bench.metric("stored_bytes_total") == 12 * len(true_page(0, 0))
    bench.nothing_is_out()


async def test_chunks_are_gathered_and_answered_window_by_window() -> None:
    bench = Bench(window_pages=32)  # a quarter of it is 2 chunks of 4 pages
    outcome = await bench.store(range(5))
    assert bench.copied_out == [2, 4, 5]
    assert outcome.stored_chunks == 5
    assert bench.pool.most_writes <= 32


async def test_a_window_smaller_than_two_chunks_takes_one_at_a_time() -> None:
    bench = Bench(window_pages=5)
    outcome = await bench.store(range(3))
    assert bench.copied_out == [1, 2, 3]
    assert outcome.stored_chunks == 3
    assert bench.pool.most_writes <= 5


async def test_the_next_windows_are_reserved_while_one_is_copied() -> None:
    bench = Bench(window_pages=16)  # four windows of a chunk
    bench.faults.gates["gather"] = asyncio.Event()
    storing = asyncio.ensure_future(bench.store(range(6)))
    await eventually(lambda: bench.faults.steps.count("reserve") == 4)
    assert not bench.copied_out
    bench.faults.gates["gather"].set()
    assert (await storing).stored_chunks == 6
    assert bench.pool.most_writes <= 16


async def test_a_chunk_that_never_fits_the_window_fails_with_advice() -> None:
    bench = Bench(window_pages=3)
    outcome = await bench.store(range(2))
    assert set(outcome.failed) == {0, 1}
    assert "max_leases" in str(outcome.failed[0])
    assert bench.copied_out == []
    bench.nothing_is_out()


async def test_a_window_is_committed_only_after_the_engine_kept_its_blocks() -> None:
    bench = Bench()
    bench.faults.gates["still_valid"] = asyncio.Event()
    storing = asyncio.ensure_future(bench.store(range(1)))
    await eventually(lambda: bench.copied_out == [1])
    assert "commit" not in bench.faults.steps
    assert not bench.cluster.pages
    bench.faults.gates["still_valid"].set()
    assert (await storing).stored_chunks == 1


async def test_a_gather_names_the_slots_of_its_pages_and_their_blocks() -> None:
    bench = Bench(window_pages=64)
    bench.offer([1], shards=[0, 1, 3])
    bench.faults.gates["gather"] = asyncio.Event()
    storing = asyncio.ensure_future(bench.store(range(3)))
    await eventually(lambda: bench.cache.running > 0)
    (batch,) = bench.cache.gathers
    pages = [key(0, shard) for shard in SHARDS] + [key(1, 2)]
    assert batch.addresses[:5].tolist() == [bench.pool.address_of(page) for page in pages]
    assert batch.shards.tolist()[:5] == [0, 1, 2, 3, 2]
    assert batch.block_ids[3:5].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not batch.skip_tokens.any()
    bench.faults.gates["gather"].set()
    assert (await storing).stored_chunks == 3


async def test_pages_that_are_not_committed_fail_their_chunks_and_no_other() -> None:
    bench = Bench(window_pages=16)
    bench.compute(range(5))

    def lose(step: str) -> None:
        if step in ("commit 1 2", "commit 3 0", "commit 3 3"):
            raise LeaseLost("its lease ended")

    bench.faults.before = lose
    outcome = await bench.store(range(5))
    assert set(outcome.failed) == {1, 3}
    assert isinstance(outcome.failed[1], LeaseLost)
    assert outcome.stored_chunks == 3
    assert len(bench.cluster.pages) == 17
    assert bench.metric("stored_bytes_total") == 17 * len(true_page(0, 0))
    bench.nothing_is_out()


async def test_blocks_that_were_not_kept_are_aborted_and_all_after_them() -> None:
    bench = Bench(window_pages=32)
    bench.still_valid = lambda chunk_count: chunk_count <= 2
    outcome = await bench.store(range(6))
    assert outcome.stored_chunks == 2
    assert set(outcome.failed) == {2, 3, 4, 5}
    assert isinstance(outcome.failed[2], Stopped)
    assert bench.copied_out == [2, 4]
    assert {page.chunk_hash for page in bench.cluster.pages} == {chunk_hash(0), chunk_hash(1)}
    bench.nothing_is_out()


async def test_what_exists_or_is_being_written_counts_as_deduplicated() -> None:
    bench = Bench()
    bench.offer([0])
    bench.cluster.writing.update(key(1, shard) for shard in SHARDS)
    outcome = await bench.store(range(3))
    assert (outcome.stored_chunks, outcome.deduplicated_chunks) == (1, 2)
    assert bench.metric("deduplicated_pages_total", admission="exists") == 4
    assert bench.metric("deduplicated_pages_total", admission="pending") == 4
    assert bench.copied_out[-1] == 3  # the engine learns that it may reuse their blocks too


async def test_a_chunk_of_which_some_pages_exist_counts_as_stored() -> None:
    bench = Bench()
    bench.offer([0], shards=[0, 2])
    outcome = await bench.store(range(1))
    assert (outcome.stored_chunks, outcome.deduplicated_chunks) == (1, 0)
    assert len(bench.cluster.pages) == 4


async def test_a_chunk_without_room_for_all_pages_gives_its_other_slots_back_ungathered() -> None:
    bench = Bench()

    def full(step: str) -> None:
        if step == "reserve 1 3":
            raise ArenaFull("everything is leased")

    bench.faults.before = full
    outcome = await bench.store(range(3))
    assert set(outcome.failed) == {1}
    assert isinstance(outcome.failed[1], ArenaFull)
    assert outcome.stored_chunks == 2
    assert {page.chunk_hash for page in bench.cluster.pages} == {chunk_hash(0), chunk_hash(2)}
    assert bench.faults.steps.count("gather") == 8
    bench.nothing_is_out()


@pytest.mark.parametrize("step", ["reserve", "gather", "still_valid", "commit"])
@pytest.mark.parametrize("error", [ServiceUnavailable, LeaseLost, RuntimeError])
@pytest.mark.parametrize("failing", [1, 2])
async def test_whatever_fails_in_a_window_fails_its_chunks_and_leaks_nothing(
    step: str, error: type[Exception], failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(window_pages=8)  # a chunk a window
    count = 0

    def fail(now: str) -> None:
        nonlocal count
        count += now == step
        if now == step and count == (4 * failing if step == "gather" else failing):
            raise error("gone")

    bench.faults.before = fail
    outcome = await bench.store(range(3))
    assert failing - 1 in outcome.failed
    assert outcome.stored_chunks + len(outcome.failed) == 3
    visible = {page.chunk_hash for page in bench.cluster.pages}
    assert visible == {chunk_hash(number) for number in range(3) if number not in outcome.failed}
    bench.nothing_is_out()
    assert ("Traceback" in caplog.text) == (error is RuntimeError)


@pytest.mark.parametrize("step", ["reserve", "gather", "still_valid", "commit"])
async def test_a_stop_ends_the_store_after_the_copies_that_have_begun(step: str) -> None:
    bench = Bench(window_pages=8)

    def stop(now: str) -> None:
        if now == step and bench.faults.steps.count(step) == (6 if step == "gather" else 2):
            bench.stop.cancel()

    bench.faults.before = stop
    outcome = await bench.store(range(4))
    assert outcome.failed
    assert isinstance(outcome.failed[3], Stopped)
    assert outcome.stored_chunks + len(outcome.failed) == 4
    bench.nothing_is_out()


async def test_a_stop_does_not_wait_for_an_engine_that_never_answers_kept() -> None:
    bench = Bench()
    bench.faults.gates["still_valid"] = asyncio.Event()
    storing = asyncio.ensure_future(bench.store(range(1)))
    await eventually(lambda: bench.copied_out == [1])
    bench.stop.cancel()
    outcome = await asyncio.wait_for(storing, PATIENCE_S)
    assert isinstance(outcome.failed[0], Stopped)
    bench.nothing_is_out()


async def test_a_stop_does_not_wait_for_slots() -> None:
    bench = Bench()
    bench.faults.gates["reserve"] = asyncio.Event()
    storing = asyncio.ensure_future(bench.store(range(1)))
    await eventually(lambda: "reserve" in bench.faults.steps)
    bench.stop.cancel()
    outcome = await asyncio.wait_for(storing, PATIENCE_S)
    assert set(outcome.failed) == {0}
    bench.nothing_is_out()


async def test_stores_that_share_a_session_wait_for_each_others_slots() -> None:
    bench = Bench(window_pages=8)
    outcomes = await asyncio.gather(*(bench.store(range(first, first + 3)) for first in (0, 16, 32)))
    assert [outcome.stored_chunks for outcome in outcomes] == [3, 3, 3]
    assert bench.pool.most_writes <= 8
    bench.nothing_is_out()


async def test_what_is_kept_beside_the_pages_is_the_chunks_own() -> None:
    bench = Bench()
    await bench.store([15, 16])
    first, second = (bench.pool.asked[number] for number in (0, 4))
    assert (first.metadata.chunk_index, second.metadata.chunk_index) == (15, 16)
    assert first.metadata.parent_hash == chunk_hash(14)
    assert second.metadata.parent_hash == chunk_hash(15)
    assert first.metadata.group_head_hash == chunk_hash(0)
    assert second.metadata.group_head_hash == chunk_hash(16)
    assert first.chain_head_hash == chunk_hash(0)


async def test_a_rank_stores_its_own_shards_only() -> None:
    bench = Bench()
    bench.compute([0])
    await bench.store([0], replace(RANK, shards=0b1010))
    assert {page.shard for page in bench.cluster.pages} == {1, 3}
    assert content(0, 3) in bench.cluster.pages[key(0, 3)]
