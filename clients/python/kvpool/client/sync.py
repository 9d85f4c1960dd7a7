"""The client library for code without an event loop: one background thread runs the loop, calls wait for it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import importlib
import inspect
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import LoadResult, RequestStats
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.handle import AsyncHandle
from kvpool.client.hashing import Prompt
from kvpool.client.paged_cache import PagedCache
from kvpool.client.pool import AsyncPool
from kvpool.core.chunks import Extra, Tokens
from kvpool.core.errors import DeadlineExceeded, ServiceUnavailable

ResultT = TypeVar("ResultT")
CallT = TypeVar("CallT", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")

_STOP_TIMEOUT_S = 5.0
_INTERRUPT_WAIT_S = 30.0
_SIGNALS_EACH_S = 1.0
_STILL_IN_USE = (
    "blocks of this call may still be in use: leave them alone until the pool is closed, or the agent has ended"
)
_started: weakref.WeakSet[BackgroundLoop] = weakref.WeakSet()


class _Work(Generic[ResultT]):
    """What a thread waits for. Belongs to the loop that runs it."""

    def __init__(self, work: Callable[[], Awaitable[ResultT]]) -> None:
        self._work, self._cancelled = work, False
        self._task: asyncio.Task[ResultT] | None = None

    async def run(self) -> ResultT:
        if self._cancelled:
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._work()

    async def cancel(self, undo: Callable[[ResultT], Awaitable[None]] | None) -> None:
        """Return when it has ended, and its result, if it has one, was undone."""
        self._cancelled = True
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if undo is not None and not self._task.cancelled() and self._task.exception() is None:
            await undo(self._task.result())


def _wait(future: Future[Any], timeout_s: float | None) -> None:
    """Return when it is done, or after timeout_s.

    In parts: a signal that comes as the thread is about to wait for a lock is looked at when that wait has ended.
    """
    ends_at_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not future.done() and (left_s := ends_at_s - time.monotonic()) > 0:
        concurrent.futures.wait([future], min(left_s, _SIGNALS_EACH_S))


class BackgroundLoop:
    """An event loop on a daemon thread. Thread-safe. Stop it when done; at exit of the interpreter it stops anyway.

    A process that was forked has the object but not the thread: every call there raises ServiceUnavailable.
    """

    def __init__(self, name: str = "kvpool-client") -> None:
        self._pid = os.getpid()
        self._stopped = False
        self._lock = threading.Lock()
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _started.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def run(
        self,
        work: Callable[[], Awaitable[ResultT]],
        timeout_s: float | None = None,
        *,
        undo: Callable[[ResultT], Awaitable[None]] | None = None,
    ) -> ResultT:
        """Await `work()` on the loop and return its result.

        An exception that interrupts the calling thread, as Ctrl-C does, cancels the work and is raised when that has
        ended. After _INTERRUPT_WAIT_S, or a second interrupt, it is raised earlier, with a note that says so.
        undo: awaited before with a result that came all the same and that the caller does not get.
        raises: what it raises; DeadlineExceeded after timeout_s (the work is cancelled); ServiceUnavailable after
        `stop`, in a forked process, and from the loop's own thread, which would wait for itself.
        """
        running = _Work(work)
        try:
            future = self.start(running.run)
            _wait(future, timeout_s)
            if future.done():
                return future.result()
            future.cancel()
            raise DeadlineExceeded(f"not done within {timeout_s:g} s")
        except Exception:
            raise
        except BaseException as interrupt:
            self._wait_cancelled(running, undo, interrupt)
            raise

    def _wait_cancelled(
        self,
        work: _Work[ResultT],
        undo: Callable[[ResultT], Awaitable[None]] | None,
        interrupt: BaseException,
    ) -> None:
        try:
            self.start(lambda: work.cancel(undo)).result(_INTERRUPT_WAIT_S)
        except Exception:  # not in time, or the loop was stopped
            interrupt.add_note(_STILL_IN_USE)
        except BaseException as again:
            again.add_note(_STILL_IN_USE)
            raise

    def start(self, work: Callable[[], Awaitable[ResultT]]) -> Future[ResultT]:
        """Begin `work()` on the loop. raises: as `run`."""
        if os.getpid() != self._pid:
            raise ServiceUnavailable("this client was made before a fork; make a new one in the child process")
        if threading.current_thread() is self._thread:
            raise ServiceUnavailable("a synchronous client cannot be used on its own loop; use the asynchronous one")

        async def call() -> ResultT:
            return await work()

        with self._lock:
            if self._stopped:
                raise ServiceUnavailable("this client was closed; make a new one")
            return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def run_begun(
        self, work: Coroutine[Any, Any, ResultT], *, undo: Callable[[ResultT], Awaitable[None]] | None = None
    ) -> ResultT:
        """`run` for a coroutine that the calling thread has made. raises: as `run`; then it is closed."""
        try:
            return self.run(lambda: work, undo=undo)
        except ServiceUnavailable:
            work.close()  # does nothing unless it was not begun
            raise

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Cancel what still runs and end the thread. Idempotent; does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def end(self, work: Callable[[], Awaitable[object]]) -> None:
        """Await `work()`, then `stop`, whatever came of it. Idempotent: a stopped or forked loop does not run it."""
        try:
            self.run(work)
        except ServiceUnavailable:
            return  # closed before, or forked: nothing of it is ours
        finally:
            self.stop()


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, as it is with vLLM; else asyncio's own, which takes a third longer a message."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


@atexit.register
def _stop_all() -> None:
    for loop in list(_started):
        loop.stop()


class Handle(Generic[ResultT]):
    """A load or store in progress, for code without an event loop. Thread-safe.

    Its blocks belong to the agent until `released`: those of a load may still be written, those of a store must keep
    their bytes.
    """

    def __init__(self, loop: BackgroundLoop, handle: AsyncHandle[ResultT]) -> None:
        self._loop, self._handle = loop, handle

    @property
    def released(self) -> bool:
        """Whether the blocks are the caller's again."""
        return self._handle.released

    @property
    def done(self) -> bool:
        """Whether `result` has nothing to wait for."""
        return self._handle.done

    @property
    def layers_loaded(self) -> int:
        """Leading layers that are in for every chunk that has not failed."""
        return self._handle.layers_loaded

    @property
    def failed_chunks(self) -> tuple[int, ...]:
        """Of a load: chunks that have failed so far."""
        return self._handle.failed_chunks

    def result(self, timeout_s: float | None = None) -> ResultT:
        """The end: a LoadResult or a StoreResult. raises: DeadlineExceeded after timeout_s; then it goes on."""
        return self._loop.run(lambda: self._handle.result(timeout_s))

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Return when the blocks are the caller's again. raises: DeadlineExceeded; then they are not."""
        if not self._handle.released:
            self._loop.run(lambda: self._handle.wait_released(timeout_s))

    def wait_layers(self, layers: int, timeout_s: float | None = None) -> bool:
        """Return when so many leading layers are in; costs next to nothing when they are. False: not all chunks can be
        had, and `result` says which. raises: DeadlineExceeded."""
        if self._handle.layers_loaded >= layers:
            return not self._handle.failed_chunks
        return self._loop.run(lambda: self._handle.wait_layers(layers, timeout_s))

    def cancel(self) -> None:
        """Have it end early; `result` and `released` follow. Idempotent."""

        async def cancel() -> None:
            self._handle.cancel()

        self._loop.run(cancel)


