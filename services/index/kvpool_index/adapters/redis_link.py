"""Raw commands to one Redis: packed by us, pipelined, answered in bytes. Connecting and logging in is redis-py's.

redis-py's own pipeline costs three to five times the processor time of what is done here, and a match is mostly that.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from redis.asyncio.connection import (
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from kvpool.core.errors import StoreUnavailable
from kvpool_index.adapters.redis_lua import Script

Reply = Any
"""bytes, int, None, or a list of replies."""


class _ExchangeMixin:
    """A connection that reads many replies without redis-py's wrapping of each."""

    _parser: Any

    async def read_replies(self, count: int) -> list[Reply]:
        read = self._parser.read_response
        return [await read(disable_decoding=True) for _ in range(count)]


class _TcpConnection(_ExchangeMixin, Connection):
    pass


class _TlsConnection(_ExchangeMixin, SSLConnection):
    pass


class _UnixConnection(_ExchangeMixin, UnixDomainSocketConnection):
    pass


_CONNECTIONS: Final[dict[type, type]] = {
    Connection: _TcpConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _UnixConnection,
}


def pack(*words: bytes) -> bytes:
    """One command as it travels."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def pack_script(script: Script, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    """The command that runs a script by its name."""
    return pack(b"EVALSHA", script.sha, b"%d" % len(keys), *keys, *arguments)


class RedisLink:
    """A bounded pool of connections. Every failure is StoreUnavailable, within the timeout, and nothing is retried."""

    def __init__(self, url: str, *, timeout_s: float, connections: int) -> None:
        """Connects on first use. Raises ValueError for a URL that is none."""
        options: dict[str, Any] = dict(parse_url(url))
        kind = _CONNECTIONS[options.pop("connection_class", Connection)]
        self._timeout_s = timeout_s
        self._pool: Any = BlockingConnectionPool(
            max_connections=connections,
            timeout=timeout_s,
            connection_class=kind,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=False,
            **options,
        )

    async def exchange(self, commands: Sequence[bytes], *, wait_s: float = 0.0) -> list[Reply]:
        """Send packed commands together and return their replies in order; an error reply is returned as a value.

        wait_s: what the commands themselves may wait beyond the timeout.
        """
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                connection = await self._pool.get_connection()
                try:
                    await connection.send_packed_command([b"".join(commands)], check_health=False)
                    replies: list[Reply] = await connection.read_replies(len(commands))
                    return replies
                except BaseException:
                    # Replies that are still to come must not be taken for those of the next caller.
                    await connection.disconnect(nowait=True)
                    raise
                finally:
                    await self._pool.release(connection)
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"Redis does not answer: {_first_line(error)}") from error

    async def call(self, *words: bytes, wait_s: float = 0.0) -> Reply:
        """One command and its reply. Raises StoreUnavailable for an error reply too (loading, full, read-only)."""
        (reply,) = await self.exchange([pack(*words)], wait_s=wait_s)
        return checked(reply)

    async def exchange_scripts(self, commands: Sequence[bytes], scripts: Sequence[Script]) -> list[Reply]:
        """The same as `exchange` for commands that run scripts, which are loaded where the server has lost them.

        Only what did not run for want of a script is sent again. Raises StoreUnavailable for any error reply.
        """
        replies = await self.exchange(commands)
        missing = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
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
        """Close all connections; idempotent."""
        with suppress(RedisError, OSError):
            await self._pool.disconnect()


def checked(reply: Reply) -> Reply:
    """The reply, unless it is an error."""
    if isinstance(reply, ResponseError):
        raise StoreUnavailable(f"Redis refuses: {_first_line(reply)}") from reply
    return reply


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
