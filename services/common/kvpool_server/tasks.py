"""Work beside the calls: background tasks that cannot die unseen, and blocking calls on a bounded thread pool."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from kvpool.core.errors import Draining, Overloaded

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Owns the tasks that a service runs beside its requests.

    Every crash is logged. A crash of a `fatal` task is handed to `on_fatal` (in a service: `stop.fail`), because
    a request that waits for a dead worker would hang. Leaving the context cancels what still runs and waits for it.
    Use from one event loop only.
    """

    def __init__(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._on_fatal = on_fatal
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], *, name: str, fatal: bool = True) -> asyncio.Task[None]:
        """Run `work` until it returns. A fatal task that ends by cancellation from outside counts as crashed too."""
        if self._closing:
            work.close()
            raise RuntimeError(f"cannot start {name}: the task group is closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, fatal))
        return task

    async def close(self) -> None:
        """Cancel every task and wait until all have ended. Their crashes on the way out are logged. Idempotent."""
        self._closing = True
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # lets the done callbacks run, which empty the set

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _ended(self, task: asyncio.Task[None], fatal: bool) -> None:
        self._tasks.discard(task)
        error: BaseException | None
        if task.cancelled():
            if self._closing or not fatal:
                return
            error = RuntimeError(f"task {task.get_name()} was cancelled")
        else:
            error = task.exception()
        if error is None:
            return
        _log.error("background task %s crashed", task.get_name(), exc_info=error)
        if fatal and not self._closing:
            self._on_fatal(error)


P = ParamSpec("P")
T = TypeVar("T")


class BoundedExecutor:
    """Runs blocking functions on `threads` threads; at most `queue_limit` more may wait.

    A started or queued call always runs to its end: when the caller is cancelled only the wait ends. The error of a
    call whose caller has gone is logged. Use from one event loop only. niceness: of the threads, 0 to 19; a
    higher one leaves the CPU to others.
    """

    def __init__(self, name: str, *, threads: int, queue_limit: int, niceness: int = 0) -> None:
        if threads < 1 or queue_limit < 0:
            raise ValueError(f"threads must be >= 1 and queue_limit >= 0, got {threads} and {queue_limit}")
        self.threads = threads
        self._name = name
        self._limit = threads + queue_limit
        self._niceness = niceness
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name, initializer=self._be_nice)
        self._pending: set[asyncio.Future[object]] = set()
        self._closing = False

    @property
    def pending_count(self) -> int:
        """Calls queued or running."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        return len(self._pending) >= self._limit

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function` run on a thread. Raises Overloaded when the queue is full, Draining when closed."""
        if self._closing:
            raise Draining(f"{self._name} is shutting down")
        if self.is_full:
            raise Overloaded(f"{self._name} already has {self._limit} calls queued or running")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))
        self._pending.add(future)  # type: ignore[arg-type]  # Future is invariant; only its end matters here
        future.add_done_callback(self._pending.discard)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._abandoned)
            raise

    async def close(self) -> None:
        """Refuse new calls, wait for the queued and running ones, end the threads. Idempotent."""
        self._closing = True
        while self._pending:
            await asyncio.wait(set(self._pending))
            await asyncio.sleep(0)  # lets the done callbacks run, which empty the set
        self._pool.shutdown(wait=True)

    def _be_nice(self) -> None:
        """On Linux, what is called a process here is a thread."""
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)

    def _abandoned(self, future: "asyncio.Future[T]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.error("a call on %s failed after its caller had left", self._name, exc_info=error)
