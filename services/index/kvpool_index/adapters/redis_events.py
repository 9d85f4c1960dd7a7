"""The log of events in Redis Streams."""

from collections.abc import Sequence
from typing import Final

from kvpool_index.adapters.redis_link import RedisLink, checked, is_error, pack
from kvpool_index.core.events import ORIGIN, LogEntry

_FIELD: Final = b"e"


class RedisEventLog:
    """EventLog over one Redis Stream a partition, each in a slot of its own; the nodes' stream lies with the nodes."""

    def __init__(
        self,
        link: RedisLink,
        waiting: Sequence[RedisLink],
        *,
        key_prefix: bytes,
        chunk_stream_count: int,
        max_entries: int,
    ) -> None:
        """waiting: for each stream a connection on which its one reader waits for the next entry."""
        self._link = link
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
        for reply in await self._link.exchange(commands):
            checked(reply)

    async def tails(self) -> tuple[str, ...]:
        replies = await self._link.exchange([pack(b"XREVRANGE", key, b"+", b"-", b"COUNT", b"1") for key in self._keys])
        return tuple(reply[0][0].decode() if reply else ORIGIN for reply in map(checked, replies))

    async def read(self, stream: int, after: str, *, limit: int, wait_s: float) -> list[LogEntry]:
        words = [b"XREAD", b"COUNT", b"%d" % limit]
        if wait_s > 0:
            words += [b"BLOCK", b"%d" % max(1, int(wait_s * 1000))]
        words += [b"STREAMS", self._keys[stream], after.encode()]
        link = self._waiting[stream] if wait_s > 0 else self._link
        found = await link.call(*words, wait_s=wait_s)
        entries = found[0][1] if found else []
        return [LogEntry(entry_id.decode(), pairs[1]) for entry_id, pairs in entries]

    async def is_kept(self, stream: int, entry_id: str) -> bool:
        key, position = self._keys[stream], entry_id.encode()
        here, state = await self._link.exchange(
            [pack(b"XRANGE", key, position, position), pack(b"XINFO", b"STREAM", key)]
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
