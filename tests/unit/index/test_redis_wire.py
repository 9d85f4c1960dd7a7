"""One connection to Redis, against a peer that answers on command."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import hiredis
import pytest

from kvpool.testing import eventually
from kvpool_index.adapters.redis_wire import Connection, pack

PING = pack(b"PING")
NEVER_S = 3600.0


class Peer(asyncio.Protocol):
    """The server's end."""

    def __init__(self) -> None:
        self.connected, self.ended = asyncio.Event(), asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self.heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.connected.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def say(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class Unread(asyncio.Transport):
    """Takes what is written, and nothing comes of it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass


@asynccontextmanager
async def connected() -> AsyncGenerator[tuple[Peer, Connection]]:
    peer, loop = Peer(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: peer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        await peer.connected.wait()
        try:
            yield peer, connection
        finally:
            await connection.close()
            await peer.ended.wait()


async def test_replies_go_to_whom_they_are_for_however_they_are_cut() -> None:
    async with connected() as (peer, connection):
        first, second = connection.send(PING * 2, 2, NEVER_S), connection.send(PING, 1, NEVER_S)
        peer.say(b"+a\r\n+")
        peer.say(b"b\r\n")
        assert await first == [b"a", b"b"] and not second.done()
        peer.say(b"+c\r\n")
        assert await second == [b"c"] and connection.waiting_count == 0


async def test_what_ends_a_reply_that_came_in_parts_is_no_reply() -> None:
    """The parser has taken all that came, and yet is in the middle of a reply."""
    connection = Connection()
    connection.connection_made(Unread())
    answered = connection.send(PING * 2, 2, NEVER_S)
    connection.data_received(b"*1\r\n*1\r\n")
    connection.data_received(b":1\r\n:1\r\n")
    assert await answered == [[[1]], 1]
    connection.abort("over")


@pytest.mark.parametrize("reply", [b"+a\r\n", b"*2\r\n$1\r\nx\r\n$-1\r\n", b"*0\r\n", b"$4\r\n+a\r\n\r\n"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", range(0, 9, 2))
async def test_equal_replies_are_distinguished_from_parts_of_them(reply: bytes, count: int, cut: int) -> None:
    connection = Connection()
    connection.connection_made(Unread())
    answers = [connection.send(PING * count, count, NEVER_S), connection.send(PING * 2, 2, NEVER_S)]
    reader = hiredis.Reader()
    reader.feed(reply)
    parsed = reader.gets()
    data = reply * count
    for part in (data[:cut], data[cut:], reply, reply):
        connection.data_received(part)
    assert [await answer for answer in answers] == [[parsed] * count, [parsed] * 2]
    last = connection.send(PING * count, count, NEVER_S)
    connection.data_received(data)
    assert await last == [parsed] * count
    connection.abort("the test ends")


async def test_an_invalid_reply_ends_the_connection() -> None:
    connection = Connection()
    connection.connection_made(Unread())
    answer = connection.send(PING * 2, 2, NEVER_S)
    connection.data_received(b"?!?!")
    with pytest.raises(ConnectionError, match="invalid reply"):
        await answer
    assert not connection.is_open


async def test_what_is_sent_together_keeps_its_order() -> None:
    async with connected() as (peer, connection):
        names = [b"%d" % number for number in range(20)]
        answers = [connection.send(pack(name), 1, NEVER_S) for name in names[:10]]
        await asyncio.sleep(0)  # a pass of the loop, in which some are written
        answers += [connection.send(pack(name), 1, NEVER_S) for name in names[10:]]
        await eventually(lambda: len(peer.heard) == len(b"".join(map(pack, names))))
        assert peer.heard == b"".join(map(pack, names))
        peer.say(b"".join(b"+%b\r\n" % name for name in names))
        assert await asyncio.gather(*answers) == [[name] for name in names]


async def test_what_was_about_to_be_sent_on_a_connection_that_ends_fails_with_the_others() -> None:
    async with connected() as (_, connection):
        answers = [connection.send(PING, 1, NEVER_S) for _ in range(3)]
        connection.abort("this test ends it")
        for answer in answers:
            with pytest.raises(ConnectionError, match="this test"):
                await answer


async def test_a_client_that_waits_too_long_gets_an_error_and_the_connection_ends() -> None:
    async with connected() as (_, connection):
        slow = connection.send(PING, 1, NEVER_S)
        quick = connection.send(PING, 1, 1e-4)
        with pytest.raises(TimeoutError):
            await quick
        with pytest.raises(ConnectionError, match="another call was not answered in time"):
            await slow
        assert not connection.is_open
        with pytest.raises(ConnectionError):
            await connection.send(PING, 1, NEVER_S)


async def test_a_caller_who_leaves_does_not_hide_that_nothing_is_answered() -> None:
    async with connected() as (_, connection):
        connection.send(PING, 1, 1e-4).cancel()
        with pytest.raises(ConnectionError, match="another call"):
            await connection.send(PING, 1, NEVER_S)


async def test_an_answer_in_time_is_no_failure_later() -> None:
    async with connected() as (peer, connection):
        for limit_s in (NEVER_S, 30.0, 60.0):
            answer = connection.send(PING, 1, limit_s)
            peer.say(b"+PONG\r\n")
            assert await answer == [b"PONG"]
        late = connection.send(PING, 1, 1e-4)
        with pytest.raises(TimeoutError):
            await late
