"""The index's store over Redis: its parts wired, the event log, and the checks of the masters.

Matches have connections of their own, so that they do not queue behind batches of changes; leases and names have
their own too; and every reader that waits for events has its own, because a waiting command blocks its connection.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvpool.core.errors import KvPoolError, Overloaded, StartupFailed, StoreUnavailable
from kvpool_index.adapters.redis_cluster import Cluster
from kvpool_index.adapters.redis_connections import ConnectionGroup, OneMaster, RedisDeployment, SentinelMaster
from kvpool_index.adapters.redis_keyspaces import RedisKeyspaceRegistry, RedisPolicyRegistry
from kvpool_index.adapters.redis_link import LinkOptions, RedisLayout, RedisLink, ReplicaWait, link_to
from kvpool_index.adapters.redis_locations import RedisLocationStore
from kvpool_index.adapters.redis_nodes import RedisNodeDirectory
from kvpool_index.adapters.redis_url import parse_redis_url
from kvpool_index.adapters.redis_wire import checked, is_error, pack
from kvpool_index.core.events import ORIGIN, LogEntry
from kvpool_index.core.redis_stats import RedisFacts, RedisStats, problems_of

_FIELD: Final = b"e"


class RedisEventLog:
    """EventLog over one Redis Stream a partition, each in a slot of its own; the nodes' stream lies with the nodes."""

    def __init__(
        self,
        changes: ConnectionGroup,
        reads: ConnectionGroup,
        waiting: Sequence[ConnectionGroup],
        stats: RedisStats,
        *,
        key_prefix: bytes,
        chunk_stream_count: int,
        max_entries: int,
    ) -> None:
        """waiting: for each stream the connections on which its one reader waits for the next entry."""
        self._changes = changes
        self._reads = reads
        self._waiting = waiting
        self._stats = stats
        self.node_key = key_prefix + b":{n}:events"
        self._keys = [key_prefix + b":{e%d}:events" % number for number in range(chunk_stream_count)] + [self.node_key]
        self._max_entries = b"%d" % max_entries

    @property
    def stream_count(self) -> int:
        return len(self._keys)

    async def append(self, entries: Sequence[tuple[int, bytes]]) -> None:
        commands = [
            pack(b"XADD", self._keys[stream], b"MAXLEN", b"~", self._max_entries, b"*", _FIELD, payload)
            for stream, payload in entries
        ]
        for reply in await self._changes.exchange(commands, [self._keys[stream] for stream, _ in entries]):
            checked(reply)

    async def tails(self) -> tuple[str, ...]:
        commands = [pack(b"XREVRANGE", key, b"+", b"-", b"COUNT", b"1") for key in self._keys]
        replies = await self._reads.exchange(commands, self._keys)
        return tuple(reply[0][0].decode() if reply else ORIGIN for reply in map(checked, replies))

    async def read(self, stream: int, after: str, *, limit: int, wait_s: float) -> list[LogEntry]:
        words = [b"XREAD", b"COUNT", b"%d" % limit]
        if wait_s > 0:
            words += [b"BLOCK", b"%d" % max(1, int(wait_s * 1000))]
        words += [b"STREAMS", self._keys[stream], after.encode()]
        connections = self._waiting[stream] if wait_s > 0 else self._reads
        found = await connections.call(self._keys[stream], *words, wait_s=wait_s)
        entries = found[0][1] if found else []
        return [LogEntry(entry_id.decode(), pairs[1]) for entry_id, pairs in entries]

    async def is_kept(self, stream: int, entry_id: str) -> bool:
        key, position = self._keys[stream], entry_id.encode()
        here, state = await self._reads.exchange(
            [pack(b"XRANGE", key, position, position), pack(b"XINFO", b"STREAM", key)], [key, key]
        )
        # The entries that go are always the oldest: as long as this one is there, so are all after it.
        if checked(here):
            return True
        if entry_id != ORIGIN:
            return False
        if is_error(state):
            return True  # the stream does not exist yet
        facts = dict(zip(state[::2], state[1::2], strict=True))
        return bool(facts.get(b"entries-added") == facts[b"length"])

    def count_malformed(self) -> None:
        self._stats.malformed["event"] += 1


_log = logging.getLogger(__name__)

_ROUNDS_BETWEEN_CHECKS: Final = 60


class RedisHealth:
    """Checks each master. Problems of its configuration are logged when they are first found."""

    def __init__(self, connections: ConnectionGroup, topology: str, stats: RedisStats, *, wait_replicas: int) -> None:
        self._connections = connections
        self._topology = topology
        self._stats = stats
        self._wait_replicas = wait_replicas
        self._checked: dict[str, frozenset[str]] = {}  # by master, what was found
        self._rounds = 0

    async def check(self) -> None:
        """One round trip to each master; the configuration of those not seen before, and of all once a minute."""
        self._rounds += 1
        if self._rounds % _ROUNDS_BETWEEN_CHECKS == 0:
            self._checked = {}
        try:
            masters = await self._connections.masters()
        except KvPoolError:
            self._stats.masters_up = 0
            return
        results = await asyncio.gather(*map(self._check_master, masters))
        self._stats.masters_up = results.count(True)
        current = {str(master.server) for master in masters}
        self._checked = {name: found for name, found in self._checked.items() if name in current}
        self._stats.problems = frozenset[str]().union(*self._checked.values())

    async def _check_master(self, master: RedisLink) -> bool:
        try:
            await master.call(b"PING")
            name = str(master.server)
            if name not in self._checked:
                self._checked[name] = await self._find_problems(master)
        except KvPoolError:
            return False
        return True

    async def _find_problems(self, master: RedisLink) -> frozenset[str]:
        """What is wrong with one master. Raises StoreUnavailable; INFO is needed, CONFIG GET is not."""
        info, save = await master.exchange([pack(b"INFO"), pack(b"CONFIG", b"GET", b"save")])
        saves = bool(save[1]) if isinstance(save, list) and len(save) == 2 else None
        found = problems_of(
            _facts(checked(info)), saves=saves, topology=self._topology, wait_replicas=self._wait_replicas
        )
        for problem, text in found.items():
            _log.warning("Redis at %s (%s): %s", master.server, problem, text)
        return frozenset(found)


