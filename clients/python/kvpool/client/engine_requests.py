"""Stores, loads and leases in progress, and the hold on the engine's blocks that goes with them.

A hold ends when the agent has said that it touches the blocks no more, or, after the session broke, when the agent's
mapping of the engine's memory has gone. A deadline, a cancelled caller or a broken stream ends the wait, not the hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from kvpool.client.engine_items import (
    EngineLease,
    LoadOutcome,
    StoreOutcome,
    load_outcome_from_proto,
    store_outcome_from_proto,
)
from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import item_error_from_proto

OutcomeT = TypeVar("OutcomeT")


class _Transfer(Generic[OutcomeT]):
    """What stores and loads share. Implements stream.Reply."""

    def __init__(self, send: Callable[[gpuagent_pb2.EngineRequest], None], chunk_count: int) -> None:
        self._send = send
        self.chunk_count = chunk_count
        self._outcome: asyncio.Future[OutcomeT] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(_mark_retrieved)  # a caller may have left
        self._changed = asyncio.Event()
        self._touchable = asyncio.Event()
        self.request_id = 0

    @property
    def hold_ended(self) -> bool:
        """Whether the engine may reuse (store) or touch (load) all blocks of the request."""
        return self._touchable.is_set()

    async def wait_hold(self) -> None:
        """Return when the hold has ended. Without a deadline: after a break it takes until the agent has let go."""
        await self._touchable.wait()

    async def done(self, timeout_s: float) -> OutcomeT:
        """The request's end. raises: DeadlineExceeded (the request goes on: `cancel` it); what refused or broke it."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._outcome)
        except TimeoutError:
            raise DeadlineExceeded(f"the agent was not done within {timeout_s:g} s") from None

    def when_done(self, act: Callable[[OutcomeT | BaseException], None]) -> None:
        """Have `act` called soon after the request's end, also if that has been; it must not raise."""

        def ended(outcome: asyncio.Future[OutcomeT]) -> None:
            if not outcome.cancelled():
                act(outcome.exception() or outcome.result())

        self._outcome.add_done_callback(ended)

    def cancel(self) -> None:
        """Ask the agent to stop early; its `done` still comes, and the hold ends with it."""
        if not self._outcome.done():
            cancel = gpuagent_pb2.EngineCancel(target_request_id=self.request_id)
            self._send(gpuagent_pb2.EngineRequest(request_id=self.request_id, cancel=cancel))

    def end_hold(self) -> None:
        """The agent touches the blocks no more."""
        self._touchable.set()
        self._changed.set()

    def _end(self, outcome: OutcomeT | KvPoolError) -> bool:
        if not self._outcome.done():
            if isinstance(outcome, KvPoolError):
                self._outcome.set_exception(outcome)
            else:
                self._outcome.set_result(outcome)
        self._changed.set()
        return True

    def fail(self, error: KvPoolError) -> None:
        """The session broke: the wait ends, the hold does not."""
        self._end(error)

    def deliver(self, response: gpuagent_pb2.EngineResponse) -> bool:
        """See stream.Reply."""
        if response.HasField("error"):
            self.end_hold()  # a refused request touches nothing
            return self._end(item_error_from_proto(response.error))
        return self._take(response)

    def _take(self, response: gpuagent_pb2.EngineResponse) -> bool:
        raise NotImplementedError


class StoreHandle(_Transfer[StoreOutcome]):
    """A store in progress."""

    def __init__(
        self,
        send: Callable[[gpuagent_pb2.EngineRequest], None],
        chunk_count: int,
        kept: Callable[[int], bool] | None,
    ) -> None:
        """kept: asked, with the count of leading chunks, whether their blocks held their bytes until now; None: they do
        until the hold ends, and the agent need not ask."""
        super().__init__(send, chunk_count)
        self._kept = kept

    def _take(self, response: gpuagent_pb2.EngineResponse) -> bool:
        if response.HasField("gathered"):
            count = response.gathered.chunk_count
            if self._kept is not None:
                answer = gpuagent_pb2.EngineKept(kept=self._kept(count), chunk_count=count)
                self._send(gpuagent_pb2.EngineRequest(request_id=self.request_id, kept=answer))
            if count >= self.chunk_count:
                self.end_hold()
            self._changed.set()
            return False
        if response.HasField("store_done"):
            self.end_hold()
            return self._end(store_outcome_from_proto(response.store_done))
        return False


