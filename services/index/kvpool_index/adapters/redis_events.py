"""The log of events in Redis Streams."""

from collections.abc import Sequence
from typing import Final

from kvpool_index.adapters.redis_lanes import RedisLane
from kvpool_index.adapters.redis_wire import checked, is_error, pack
from kvpool_index.core.events import ORIGIN, LogEntry

_FIELD: Final = b"e"


class RedisEventLog:
    """EventLog over one Redis Stream a partition, each in a slot of its own; the nodes' stream lies with the nodes."""

    def __init__(
        self,
        changes: RedisLane,
        reads: RedisLane,
        waiting: Sequence[RedisLane],
        *,
        key_prefix: bytes,
        chunk_stream_count: int,
        max_entries: int,
    ) -> None:
        """waiting: for each stream a lane on which its one reader waits for the next entry."""
        self._changes = changes
        self._reads = reads
        self._waiting = waiting
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
        lane = self._waiting[stream] if wait_s > 0 else self._reads
        found = await lane.call(self._keys[stream], *words, wait_s=wait_s)
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
            return True  # there is no such stream yet
        facts = dict(zip(state[::2], state[1::2], strict=True))
        return bool(facts.get(b"entries-added") == facts[b"length"])
