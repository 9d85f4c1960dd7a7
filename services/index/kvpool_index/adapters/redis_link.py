"""Raw commands to one Redis over one pipelined connection: packed by us, parsed by hiredis, answered in bytes.

A match is mostly its round trip to Redis, and redis-py's pool and pipeline cost several times the processor time of
what is done here. redis-py still reads the URL.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import hiredis
from redis.asyncio.connection import parse_url

from kvpool.core.errors import Overloaded, StoreUnavailable
from kvpool_index.adapters.redis_lua import Script

Reply = Any
"""bytes, int, None, a list of replies, or (only from `exchange`) a hiredis.ReplyError."""

_TLS_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_PLAIN_OPTIONS: Final = frozenset({"host", "port", "db", "username", "password", "path", "connection_class"})


def pack(*words: bytes) -> bytes:
    """One command as it travels."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def pack_script(script: Script, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    """The command that runs a script by its name."""
    return pack(b"EVALSHA", script.sha, b"%d" % len(keys), *keys, *arguments)


class _Connection(asyncio.Protocol):
    """One connection. Replies come in the order of the commands, so a queue tells whose they are."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[int, list[Reply], asyncio.Future[list[Reply]]]] = deque()
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.Event()
        self.is_open = True

    @property
    def waiting_count(self) -> int:
        """Exchanges whose replies have not all come."""
        return len(self._waiting)

    def send(self, packed: bytes, reply_count: int) -> "asyncio.Future[list[Reply]]":
        """Write commands; the future gets their replies, or ConnectionError. Cancelling it forgets the replies only."""
        answered: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        if self._transport is None or not self.is_open:
            answered.set_exception(ConnectionError("the connection is closed"))
        else:
            self._waiting.append((reply_count, [], answered))
            self._transport.write(packed)
        return answered

    def abort(self, cause: str) -> None:
        """Close at once; everybody who waits gets ConnectionError."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        self._fail_all(cause)

    async def close(self) -> None:
        """Abort, and wait until the socket is closed."""
        self.abort("the index is closing")
        await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while self._waiting:
            reply_count, replies, answered = self._waiting[0]
            while len(replies) < reply_count:
                try:
                    reply = self._reader.gets()
                except hiredis.ProtocolError as error:
                    return self.abort(f"what came is no reply: {error}")
                if reply is False:  # not all of it is here yet
                    return None
                replies.append(reply)
            self._waiting.popleft()
            if not answered.done():
                answered.set_result(replies)
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail_all(f"the connection was lost: {exc or 'closed by Redis'}")
        self._ended.set()

    def _fail_all(self, cause: str) -> None:
        while self._waiting:
            _, _, answered = self._waiting.popleft()
            if not answered.done():
                answered.set_exception(ConnectionError(cause))


class RedisLink:
    """A connection that is made when it is needed and made again after a failure.

    Every failure is StoreUnavailable, within the timeout, and nothing is retried. Use from one event loop only.
    """

    def __init__(self, url: str, *, timeout_s: float, max_in_flight: int) -> None:
        """Connects on first use. Raises ValueError for a URL that is none, or with options that are not served."""
        self._options: dict[str, Any] = dict(parse_url(url))
        refused = self._options.keys() - _PLAIN_OPTIONS - _TLS_OPTIONS
        if refused:
            raise ValueError(f"options {', '.join(sorted(refused))} are not supported")
        self._tls = _tls_context(self._options) if url.startswith("rediss:") else None
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None

    async def exchange(self, commands: Sequence[bytes], *, wait_s: float = 0.0) -> list[Reply]:
        """Send packed commands together and return their replies in order; an error reply is returned as a value.

        wait_s: what the commands themselves may wait beyond the timeout; nobody else may use this link meanwhile.
        """
        connection = self._connection
        try:
            if connection is None or not connection.is_open:
                connection = await self._connect()
            if connection.waiting_count >= self._max_in_flight:
                raise Overloaded(f"{self._max_in_flight} calls wait for Redis already")
            async with asyncio.timeout(self._timeout_s + wait_s):
                return await connection.send(b"".join(commands), len(commands))
        except TimeoutError as error:
            if connection is not None:
                connection.abort("another call was not answered in time")
            raise StoreUnavailable(f"Redis did not answer within {self._timeout_s + wait_s:g} s") from error
        except OSError as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}") from error
        except asyncio.CancelledError:
            if wait_s and connection is not None:
                connection.abort("the call that waited was cancelled")  # it would hold up whoever comes next
            raise

    async def call(self, *words: bytes, wait_s: float = 0.0) -> Reply:
        """One command and its reply. Raises StoreUnavailable for an error reply too (loading, full, read-only)."""
        (reply,) = await self.exchange([pack(*words)], wait_s=wait_s)
        return checked(reply)

    async def exchange_scripts(self, commands: Sequence[bytes], scripts: Sequence[Script]) -> list[Reply]:
        """The same as `exchange` for commands that run scripts, which are loaded where the server has lost them.

        Only what did not run for want of a script is sent again. Raises StoreUnavailable for any error reply.
        """
        replies = await self.exchange(commands)
        missing = [at for at, reply in enumerate(replies) if _lacks_script(reply)]
        if missing:
            await self.exchange([pack(b"SCRIPT", b"LOAD", script.source) for script in scripts])
            again = await self.exchange([commands[at] for at in missing])
            for at, reply in zip(missing, again, strict=True):
                replies[at] = reply
        for reply in replies:
            checked(reply)
        return replies

    async def run(self, script: Script, keys: Sequence[bytes], *arguments: bytes) -> Reply:
        """Run one script."""
        (reply,) = await self.exchange_scripts([pack_script(script, keys, *arguments)], [script])
        return reply

    async def close(self) -> None:
        """Close the connection; idempotent."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _connect(self) -> _Connection:
        """A fresh connection, logged in. All who need one at the same time share one attempt, and its failure."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open(), name="redis-connect")
            self._connecting.add_done_callback(self._connect_ended)
        return await asyncio.shield(self._connecting)

    def _connect_ended(self, attempt: "asyncio.Task[_Connection]") -> None:
        self._connecting = None
        if not attempt.cancelled() and attempt.exception() is None:
            self._connection = attempt.result()

    async def _open(self) -> _Connection:
        options, loop = self._options, asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            connection: _Connection
            if "path" in options:
                _, connection = await loop.create_unix_connection(_Connection, options["path"])
            else:
                host, port = options.get("host", "localhost"), options.get("port", 6379)
                _, connection = await loop.create_connection(_Connection, host, port, ssl=self._tls)
            try:
                await _log_in(connection, options)
            except BaseException:
                connection.abort("login failed")
                raise
            return connection


async def _log_in(connection: _Connection, options: dict[str, Any]) -> None:
    commands = _login_commands(options)
    for reply in await connection.send(b"".join(commands), len(commands)):
        if is_error(reply):
            raise ConnectionError(f"login was refused: {reply}")


def checked(reply: Reply) -> Reply:
    """The reply, unless it is an error."""
    if isinstance(reply, hiredis.ReplyError):
        raise StoreUnavailable(f"Redis refuses: {reply}")
    return reply


def is_error(reply: Reply) -> bool:
    """Whether Redis refused the command."""
    return isinstance(reply, hiredis.ReplyError)


def _lacks_script(reply: Reply) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def _login_commands(options: dict[str, Any]) -> list[bytes]:
    """What a connection says first. PING last, so that Redis has answered once before the connection is used."""
    commands: list[bytes] = []
    if options.get("password"):
        names = [options["username"].encode()] if options.get("username") else []
        commands.append(pack(b"AUTH", *names, options["password"].encode()))
    if options.get("db"):
        commands.append(pack(b"SELECT", b"%d" % options["db"]))
    return [*commands, pack(b"PING")]


def _tls_context(options: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_certfile"):
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    return context
