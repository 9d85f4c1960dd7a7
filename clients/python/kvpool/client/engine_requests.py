"""Stores, loads and leases in progress, and the hold on the engine's blocks that goes with them.

A hold ends when the agent has said that it touches the blocks no more, or, after the session broke, when the agent's
mapping of the engine's memory has gone. A deadline, a cancelled caller or a broken stream ends the wait, not the hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Generic, TypeVar

from kvpool.client.engine_items import LoadResult, StoreResult, load_result_from_proto, store_result_from_proto
from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import item_error_from_proto

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class TransferRequest(Generic[ResultT]):
    """One store or load on a session stream. Implements stream.Reply."""

    def __init__(self, send: Callable[[gpuagent_pb2.EngineRequest], None], chunks: range) -> None:
        """chunks: by their index in the prompt."""
        self._send, self.chunks = send, chunks
        self._outcome: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(_mark_retrieved)  # a caller may have left
        self._touchable = asyncio.Event()
        self.request_id = 0

    @property
    def released(self) -> bool:
        """Whether the engine may reuse (store) or touch (load) all blocks of the request."""
        return self._touchable.is_set()

    async def wait_released(self) -> None:
        """Return when the hold has ended. Without a deadline: after a break it takes until the agent has let go."""
        await self._touchable.wait()

    async def done(self, timeout_s: float) -> ResultT:
        """The request's end. raises: DeadlineExceeded (the request goes on: `cancel` it); what refused or broke it."""
        if not self._outcome.done():
            await asyncio.wait([self._outcome], timeout=timeout_s)  # which cancels nothing
        if not self._outcome.done():
            raise DeadlineExceeded(f"the agent was not done within {timeout_s:g} s")
        return self._outcome.result()

    def when_done(self, act: Callable[[ResultT | BaseException], None]) -> None:
        """Have `act` called soon after the request's end, also if that has been; it must not raise."""

        def ended(outcome: asyncio.Future[ResultT]) -> None:
            if not outcome.cancelled():
                act(outcome.exception() or outcome.result())

        self._outcome.add_done_callback(ended)

    def cancel(self) -> None:
        """Ask the agent to stop early; its `done` still comes, and the hold ends with it."""
        if not self._outcome.done():
            cancel = gpuagent_pb2.EngineCancel(target_request_id=self.request_id)
            self._send(gpuagent_pb2.EngineRequest(request_id=self.request_id, cancel=cancel))

    def release(self) -> None:
        """The agent touches the blocks no more."""
        self._touchable.set()

    def _end(self, outcome: ResultT | KvPoolError) -> bool:
        if not self._outcome.done():
            if isinstance(outcome, KvPoolError):
                self._outcome.set_exception(outcome)
            else:
                self._outcome.set_result(outcome)
        return True

    def fail(self, error: KvPoolError) -> None:
        """The session broke: the wait ends, the hold does not."""
        self._end(error)

    def deliver(self, response: gpuagent_pb2.EngineResponse) -> bool:
        """See stream.Reply."""
        if response.HasField("error"):
            self.release()  # a refused request touches nothing
            return self._end(item_error_from_proto(response.error))
        return self._take(response)

    def _take(self, response: gpuagent_pb2.EngineResponse) -> bool:
        raise NotImplementedError


class StoreRequest(TransferRequest[StoreResult]):
    """A store in progress."""

    def __init__(
        self,
        send: Callable[[gpuagent_pb2.EngineRequest], None],
        chunks: range,
        still_valid: Callable[[int], bool | Awaitable[bool]] | None,
    ) -> None:
        """still_valid: called with the count of leading chunks that were copied out: whether their blocks held their
        bytes until now; what is awaited must end within the agent's `kept_timeout_ms`. None: they do until the hold
        ends, and the agent need not ask."""
        super().__init__(send, chunks)
        self._still_valid = still_valid
        self._answering: asyncio.Task[None] | None = None

    def _take(self, response: gpuagent_pb2.EngineResponse) -> bool:
        if response.HasField("gathered"):
            count = response.gathered.chunk_count
            valid = self._still_valid(count) if self._still_valid is not None else None
            if isawaitable(valid):
                self._answering = asyncio.get_running_loop().create_task(self._answer_later(count, valid))
            else:  # numpy's booleans are none of Python's
                self._answer(count, None if self._still_valid is None else bool(valid))
            return False
        if response.HasField("store_done"):
            if self._answering is not None:
                self._answering.cancel()
            self.release()
            return self._end(store_result_from_proto(response.store_done, self.chunks.start))
        return False

    async def _answer_later(self, count: int, valid: Awaitable[bool]) -> None:
        try:
            answer = bool(await valid)
        except Exception:
            _log.exception("it is not known whether blocks of a store held their bytes: they are not stored")
            answer = False
        self._answer(count, answer)

    def _answer(self, count: int, valid: bool | None) -> None:
        """valid: None if the agent does not ask."""
        if valid is not None:
            kept = gpuagent_pb2.EngineKept(kept=valid, chunk_count=count)
            self._send(gpuagent_pb2.EngineRequest(request_id=self.request_id, kept=kept))
        if count >= len(self.chunks):
            self.release()


class LoadRequest(TransferRequest[LoadResult]):
    """A load in progress."""

    def __init__(
        self,
        send: Callable[[gpuagent_pb2.EngineRequest], None],
        chunks: range,
        on_progress: Callable[[int, tuple[int, ...]], None] | None,
    ) -> None:
        """on_progress: called on the event loop with layers that are in and chunks that have failed so far."""
        super().__init__(send, chunks)
        self._on_progress, self._layers = on_progress, 0

    def _take(self, response: gpuagent_pb2.EngineResponse) -> bool:
        if response.HasField("load_progress"):
            if self._on_progress is not None:
                progress = response.load_progress
                self._layers = max(self._layers, progress.layers_loaded)
                self._on_progress(self._layers, tuple(self.chunks.start + at for at in progress.failed_chunks))
            return False
        if response.HasField("load_done"):
            self.release()
            return self._end(load_result_from_proto(response.load_done, self.chunks.start))
        return False


class LeaseHandle:
    """Pages that the agent keeps in staging memory. Implements stream.Reply. Belongs to one event loop."""

    def __init__(self, send: Callable[[gpuagent_pb2.EngineRequest], None], broken: asyncio.Event) -> None:
        """broken: of its session, with which it ends."""
        self._send, self._broken = send, broken
        self._ended = False
        self.request_id = 0

    @property
    def ended(self) -> bool:
        """Whether it keeps nothing for certain: it was ended or refused, or its session broke. Any thread may ask."""
        return self._ended or self._broken.is_set()

    def end(self) -> None:
        """Give back what it keeps, or does not keep yet. Idempotent."""
        if not self.ended:
            cancel = gpuagent_pb2.EngineCancel(target_request_id=self.request_id)
            self._send(gpuagent_pb2.EngineRequest(request_id=self.request_id, cancel=cancel))
        self._ended = True

    def deliver(self, response: gpuagent_pb2.EngineResponse) -> bool:
        """See stream.Reply."""
        self._ended |= not response.lease_held.held_chunks  # also where it was refused
        return True

    def fail(self, error: KvPoolError) -> None:
        """See stream.Reply."""
        self._ended = True


def _mark_retrieved(outcome: asyncio.Future[ResultT]) -> None:
    if not outcome.cancelled():
        outcome.exception()
