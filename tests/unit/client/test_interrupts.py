"""Ctrl-C inside of a blocking call: it is raised when the blocks are the caller's again, or says that they are not."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.client import sync
from kvpool.client.pool import AsyncPool
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_sync import StorePages
from kvpool.client.sync import BackgroundLoop, Pool
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.engine_peer import Engine, Response, engine
from tests.unit.client.servers import Script

Act = Callable[[Script, "Agent"], Awaitable[None]]


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Agent:
    """A scripted one on a loop of its own: the calling thread is the main one, which gets the signal."""

    def __init__(self) -> None:
        self.loop = BackgroundLoop("agent")
        self.done: list[str] = []

    def play(self, act: Act, **settings: Any) -> tuple[Engine, Callable[[], None]]:
        """Serve one session; `act` plays it after the greeting. Returns the engine, and what waits for the end."""
        ready: asyncio.Future[Engine]

        async def prepare() -> None:
            nonlocal ready
            ready = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            async with engine(**settings) as one:
                ready.set_result(one)
                stream, _ = await one.greet(max_request_chunks=1)
                await act(stream, self)
                await stream.next("close")
                stream.send(Response(closed=gpuagent_pb2.EngineClose()))
                stream.end()
                await stream.ended.wait()

        async def one_ready() -> Engine:
            return await ready

        self.loop.run(prepare)
        serving = self.loop.start(serve)
        return self.loop.run(one_ready), lambda: serving.result(PATIENCE_S)

    def end(self, stream: Script, request: Any) -> None:
        """Say that the agent touches no block of a request any more."""
        self.done.append(request.WhichOneof("kind"))
        if request.HasField("load"):
            answer = Response(
                request_id=request.request_id, load_done=gpuagent_pb2.EngineLoadDone(loaded_chunks=0, failed_chunks=[0])
            )
        else:
            answer = Response(request_id=request.request_id, store_done=gpuagent_pb2.EngineStoreDone(failed_chunks=[0]))
        stream.send(answer)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Also in a process that was started in the background, where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.loop.stop()


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], Pool]:
    def opened(one: Engine) -> Pool:
        opening = AsyncPool.open
        monkeypatch.setattr(
            AsyncPool, "open", lambda registration, config: opening(registration, config, offer=one.memory.offer)
        )
        return Pool(one.plan, one.config)

    return opened


def test_an_interrupted_load_is_raised_when_its_blocks_are_released(
    agent: Agent, pool_of: Callable[[Engine], Pool]
) -> None:
    async def act(stream: Script, agent: Agent) -> None:
        request = await stream.next("load")
        press_ctrl_c()
        await stream.next("cancel")
        agent.end(stream, request)

    one, finish = agent.play(act)
    with pool_of(one) as pool:
        with pytest.raises(KeyboardInterrupt) as raised:
            pool.load(pool.prompt(list(range(20))), np.arange(4), end_chunk=1)
        assert agent.done == ["load"]
        assert not hasattr(raised.value, "__notes__")
    finish()


def test_an_interrupted_store_is_raised_when_its_blocks_are_released(
    agent: Agent, pool_of: Callable[[Engine], Pool]
) -> None:
    async def act(stream: Script, agent: Agent) -> None:
        request = await stream.next("store")  # the second part waits for room in flight
        press_ctrl_c()
        await stream.next("cancel")
        agent.end(stream, request)

    one, finish = agent.play(act, requests_in_flight_max=1)
    with pool_of(one) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.store(pool.prompt(list(range(40))), np.arange(8))
        assert agent.done == ["store"]
    finish()


def test_a_second_interrupt_says_that_the_blocks_are_still_in_use(
    agent: Agent, pool_of: Callable[[Engine], Pool]
) -> None:
    async def act(stream: Script, agent: Agent) -> None:
        await stream.next("load")
        press_ctrl_c()
        await stream.next("cancel")
        press_ctrl_c()

    one, finish = agent.play(act)
    with pool_of(one) as pool, pytest.raises(KeyboardInterrupt) as raised:
        pool.load(pool.prompt(list(range(20))), np.arange(4), end_chunk=1)
    assert any("still be in use" in note for note in raised.value.__notes__)
    assert agent.done == []
    finish()


def test_the_wait_after_an_interrupt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_INTERRUPT_WAIT_S", 0.01)
    loop, goes_on = BackgroundLoop(), asyncio.Event()

    async def stubborn() -> None:
        press_ctrl_c()
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                continue

    async def let_go() -> None:
        goes_on.set()

    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            loop.run(stubborn)
        assert any("still be in use" in note for note in raised.value.__notes__)
        loop.run(let_go)
    finally:
        loop.stop()


def test_a_result_that_an_interrupt_loses_is_undone() -> None:
    """A handle, say, whose request goes on."""
    loop, undone = BackgroundLoop(), list[int]()

    async def work() -> int:
        press_ctrl_c()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7  # it was just done
        return 0

    async def undo(value: int) -> None:
        undone.append(value)

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work, undo=undo)
        assert undone == [7]
    finally:
        loop.stop()


def test_an_interrupted_store_call_is_raised_when_no_copy_runs_and_a_second_interrupt_says_otherwise() -> None:
    pages = StorePages(StoreConfig(index_endpoints=("127.0.0.1:1",), pagestore="127.0.0.1:1"), "t")
    copied = asyncio.Event()
    ended: list[str] = []

    async def call(_: AsyncStorePages, presses: int) -> list[bool]:
        press_ctrl_c()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if presses > 1:
                press_ctrl_c()
                await copied.wait()
            ended.append("copy")
            raise
        return [True]

    async def end_copy() -> None:
        copied.set()

    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            pages.run(lambda pool: call(pool, 1), 1)
        assert ended == ["copy"] and not hasattr(raised.value, "__notes__")
        with pytest.raises(KeyboardInterrupt) as raised:
            pages.run(lambda pool: call(pool, 2), 1)
        assert ended == ["copy"] and any("still be in use" in note for note in raised.value.__notes__)
        pages.start(lambda _: end_copy()).result(PATIENCE_S)
    finally:
        pages.close()
