"""The synchronous face: one loop thread, clean ends, clear words after a fork."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvpool
from kvpool.client import sync
from kvpool.client.pool import AsyncPool
from kvpool.client.sync import BackgroundLoop, Pool
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, PageCorrupt, ServiceUnavailable
from kvpool.testing import eventually_sync
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.engine_peer import Engine, Response, engine


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that stands still is not stuck."""
    monkeypatch.setattr(sync, "_STOP_TIMEOUT_S", PATIENCE_S)


async def _value(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_results_and_errors_come_back() -> None:
    loop = BackgroundLoop()
    try:
        assert loop.run(lambda: _value(3)) == 3

        async def fail() -> None:
            raise PageCorrupt("p")

        with pytest.raises(PageCorrupt):
            loop.run(fail)
    finally:
        loop.stop()


def test_many_threads_share_one_loop() -> None:
    loop = BackgroundLoop()
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda value: loop.run(lambda: _value(value)), range(200))) == list(range(200))
    finally:
        loop.stop()


def test_a_deadline_cancels_the_work() -> None:
    loop = BackgroundLoop()
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    try:
        with pytest.raises(DeadlineExceeded):
            loop.run(wait, timeout_s=0.02)
        assert cancelled.wait(PATIENCE_S)
    finally:
        loop.stop()


def test_stop_cancels_what_runs_and_later_calls_are_refused() -> None:
    loop = BackgroundLoop("to be stopped")
    left = loop.start(asyncio.Event().wait)
    assert "to be stopped" in {thread.name for thread in threading.enumerate()}
    loop.stop()
    assert left.cancelled()
    assert "to be stopped" not in {thread.name for thread in threading.enumerate()}
    loop.stop()
    with pytest.raises(ServiceUnavailable, match="closed"):
        loop.run(lambda: _value(1))


def test_the_loops_own_thread_is_refused() -> None:
    loop = BackgroundLoop()

    async def nested() -> int:
        return loop.run(lambda: _value(1))

    try:
        with pytest.raises(ServiceUnavailable, match="own loop"):
            loop.run(nested)
    finally:
        loop.stop()


def test_a_forked_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = BackgroundLoop()
    try:
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(ServiceUnavailable, match="fork"):
            loop.run(lambda: _value(1))
        loop.stop()  # must not touch the parent's thread
        monkeypatch.undo()
        assert loop.run(lambda: _value(1)) == 1
    finally:
        loop.stop()


def test_an_interpreter_that_forgot_to_stop_exits_cleanly() -> None:
    code = """
import asyncio
from kvpool.client.sync import BackgroundLoop
loop = BackgroundLoop()
loop.start(asyncio.Event().wait)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


async def test_a_pool_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's threads are blocked in Pool while this test's loop plays the agent."""
    async with engine() as one:
        opened = AsyncPool.open
        monkeypatch.setattr(
            AsyncPool, "open", lambda registration, config: opened(registration, config, offer=one.memory.offer)
        )
        using = asyncio.create_task(asyncio.to_thread(_use, one))
        stream, _ = await one.greet()
        request = await stream.next("match")
        stream.send(Response(request_id=request.request_id, match=gpuagent_pb2.EngineMatchResponse(matched_chunks=1)))
        request = await stream.next("load")
        stream.send(Response(request_id=request.request_id, load_done=gpuagent_pb2.EngineLoadDone(loaded_chunks=1)))
        request = await stream.next("store")
        gathered = gpuagent_pb2.EngineGathered(chunk_count=1)
        stream.send(Response(request_id=request.request_id, gathered=gathered))
        stream.send(Response(request_id=request.request_id, store_done=gpuagent_pb2.EngineStoreDone(stored_chunks=1)))
        await stream.next("close")
        stream.send(Response(closed=gpuagent_pb2.EngineClose()))
        stream.end()
        assert await using == (1, 1, 1)


def _use(one: Engine) -> tuple[int, int, int]:
    with Pool(one.plan, one.config) as cache:
        chain = cache.extend(cache.prompt(list(range(20))), list(range(40)))
        found = cache.match(chain)
        report = cache.load(chain, np.arange(4), first_chunk=0, end_chunk=1)
        ticket = cache.store(chain, np.arange(4), first_chunk=1, end_chunk=2)
        ticket.wait_released(PATIENCE_S)
        stored = ticket.result(PATIENCE_S)
        cache.count(chain, own_tokens=0, load=report)
    with pytest.raises(ServiceUnavailable):
        cache.match(chain)
    eventually_sync(lambda: not any(thread.name == "kvpool-client" for thread in threading.enumerate()))
    return found.matched_chunks, report.loaded_chunks, stored.stored_chunks


@pytest.mark.parametrize("name", ["match", "load", "start_load", "store"])
def test_a_blocking_call_is_presented_as_one_and_takes_what_the_asynchronous_one_takes(name: str) -> None:
    blocking = inspect.signature(getattr(Pool, name))
    assert blocking.parameters == inspect.signature(getattr(AsyncPool, name)).parameters
    text = f"{blocking.return_annotation} {inspect.getdoc(getattr(Pool, name))}"
    assert not [word for word in ("Coroutine", "Async", "async", "cancellation") if word in text]


def cache() -> kvpool.PagedCache:
    model = kvpool.Model("tiny", "1", layers=2, kv_heads=2, head_dim=16)
    return kvpool.PagedCache.in_shared_memory(model, layout="vllm", block_size=16, block_count=4)


@pytest.mark.parametrize("address", ["/tmp/agent.sock", "localhost", "unix:", "", "dns:1", "127.0.0.1:99999"])
def test_an_address_of_another_form_is_refused_with_the_forms_there_are(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"agent must be host:port .* or unix: and an absolute path"):
        kvpool.connect(address, cache())


@pytest.mark.parametrize("address", ["unix:/nonexistent/agent.sock", "unix:nonexistent.sock", "127.0.0.1:1"])
def test_where_there_is_no_agent_the_error_says_what_to_do(address: str) -> None:
    with pytest.raises(ServiceUnavailable, match=f"no agent can be reached at {address}; .*`kvpool cluster up`"):
        kvpool.connect(address, cache(), config=kvpool.ClientConfig(connect_timeout_s=PATIENCE_S))
