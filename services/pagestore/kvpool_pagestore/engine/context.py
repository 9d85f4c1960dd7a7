"""What the engine's parts share: clock, events, metrics, places of pages, background tasks, stop signals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvpool.core.clock import Clock
from kvpool.core.tracing import Tracer
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.metrics import PageStoreMetrics

if TYPE_CHECKING:  # they use this module
    from kvpool_pagestore.engine.arena import ArenaSpace
    from kvpool_pagestore.engine.commits import Sealing
    from kvpool_pagestore.engine.disk_tier import DiskTier
    from kvpool_pagestore.engine.writeback import WriteBack


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Serves every part and knows nothing of single pages."""

    clock: Clock
    tasks: EngineTasks
    events: PageEvents
    metrics: PageStoreMetrics
    tracer: Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The arena: what is in it, room in it, and headers and sums of its pages."""

    table: PageTable
    space: ArenaSpace
    sealing: Sealing


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """All places of this node. A node without a disk has neither `disk` nor `write_back`."""

    staging: Staging
    disk: DiskTier | None
    write_back: WriteBack | None


_log = logging.getLogger(__name__)
T = TypeVar("T")


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that its owner cancels some day; if it fails before, that is logged."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


async def cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task, if there is one, and wait for its end."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


class EngineTasks:
    """Tasks that run to their end even when the call that started them is cancelled. Use from one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._context = copy_context()

    def start(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run `work`, which is not waited for: its failure is logged.

        It does not run in the caller's context but in the engine's: it may serve several requests, and its logs and
        spans are no part of the one that happened to come first.
        """
        self._add(work, name, self._context.copy()).add_done_callback(_log_failure)

    async def finish(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """The result of `work`, which goes on to its end even if the caller is cancelled meanwhile."""
        return await asyncio.shield(self._add(work, name))

    async def drain(self) -> None:
        """Wait until everything that was started has ended."""
        while self._running:
            await asyncio.wait(set(self._running))
            await asyncio.sleep(0)  # lets the done callbacks run

    def _add(self, work: Coroutine[Any, Any, T], name: str, context: Context | None = None) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task %s failed", task.get_name(), exc_info=error)
