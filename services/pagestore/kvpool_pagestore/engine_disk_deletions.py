"""Deletions on disk: no page is written again before its old copy is gone; failed ones are remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from kvpool.core.errors import KvPoolError, Overloaded
from kvpool.core.page import PageKey
from kvpool_pagestore.ports import PageStore, Workers

_AGAIN_FIRST_S = 0.05
_AGAIN_LAST_S = 5.0


class Deletions:
    """Of pages that the map has forgotten. Use on one event loop.

    again: deletes pages that were refused because too much was waiting; the disk is well, so that no change of its
    health would bring them up.
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
        """Return when everything that was begun by now has ended, well or not."""
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
