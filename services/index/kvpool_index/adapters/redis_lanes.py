"""What the parts of the store send commands through, whether one master has all keys or several share them.

A lane has one connection to each master, and its commands are answered in order on each. Matches have a lane for
themselves, so that they do not queue behind batches of changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvpool_index.adapters.redis_link import LinkOptions, RedisLink, ReplicaWait
from kvpool_index.adapters.redis_lua import Script
from kvpool_index.adapters.redis_reads import PackedReads
from kvpool_index.adapters.redis_url import Server
from kvpool_index.adapters.redis_wire import Reply, checked, is_error, pack, pack_script


class RedisLane(ABC):
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

    def lane(self, replicas: ReplicaWait | None = None) -> RedisLane:
        """A new lane. replicas: that must have whatever is sent through it."""
        ...

    async def look(self) -> None:
        """Ask who the masters are, and leave those that no longer are; called about once a second."""
        ...

    async def close(self) -> None:
        """Close the lanes and all other connections; idempotent."""
        ...


class OneMasterLane(RedisLane):
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
                self._link.reset("its server is no master any more")
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
        self._lanes: list[OneMasterLane] = []
        options.stats.masters = 1

    def lane(self, replicas: ReplicaWait | None = None) -> RedisLane:
        return new_lane(self._find, self._options, replicas, self._lanes)

    async def look(self) -> None:
        return None

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()

    async def _find(self) -> Server:
        return self._server


def new_lane(
    find: Callable[[], Awaitable[Server]],
    options: LinkOptions,
    replicas: ReplicaWait | None,
    lanes: list[OneMasterLane],
) -> OneMasterLane:
    """A lane to whatever master is found, noted among the others."""
    lane = OneMasterLane(RedisLink(find, options), replicas)
    lanes.append(lane)
    return lane
