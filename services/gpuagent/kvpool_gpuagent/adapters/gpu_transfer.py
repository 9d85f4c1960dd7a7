"""What a lane moves, and what moves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageFault
from kvpool_gpuagent.ports import PageCopy, StopFlag


class Issued(Protocol):
    """Work of one burst on the GPU."""

    def finish(self) -> Sequence[PageFault | None]:
        """Wait for it, complete the pages; per copy, why it was not moved."""
        ...

    @property
    def turn_s(self) -> float | None:
        """Once finished: seconds that its kernels and their turn were waited for, 0.0 if they had ended before; None
        without kernels."""
        ...


class Mover(Protocol):
    """Moves pages of one cache in one direction on one way. Transfers with the same mover share bursts."""

    needs_scratch: bool
    most_pages: int  # of a burst

    def page_bytes(self, copy: PageCopy) -> int:
        """What a page takes of a burst, and of the scratch if it needs some."""
        ...

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> Issued:
        """Enqueue the work of a burst; page after page in the scratch, each page_bytes long."""
        ...


@dataclass(slots=True, eq=False)
class Transfer:
    """One call: its copies, in order. `settled` gets per copy None or a fault, or False if `stop` said so."""

    mover: Mover
    copies: Sequence[PageCopy]
    stop: StopFlag
    settled: asyncio.Future[Sequence[PageFault | None] | bool]
    faults: list[PageFault | None] = field(default_factory=list)
    issued: int = 0  # leading copies that went into bursts
    in_flight: int = 0
    stopped: bool = False
    error: KvPoolError | None = None

    def __post_init__(self) -> None:
        self.faults = [None] * len(self.copies)

    @property
    def over(self) -> bool:
        """Nothing of it is enqueued or will be."""
        ended = self.stopped or self.error is not None or self.issued == len(self.copies)
        return ended and not self.in_flight


def settle(transfers: Iterable[Transfer]) -> None:
    """Tell the callers of transfers that are over, from any thread; a burst's in one wake-up of each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Transfer]] = {}
    for transfer in transfers:
        loops.setdefault(transfer.settled.get_loop(), []).append(transfer)
    for loop, own in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would be told
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        if transfer.error is not None:
            transfer.settled.set_exception(transfer.error)
        elif transfer.stopped:
            transfer.settled.set_result(False)
        else:
            transfer.settled.set_result(transfer.faults)