def _waiting(
    method: Callable[Concatenate[AsyncPool, Arguments], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[Pool, Arguments], ResultT]:
    """A method of AsyncPool that waits for its result."""

    @functools.wraps(method)
    def call(pool: Pool, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
        return pool.background.run_begun(method(pool.pool, *args, **kwargs))

    return _presented(call, method)


def _handing(
    method: Callable[Concatenate[AsyncPool, Arguments], Coroutine[Any, Any, AsyncHandle[ResultT]]],
) -> Callable[Concatenate[Pool, Arguments], Handle[ResultT]]:
    """A method of AsyncPool that returns a handle."""

    @functools.wraps(method)
    def call(pool: Pool, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Handle[ResultT]:
        begun = pool.background.run_begun(method(pool.pool, *args, **kwargs), undo=pool.pool.end)
        return Handle(pool.background, begun)

    return _presented(call, method)


def _presented(call: CallT, method: Callable[..., Any]) -> CallT:
    """Have `help` show that a call returns what the method's coroutine does, and a Handle for an AsyncHandle."""
    signature = inspect.signature(method)
    returned = re.sub(r"^Coroutine\[Any, Any, (.*)\]$", r"\1", signature.return_annotation)
    signature = signature.replace(return_annotation=returned.replace("AsyncHandle", "Handle"))
    call.__signature__ = signature  # type: ignore[attr-defined]  # where inspect looks for it
    return call


class Pool:
    """The cache as one engine rank sees it, for code without an event loop. Thread-safe; make it after a fork.

    After `connect` a method raises only for misuse (InvalidRequest); a cache failure is part of its result. When the
    agent goes away, the pool reconnects in the background and finds nothing meanwhile.

    `block_table` names the engine's blocks of the whole prompt from token 0 on, in order. `wait_event` is GPU work that
    a load or store has to come after: an event of `PagedCache.record_event`, which the call gives back; without one it
    is what the calling thread gave to its current stream so far.
    """

    match = _waiting(AsyncPool.match)
    load = _waiting(AsyncPool.load)
    start_load = _handing(AsyncPool.start_load)
    store = _handing(AsyncPool.store)

    def __init__(self, registration: EngineRegistration, config: ClientConfig) -> None:
        """Register with the agent, see AsyncPool.open; `kvpool.connect` does it for a PagedCache."""
        self._open(lambda: AsyncPool.open(registration, config))

    def _open(self, work: Callable[[], Awaitable[AsyncPool]]) -> None:
        self._loop = BackgroundLoop()
        try:
            self._pool = self._loop.run(work)
        except BaseException:
            self._loop.stop()
            raise

    @property
    def pool(self) -> AsyncPool:
        """The asynchronous pool: only its plain properties may be read from here."""
        return self._pool

    @property
    def background(self) -> BackgroundLoop:
        """The loop that the pool lives on, for what works beside it."""
        return self._loop

    @property
    def connected(self) -> bool:
        """Whether the agent can be asked now."""
        return self.pool.connected

    def prompt(self, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Prompt:
        """Hash a prompt. extras: of each full chunk, what its KV depends on beside tokens (images, a LoRA adapter).

        raises: InvalidRequest for tokens that are not token ids.
        """
        return self.pool.prompt(tokens, extras)

    def extend(self, prompt: Prompt, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Prompt:
        """Hash a longer prompt that begins with `prompt`. tokens: all of it. extras: of the new full chunks."""
        return self.pool.extend(prompt, tokens, extras)

    def count(self, prompt: Prompt, *, own_tokens: int, load: LoadResult | None = None) -> RequestStats:
        """Where one prompt's tokens came from; also added to the totals of `pool`."""

        async def count() -> RequestStats:
            return self.pool.count(prompt, own_tokens=own_tokens, load=load)

        return self._loop.run(count)

    def close(self) -> None:
        """End the session and the thread. Idempotent."""
        self._loop.end(self._pool.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    agent: str,
    cache: PagedCache,
    *,
    engine_name: str = "",
    keyspace_name: str = "",
    config: ClientConfig | None = None,
) -> Pool:
    """Share an engine's KV cache through the agent at `agent` ("unix:/path" or "host:port").

    engine_name, keyspace_name: what operators see; by default the process's id, and a name made of the model.
    raises: InvalidRequest, KeyspaceMismatch, PartitionRefused, GeometryUnsupported, NotServed (arguments that must be
    changed); ServiceUnavailable, DeadlineExceeded (there is no agent yet: try again later).
    """
    pool = Pool.__new__(Pool)
    pool._open(  # noqa: SLF001  # an alternate constructor
        lambda: AsyncPool.connect(agent, cache, engine_name=engine_name, keyspace_name=keyspace_name, config=config)
    )
    return pool
