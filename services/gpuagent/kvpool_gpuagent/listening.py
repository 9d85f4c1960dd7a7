"""Tells when an engine says nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.core.silence import Silence


class Listener:
    """Calls `on_silent` once with DeadlineExceeded, unless it is stopped before. Belongs to one event loop."""

    def __init__(self, heartbeat_s: float, on_silent: Callable[[KvPoolError], None]) -> None:
        self._silence = Silence(heartbeat_s)
        self._on_silent = on_silent
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on the engine is to say something."""
        self._task = asyncio.create_task(self._listen(), name="listen to an engine")

    def heard(self) -> None:
        """It said something."""
        self._silence.heard()

    def stop(self) -> None:
        """It need not say anything more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._silence.look_s)
            if self._silence.look(loop.time()):
                break
        limit_s = self._silence.limit_s
        self._on_silent(DeadlineExceeded(f"the engine was silent for {limit_s:g} s; its session is over"))
