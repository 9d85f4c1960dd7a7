"""One call's pages through a lane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.core.page import PageFault
from kvpool_gpuagent.adapters.finishing import finished
from kvpool_gpuagent.adapters.gpu_lane import Lane
from kvpool_gpuagent.adapters.gpu_transfer import Mover, Transfer
from kvpool_gpuagent.ports import PageCopy, StopFlag

Moved = Sequence[PageFault | None] | bool
"""Per copy None or why it was not moved; False if a stop flag said so."""


async def move_on_lane(lane: Lane, mover: Mover, copies: Sequence[PageCopy], stop: StopFlag) -> Moved:
    """Move pages. A cancelled caller is told so once nothing is running any more."""
    transfer = Transfer(mover, copies, stop, asyncio.get_running_loop().create_future())
    lane.submit(transfer)
    return await until_over(transfer.settled)


async def until_over(work: asyncio.Future[Moved]) -> Moved:
    """What came of work that goes on when its caller is cancelled; the caller is told so after it."""
    settled, gone = await finished(work)
    if gone:
        settled.exception()  # nobody is left who could be told
        raise asyncio.CancelledError
    return settled.result()
