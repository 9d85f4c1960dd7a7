"""An event loop with virtual time that runs several simulated processes, interleaved by a seeded choice.

Callbacks of one process run in the order in which they became ready, as on a real loop; which process goes next is
chosen at random. When nothing is ready, time jumps to the next timer. A process can be killed between any two of its
callbacks, and paused, as by SIGSTOP.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from asyncio import _set_running_loop  # in asyncio's __all__: what event loops call
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

_THREAD_DELAY_S = 0.004  # at most, until a thread begins, and again until its result is there


class SimKilled(BaseException):
    """Unwinds code of a process that is no more."""


class Violation(AssertionError):
    """The simulated system broke a promise."""


class SimHandle:
    """What asyncio.Handle and TimerHandle are, without their repr and debugging."""

    __slots__ = ("arguments", "at_s", "callback", "context", "is_cancelled")

    def __init__(
        self, at_s: float, callback: Callable[..., object], arguments: tuple[Any, ...], context: Context
    ) -> None:
        self.at_s, self.callback, self.arguments, self.context = at_s, callback, arguments, context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.at_s


_AnyLoop: Any = asyncio.AbstractEventLoop


@dataclass(slots=True, eq=False)
class Process:
    """One simulated process: what it is named, whether it runs, and what it would run next."""

    name: str
    alive: bool = True
    paused: bool = False
    ready: deque[SimHandle] = field(default_factory=deque)
    callback_count: int = 0
    kill_at: int = 0  # the callback before which the process dies; 0: none
    on_kill: list[Callable[[], None]] = field(default_factory=list)  # what the rest of the world sees of its death
    context: Context = field(default_factory=Context)

    def __repr__(self) -> str:
        return self.name


_PROCESS: ContextVar[Process] = ContextVar("process")


def current_process() -> Process:
    """The process whose code is running."""
    return _PROCESS.get()


class SimLoop(_AnyLoop):  # type: ignore[misc]  # of its many methods few are there
    """See the module. Only what the engines and the client library use is there."""

    def __init__(self, rng: Random, *, callbacks_max: int = 400_000) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.callback_count = 0
        self.failures: list[str] = []  # of callbacks and tasks
        self.tasks: list[asyncio.Task[Any]] = []
        self.trace: Callable[[str], None] | None = None
        self._callbacks_max = callbacks_max
        self._timers: list[tuple[float, int, Process, SimHandle]] = []
        self._timer_count = 0
        self._runnable: list[Process] = []
        self._closed = False
        self.world = self.process("world")

    def process(self, name: str) -> Process:
        """A new process."""
        made = Process(name)
        made.context.run(_PROCESS.set, made)
        return made

    # What happens to processes

    def kill(self, process: Process) -> None:
        """End a process at once: nothing of it runs any more."""
        if not process.alive:
            return
        if self.trace is not None:
            self.trace(f"KILL {process} at its callback {process.callback_count}")
        process.alive = False
        process.ready.clear()
        self._not_runnable(process)
        for listener in process.on_kill:
            listener()

    def pause(self, process: Process) -> None:
        process.paused = True
        self._not_runnable(process)

    def resume(self, process: Process) -> None:
        process.paused = False
        if process.ready and process.alive and process not in self._runnable:
            self._runnable.append(process)

    def spawn(self, process: Process, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """A task of a process."""
        task = asyncio.Task(work, loop=self, name=name or process.name, context=process.context.copy())
        self.tasks.append(task)
        return task

    def run(self, main: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run until `main`, a task of the world, has ended. Raises Violation if it has not by then."""
        _set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=lambda generator: None)  # a dead process does not unwind
        try:
            task = self.spawn(self.world, main)
            while not task.done():
                if self._runnable:
                    self._step()
                    continue
                self._advance()
                if self.now_s > limit_s:
                    raise Violation(f"the history did not end within {limit_s:g} virtual seconds")
            return task.result()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            _set_running_loop(None)

    def close(self) -> None:
        """Throw away what is left, so that none of it runs when it is collected."""
        self._closed = True
        self._timers.clear()
        self._runnable.clear()
        _set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=lambda generator: None)
        try:
            while self.tasks:
                task = self.tasks.pop()
                if not task.done():
                    _discard(task)  # that it never ended comes to `call_exception_handler`, which is closed
                elif not task.cancelled():
                    task.exception()  # it was looked at, or it is a dead process's
        finally:
            sys.set_asyncgen_hooks(*hooks)
            _set_running_loop(None)

    def _step(self) -> None:
        runnable = self._runnable
        process = runnable[int(self.rng.random() * len(runnable))]
        if process.kill_at and process.callback_count >= process.kill_at:
            process.kill_at = 0
            self.kill(process)
            return
        handle = process.ready.popleft()
        if not process.ready:
            runnable.remove(process)
        if handle.is_cancelled:
            return
        process.callback_count += 1
        self.callback_count += 1
        if self.callback_count > self._callbacks_max:
            raise Violation(f"more than {self._callbacks_max} callbacks: something runs in circles ({handle!r})")
        try:
            handle.context.run(handle.callback, *handle.arguments)
        except SimKilled:
            pass  # of the process that ran
        except Exception as error:
            self.call_exception_handler({"message": f"a callback of {process} failed", "exception": error})

    def _advance(self) -> None:
        if not self._timers:
            raise Violation("nothing can happen any more, and the history has not ended")
        at_s, _, process, handle = heapq.heappop(self._timers)
        self.now_s = max(self.now_s, at_s)
        if not handle.is_cancelled:
            self._make_ready(process, handle)

    def _make_ready(self, process: Process, handle: SimHandle) -> None:
        if not process.alive or self._closed:
            return
        if not process.ready and not process.paused:
            self._runnable.append(process)
        process.ready.append(handle)

    def _not_runnable(self, process: Process) -> None:
        if process in self._runnable:
            self._runnable.remove(process)

    # asyncio.AbstractEventLoop

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        where = context if context is not None else copy_context()
        handle = SimHandle(self.now_s, callback, args, where)
        self._make_ready(where.get(_PROCESS, self.world), handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        where = context if context is not None else copy_context()
        handle = SimHandle(when, callback, args, where)
        process = where.get(_PROCESS, self.world)
        if process.alive and not self._closed:
            self._timer_count += 1
            heapq.heappush(self._timers, (when, self._timer_count, process, handle))
        return handle

    def run_in_executor(self, executor: None, function: Callable[[], T], *args: Any) -> asyncio.Future[T]:
        """What asyncio.to_thread calls: the function runs as a whole, somewhat later, and its result comes later still.

        As with true threads, a caller that is cancelled meanwhile does not stop it.
        """
        outcome: asyncio.Future[T] = asyncio.Future(loop=self)

        def tell(work: Callable[[], None]) -> None:
            if not outcome.done():
                work()

        def run() -> None:
            try:
                result = function(*args)
            except Exception as error:
                self.call_later(self._thread_delay_s(), tell, partial(outcome.set_exception, error))
            else:
                self.call_later(self._thread_delay_s(), tell, partial(outcome.set_result, result))

        self.call_later(self._thread_delay_s(), run)
        return outcome

    def _thread_delay_s(self) -> float:
        return self.rng.random() * _THREAD_DELAY_S

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._closed or isinstance(error, SimKilled):
            return
        self.failures.append(f"{context.get('message')}: {error!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)


def _discard(task: asyncio.Task[Any]) -> None:
    try:
        coroutine = task.get_coro()
        if coroutine is not None:
            coroutine.close()
    except BaseException as error:  # code of a process that is gone may say what it likes
        del error
