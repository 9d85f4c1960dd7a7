"""Groups of connections to the masters, and who the masters are: one server, or the one that Sentinels name.

A connection group has one connection to each master, and its commands are answered in order on each. Matches have a
group of their own, so that they do not queue behind batches of changes. A Cluster's masters: see redis_cluster.

We ask Sentinels ourselves: that is one command, for which redis-py's Sentinel client would bring connections, timeouts
and retries of its own beside those that serve the calls.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from kvpool.core.errors import KvPoolError, StoreUnavailable
from kvpool_index.adapters.redis_link import LinkOptions, RedisLink, ReplicaWait, shared
from kvpool_index.adapters.redis_lua import Script
from kvpool_index.adapters.redis_reads import PackedReads
from kvpool_index.adapters.redis_url import Server
from kvpool_index.adapters.redis_wire import Reply, checked, is_error, pack, pack_script


class ConnectionGroup(ABC):
    """Sends commands to the masters that own their keys. Raises StoreUnavailable, soon; see RedisLink."""

    @abstractmethod
    async def exchange(
        self,
        commands: Sequence[bytes],
        keys: Sequence[bytes],
        *,
        scripts: Sequence[Script] = (),
        wait_s: float = 0.0,
        try_again: bool = True,
    ) -> list[Reply]:
        """Send packed commands, in one pipelined round to each master they concern; replies in order.

        keys: for each command a key that says where it goes (of several keys in one slot, any one). An error reply is
        returned as a value. scripts and wait_s: see RedisLink.exchange. try_again: whether to wait for the end of a
        move of a slot that keeps a command of several keys from being run.
        """

    async def exchange_reachable(self, commands: Sequence[bytes], keys: Sequence[bytes]) -> list[Reply]:
        """The same, with None for the replies of masters that are out of reach while others answer."""
        return await self.exchange(commands, keys)

    async def read(self, reads: PackedReads) -> list[Reply]:
        """The same as `exchange_reachable` for reads that are packed in one piece."""
        return await self.exchange_reachable(*reads.split())

    @abstractmethod
    async def masters(self) -> list[RedisLink]:
        """A connection to each master, for commands about no key in particular."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections; idempotent."""

    async def call(self, key: bytes, *words: bytes, wait_s: float = 0.0) -> Reply:
        """One command about one key and its reply. Raises StoreUnavailable for an error reply too."""
        (reply,) = await self.exchange([pack(*words)], [key], wait_s=wait_s)
        return checked(reply)

    async def run(self, script: Script, keys: Sequence[bytes], *arguments: bytes) -> Reply:
        """Run one script on keys of one slot."""
        (reply,) = await self.exchange([pack_script(script, keys, *arguments)], keys[:1], scripts=[script])
        return checked(reply)

    async def run_all(self, commands: Sequence[bytes], keys: Sequence[bytes], script: Script) -> list[Reply]:
        """The same as `exchange` for commands of which some run a script; StoreUnavailable for any error reply."""
        replies = await self.exchange(commands, keys, scripts=[script])
        for reply in replies:
            checked(reply)
        return replies


class RedisDeployment(Protocol):
    """One or more masters, and who they are at the moment."""

    @property
    def kind(self) -> str:
        """One of "single", "sentinel" and "cluster"."""
        ...

    def connection_group(self, replicas: ReplicaWait | None = None) -> ConnectionGroup:
        """A new group. replicas: that must have whatever is sent through it."""
        ...

    async def refresh(self) -> None:
        """Ask who the masters are, and leave those that no longer are; called about once a second."""
        ...

    async def close(self) -> None:
        """Close the groups and all other connections; idempotent."""
        ...


class OneMasterGroup(ConnectionGroup):
    """All keys at one master."""

    def __init__(self, link: RedisLink, replicas: ReplicaWait | None) -> None:
        self._link = link
        self._replicas = replicas

    async def exchange(
        self,
        commands: Sequence[bytes],
        keys: Sequence[bytes],
        *,
        scripts: Sequence[Script] = (),
        wait_s: float = 0.0,
        try_again: bool = True,
    ) -> list[Reply]:
        replies = await self._link.exchange(commands, scripts=scripts, wait_s=wait_s, replicas=self._replicas)
        for reply in replies:
            if is_error(reply) and str(reply).startswith("READONLY"):
                self._link.reset("its server is not a master any more")
                break
        return replies

    async def read(self, reads: PackedReads) -> list[Reply]:
        return await self._link.exchange_packed(reads.packed, reads.count)

    async def masters(self) -> list[RedisLink]:
        return [self._link]

    def follow(self, master: Server) -> None:
        """Leave any other server, so that the next call goes to this one."""
        if self._link.server not in (None, master):
            self._link.reset(f"the master is {master} now")

    async def close(self) -> None:
        await self._link.close()


