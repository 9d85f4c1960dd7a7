"""Raw commands over one pipelined connection: packed by us, parsed by hiredis, answered in bytes.

A match is mostly its round trip to Redis, and redis-py's pool and pipeline cost several times the processor time of
what is done here.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import hiredis

from kvpool.core.errors import StoreUnavailable
from kvpool_index.adapters.redis_lua import Script

Reply = Any
"""bytes, int, None, a list of replies, or (until it is `checked`) a hiredis.ReplyError."""


def pack(*words: bytes) -> bytes:
    """One command as it travels."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def pack_script(script: Script, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    """The command that runs a script by its name."""
    return pack(b"EVALSHA", script.sha, b"%d" % len(keys), *keys, *arguments)


def checked(reply: Reply) -> Reply:
    """The reply, unless it is an error (loading, full, read-only, ...): then StoreUnavailable."""
    if isinstance(reply, hiredis.ReplyError):
        raise StoreUnavailable(f"Redis refuses: {reply}")
    return reply


def is_error(reply: Reply) -> bool:
    """Whether Redis refused the command."""
    return isinstance(reply, hiredis.ReplyError)


def lacks_script(reply: Reply) -> bool:
    """Whether Redis lacks the script that it was asked to run."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def is_redirection(reply: Reply) -> bool:
    """Whether a member of a Cluster did not run the command because another one is to."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("MOVED", "ASK", "TRYAGAIN"))


class Connection(asyncio.Protocol):
    """One connection. Replies come in the order of the commands, so a queue assigns them."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._is_within_reply = False  # a part of a list may be taken already, and then the reader has no data either
        self._waiting: deque[tuple[int, list[Reply], asyncio.Future[list[Reply]], float]] = deque()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # one for all who wait: one for each costs as much as parsing
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes | bytearray] = []
        self._ended = asyncio.Event()
        self.is_open = True

    @property
    def waiting_count(self) -> int:
        """Exchanges whose replies have not all come."""
        return len(self._waiting)

    def send(self, packed: bytes | bytearray, reply_count: int, timeout_s: float) -> "asyncio.Future[list[Reply]]":
        """Write commands; the future gets their replies, or ConnectionError. Cancelling it forgets the replies only.

        Without an answer in time the future gets TimeoutError, and the connection is closed: replies come in order.
        """
        answered: asyncio.Future[list[Reply]] = self._loop.create_future()
        if self._transport is None or not self.is_open:
            answered.set_exception(ConnectionError("the connection is closed"))
        else:
            ends_at_s = self._loop.time() + timeout_s
            self._waiting.append((reply_count, [], answered, ends_at_s))
            if self._timer is None or ends_at_s < self._timer.when():
                self._watch(ends_at_s)
            if len(self._waiting) == 1:
                self._transport.write(packed)  # no other command is pending: at once
            else:
                if not self._unsent:
                    self._loop.call_soon(self._write_unsent)
                self._unsent.append(packed)
        return answered

    def abort(self, cause: str) -> None:
        """Close at once; all waiters get ConnectionError."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        self._fail_all(cause)

    async def close(self) -> None:
        """Abort, and wait until the socket is closed."""
        self.abort("the index is closing")
        await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other loops than asyncio's have classes of their own

    def data_received(self, data: bytes) -> None:
        try:
            self._take(data)
        except hiredis.ProtocolError as error:
            self.abort(f"the server sent an invalid reply: {error}")

    def _take(self, data: bytes) -> None:
        if len(self._waiting) == 1 and not self._is_within_reply and not self._reader.has_data():
            data = self._take_equal(data)
        self._reader.feed(data)
        while self._waiting:
            reply_count, replies, answered, _ = self._waiting[0]
            while len(replies) < reply_count:
                reply = self._reader.gets()
                if reply is False:  # not all of it is here yet
                    self._is_within_reply = True
                    return
                replies.append(reply)
            self._waiting.popleft()
            self._is_within_reply = False
            if not answered.done():
                answered.set_result(replies)
            if not self._reader.has_data():
                return

    def _take_equal(self, data: bytes) -> bytes:
        """Parse one reply for all if they are equal, as those about a chain at one place are; returns what is left."""
        reply_count, replies, _, _ = self._waiting[0]
        size = len(data) // reply_count
        first = data[:size]
        if replies or reply_count == 1 or data != first * reply_count:
            return data
        self._reader.feed(first)
        reply = self._reader.gets()
        if reply is False:
            return data[size:]
        if self._reader.has_data():  # it repeats itself, but not by replies
            replies.append(reply)
            return data[size:]
        replies += [reply] * reply_count
        return b""

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail_all(f"the connection was lost: {exc or 'closed by Redis'}")
        self._ended.set()

    def _write_unsent(self) -> None:
        """Write together what was sent in one pass of the loop: Redis reads and answers it together, too."""
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and self.is_open:
            self._transport.write(b"".join(unsent))

    def _watch(self, ends_at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(ends_at_s, self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._timer = None
        if not self._waiting:  # the next `send` starts it again
            return
        first_s = min(ends_at_s for _, _, _, ends_at_s in self._waiting)
        if first_s > self._loop.time():
            self._watch(first_s)
            return
        for _, _, answered, ends_at_s in self._waiting:
            if ends_at_s == first_s and not answered.done():
                answered.set_exception(TimeoutError())
        self.abort("another call was not answered in time")

    def _fail_all(self, cause: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, _, answered, _ = self._waiting.popleft()
            if not answered.done():
                answered.set_exception(ConnectionError(cause))
