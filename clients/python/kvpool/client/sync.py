"""The client library for code without an event loop: one background thread runs the loop, calls wait for it."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EnginePlan
from kvpool.client.hashing import Chain
from kvpool.client.pool import KvPool
from kvpool.client.pool_values import BlockHold, LoadReport, LoadTicket, PrefixMatch, StoreReport, StoreTicket
from kvpool.client.request_stats import RequestStats
from kvpool.core.chunks import Extra, Tokens
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.core.ipc import EngineEvent
from kvpool.core.retention import Retention
from kvpool.wire.convert_engine import BlockIds

ResultT = TypeVar("ResultT")

_STOP_TIMEOUT_S = 5.0
_started: weakref.WeakSet[BackgroundLoop] = weakref.WeakSet()


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

    def run(self, work: Callable[[], Awaitable[ResultT]], timeout_s: float | None = None) -> ResultT:
        """Await `work()` on the loop and return its result.

        raises: what it raises; DeadlineExceeded after timeout_s (the work is cancelled); ServiceUnavailable after
        `stop`, in a forked process, and from the loop's own thread, which would wait for itself.
        """
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise  # it is the work's own
            future.cancel()
            raise DeadlineExceeded(f"not done within {timeout_s:g} s") from None
        except BaseException:
            future.cancel()  # KeyboardInterrupt, say: nobody waits for it any more
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


class SyncLoadTicket:
    """LoadTicket for code without an event loop."""

    def __init__(self, loop: BackgroundLoop, ticket: LoadTicket) -> None:
        self._loop = loop
        self._ticket = ticket

    @property
    def layers_loaded(self) -> int:
        """Leading layers that are in for every chunk that has not failed."""
        return self._ticket.layers_loaded

    @property
    def failed_chunks(self) -> tuple[int, ...]:
        """Chunks that have failed so far."""
        return self._ticket.failed_chunks

    def wait_layers(self, layers: int, timeout_s: float | None = None) -> bool:
        """See LoadTicket.wait_layers; costs next to nothing when they are in. raises: DeadlineExceeded."""
        if self._ticket.layers_loaded >= layers:
            return True
        return self._loop.run(lambda: self._ticket.wait_layers(layers), timeout_s)

    def report(self, timeout_s: float | None = None) -> LoadReport:
        """See LoadTicket.report. raises: DeadlineExceeded; the load goes on."""
        return self._loop.run(self._ticket.report, timeout_s)


class SyncStoreTicket:
    """StoreTicket for code without an event loop."""

    def __init__(self, loop: BackgroundLoop, ticket: StoreTicket, timeout_s: float) -> None:
        self._loop = loop
        self._ticket = ticket
        self._timeout_s = timeout_s

    @property
    def hold(self) -> BlockHold:
        """Whether the blocks may be reused; `ended` can be read in any thread."""
        return self._ticket.hold

    def wait_reusable(self, timeout_s: float | None = None) -> None:
        """Return when the engine may reuse the blocks. raises: DeadlineExceeded; then they are still held."""
        self._loop.run(self._ticket.wait_reusable, timeout_s)

    def report(self, timeout_s: float | None = None) -> StoreReport:
        """The end of the store, or what is known of it by then."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return self._loop.run(lambda: self._ticket.report(limit_s))


class SyncKvPool:
    """KvPool for engines without an event loop. Thread-safe; methods do and raise what KvPool's do."""

    def __init__(self, plan: EnginePlan, config: ClientConfig) -> None:
        """Register with the agent; see KvPool.open."""
        self._loop = BackgroundLoop()
        self._config = config
        try:
            self._pool = self._loop.run(lambda: KvPool.open(plan, config))
        except BaseException:
            self._loop.stop()
            raise

    @property
    def pool(self) -> KvPool:
        """The asynchronous pool: only its plain properties may be read from here."""
        return self._pool

    @property
    def background(self) -> BackgroundLoop:
        """The loop that the pool lives on, for what works beside it."""
        return self._loop

    def chain(self, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Chain:
        """See KvPool.chain; runs in the calling thread."""
        return self._pool.chain(tokens, extras)

    def extend(self, chain: Chain, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Chain:
        """See KvPool.extend; runs in the calling thread."""
        return self._pool.extend(chain, tokens, extras)

    def match(self, chain: Chain, *, held_chunks: int = 0, timeout_s: float | None = None) -> PrefixMatch:
        """See KvPool.match."""
        return self._loop.run(lambda: self._pool.match(chain, held_chunks=held_chunks, timeout_s=timeout_s))

    def load(
        self,
        chain: Chain,
        block_table: BlockIds,
        *,
        first_chunk: int,
        end_chunk: int,
        skip_tokens: int = 0,
        timeout_s: float | None = None,
        on_progress: Callable[[int, tuple[int, ...]], None] | None = None,
        after: EngineEvent | None = None,
    ) -> LoadReport:
        """See KvPool.load; on_progress is called on the client's thread."""
        return self._loop.run(
            lambda: self._pool.load(
                chain,
                block_table,
                first_chunk=first_chunk,
                end_chunk=end_chunk,
                skip_tokens=skip_tokens,
                timeout_s=timeout_s,
                on_progress=on_progress,
                after=after,
            )
        )

    def begin_load(
        self,
        chain: Chain,
        block_table: BlockIds,
        *,
        first_chunk: int,
        end_chunk: int,
        skip_tokens: int = 0,
        timeout_s: float | None = None,
        after: EngineEvent | None = None,
    ) -> SyncLoadTicket:
        """See KvPool.begin_load."""

        async def begin() -> LoadTicket:
            return self._pool.begin_load(
                chain,
                block_table,
                first_chunk=first_chunk,
                end_chunk=end_chunk,
                skip_tokens=skip_tokens,
                timeout_s=timeout_s,
                after=after,
            )

        return SyncLoadTicket(self._loop, self._loop.run(begin))

    def store(
        self,
        chain: Chain,
        block_table: BlockIds,
        *,
        first_chunk: int,
        end_chunk: int,
        retention: Retention | None = None,
        kept: Callable[[], bool] | None = None,
        after: EngineEvent | None = None,
    ) -> SyncStoreTicket:
        """See KvPool.store; `kept` is called on the client's thread."""
        ticket = self._loop.run(
            lambda: self._pool.store(
                chain,
                block_table,
                first_chunk=first_chunk,
                end_chunk=end_chunk,
                retention=retention,
                kept=kept,
                after=after,
            )
        )
        return SyncStoreTicket(self._loop, ticket, self._config.store_timeout_s)

    def wait_hold(self, hold: BlockHold, timeout_s: float) -> bool:
        """Wait until blocks may be reused; False if timeout_s passed first."""
        if hold.ended:
            return True
        try:
            self._loop.run(hold.wait, timeout_s)
        except KvPoolError:
            return hold.ended
        return True

    def count(self, chain: Chain, *, own_tokens: int, load: LoadReport | None = None) -> RequestStats:
        """See KvPool.count."""

        async def count() -> RequestStats:
            return self._pool.count(chain, own_tokens=own_tokens, load=load)

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
