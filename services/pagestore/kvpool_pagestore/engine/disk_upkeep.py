"""What the disk tier keeps in order beside reads and writes: its health, deletions, changes of metadata."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from enum import IntEnum
from typing import Any

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, Overloaded
from kvpool.core.page import PageKey
from kvpool_pagestore.core.events import DiskHealthChanged, PageEvents
from kvpool_pagestore.engine.context import EngineTasks, background, cancelled
from kvpool_pagestore.ports import PageStore, Workers

_log = logging.getLogger(__name__)

_READ_FAULTS_MAX = 3  # in a row: fewer may be bad sectors, so many are the disk
_PROBE_FIRST_S = 0.5
_PROBE_LAST_S = 30.0


class DiskState(IntEnum):
    """What the disk tier is good for now. The numbers are those of the metric."""

    READ_WRITE = 0
    READ_ONLY = 1  # full, or failing at writes: what is there is served
    OFF = 2  # failing at reads: nothing on it counts as present


class DiskHealth:
    """One state with its reason. A tier that fails is probed, at growing intervals, until it works.

    probe: reads and writes a little as the tier does; raises what it fails with.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]], events: PageEvents) -> None:
        self._probe = probe
        self._events = events
        self._probing: asyncio.Task[None] | None = None
        self._read_faults = 0  # since the last read that succeeded
        self.state = DiskState.READ_WRITE
        self.fault = ""  # why it is not READ_WRITE

    def write_failed(self, error: KvPoolError) -> None:
        """Note that writes fail, because the disk is full or otherwise."""
        self._worsen(DiskState.READ_ONLY, error)

    def read_failed(self, error: KvPoolError) -> None:
        """One page could not be read."""
        self._read_faults += 1
        if self._read_faults >= _READ_FAULTS_MAX:
            self._worsen(DiskState.OFF, error)
        else:
            _log.error("a page on disk cannot be read: %s", error)

    def read_succeeded(self) -> None:
        self._read_faults = 0

    async def close(self) -> None:
        """Probe no more."""
        await cancelled(self._probing)

    def _worsen(self, state: DiskState, error: KvPoolError) -> None:
        if state > self.state:
            _log.error("the disk tier is %s: %s", state.name, error)
            self.state, self.fault = state, str(error)
            self._events.publish(DiskHealthChanged(self.fault))
        if self._probing is None:
            self._probing = background(self._probe_until_ok(), "probe-disk")

    async def _probe_until_ok(self) -> None:
        delay_s = _PROBE_FIRST_S
        while True:
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _PROBE_LAST_S)
            try:
                await self._probe()
            except KvPoolError as error:
                self.fault = str(error)
            else:
                break
        _log.warning("the disk tier is READ_WRITE again")
        self._probing, self._read_faults = None, 0
        self.state, self.fault = DiskState.READ_WRITE, ""
        self._events.publish(DiskHealthChanged(self.fault))


_AGAIN_FIRST_S = 0.05
_AGAIN_LAST_S = 5.0


class Deletions:
    """Deletes pages that the map has forgotten. Use on one event loop.

    again: deletes pages that were refused because too much was waiting; the disk works, so that no change of its
    health would start them again.
    """

    def __init__(self, store: PageStore, writers: Workers, again: Callable[[Sequence[PageKey]], None]) -> None:
        self._store = store
        self._writers = writers
        self._again = again
        self._again_s = _AGAIN_FIRST_S
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: set[asyncio.Future[None]] = set()
        self._failed: set[PageKey] = set()  # still on disk

    def begin(self) -> asyncio.Future[None]:
        """Have later writes wait for a deletion that is about to start; pass the answer to `run`."""
        ended = asyncio.get_running_loop().create_future()
        self._under_way.add(ended)
        return ended

    async def run(self, keys: Sequence[PageKey], ended: asyncio.Future[None]) -> None:
        """Delete pages. Raises StoreFault and the like; then they are remembered."""
        try:
            await self._writers.run(self._store.delete_batch, keys)
            self._again_s = _AGAIN_FIRST_S
        except KvPoolError as error:
            self._failed.update(keys)
            if isinstance(error, Overloaded):
                self._try_later()
            raise
        finally:
            self._under_way.discard(ended)
            ended.set_result(None)

    async def wait_ended(self) -> None:
        """Return when everything that was begun by now has ended, successfully or not."""
        if self._under_way:
            await asyncio.wait(set(self._under_way))

    def replaced(self, keys: Iterable[PageKey]) -> None:
        """They are written again: their old copies need no deletion any more."""
        self._failed.difference_update(keys)

    def take_failed(self) -> list[PageKey]:
        """What is still on disk, once: try again."""
        failed, self._failed = list(self._failed), set()
        return failed

    def close(self) -> None:
        """Try nothing again."""
        if self._timer is not None:
            self._timer.cancel()

    def _try_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._again_s, self._try_again)
            self._again_s = min(2 * self._again_s, _AGAIN_LAST_S)

    def _try_again(self) -> None:
        self._timer = None
        if failed := self.take_failed():
            self._again(failed)


class MetadataWrites:
    """One write at a time, the next with all that came meanwhile: of two changes of one page the later stays.

    Threads would carry them out in any order. Use on one event loop.
    """

    def __init__(self, store: PageStore, writers: Workers, tasks: EngineTasks) -> None:
        self._store = store
        self._writers = writers
        self._tasks = tasks
        self._waiting: dict[PageKey, PageMetadata] = {}
        self._next: asyncio.Future[None] | None = None  # writes what is waiting
        self._latest: asyncio.Future[None] | None = None  # that began

    def write(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> Coroutine[Any, Any, None]:
        """Queue changes, at once. The answer returns when they are synced; it raises StoreFault and the like."""
        self._waiting.update(changes)
        if changes and self._next is None:
            work = self._tasks.finish(self._write_next(self._latest), "set-metadata")
            self._next = asyncio.ensure_future(work)
            self._next.add_done_callback(_observe_failure)
        return _ended(self._next if changes else None)

    async def _write_next(self, before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        changes, self._waiting = list(self._waiting.items()), {}
        self._latest, self._next = self._next, None
        await self._writers.run(self._store.set_metadata, changes)


async def _ended(write: asyncio.Future[None] | None) -> None:
    if write is not None:
        await asyncio.shield(write)


def _observe_failure(write: asyncio.Future[None]) -> None:
    if not write.cancelled():
        write.exception()  # also when every caller has left; those who wait get it themselves
