"""Launches that one engine was asked for: which are out, and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvpool.core.errors import InvalidRequest, Stopped
from kvpool.core.launches import Launch, Launched, LaunchKind, LaunchPage
from kvpool_gpuagent.ports import BlockIds, MappedHandle

OnLaunch = Callable[[Launch], None]
"""Sends a launch to the engine; returns at once."""


class SessionLaunches:
    """See ports.EngineLaunches. Belongs to the session's event loop."""

    def __init__(self, scratch: MappedHandle, send: OnLaunch, timeout_s: float) -> None:
        """scratch: what the engine lent."""
        self.scratch, self.timeout_s = scratch, timeout_s
        self._send = send
        self._asked: dict[int, asyncio.Future[Launched]] = {}
        self._last_ticket = 0
        self._over = False

    def ask(
        self, kind: LaunchKind, pages: Sequence[LaunchPage], block_ids: BlockIds, *, sums: bool
    ) -> asyncio.Future[Launched]:
        """See ports.EngineLaunches.ask."""
        answer: asyncio.Future[Launched] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have left
        self._last_ticket += 1
        self._asked[self._last_ticket] = answer
        if self._over:
            self.end()
        else:
            self._send(Launch(self._last_ticket, kind, tuple(pages), block_ids, sums))
        return answer

    def ended(self, launched: Launched) -> None:
        """The engine's answer. Raises InvalidRequest for a launch that is not out."""
        answer = self._asked.pop(launched.ticket, None)
        if answer is None:
            raise InvalidRequest(f"launch {launched.ticket} is not out: it was never asked for, or answered before")
        answer.set_result(launched)

    def end(self) -> None:
        """The engine closes its session, or has left: it begins no launch any more, and those that it began have ended
        or are its own to wait for (EngineLaunch in the protocol). Idempotent."""
        self._over = True
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            answer.set_exception(Stopped("the engine's session is over"))
