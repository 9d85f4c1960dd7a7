"""The pool over a scripted agent: values instead of exceptions, exact failed chunks, holds that outlive waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvpool.client.engine_items import RequestStats, TierTokens
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.core.chunks import ROOT_HASH, chunk_hashes
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PageCorrupt,
    ServiceUnavailable,
    Stopped,
    StoreUnavailable,
)
from kvpool.testing import eventually
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.convert import item_error_to_proto
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still
from tests.unit.client.engine_peer import HASH_KEY, Engine, Response, engine
from tests.unit.client.servers import Script

TOKENS = list(range(16 * 4 + 3))
BLOCKS = np.arange(8)


@asynccontextmanager
async def pool(max_request_chunks: int = 100, **settings: Any) -> AsyncGenerator[tuple[AsyncPool, Script, Engine]]:
    async with engine(**settings) as one:
        opening = asyncio.create_task(AsyncPool.open(one.plan, one.config, offer=one.memory.offer))
        stream, _ = await one.greet(max_request_chunks=max_request_chunks)
        cache = await opening
        try:
            yield cache, stream, one
        finally:
            one.memory.let_go()
            stream.end()
            await cache.close()


def load_done(request: Any, loaded: int, failed: list[int] | None = None, **tokens: int) -> Response:
    error = item_error_to_proto(PageCorrupt("flipped")) if failed else None
    done = gpuagent_pb2.EngineLoadDone(
        loaded_chunks=loaded, failed_chunks=failed or [], error=error, tokens=common_pb2.TierTokens(**tokens)
    )
    return Response(request_id=request.request_id, load_done=done)


async def test_match_never_uses_the_last_token() -> None:
    async with pool() as (cache, stream, _):
        for tokens, usable in ((TOKENS[:64], 63), (TOKENS, 64)):
            chain = cache.prompt(tokens)
            asked = asyncio.create_task(cache.match(chain))
            request = await stream.next("match")
            assert request.match.chunk_hashes == b"".join(chunk_hashes(HASH_KEY, tokens, 16))
            answer = gpuagent_pb2.EngineMatchResponse(matched_chunks=4)
            stream.send(Response(request_id=request.request_id, match=answer))
            found = await asked
            assert (found.matched_chunks, found.num_tokens, found.error) == (4, usable, None)


async def test_match_does_not_ask_for_what_the_engine_holds() -> None:
    async with pool() as (cache, _, _one):
        found = await cache.match(cache.prompt(TOKENS), held_chunks=9)
        assert (found.matched_chunks, found.num_tokens) == (4, 64)


async def test_trouble_is_a_value() -> None:
    async with pool(match_timeout_s=0.05) as (cache, stream, _):
        chain = cache.prompt(TOKENS)
        found = await cache.match(chain, held_chunks=1)
        assert (found.matched_chunks, found.num_tokens) == (1, 16)
        assert isinstance(found.error, DeadlineExceeded)
        asked = asyncio.create_task(cache.match(chain, timeout_s=PATIENCE_S))
        await stream.next("match")
        request = await stream.next("match")
        stream.send(Response(request_id=request.request_id, error=item_error_to_proto(StoreUnavailable("redis"))))
        assert isinstance((await asked).error, StoreUnavailable)


async def test_load_names_parents_heads_and_blocks() -> None:
    async with pool() as (cache, stream, _):
        chain = cache.prompt(TOKENS)
        loading = asyncio.create_task(cache.load(chain, BLOCKS, first_chunk=1, end_chunk=4, skip_tokens=5))
        request = await stream.next("load")
        load = request.load
        assert (load.first_chunk_index, load.parent_hash, load.group_head_hashes) == (
            1,
            chain.hashes[0],
            chain.hashes[0],
        )
        assert load.chunk_hashes == b"".join(chain.hashes[1:4])
        assert load.skip_tokens == 5
        assert np.frombuffer(load.block_ids, "<i8").tolist() == [2, 3, 4, 5, 6, 7]
        stream.send(load_done(request, 3, staging=32, remote=11))
        report = await loading
        assert (report.loaded_chunks, report.end_chunk, report.failed_chunks) == (3, 4, ())
        assert report.tokens == TierTokens(staging=32, remote=11)


async def test_a_failed_window_fails_all_chunks_after_it() -> None:
    async with pool(max_request_chunks=2) as (cache, stream, _):
        loading = asyncio.create_task(cache.load(cache.prompt(TOKENS), BLOCKS, first_chunk=0, end_chunk=4))
        first = await stream.next("load")
        assert len(first.load.chunk_hashes) == 2 * 16
        stream.send(load_done(first, 1, [1], disk=16))
        report = await loading
        assert (report.loaded_chunks, report.failed_chunks) == (1, (1, 2, 3))
        assert isinstance(report.error, PageCorrupt)


async def test_windows_follow_one_another() -> None:
    async with pool(max_request_chunks=3) as (cache, stream, _):
        chain = cache.prompt(TOKENS)
        loading = asyncio.create_task(cache.load(chain, BLOCKS, first_chunk=0, end_chunk=4))
        stream.send(load_done(await stream.next("load"), 3, staging=48))
        second = await stream.next("load")
        assert (second.load.first_chunk_index, second.load.parent_hash) == (3, chain.hashes[2])
        stream.send(load_done(second, 1, disk=16))
        assert (await loading).tokens == TierTokens(staging=48, disk=16)


async def test_a_load_cut_off_by_the_deadline_keeps_its_hold() -> None:
    async with pool() as (cache, stream, _):
        loading = await cache.start_load(cache.prompt(TOKENS), BLOCKS, first_chunk=0, end_chunk=4)
        request = await stream.next("load")
        stood_still(3 * PATIENCE_S)
        report = await loading.result()
        assert report.failed_chunks == (0, 1, 2, 3)
        assert isinstance(report.error, DeadlineExceeded)
        assert not loading.released
        await stream.next("cancel")
        stream.send(load_done(request, 0, [0, 1, 2, 3]))
        await loading.wait_released(PATIENCE_S)


async def test_loads_that_run_at_once_keep_apart_what_computing_them_would_cost() -> None:
    async with pool() as (cache, stream, _):
        chain = cache.prompt(TOKENS)
        loading = [
            asyncio.create_task(cache.load(chain, BLOCKS, first_chunk=0, end_chunk=4, compute_us_per_token=cost))
            for cost in (7.0, 0.0, 9.0)
        ]
        requests = [await stream.next("load") for _ in loading]
        assert [request.load.compute_us_per_token for request in requests] == [7.0, 0.0, 9.0]
        for request in requests:
            stream.send(load_done(request, 4))
        await asyncio.gather(*loading)


async def test_a_load_that_is_stopped_ends_when_the_agent_says_so_and_asks_for_no_more() -> None:
    async with pool(max_request_chunks=2) as (cache, stream, _):
        loading = await cache.start_load(cache.prompt(TOKENS), BLOCKS, first_chunk=0, end_chunk=4, timeout_s=60.0)
        request = await stream.next("load")
        loading.cancel()
        loading.cancel()
        cancel = await stream.next("cancel")
        assert cancel.cancel.target_request_id == request.request_id
        assert not loading.done, "the agent may still write"
        stream.send(load_done(request, 2))  # it had come in before
        report = await loading.result()
        assert (report.loaded_chunks, report.failed_chunks, loading.released) == (2, (2, 3), True)
        assert isinstance(report.error, Stopped)


async def test_a_load_that_is_stopped_before_it_begins_touches_nothing() -> None:
    async with pool() as (cache, _, _):
        loading = await cache.start_load(cache.prompt(TOKENS), BLOCKS, first_chunk=0, end_chunk=4)
        loading.cancel()
        report = await loading.result()
        assert (report.loaded_chunks, loading.released) == (0, True)
        assert isinstance(report.error, Stopped)


async def test_a_part_that_begins_while_its_load_is_stopped_is_cancelled() -> None:
    async with pool() as (cache, stream, _):
        loading = await cache.start_load(cache.prompt(TOKENS), BLOCKS, first_chunk=0, end_chunk=4)
        await asyncio.sleep(0)  # the request is on its way
        loading.cancel()
        request = await stream.next("load")
        await stream.next("cancel")
        stream.send(load_done(request, 0, [0]))
        assert isinstance((await loading.result()).error, PageCorrupt)


async def test_a_load_returns_when_its_blocks_are_the_callers_again() -> None:
    async with pool(load_grace_s=0.01) as (cache, stream, _):
        prompt = cache.prompt(TOKENS)
        loading = asyncio.create_task(cache.load(prompt, BLOCKS, first_chunk=0, end_chunk=4, timeout_s=0.01))
        request = await stream.next("load")
        await stream.next("cancel")  # its time is over
        assert not loading.done(), "the agent may still write"
        stream.send(load_done(request, 0, [0]))
        assert isinstance((await loading).error, DeadlineExceeded)


async def test_a_cancelled_load_ends_when_its_blocks_are_the_callers_again() -> None:
    async with pool() as (cache, stream, _):
        prompt = cache.prompt(TOKENS)
        loading = asyncio.create_task(cache.load(prompt, BLOCKS, first_chunk=0, end_chunk=4))
        request = await stream.next("load")
        loading.cancel()
        await stream.next("cancel")
        loading.cancel()  # impatience changes nothing
        await asyncio.sleep(0)
        assert not loading.done(), "the agent may still write"
        stream.send(load_done(request, 0, [0]))
        with pytest.raises(asyncio.CancelledError):
            await loading


async def test_a_store_that_is_cancelled_half_begun_gives_no_block_back_early() -> None:
    async with pool(max_request_chunks=1, requests_in_flight_max=1) as (cache, stream, _):
        storing = asyncio.create_task(cache.store(cache.prompt(TOKENS), BLOCKS, end_chunk=2))
        request = await stream.next("store")
        storing.cancel()  # while the second request waits for the first
        await stream.next("cancel")
        assert not storing.done(), "the agent may still read"
        done = gpuagent_pb2.EngineStoreDone(stored_chunks=1)
        stream.send(Response(request_id=request.request_id, store_done=done))
        with pytest.raises(asyncio.CancelledError):
            await storing


async def test_a_load_without_a_range_brings_what_is_matched() -> None:
    async with pool() as (cache, stream, _):
        prompt = cache.prompt(TOKENS[:64])
        loading = asyncio.create_task(cache.load(prompt, BLOCKS))
        request = await stream.next("match")
        stream.send(Response(request_id=request.request_id, match=gpuagent_pb2.EngineMatchResponse(matched_chunks=4)))
        request = await stream.next("load")
        stream.send(load_done(request, 4, staging=64))
        assert (await loading).num_tokens == 63, "never the prompt's last token"


async def test_what_is_pooled_is_not_stored_twice() -> None:
    async with pool() as (cache, stream, _):
        prompt = cache.prompt(TOKENS)
        loading = asyncio.create_task(cache.load(prompt, BLOCKS, end_chunk=1))
        stream.send(load_done(await stream.next("load"), 1))
        await loading
        storing = await cache.store(prompt, BLOCKS)
        request = await stream.next("store")
        assert (request.store.first_chunk_index, request.store.chunk_hashes) == (1, prompt.packed_hashes(1, 4))
        failed = item_error_to_proto(PageCorrupt("sums"))
        done = gpuagent_pb2.EngineStoreDone(stored_chunks=2, failed_chunks=[1], errors=[failed])
        stream.send(Response(request_id=request.request_id, store_done=done))
        assert sorted((await storing.result(PATIENCE_S)).failed_chunks) == [2]
        await cache.store(prompt, BLOCKS)
        request = await stream.next("store")
        assert request.store.first_chunk_index == 2, "from the chunk that failed on"
        stream.send(Response(request_id=request.request_id, store_done=gpuagent_pb2.EngineStoreDone(stored_chunks=2)))
        longer = cache.extend(prompt, [*TOKENS, *range(16)])
        assert longer.pooled_chunks == 4


async def test_a_broken_session_is_replaced_and_costs_only_recomputing() -> None:
    async with pool() as (cache, stream, one):
        chain = cache.prompt(TOKENS)
        loading = await cache.start_load(chain, BLOCKS, first_chunk=0, end_chunk=4)
        await stream.next("load")
        stream.end()
        report = await loading.result(PATIENCE_S)
        assert report.failed_chunks == (0, 1, 2, 3)
        assert isinstance(report.error, ServiceUnavailable)
        assert isinstance((await cache.match(chain)).error, ServiceUnavailable)
        fresh, request = await one.greet()
        assert request.register.previous_session_id == b"s" * 16
        await loading.wait_released(PATIENCE_S)
        await eventually(lambda: cache.connected)
        asked = asyncio.create_task(cache.match(chain))
        request = await fresh.next("match")
        fresh.send(Response(request_id=request.request_id, match=gpuagent_pb2.EngineMatchResponse(matched_chunks=2)))
        assert (await asked).matched_chunks == 2
        fresh.end()


async def test_store_reports_chunks_by_their_place_in_the_chain() -> None:
    async with pool(max_request_chunks=2) as (cache, stream, _):
        chain = cache.prompt(TOKENS)
        storing = await cache.store(chain, BLOCKS, first_chunk=1, end_chunk=4)
        first, second = await stream.next("store"), await stream.next("store")
        assert (first.store.parent_hash, first.store.chain_head_hash) == (chain.hashes[0], chain.hashes[0])
        assert (second.store.first_chunk_index, second.store.chunk_hashes) == (3, chain.hashes[3])
        assert not storing.released
        for request, count in ((first, 2), (second, 1)):
            answer = gpuagent_pb2.EngineGathered(chunk_count=count)
            stream.send(Response(request_id=request.request_id, gathered=answer))
        await storing.wait_released(PATIENCE_S)
        done = gpuagent_pb2.EngineStoreDone(
            stored_chunks=1, failed_chunks=[1], errors=[item_error_to_proto(PageCorrupt("sums"))]
        )
        stream.send(Response(request_id=first.request_id, store_done=done))
        stream.send(
            Response(request_id=second.request_id, store_done=gpuagent_pb2.EngineStoreDone(deduplicated_chunks=1))
        )
        report = await storing.result(PATIENCE_S)
        assert (report.stored_chunks, report.deduplicated_chunks) == (1, 1)
        assert {index: type(error) for index, error in report.failed_chunks.items()} == {2: PageCorrupt}


async def test_a_store_of_one_request_is_one_request_or_none() -> None:
    async with pool(max_request_chunks=2) as (cache, stream, _):
        chain = cache.prompt(TOKENS)
        for chunks in (range(4), range(0), range(3, 5)):
            with pytest.raises(InvalidRequest):
                await cache.begin_store(chain, BLOCKS, chunks, wait_event=None)
        counts: list[int] = []

        def still_valid(count: int) -> bool:
            counts.append(count)
            return True

        storing = await cache.begin_store(chain, BLOCKS, range(1, 3), wait_event=None, still_valid=still_valid)
        request = await stream.next("store")  # of those before nothing was sent
        assert request.store.chunk_hashes == chain.packed_hashes(1, 3)
        with pytest.raises(DeadlineExceeded):
            await storing.done(0.0)
        stream.send(Response(request_id=request.request_id, gathered=gpuagent_pb2.EngineGathered(chunk_count=2)))
        assert (await stream.next("kept")).kept.kept
        assert (storing.released, counts) == (True, [2])
        waiting = asyncio.create_task(storing.done(PATIENCE_S))
        await asyncio.sleep(0)
        waiting.cancel()
        done = gpuagent_pb2.EngineStoreDone(stored_chunks=2)
        stream.send(Response(request_id=request.request_id, store_done=done))
        assert (await storing.done(PATIENCE_S)).stored_chunks == 2, "also after one that was cancelled"


async def test_a_store_of_one_request_that_is_not_begun_says_why() -> None:
    async with pool() as (cache, stream, _):
        stream.end()
        await cache.session.broken.wait()
        with pytest.raises(ServiceUnavailable):
            await cache.begin_store(cache.prompt(TOKENS), BLOCKS, range(2), wait_event=None)


async def test_a_store_of_one_request_waits_for_its_place_no_longer_than_a_call() -> None:
    async with pool(requests_in_flight_max=1, call_timeout_s=0.2) as (cache, stream, _):
        chain = cache.prompt(TOKENS)
        first = await cache.begin_store(chain, BLOCKS, range(1), wait_event=None)
        request = await stream.next("store")
        with pytest.raises(DeadlineExceeded, match="takes no more stores"):
            await cache.begin_store(chain, BLOCKS, range(1, 2), wait_event=None)
        stream.send(Response(request_id=request.request_id, store_done=gpuagent_pb2.EngineStoreDone(stored_chunks=1)))
        assert (await first.done(PATIENCE_S)).stored_chunks == 1


async def test_stores_that_begin_together_are_sent_together() -> None:
    async with pool() as (cache, stream, _):
        chain, before = cache.prompt(TOKENS), stream.message_count
        begun = [await cache.begin_store(chain, BLOCKS, range(at, at + 1), wait_event=None) for at in range(4)]
        requests = [await stream.next("store") for _ in begun]
        assert [request.store.first_chunk_index for request in requests] == [0, 1, 2, 3]
        assert stream.message_count < before + 4
        for request in requests:
            done = gpuagent_pb2.EngineStoreDone(stored_chunks=1)
            stream.send(Response(request_id=request.request_id, store_done=done))
        assert [(await one.done(PATIENCE_S)).stored_chunks for one in begun] == [1, 1, 1, 1]


async def test_a_store_without_an_agent_fails_every_chunk_and_holds_nothing() -> None:
    async with pool() as (cache, stream, _):
        stream.end()
        await asyncio.wait_for(cache.session.broken.wait(), PATIENCE_S)
        storing = await cache.store(cache.prompt(TOKENS), BLOCKS, first_chunk=0, end_chunk=4)
        assert storing.released
        report = await storing.result(PATIENCE_S)
        assert sorted(report.failed_chunks) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("first", "end", "skip", "named"), [(2, 5, 0, "chunks"), (3, 2, 0, "chunks"), (0, 4, 16, "skip_tokens")]
)
async def test_misuse_is_refused(first: int, end: int, skip: int, named: str) -> None:
    async with pool() as (cache, _, _one):
        with pytest.raises(InvalidRequest, match=named):
            await cache.load(cache.prompt(TOKENS), BLOCKS, first_chunk=first, end_chunk=end, skip_tokens=skip)
        with pytest.raises(InvalidRequest, match="block_table"):
            await cache.load(cache.prompt(TOKENS), BLOCKS[:7], first_chunk=0, end_chunk=4)


def test_a_chain_grows_without_hashing_again() -> None:
    chain = Prompt.of(HASH_KEY, TOKENS[:40], 16)
    longer = chain.extended(HASH_KEY, TOKENS)
    assert longer == Prompt.of(HASH_KEY, TOKENS, 16)
    assert (longer.parent_hash(0), longer.parent_hash(2)) == (ROOT_HASH, longer.hashes[1])
    with pytest.raises(InvalidRequest):
        longer.extended(HASH_KEY, TOKENS[:5])


def test_group_heads_are_named_once_each() -> None:
    chain = Prompt.of(HASH_KEY, list(range(16 * 40)), 16)
    assert chain.group_head_hashes(15, 3) == (chain.hashes[0], chain.hashes[16])
    assert chain.group_head_hashes(16, 16) == (chain.hashes[16],)
    assert chain.group_head_hashes(31, 9) == (chain.hashes[16], chain.hashes[32])


@pytest.mark.parametrize(
    ("own", "loaded", "expected"),
    [
        (0, TierTokens(staging=48, disk=16), RequestStats(staging=48, disk=16, recomputed=3)),
        (16, TierTokens(remote=48), RequestStats(own=16, remote=48, recomputed=3)),
        (67, TierTokens(), RequestStats(own=66, recomputed=1)),
    ],
)
def test_stats_add_up_to_the_prompt(own: int, loaded: TierTokens, expected: RequestStats) -> None:
    stats = RequestStats.of(Prompt.of(HASH_KEY, TOKENS, 16), own_tokens=own, loaded=loaded)
    assert stats == expected
    assert stats.prompt == len(TOKENS)


def test_the_last_token_counts_as_recomputed_even_if_it_was_loaded() -> None:
    stats = RequestStats.of(Prompt.of(HASH_KEY, TOKENS[:64], 16), own_tokens=0, loaded=TierTokens(staging=32, disk=32))
    assert stats == RequestStats(staging=32, disk=31, recomputed=1)