class OneMaster:
    """RedisDeployment of one server at a fixed place."""

    kind = "single"

    def __init__(self, server: Server, options: LinkOptions) -> None:
        self._server = server
        self._options = options
        self._groups: list[OneMasterGroup] = []
        options.stats.masters = 1

    def connection_group(self, replicas: ReplicaWait | None = None) -> ConnectionGroup:
        return new_group(self._find, self._options, replicas, self._groups)

    async def refresh(self) -> None:
        return None

    async def close(self) -> None:
        for group in self._groups:
            await group.close()

    async def _find(self) -> Server:
        return self._server


def new_group(
    find: Callable[[], Awaitable[Server]],
    options: LinkOptions,
    replicas: ReplicaWait | None,
    groups: list[OneMasterGroup],
) -> OneMasterGroup:
    """A group of connections to whatever master is found, noted among the others."""
    group = OneMasterGroup(RedisLink(find, options), replicas)
    groups.append(group)
    return group


_log = logging.getLogger(__name__)

_FAILOVER_TRUST_S: Final = 30.0  # how long the latest reported failover outweighs reports of earlier ones
_SHARE_OF_TIMEOUT: Final = 0.5  # what asking the Sentinels may take of the time for one connection


class SentinelMaster:
    """RedisDeployment of the master of one service.

    Before each connection all Sentinels are asked at once, and of the answers of a majority (or of those that came in
    time) the one of the latest failover counts; the server must then call itself a master. A server that was master
    is left when `refresh` finds another one named by any of them, when it refuses a write, or when Sentinel closes its
    connections, which it does on demoting it.
    """

    kind = "sentinel"

    def __init__(self, sentinels: Sequence[RedisLink], service: str, options: LinkOptions) -> None:
        """options: of the links to the master; must be masters_only."""
        self._sentinels = sentinels
        name = service.encode()
        self._questions = [
            pack(b"SENTINEL", b"MASTER", name),
            pack(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name),
        ]
        self._options = options
        self._groups: list[OneMasterGroup] = []
        self._asking: asyncio.Task[Server] | None = None
        self._master: Server | None = None
        self._epoch = 0  # of the failover that made it
        self._named_at_s = 0.0
        options.stats.masters = 1

    def connection_group(self, replicas: ReplicaWait | None = None) -> ConnectionGroup:
        return new_group(self._find, self._options, replicas, self._groups)

    async def refresh(self) -> None:
        try:
            self._take(await self._ask_all(len(self._sentinels)))
        except OSError as error:
            _log.debug("no Sentinel names the master: %s", error)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for group in self._groups:
            await group.close()
        for link in self._sentinels:
            await link.close()

    async def _find(self) -> Server:
        """Return the master. Groups that connect at the same time ask once. ConnectionError if no Sentinel answers."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(len(self._sentinels) // 2 + 1), name="ask-sentinels")
            self._asking.add_done_callback(self._asked)
        return await shared(self._asking)

    def _asked(self, asking: "asyncio.Task[Server]") -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._take(asking.result())

    def _take(self, found: Server) -> None:
        before = self._master
        self._master = found
        if before is not None and before != found:
            self._options.stats.failovers += 1
            _log.warning("the Sentinels name %s as master, no longer %s", found, before)
        for group in self._groups:
            group.follow(found)

    async def _ask_all(self, enough: int) -> Server:
        """The master by the answers that came first, or by those that came in time if they are fewer."""
        asked = [asyncio.create_task(self._ask(link)) for link in self._sentinels]
        answers: list[tuple[int, Server]] = []
        causes: list[str] = []
        try:
            async with asyncio.timeout(self._options.timeout_s * _SHARE_OF_TIMEOUT):
                for each in asyncio.as_completed(asked):
                    try:
                        answers.append(await each)
                    except KvPoolError as error:
                        causes.append(str(error))
                    if len(answers) == enough:
                        break
        except TimeoutError:
            causes.append("not all answered in time")
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not answers:
            raise ConnectionError(f"no Sentinel names a master: {'; '.join(causes)}")
        return self._latest(*max(answers, key=lambda answer: answer[0]))

    def _latest(self, epoch: int, server: Server) -> Server:
        """Return the named server, unless a Sentinel that knew a later failover named another one recently."""
        now_s = asyncio.get_running_loop().time()
        if epoch < self._epoch and self._master is not None and now_s < self._named_at_s + _FAILOVER_TRUST_S:
            return self._master
        self._epoch, self._named_at_s = epoch, now_s
        return server

    async def _ask(self, link: RedisLink) -> tuple[int, Server]:
        """Number of the failover that made the master, and the master. Raises StoreUnavailable."""
        facts, address = map(checked, await link.exchange(self._questions))
        try:
            # Of the two only the address is right while a failover is on its way; they are answered as of one moment.
            epoch = dict(zip(facts[::2], facts[1::2], strict=True))[b"config-epoch"]
            return int(epoch), Server(address[0].decode(), int(address[1]))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise StoreUnavailable(f"{link.server} is not a Sentinel, by its answer") from error
