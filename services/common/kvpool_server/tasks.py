"""Long-lived background tasks that cannot die unseen."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

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
