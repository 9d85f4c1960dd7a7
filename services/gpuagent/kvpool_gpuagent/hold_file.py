"""The file by which an engine knows whether this agent may still touch its memory."""

from __future__ import annotations

import asyncio
import logging
import os

from kvpool.core.ipc import HOLD_ENDED

_log = logging.getLogger(__name__)


class HoldFile:
    """An engine's open file, kept open as long as its memory is mapped; see the proto's EngineRegister.hold_file.

    The engine has locked it: the kernel drops the lock when this process ends, so that it need not trust us.
    """

    def __init__(self, descriptor: int) -> None:
        """Owns the descriptor."""
        self._descriptor = descriptor

    async def let_go(self) -> None:
        """Nothing of this process touches the engine's memory any more. Idempotent, never raises."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            await asyncio.to_thread(_end, descriptor)  # whatever kind of file a peer has made it


def _end(descriptor: int) -> None:
    try:
        os.pwrite(descriptor, HOLD_ENDED, 0)
    except OSError as error:
        _log.warning("an engine's hold file cannot be written: %s", error)
    finally:
        os.close(descriptor)
