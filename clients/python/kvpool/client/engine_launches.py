"""Launches that an agent asks of an engine: taken from the session's stream, answered on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvpool.client.engine_registration import Launcher
from kvpool.core.errors import InvalidRequest, KvPoolError, Overloaded
from kvpool.core.launches import Launched
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert_launch import launch_from_proto, launched_to_proto

MOST_RUNNING = 256  # an agent asks for fewer; more are refused


class SessionLaunches:
    """Of one session; belongs to its event loop. Each launch that was begun is answered, also while the session ends.

    A launch that has not been begun when the session is to end never will be: `close`, or the break, answers it. So
    whoever ends a session calls `stop`, waits until it is `idle`, and only then says `close` or lets go of the blocks.
    """

    def __init__(
        self, launcher: Launcher | None, blocks_per_chunk: int, send: Callable[[gpuagent_pb2.EngineRequest], None]
    ) -> None:
        """send: does nothing once the stream is broken."""
        self._launcher, self._blocks_per_chunk, self._send = launcher, blocks_per_chunk, send
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._stopped = False
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, message: gpuagent_pb2.EngineLaunch) -> None:
        """The agent asks for a launch. Neither blocks nor raises."""
        if self._stopped:
            return
        try:
            if self._launcher is None:
                raise InvalidRequest("this engine lent no scratch, so it launches nothing")
            if self._running >= MOST_RUNNING:
                raise Overloaded(f"{self._running} launches run in this engine")
            launch = launch_from_proto(message, self._blocks_per_chunk)
        except KvPoolError as error:
            self._answer(Launched(message.ticket, error=error))
            return
        self._running += 1
        self._idle.clear()
        self._launcher.start(launch, self._ended_in_thread)

    def stop(self) -> None:
        """Begin no more. Idempotent."""
        self._stopped = True

    async def idle(self) -> None:
        """Return when nothing that was begun is running any more; as long as the engine's own GPU needs."""
        await self._idle.wait()

    def _ended_in_thread(self, launched: Launched) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would be told
            self._loop.call_soon_threadsafe(self._ended, launched)

    def _ended(self, launched: Launched) -> None:
        self._running -= 1
        self._answer(launched)
        if not self._running:
            self._idle.set()

    def _answer(self, launched: Launched) -> None:
        self._send(gpuagent_pb2.EngineRequest(launched=launched_to_proto(launched)))
