"""Worker threads of simulated processes: real threads of which only one runs at a time, and only when the loop says so.

A blocking function can be held up in its middle (`pause_s`, `wait_for`) while everything else goes on, so that whatever
might happen during a read, a write or a pull does happen in some history.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, ParamSpec, TypeVar

from kvpool.core.errors import Draining, Overloaded
from tests.sim.loop import SimKilled, SimLoop

P = ParamSpec("P")
T = TypeVar("T")

_Starter = Callable[[Callable[[], None]], None]  # begins a wait; calls what it is given when the wait is over


class _Thread(threading.Thread):
    """One thread, used again and again."""

    def __init__(self) -> None:
        super().__init__(name="sim", daemon=True)
        # Bare locks, taken here and released by the other side: a semaphore costs several times as much.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._job: Callable[[], Any] = lambda: None
        self._killed = False
        self.waits_for: _Starter | None = None  # None: the job has ended
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def begin(self, job: Callable[[], Any], context: Context) -> None:
        self._job, self._killed = lambda: context.run(job), False
        self.proceed()

    def proceed(self) -> None:
        """Let it run until it waits or has ended. On the loop's thread."""
        self._go.release()
        self._back.acquire()

    def kill(self) -> None:
        """Unwind the job of a process that is gone."""
        self._killed = True
        while self.waits_for is not None:
            self.proceed()

    def wait(self, starter: _Starter) -> None:
        """Give control back until the wait is over. On this thread."""
        if self._killed:
            raise SimKilled
        self.waits_for = starter
        self._back.release()
        self._go.acquire()
        self.waits_for = None
        if self._killed:
            raise SimKilled

    def run(self) -> None:
        while True:
            self._go.acquire()
            self.result = self.error = None
            try:
                self.result = self._job()
            except BaseException as error:
                self.error = error
            self._back.release()


_idle: list[_Thread] = []


def _on_thread() -> _Thread | None:
    thread = threading.current_thread()
    return thread if isinstance(thread, _Thread) else None


def pause_s(loop: SimLoop, duration_s: float) -> None:
    """Let virtual time pass in the middle of a blocking call; nothing outside of one."""
    thread = _on_thread()
    if thread is not None:
        thread.wait(lambda proceed: loop.call_later(duration_s, proceed) and None)


def is_on_thread() -> bool:
    """Whether the caller may be held up."""
    return _on_thread() is not None


def wait_for(loop: SimLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop, as part of the calling process, and wait for its result."""
    thread = _on_thread()
    assert thread is not None
    tasks: list[asyncio.Task[T]] = []

    def begin(proceed: Callable[[], None]) -> None:
        task: asyncio.Task[T] = loop.create_task(work)
        task.add_done_callback(lambda _: proceed())
        tasks.append(task)

    thread.wait(begin)
    return tasks[0].result()


class SimWorkers:
    """A pagestore's ports.Workers. `delay_s` gives the time until a call begins, and until its result is delivered."""

    def __init__(
        self,
        loop: SimLoop,
        *,
        threads: int,
        delay_s: Callable[[], float],
        blocking: Callable[[], float],
        queue_limit: int = 4096,
    ) -> None:
        self.threads = threads
        self._loop = loop
        self._delay_s = delay_s
        self._blocking = blocking  # share of calls that may wait inside, and need a thread
        self._limit = threads + queue_limit
        self._queue: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._running = 0
        self._threads: dict[_Thread, None] = {}  # in order: a set's differs from process to process
        self._closed = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise Draining("the workers are shutting down")
        if self._running + len(self._queue) >= self._limit:
            raise Overloaded("too many calls")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.append((future, lambda: function(*args, **kwargs)))
        self._begin_next()
        return await future

    def abandon(self) -> None:
        """The process is gone: unwind what its threads were doing. After the loop was closed."""
        for thread in self._threads:
            thread.kill()
            _idle.append(thread)
        self._threads.clear()

    def _begin_next(self) -> None:
        while self._queue and self._running < self.threads:
            self._running += 1
            future, job = self._queue.popleft()
            self._loop.call_later(self._delay_s(), self._begin, future, job)

    def _begin(self, future: asyncio.Future[Any], job: Callable[[], Any]) -> None:
        if self._loop.rng.random() >= self._blocking():
            try:
                result, error = job(), None
            except Exception as failed:
                result, error = None, failed
            self._loop.call_later(self._delay_s(), self._ended, future, result, error)
            return
        thread = _idle.pop() if _idle else _Thread()
        self._threads[thread] = None
        thread.begin(job, copy_context())
        self._went_on(thread, future)

    def _went_on(self, thread: _Thread, future: asyncio.Future[Any]) -> None:
        starter = thread.waits_for
        if starter is not None:
            starter(lambda: self._proceed(thread, future))
            return
        self._threads.pop(thread, None)
        result, error = thread.result, thread.error
        thread.result = thread.error = None
        _idle.append(thread)
        if isinstance(error, SimKilled):
            return
        # Soon, not at once: what the thread handed over by call_soon_threadsafe comes first.
        self._loop.call_soon(self._ended, future, result, error)

    def _proceed(self, thread: _Thread, future: asyncio.Future[Any]) -> None:
        thread.proceed()
        self._went_on(thread, future)

    def _ended(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._running -= 1
        if future.cancelled():
            pass  # its caller has left: what was begun has gone on nevertheless
        elif error is not None:
            future.set_exception(error)
            future.exception()  # also when its caller has left
        else:
            future.set_result(result)
        self._begin_next()


Waiter = Callable[[Awaitable[T]], T]
