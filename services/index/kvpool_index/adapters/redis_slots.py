"""Which master of a Redis Cluster owns which of the 16,384 slots that keys fall into."""

import asyncio
import logging
import random
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.core.errors import KvPoolError, StoreUnavailable
from kvpool_index.adapters.redis_link import LinkOptions, RedisLink, link_to, shared
from kvpool_index.adapters.redis_url import Server

_log = logging.getLogger(__name__)

SLOT_COUNT: Final = 16384
_REFRESH_PAUSE_S: Final = 0.1


def slot_of(key: bytes) -> int:
    """The slot of a key: of what is between its first { and the next }, if that is anything, else of all of it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) & (SLOT_COUNT - 1)


class SlotMap:
    """Which master owns which slot, as far as is known. Asked for on first use, and again when it proves wrong."""

    def __init__(self, seeds: Sequence[Server], options: LinkOptions) -> None:
        self._seeds = seeds
        self._options = options
        self._links: dict[Server, RedisLink] = {}
        self._owners: list[Server | None] = []
        self._refreshing: asyncio.Task[None] | None = None
        self._cause = "none has any"
        self.on_change: list[Callable[[frozenset[Server]], None]] = []

    @property
    def masters(self) -> frozenset[Server]:
        """All owners of slots."""
        return frozenset(owner for owner in self._owners if owner is not None)

    async def load(self) -> None:
        """Ask for the slots, once. Raises StoreUnavailable if no member of the Cluster tells."""
        if self._owners:
            return
        self.refresh_soon(pause_s=0.0)
        assert self._refreshing is not None
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await shared(self._refreshing)
        except OSError as error:
            raise StoreUnavailable("no member of the Cluster tells its slots in time") from error
        if not self._owners:
            raise StoreUnavailable(f"no member of the Cluster tells its slots: {self._cause}")

    def owner(self, key: bytes) -> Server:
        """The master that has a key. Raises StoreUnavailable if its slot has none."""
        owner = self.find(key)
        if owner is None:
            raise StoreUnavailable(f"slot {slot_of(key)} of the Cluster has no master")
        return owner

    def find(self, key: bytes) -> Server | None:
        """The master that has a key; None if its slot has none as far as is known, and then the map is asked for."""
        owner = self._owners[slot_of(key)]
        if owner is None:
            self.refresh_soon()
        return owner

    def moved(self, slot: int, owner: Server) -> None:
        """Take over what a redirection says, and ask for the rest."""
        if self._owners and self._owners[slot] != owner:
            self._owners[slot] = owner
            self.refresh_soon()

    def refresh_soon(self, *, pause_s: float = _REFRESH_PAUSE_S) -> None:
        """Ask again in the background; once, however many find that they should."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(pause_s), name="redis-slots")
            self._refreshing.add_done_callback(self._refreshed)

    async def close(self) -> None:
        """End what runs in the background; idempotent."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        for link in self._links.values():
            await link.close()

    def _refreshed(self, done: "asyncio.Task[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("the slots of the Cluster cannot be read", exc_info=error)

    async def _refresh(self, pause_s: float) -> None:
        try:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            await self._ask_members()
        finally:
            # Here, not in a callback: whoever finds the map wrong before that has run would ask for nothing.
            self._refreshing = None

    async def _ask_members(self) -> None:
        """Ask all members that are known, and take the first answer."""
        asked = [asyncio.create_task(self._ask(server)) for server in {*self._seeds, *self.masters}]
        try:
            for each in asyncio.as_completed(asked):
                try:
                    found = await each
                except KvPoolError as error:
                    self._cause = str(error)
                    continue
                if any(found):
                    return self._take(found)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return None

    async def _ask(self, server: Server) -> list[Server | None]:
        link = self._links.get(server)
        if link is None:
            link = self._links[server] = link_to(server, self._options)
        owners: list[Server | None] = [None] * SLOT_COUNT
        ranges = await link.call(b"CLUSTER", b"SLOTS")
        try:
            for first, last, master, *_ in ranges:
                # A member that does not know its own address leaves it out.
                owner = Server((master[0] or b"").decode() or server.host, master[1])
                owners[first : last + 1] = [owner] * (last + 1 - first)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise StoreUnavailable(f"{server} is no member of a Cluster, by its answer") from error
        return owners

    def _take(self, found: list[Server | None]) -> None:
        before, self._owners = self.masters, found
        masters = self.masters
        self._options.stats.masters = len(masters)
        if before and masters - before:
            self._options.stats.failovers += 1
            _log.warning("masters of the Cluster: %s", ", ".join(sorted(map(str, masters))))
        for changed in self.on_change:
            changed(masters)
