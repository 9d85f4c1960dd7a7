"""Rounds of a reconciler, as its own task makes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from kvpool_server.node import reconciler as reconciler_module
from kvpool_server.node.reconciler import Reconciler


async def make_round(reconciler: Reconciler, turn: Callable[[], Awaitable[None]]) -> None:
    """Let a reconciler that never pauses run until it has completed one more round.

    turn: what others do between its steps. A round that is begun again, because the node has registered again, is not
    complete.
    """
    round_count = reconciler.round_count
    with _no_failures():
        running = asyncio.create_task(reconciler.run())
        try:
            while reconciler.round_count == round_count and not running.done():
                await asyncio.sleep(0)
                await turn()
            if running.done():
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@contextmanager
def _no_failures() -> Iterator[None]:
    """A round that fails is logged and begun again; here it must not fail."""
    handler, logger = _Failures(), logging.getLogger(reconciler_module.__name__)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not handler.found


class _Failures(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[object] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.getMessage(), record.exc_info))
