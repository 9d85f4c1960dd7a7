"""A load or store in progress, which may be several requests to the agent: a load is windows, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvpool.client.engine_items import LoadResult, TierTokens
from kvpool.client.engine_requests import LoadRequest, TransferRequest
from kvpool.client.gpuagent import EngineSession
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Stopped
from kvpool.core.ipc import EngineEvent

ResultT = TypeVar("ResultT")


class AsyncHandle(Generic[ResultT]):
    """A load or store in progress. Belongs to one event loop; `released` may be read in any thread.

    Its blocks belong to the agent until `released`: blocks of a load may still be written, blocks of a store must keep
    their bytes. A deadline or a broken session ends the result, not that: then it takes until the agent says so, or its
    process has let go of the engine's memory.
    """

    def __init__(self, work: Callable[[AsyncHandle[ResultT]], Coroutine[Any, Any, ResultT]]) -> None:
        """work: runs as a task of its own and reports to this handle."""
        self.layers_loaded = 0
        self.failed_chunks: tuple[int, ...] = ()  # of a load, so far
        self.cancelled = False  # whether `cancel` was called
        self._requests: list[TransferRequest[Any]] = []
        self._begun = False  # all requests that there will be
        self._changed = asyncio.Event()
        self._work = asyncio.create_task(work(self), name="kvpool transfer")
        self._work.add_done_callback(self._ended)

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._work.done()

    @property
    def released(self) -> bool:
        """Whether the blocks are the caller's again."""
        return self._is_begun and all(request.released for request in self._requests)

    @property
    def _is_begun(self) -> bool:
        return self._begun or self._work.done()

    async def result(self, timeout_s: float | None = None) -> ResultT:
        """The end. A load or store has a deadline of its own, so this returns soon after that.

        raises: DeadlineExceeded after timeout_s, and it goes on; InvalidRequest for arguments that do not fit.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._work)
        except TimeoutError:
            raise DeadlineExceeded(f"not done within {timeout_s:g} s") from None

    async def wait_released(self, timeout_s: float | None = None) -> None:
        """Return when the blocks are the caller's again. raises: DeadlineExceeded; then they are not."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_begun:
                    await self._wait_change()
                for request in self._requests:
                    await request.wait_released()
        except TimeoutError:
            raise DeadlineExceeded(f"the blocks were not released within {timeout_s:g} s") from None

    async def wait_layers(self, layers: int, timeout_s: float | None = None) -> bool:
        """Wait until so many leading layers are in: GPU work of the engine that is launched after this finds them.

        False: not all chunks can be had, and `result` says which; a chunk may also fail in a later layer, so a step
        that has begun with it is to be computed again. raises: DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.layers_loaded < layers and not self._work.done():
                    await self._wait_change()
        except TimeoutError:
            raise DeadlineExceeded(f"{layers} layers were not in within {timeout_s:g} s") from None
        return self.layers_loaded >= layers and not self.failed_chunks

    def cancel(self) -> None:
        """End it early: what runs ends soon, and nothing further begins. `result` and `released` follow. Idempotent."""
        if not self.cancelled:
            self.cancelled = True
            for request in self._requests:
                request.cancel()

    def add(self, request: TransferRequest[Any]) -> None:
        """A part of it has begun."""
        self._requests.append(request)
        if self.cancelled:
            request.cancel()

    def begun(self) -> None:
        """All parts have."""
        self._begun = True
        self._changed.set()

    def progressed(self, layers: int, failed_chunks: tuple[int, ...]) -> None:
        """So many leading layers are in for every chunk that has not failed."""
        self.layers_loaded, self.failed_chunks = layers, failed_chunks
        self._changed.set()

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _ended(self, work: asyncio.Task[ResultT]) -> None:
        self._changed.set()
        if not work.cancelled():
            work.exception()  # its caller may have left


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTerms:
    """Of one load. grace_s: after its time, for the agent to say so. wait_event: GPU work that may still read or write
    the blocks. by_layer: progress is wanted. compute_us_per_token, from_gpu: see EngineSession.load."""

    timeout_s: float
    grace_s: float
    by_layer: bool = False
    wait_event: EngineEvent | None = None
    compute_us_per_token: float = 0.0
    from_gpu: bool = False


async def load_windows(
    session: Callable[[], EngineSession],
    windows: Sequence[ChunkRange],
    chunks: range,
    terms: LoadTerms,
    handle: AsyncHandle[LoadResult],
) -> LoadResult:
    """Load what can be loaded of chunks, which the windows are cut from. session: the one in use then."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    ends_at_s = started_s + terms.timeout_s
    loaded, copy_s, tokens = 0, 0.0, TierTokens()
    error: KvPoolError | None = None
    on_progress = handle.progressed if terms.by_layer and len(windows) == 1 else None
    for span in windows:
        part = await _load_span(session(), span, ends_at_s, on_progress, terms, handle)
        loaded += part.loaded_chunks
        tokens += part.tokens
        copy_s += part.copy_s
        error = part.error
        if part.loaded_chunks < span.chunk_count:
            break
    failed = tuple(chunks[loaded:])
    if chunks:
        layers = handle.layers_loaded if failed else session().spec.group.layers
        handle.progressed(layers, failed)
    return LoadResult(
        first_chunk=chunks.start,
        loaded_chunks=loaded,
        failed_chunks=failed,
        error=error if failed else None,
        tokens=tokens,
        copy_s=copy_s,
        duration_s=loop.time() - started_s,
    )


async def _load_span(
    session: EngineSession,
    span: ChunkRange,
    ends_at_s: float,
    on_progress: Callable[[int, tuple[int, ...]], None] | None,
    terms: LoadTerms,
    handle: AsyncHandle[LoadResult],
) -> LoadResult:
    loop = asyncio.get_running_loop()
    request: LoadRequest | None = None
    if handle.cancelled:
        return LoadResult(error=Stopped("the load is no longer needed"))
    try:
        wait_s = max(0.001, ends_at_s - loop.time())
        async with asyncio.timeout(wait_s):
            request = await session.load(
                span,
                wait_s=wait_s,
                on_progress=on_progress,
                after=terms.wait_event,
                compute_us_per_token=terms.compute_us_per_token,
                from_gpu=terms.from_gpu,
            )
        handle.add(request)
        return await request.done(max(0.0, ends_at_s - loop.time()) + terms.grace_s)
    except TimeoutError:
        return LoadResult(error=DeadlineExceeded("the agent takes no more loads now"))
    except KvPoolError as error:
        if request is not None:
            request.cancel()
        return LoadResult(error=error)
    except asyncio.CancelledError:
        if request is not None:
            request.cancel()  # the blocks stay the agent's until it says so; the session keeps the request
        raise
