"""Waiting for work that cannot be interrupted."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def finished(work: asyncio.Future[T]) -> tuple[asyncio.Future[T], bool]:
    """The work once it is done, and whether the caller was cancelled meanwhile: only then may it tell so, too."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled = True
        except Exception:
            break  # the work's own: whoever asks it gets it
    return work, cancelled
