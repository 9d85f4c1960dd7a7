"""A master that Sentinels name, and that they replace when it fails.

We ask them ourselves: that is one command, for which redis-py's Sentinel client would bring connections, timeouts and
retries of its own beside those that serve the calls.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from kvpool.core.errors import StoreUnavailable
from kvpool_index.adapters.redis_lanes import OneMasterLane, RedisLane, new_lane
from kvpool_index.adapters.redis_link import LinkOptions, RedisLink, ReplicaWait
from kvpool_index.adapters.redis_url import Server

_log = logging.getLogger(__name__)

_SHARE_OF_TIMEOUT: Final = 0.5  # what asking the Sentinels may take of the time for one connection


class SentinelMaster:
    """RedisDeployment of the master of one service.

    Before each connection all Sentinels are asked at once, and of the answers of a majority (or of those that came in
    time) the one of the latest failover counts; the server must then call itself a master. A replica that was master
    is left when a look finds another one named, when it refuses a write, or when Sentinel closes its connections,
    which it does on demoting it.
    """

    kind = "sentinel"

    def __init__(self, sentinels: Sequence[RedisLink], service: str, options: LinkOptions) -> None:
        """options: of the links to the master; must be masters_only."""
        self._sentinels = sentinels
        self._service = service.encode()
        self._options = options
        self._lanes: list[OneMasterLane] = []
        self._asking: asyncio.Task[Server] | None = None
        self._master: Server | None = None
        options.stats.masters = 1

    def lane(self, replicas: ReplicaWait | None = None) -> RedisLane:
        return new_lane(self._find, self._options, replicas, self._lanes)

    async def look(self) -> None:
        try:
            await self._find()
        except OSError as error:
            _log.debug("no Sentinel names the master: %s", error)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for lane in self._lanes:
            await lane.close()
        for link in self._sentinels:
            await link.close()

    async def _find(self) -> Server:
        """The master now. Lanes that connect at the same time ask once. Raises ConnectionError if nobody tells."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(), name="ask-sentinels")
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, asking: "asyncio.Task[Server]") -> None:
        self._asking = None
        if asking.cancelled() or asking.exception() is not None:
            return
        found, before = asking.result(), self._master
        self._master = found
        if before is not None and before != found:
            self._options.stats.failovers += 1
            _log.warning("the Sentinels name %s as master, no longer %s", found, before)
        for lane in self._lanes:
            lane.follow(found)

    async def _ask_all(self) -> Server:
        asked = [asyncio.create_task(self._ask(link)) for link in self._sentinels]
        answers: list[tuple[int, Server]] = []
        causes: list[str] = []
        try:
            async with asyncio.timeout(self._options.timeout_s * _SHARE_OF_TIMEOUT):
                for each in asyncio.as_completed(asked):
                    try:
                        answers.append(await each)
                    except StoreUnavailable as error:
                        causes.append(str(error))
                    if len(answers) > len(asked) // 2:
                        break
        except TimeoutError:
            causes.append("not all answered in time")
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not answers:
            raise ConnectionError(f"no Sentinel names a master: {'; '.join(causes)}")
        return max(answers, key=lambda answer: answer[0])[1]

    async def _ask(self, link: RedisLink) -> tuple[int, Server]:
        """Number of the failover that made the master, and the master. Raises StoreUnavailable."""
        flat = await link.call(b"SENTINEL", b"MASTER", self._service)
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        return int(facts[b"config-epoch"]), Server(facts[b"ip"].decode(), int(facts[b"port"]))