class LoadHandle(_Transfer[LoadOutcome]):
    """A load in progress."""

    def __init__(
        self,
        send: Callable[[gpuagent_pb2.EngineRequest], None],
        chunk_count: int,
        on_progress: Callable[[int, tuple[int, ...]], None] | None,
    ) -> None:
        """on_progress: called on the event loop with layers that are in and positions of chunks failed so far."""
        super().__init__(send, chunk_count)
        self._on_progress = on_progress
        self.layers_loaded = 0
        self.failed_chunks: tuple[int, ...] = ()

    async def wait_layers(self, layers: int) -> None:
        """Wait until so many layers are in for every chunk that did not fail, or the request ended (see `done`)."""
        while self.layers_loaded < layers and not self._outcome.done():
            self._changed.clear()
            await self._changed.wait()

    def _take(self, response: gpuagent_pb2.EngineResponse) -> bool:
        if response.HasField("load_progress"):
            self.layers_loaded = max(self.layers_loaded, response.load_progress.layers_loaded)
            self.failed_chunks = tuple(response.load_progress.failed_chunks)
            if self._on_progress is not None:
                self._on_progress(self.layers_loaded, self.failed_chunks)
            self._changed.set()
            return False
        if response.HasField("load_done"):
            self.end_hold()
            return self._end(load_outcome_from_proto(response.load_done))
        return False


class LeaseHandle:
    """Pages that the agent keeps in staging memory. Implements stream.Reply. Belongs to one event loop."""

    def __init__(self, send: Callable[[gpuagent_pb2.EngineRequest], None], broken: asyncio.Event) -> None:
        """broken: of its session, with which it ends."""
        self._send, self._broken = send, broken
        self._held: asyncio.Future[EngineLease] = asyncio.get_running_loop().create_future()
        self._held.add_done_callback(_mark_retrieved)  # most callers do not ask
        self._ended = False
        self.request_id = 0

    @property
    def ended(self) -> bool:
        """Whether it keeps nothing for certain: it was ended or refused, or its session broke. Any thread may ask."""
        return self._ended or self._broken.is_set()

    async def held(self, timeout_s: float) -> EngineLease:
        """How much of it could be had. raises: what refused it or broke the session; DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._held)
        except TimeoutError:
            raise DeadlineExceeded(f"the agent did not answer within {timeout_s:g} s") from None

    def end(self) -> None:
        """Give back what it keeps, or does not keep yet. Idempotent."""
        if not self.ended:
            cancel = gpuagent_pb2.EngineCancel(target_request_id=self.request_id)
            self._send(gpuagent_pb2.EngineRequest(request_id=self.request_id, cancel=cancel))
        self._ended = True

    def deliver(self, response: gpuagent_pb2.EngineResponse) -> bool:
        """See stream.Reply."""
        if response.HasField("error"):
            self.fail(item_error_from_proto(response.error))
            return True
        held = EngineLease(response.lease_held.held_chunks, response.lease_held.staged_chunks)
        self._ended |= not held.held_chunks
        if not self._held.done():
            self._held.set_result(held)
        return True

    def fail(self, error: KvPoolError) -> None:
        """See stream.Reply."""
        self._ended = True
        if not self._held.done():
            self._held.set_exception(error)


def _mark_retrieved(outcome: asyncio.Future[OutcomeT]) -> None:
    if not outcome.cancelled():
        outcome.exception()
