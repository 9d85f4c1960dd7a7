"""An engine's session with a scripted agent: holds on blocks end when, and only when, the agent has let go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from kvpool.client.engine_items import EngineSource, TierTokens
from kvpool.client.engine_registration import GpuRegion
from kvpool.client.engine_requests import LoadRequest, StoreRequest
from kvpool.client.gpuagent import EngineSession
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KeyspaceMismatch,
    PageCorrupt,
    ServiceUnavailable,
    StoreUnavailable,
)
from kvpool.core.ipc import HOLD_ENDED, IpcMemory
from kvpool.testing import eventually
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.convert import item_error_to_proto
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.engine_peer import HASH_KEY, Response, engine
from tests.unit.client.servers import Script


def span(count: int) -> ChunkRange:
    return ChunkRange(
        chunk_hashes=b"".join(bytes([number]) * 16 for number in range(count)),
        block_ids=np.arange(2 * count, dtype=np.int64).reshape(count, 2),
        first_chunk_index=0,
        parent_hash=bytes(16),
        group_head_hashes=(bytes(16),),
        chain_head_hash=bytes(16),
    )


def gathered(request_id: int, count: int) -> Response:
    return Response(request_id=request_id, gathered=gpuagent_pb2.EngineGathered(chunk_count=count))


def store_done(request_id: int, stored: int) -> Response:
    return Response(request_id=request_id, store_done=gpuagent_pb2.EngineStoreDone(stored_chunks=stored))


def holds(handle: StoreRequest | LoadRequest) -> bool:
    return not handle.released


async def break_session(session: EngineSession, stream: Script) -> None:
    stream.end()
    await asyncio.wait_for(session.broken.wait(), PATIENCE_S)


async def test_registers_and_lends_its_memory() -> None:
    async with engine() as one:
        session, stream = await one.open()
        assert (session.session_id, session.hash_key, session.device) == (b"s" * 16, HASH_KEY, "cpu")
        assert (session.max_request_chunks, session.blocks_per_chunk) == (100, 2)
        one.region.buffer[:3] = b"abc"
        assert one.memory.mappings[0][:3] == b"abc"
        assert one.region.is_lent()
        one.memory.let_go()
        assert not one.region.is_lent()
        await break_session(session, stream)


async def test_a_refused_registration_raises_and_lends_nothing() -> None:
    async with engine() as one:
        opening = asyncio.create_task(EngineSession.open(one.plan, one.config, offer=one.memory.offer))
        stream = await one.agent.streams.next()
        stream.end(KeyspaceMismatch("kv_heads differ", field="groups[0].kv_heads"))
        with pytest.raises(KeyspaceMismatch, match="kv_heads"):
            await opening
        assert not one.region.is_lent()


async def test_regions_that_do_not_fit_the_layout_are_refused_here() -> None:
    async with engine() as one:
        layout = one.plan.layout
        object.__setattr__(layout, "handle_sizes", (1,))
        with pytest.raises(InvalidRequest, match="regions"):
            await EngineSession.open(one.plan, one.config, offer=one.memory.offer)


async def test_match_returns_sources_and_estimates() -> None:
    async with engine() as one:
        session, stream = await one.open()
        asked = asyncio.create_task(session.match([bytes(16)] * 5, 2))
        request = await stream.next("match")
        assert (request.match.held_chunks, len(request.match.chunk_hashes)) == (2, 80)
        disk = gpuagent_pb2.ENGINE_SOURCE_DISK
        runs = [gpuagent_pb2.EngineMatchRun(chunk_count=2, source=disk, estimated_load_ms=1.5)]
        answer = gpuagent_pb2.EngineMatchResponse(matched_chunks=4, runs=runs)
        stream.send(Response(request_id=request.request_id, match=answer))
        found = await asked
        assert (found.matched_chunks, found.estimated_load_ms) == (4, 1.5)
        assert found.runs[0].source is EngineSource.DISK
        asked = asyncio.create_task(session.match([bytes(16)]))
        request = await stream.next("match")
        stream.send(Response(request_id=request.request_id, error=item_error_to_proto(StoreUnavailable("redis"))))
        with pytest.raises(StoreUnavailable):
            await asked
        await break_session(session, stream)


async def test_store_blocks_are_free_once_gathered_window_by_window() -> None:
    async with engine() as one:
        session, stream = await one.open()
        handle = await session.store(span(3), kept=lambda count: True)
        request = await stream.next("store")
        assert not request.store.keeps_blocks
        assert holds(handle)
        stream.send(gathered(request.request_id, 2))
        kept = await stream.next("kept")
        assert (kept.request_id, kept.kept.kept, kept.kept.chunk_count) == (request.request_id, True, 2)
        assert holds(handle)
        stream.send(gathered(request.request_id, 3))
        await handle.wait_released()
        stream.send(store_done(request.request_id, 3))
        assert (await handle.done(PATIENCE_S)).stored_chunks == 3


async def test_an_engine_that_keeps_its_blocks_says_so_beforehand() -> None:
    async with engine() as one:
        session, stream = await one.open()
        handle, other = await session.store(span(2)), await session.store(span(1))
        request, next_request = await stream.next("store"), await stream.next("store")
        assert request.store.keeps_blocks
        stream.send(gathered(request.request_id, 2))
        await handle.wait_released()  # the commit takes its time
        assert holds(other)
        stream.send(store_done(next_request.request_id, 1))
        await other.wait_released()
        stream.send(store_done(request.request_id, 2))
        assert (await handle.done(PATIENCE_S)).stored_chunks == 2


async def test_only_who_looks_at_progress_asks_for_it() -> None:
    async with engine() as one:
        session, stream = await one.open()
        await session.load(span(1), wait_s=3)
        assert (await stream.next("load")).load.no_progress
        await session.load(span(1), wait_s=3, on_progress=lambda layers, failed: None)
        assert not (await stream.next("load")).load.no_progress


async def test_an_engine_that_reused_blocks_says_so() -> None:
    async with engine() as one:
        session, stream = await one.open()
        await session.store(span(1), kept=lambda count: count != 1)
        request = await stream.next("store")
        stream.send(gathered(request.request_id, 1))
        assert not (await stream.next("kept")).kept.kept


async def test_an_engine_may_answer_with_what_numpy_compares() -> None:
    async with engine() as one:
        session, stream = await one.open()
        generations = np.zeros(3, dtype=np.int64)
        handle = await session.store(span(1), kept=lambda count: cast(bool, (generations == 0).all()))
        request = await stream.next("store")
        stream.send(gathered(request.request_id, 1))
        assert (await stream.next("kept")).kept.kept
        await handle.wait_released()


async def test_an_engine_may_answer_later_and_its_blocks_are_held_until_then() -> None:
    asked, known = asyncio.Event(), asyncio.Event()

    async def still_valid() -> bool:
        asked.set()
        return await known.wait()

    async with engine() as one:
        session, stream = await one.open()
        handle = await session.store(span(3), kept=lambda count: still_valid())
        request = await stream.next("store")
        stream.send(gathered(request.request_id, 3))
        await asked.wait()
        assert holds(handle)
        known.set()
        kept = await stream.next("kept")
        assert (kept.request_id, kept.kept.kept, kept.kept.chunk_count) == (request.request_id, True, 3)
        await handle.wait_released()


async def test_an_engine_that_cannot_say_whether_it_reused_blocks_loses_the_store() -> None:
    async def still_valid() -> bool:
        raise RuntimeError("planted")

    async with engine() as one:
        session, stream = await one.open()
        handle = await session.store(span(1), kept=lambda count: still_valid())
        request = await stream.next("store")
        stream.send(gathered(request.request_id, 1))
        assert not (await stream.next("kept")).kept.kept
        await handle.wait_released()


async def test_an_answer_that_comes_after_the_end_of_a_store_is_not_waited_for() -> None:
    asked, stopped = asyncio.Event(), asyncio.Event()

    async def still_valid() -> bool:
        asked.set()
        try:
            return await asyncio.Future[bool]()
        finally:
            stopped.set()

    async with engine() as one:
        session, stream = await one.open()
        handle = await session.store(span(1), kept=lambda count: still_valid())
        request = await stream.next("store")
        stream.send(gathered(request.request_id, 1))
        await asked.wait()
        stream.send(store_done(request.request_id, 0))
        await handle.wait_released()
        await stopped.wait()


async def test_store_names_failed_chunks() -> None:
    async with engine() as one:
        session, stream = await one.open()
        handle = await session.store(span(3))
        request = await stream.next("store")
        done = gpuagent_pb2.EngineStoreDone(
            stored_chunks=1,
            deduplicated_chunks=1,
            failed_chunks=[2],
            errors=[item_error_to_proto(PageCorrupt("sums"))],
        )
        stream.send(Response(request_id=request.request_id, store_done=done))
        outcome = await handle.done(PATIENCE_S)
        assert (outcome.stored_chunks, outcome.deduplicated_chunks) == (1, 1)
        assert isinstance(outcome.failed_chunks[2], PageCorrupt)
        assert not holds(handle)


async def test_load_reports_progress_and_sources() -> None:
    async with engine() as one:
        session, stream = await one.open()
        seen: list[tuple[int, tuple[int, ...]]] = []
        handle = await session.load(span(2), wait_s=3, on_progress=lambda layers, failed: seen.append((layers, failed)))
        request = await stream.next("load")
        assert request.load.wait_ms == 3000
        assert request.load.chunk_hashes == bytes(16) + bytes([1]) * 16
        assert request.load.block_ids == b"".join(block.to_bytes(8, "little") for block in range(4))
        progress = gpuagent_pb2.EngineLoadProgress(layers_loaded=1, failed_chunks=[1])
        stream.send(Response(request_id=request.request_id, load_progress=progress))
        await eventually(lambda: seen == [(1, (1,))])
        assert holds(handle)
        done = gpuagent_pb2.EngineLoadDone(
            loaded_chunks=1,
            failed_chunks=[1],
            error=item_error_to_proto(PageCorrupt("flipped")),
            tokens=common_pb2.TierTokens(disk=16),
        )
        stream.send(Response(request_id=request.request_id, load_done=done))
        outcome = await handle.done(PATIENCE_S)
        assert (outcome.loaded_chunks, outcome.failed_chunks, outcome.tokens) == (1, (1,), TierTokens(disk=16))
        assert isinstance(outcome.error, PageCorrupt)
        assert not holds(handle)


async def test_a_deadline_ends_the_wait_and_not_the_hold() -> None:
    async with engine() as one:
        session, stream = await one.open()
        handle = await session.load(span(1), wait_s=1)
        request = await stream.next("load")
        with pytest.raises(DeadlineExceeded):
            await handle.done(0.01)
        assert holds(handle)
        handle.cancel()
        cancel = await stream.next("cancel")
        assert (cancel.request_id, cancel.cancel.target_request_id) == (request.request_id, request.request_id)
        assert holds(handle)
        done = gpuagent_pb2.EngineLoadDone(failed_chunks=[0])
        stream.send(Response(request_id=request.request_id, load_done=done))
        await asyncio.wait_for(handle.wait_released(), PATIENCE_S)
        assert (await handle.done(PATIENCE_S)).failed_chunks == (0,)


async def test_a_refused_request_holds_nothing() -> None:
    async with engine() as one:
        session, stream = await one.open()
        handle = await session.load(span(1), wait_s=1)
        request = await stream.next("load")
        stream.send(Response(request_id=request.request_id, error=item_error_to_proto(InvalidRequest("blocks"))))
        with pytest.raises(InvalidRequest):
            await handle.done(PATIENCE_S)
        assert not holds(handle)


async def test_a_broken_session_fails_at_once_and_holds_until_the_agent_lets_go() -> None:
    async with engine() as one:
        session, stream = await one.open()
        store, load = await session.store(span(1)), await session.load(span(1), wait_s=60)
        await stream.next("load")
        await break_session(session, stream)
        for handle in (store, load):
            with pytest.raises(ServiceUnavailable):
                await handle.done(60)
        with pytest.raises(ServiceUnavailable):
            await session.match([bytes(16)])
        assert holds(store)
        assert holds(load)
        assert not session.released.is_set()
        one.memory.let_go()
        await asyncio.wait_for(load.wait_released(), PATIENCE_S)
        assert not holds(store)
        assert session.released.is_set()


async def test_a_successor_ends_the_holds_of_the_session_before() -> None:
    async with engine() as one:
        session, stream = await one.open()
        load = await session.load(span(1), wait_s=60)
        await break_session(session, stream)
        reopening = asyncio.create_task(session.reopen())
        (await one.agent.streams.next()).end(ServiceUnavailable("not yet"))
        with pytest.raises(ServiceUnavailable):
            await reopening
        assert holds(load)
        reopening = asyncio.create_task(session.reopen())
        _, request = await one.greet()
        successor = await reopening
        assert request.register.previous_session_id == b"s" * 16
        assert not holds(load), "the agent answers only after all work of the old session has ended"
        assert successor.failure is None


async def test_a_new_agent_cannot_end_holds_on_gpu_memory_that_the_old_one_may_touch() -> None:
    """It has never heard of the old session, whose agent hangs, say, with a scatter under way."""
    async with engine() as one:
        memory = IpcMemory("GPU-01234567-89ab-cdef-0123-456789abcdef", bytes(64), 0, one.region.size_bytes)
        one.plan = replace(one.plan, regions=(GpuRegion(one.region.size_bytes, memory),))
        session, stream = await one.open()
        load = await session.load(span(1), wait_s=60)
        await break_session(session, stream)
        reopening = asyncio.create_task(session.reopen())
        await one.greet()
        await reopening
        assert holds(load)
        assert not session.released.is_set()
        hold_file = one.memory.mappings.pop(0)
        hold_file[:1] = HOLD_ENDED
        hold_file.close()
        await asyncio.wait_for(load.wait_released(), PATIENCE_S)
        assert session.released.is_set()


async def test_close_ends_holds_when_the_agent_confirms() -> None:
    async with engine() as one:
        session, stream = await one.open()
        load = await session.load(span(1), wait_s=60)
        closing = asyncio.create_task(session.close())
        assert (await stream.next("close")).request_id == 0
        stream.send(Response(closed=gpuagent_pb2.EngineClose()))
        stream.end()
        assert await closing
        assert not holds(load)
        with pytest.raises(ServiceUnavailable):
            await load.done(PATIENCE_S)


async def test_no_task_outlives_a_session_whose_agent_keeps_the_memory() -> None:
    async with engine(call_timeout_s=0.05) as one:
        session, stream = await one.open()
        stream.end(ServiceUnavailable("the agent fell over"))
        assert not await session.close()
        assert not session.released.is_set()
        await eventually(lambda: not any("engine session" in task.get_name() for task in asyncio.all_tasks()))