def _facts(info: bytes) -> RedisFacts:
    lines = [line.partition(":") for line in info.decode(errors="replace").splitlines()]
    facts: Mapping[str, str] = {name: value for name, _, value in lines}
    try:
        return RedisFacts(
            version=facts.get("redis_version", ""),
            used_bytes=int(facts.get("used_memory", "0")),
            maxmemory_bytes=int(facts.get("maxmemory", "0")),
            maxmemory_policy=facts.get("maxmemory_policy", ""),
            is_append_only=facts.get("aof_enabled", "0") == "1",
            is_cluster=facts.get("cluster_enabled", "0") == "1",
            replica_count=int(facts.get("connected_slaves", "0")),
        )
    except ValueError as error:
        raise StoreUnavailable(f"INFO has a value that is not a number: {error}") from error


_CHECK_INTERVAL_S: Final = 1.0


class RedisIndexStore:
    """IndexStore over Redis. Nothing is connected until it is used, so that Redis may come later than the index."""

    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.5,
        max_in_flight: int = 1024,
        key_prefix: str = "kvpool",
        chunk_stream_count: int = 4,
        stream_entries: int = 4096,
        wait_replicas: int = 0,
    ) -> None:
        """wait_replicas: that must have a batch of changes, within half of timeout_s, before it counts as applied.

        Raises StartupFailed for an invalid URL, which is not shown, because it may hold a password.
        """
        prefix = key_prefix.encode()
        self.redis = RedisStats()
        self._layout = RedisLayout(key_prefix)
        try:
            self.deployment = open_deployment(
                url, timeout_s=timeout_s, max_in_flight=max_in_flight, stats=self.redis, layout=self._layout
            )
        except (ValueError, OSError) as error:
            raise StartupFailed(f"redis_url cannot be used: {error}") from error
        wait_ms = max(1, int(timeout_s * 500))
        replicas = ReplicaWait(replica_count=wait_replicas, wait_ms=wait_ms) if wait_replicas else None
        new_group = self.deployment.connection_group
        reads, changes, self._control = new_group(), new_group(replicas), new_group()
        waiting = [new_group() for _ in range(chunk_stream_count + 1)]
        self._health = RedisHealth(self._control, self.deployment.kind, self.redis, wait_replicas=wait_replicas)
        self.events = RedisEventLog(
            changes,
            self._control,
            waiting,
            self.redis,
            key_prefix=prefix,
            chunk_stream_count=chunk_stream_count,
            max_entries=stream_entries,
        )
        self.nodes = RedisNodeDirectory(
            self._control, self.redis, key_prefix=prefix, event_key=self.events.node_key, event_entries=stream_entries
        )
        self.keyspaces = RedisKeyspaceRegistry(self._control, self.redis, key_prefix=prefix)
        self.policies = RedisPolicyRegistry(self._control, self.redis, key_prefix=prefix)
        self.locations = RedisLocationStore(reads, changes, self.nodes, key_prefix=prefix)

    async def check_layout(self) -> None:
        with suppress(StoreUnavailable, Overloaded, ConnectionError):  # out of reach, or refused: the latter is noted
            replies = await self._control.exchange(self._layout.claim(), [self._layout.key] * 2)
            self._layout.take(replies[-1])
        self._layout.check()

    async def ping(self) -> float:
        started_at_s = time.perf_counter()
        for master in await self._control.masters():
            await master.call(b"PING")
        return time.perf_counter() - started_at_s

    async def run(self) -> None:
        """Check about once a second who the masters are and whether they are well set up, as long as the store is used.

        Raises StartupFailed when its keys have come to be of another layout.
        """
        while True:
            await self.deployment.refresh()
            await self._health.check()
            await self.check_layout()
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def close(self) -> None:
        await self.deployment.close()


def open_deployment(
    url: str,
    *,
    timeout_s: float,
    max_in_flight: int,
    stats: RedisStats | None = None,
    layout: RedisLayout | None = None,
) -> RedisDeployment:
    """What a URL leads to; connected when it is used. Raises ValueError and OSError, see parse_redis_url.

    layout: that its keys must have; None: any.
    """
    parsed = parse_redis_url(url)
    counted = stats if stats is not None else RedisStats()

    def options(*, masters_only: bool = False) -> LinkOptions:
        return LinkOptions(
            login=parsed.login,
            timeout_s=timeout_s,
            max_in_flight=max_in_flight,
            stats=counted,
            masters_only=masters_only,
            layout=layout,
        )

    if parsed.topology == "cluster":
        return Cluster(parsed.servers, options())
    if parsed.sentinel_login is not None:
        asking = LinkOptions(
            login=parsed.sentinel_login, timeout_s=timeout_s / 2, max_in_flight=max_in_flight, stats=RedisStats()
        )
        sentinels = [link_to(server, asking) for server in parsed.servers]
        return SentinelMaster(sentinels, parsed.service, options(masters_only=True))
    return OneMaster(parsed.servers[0], options())
