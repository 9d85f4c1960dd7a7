"""Whether the disk tier can be written and read, and finding out when it can again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import IntEnum

from kvpool.core.errors import KvPoolError
from kvpool_pagestore.core.events import DiskHealthChanged, PageEvents
from kvpool_pagestore.engine_tasks import background, cancelled

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
    """One state with its reason. A tier that is not well is probed, at growing distance, until it is.

    probe: reads and writes a little as the tier does; raises what it fails with.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]], events: PageEvents) -> None:
        self._probe = probe
        self._events = events
        self._probing: asyncio.Task[None] | None = None
        self._read_faults = 0  # since the last read that went well
        self.state = DiskState.READ_WRITE
        self.fault = ""  # why it is not READ_WRITE

    def write_failed(self, error: KvPoolError) -> None:
        """Writes fail, for want of room or otherwise."""
        self._worsen(DiskState.READ_ONLY, error)

    def read_failed(self, error: KvPoolError) -> None:
        """One page could not be read."""
        self._read_faults += 1
        if self._read_faults >= _READ_FAULTS_MAX:
            self._worsen(DiskState.OFF, error)
        else:
            _log.error("a page on disk cannot be read: %s", error)

    def read_went_well(self) -> None:
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
            self._probing = background(self._probe_until_well(), "probe-disk")

    async def _probe_until_well(self) -> None:
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
