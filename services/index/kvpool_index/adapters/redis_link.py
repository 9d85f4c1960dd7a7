"""One connection to one master: made on first use, made again after a failure, and checked for the layout of the keys.

A mark beside the keys of a prefix says which layout they have, so that no release takes those of another for its own.
The mark is read on every connection, because a failover may lead to the Redis of another release, and set again about
once a second, because FLUSHALL removes it. It lies in the slot of the node records: what loses them loses it too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvpool.core.errors import Overloaded, StartupFailed, StoreUnavailable
from kvpool_index.adapters.redis_lua import Script
from kvpool_index.adapters.redis_url import HINT_PLAIN, HINT_TLS, Login, Server, explain_tls
from kvpool_index.adapters.redis_wire import Connection, Reply, checked, is_error, lacks_script, pack
from kvpool_index.core.redis_stats import RedisStats

LAYOUT: Final = 3
"""Counted up when keys of the same names change their meaning for readers or writers."""

_SHOWN_CHARS: Final = 32


class RedisLayout:
    """The last mark seen in a deployment. Keys without a mark have the layout of the first release that marks them."""

    def __init__(self, key_prefix: str, layout: int = LAYOUT) -> None:
        self._prefix = key_prefix
        self._layout = b"%d" % layout
        self.key = key_prefix.encode() + b":{n}:layout"
        self._refusal = ""

    def question(self) -> bytes:
        """A command whose reply `take` understands."""
        return pack(b"GET", self.key)

    def claim(self) -> list[bytes]:
        """Return commands that set the mark if it is missing; the first of two counts. `take` the last reply."""
        return [pack(b"SET", self.key, self._layout, b"NX"), self.question()]

    def take(self, reply: Reply) -> None:
        """Note what the mark is; raises ConnectionError for that of another layout.

        An error is not a mark: another member of the Cluster has it, or the server is loading.
        """
        if reply is None or is_error(reply):
            return
        self._refusal = self._refuse(reply) if reply != self._layout else ""
        if self._refusal:
            raise ConnectionError(self._refusal)

    def check(self) -> None:
        """Raise StartupFailed if the mark that was seen last is of another layout."""
        if self._refusal:
            raise StartupFailed(self._refusal)

    def _refuse(self, found: bytes) -> str:
        shown = ascii(found[:_SHOWN_CHARS].decode("latin-1"))
        ours = self._layout.decode()
        return (
            f"the keys {self._prefix}:* in Redis have layout {shown}, and this release has layout '{ours}': run "
            "the release that wrote them, or give this one a redis_key_prefix of its own, or stop all index replicas "
            "of the other and delete its keys (docs/upgrades.md, 'Deleting the keys of a prefix'); nodes announce "
            "again what they hold"
        )


ResultT = TypeVar("ResultT")

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.25
_SHARE_OF_HANDSHAKE: Final = 0.7  # of the time for a connection, so that the cause can be reported


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWait:
    """Replicas that must have what a call changed before it counts as done, and how long to wait for them."""

    replica_count: int
    wait_ms: int

    def command(self) -> bytes:
        """WAIT, packed."""
        return pack(b"WAIT", b"%d" % self.replica_count, b"%d" % self.wait_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What all links to one deployment have in common."""

    login: Login
    timeout_s: float
    max_in_flight: int
    stats: RedisStats
    masters_only: bool = False  # ask each server for its role, and refuse one that is not a master
    layout: RedisLayout | None = None  # ask each server for it, and refuse one of another


class RedisLink:
    """Every failure is StoreUnavailable, within the timeout, and nothing is retried. Use from one event loop only.

    After a failed attempt to connect the next one comes after a pause that doubles, with jitter, to a quarter of a
    second; calls wait for it as long as their timeout lets them. All who need a connection share one attempt.
    """

    def __init__(self, find: Callable[[], Awaitable[Server]], options: LinkOptions) -> None:
        """Connects on first use. find: returns the server before each attempt; may raise OSError."""
        self._find = find
        self._options = options
        self._timeout_s = options.timeout_s
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._failures = 0
        self._joined = 0
        self._is_closed = False
        self.server: Server | None = None  # that the connection leads to, or led to last

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None and self._connection.is_open

    @property
    def is_failing(self) -> bool:
        """Whether there is no connection and the last attempt at one failed."""
        return self._failures > 0 and not self.is_open

    def connect_soon(self) -> None:
        """Try to connect in the background, for those who do not wait for it."""
        if self._connecting is None and not self._is_closed:
            self._begin_connecting()

    async def exchange(
        self,
        commands: Sequence[bytes],
        *,
        scripts: Sequence[Script] = (),
        wait_s: float = 0.0,
        replicas: ReplicaWait | None = None,
    ) -> list[Reply]:
        """Send packed commands together and return their replies in order; an error reply is returned as a value.

        scripts: loaded where the server has lost them, and then only what did not run for want of one is sent again.
        wait_s: what the commands themselves may wait beyond the timeout; no other call may use this link meanwhile.
        replicas: StoreUnavailable unless so many have, in time, what was sent through this connection so far.
        """
        replies = await self._exchange_waiting(commands, wait_s, replicas)
        if scripts:
            missing = [at for at, reply in enumerate(replies) if lacks_script(reply)]
            if missing:
                loads = [pack(b"SCRIPT", b"LOAD", script.source) for script in scripts]
                await self._exchange(b"".join(loads), len(loads), 0.0)
                again = await self._exchange_waiting([commands[at] for at in missing], wait_s, replicas)
                for at, reply in zip(missing, again, strict=True):
                    replies[at] = reply
        return replies

    async def call(self, *words: bytes) -> Reply:
        """One command and its reply. Raises StoreUnavailable for an error reply too (loading, full, read-only)."""
        (reply,) = await self._exchange(pack(*words), 1, 0.0)
        return checked(reply)

    def reset(self, cause: str) -> None:
        """Give the connection up, so that the next call makes a new one; who waits gets StoreUnavailable."""
        if self._connection is not None:
            self._connection.abort(cause)

    async def close(self) -> None:
        """Close the connection for good; idempotent."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _exchange_waiting(
        self, commands: Sequence[bytes], wait_s: float, replicas: ReplicaWait | None
    ) -> list[Reply]:
        if replicas is None:
            return await self._exchange(b"".join(commands), len(commands), wait_s)
        # In one with the commands: WAIT is about what came before it on its own connection.
        *replies, reached = await self._exchange(b"".join((*commands, replicas.command())), len(commands) + 1, wait_s)
        if checked(reached) < replicas.replica_count:
            raise StoreUnavailable(f"only {reached} of {replicas.replica_count} replicas have it")
        return replies

    async def exchange_packed(self, packed: bytes | bytearray, command_count: int) -> list[Reply]:
        """The same for commands that are packed in one piece, and need neither scripts nor replicas."""
        return await self._exchange(packed, command_count, 0.0)

    async def _exchange(self, packed: bytes | bytearray, command_count: int, wait_s: float) -> list[Reply]:
        connection, limit_s = self._connection, self._timeout_s + wait_s
        try:
            if connection is None or not connection.is_open:
                ends_at_s = asyncio.get_running_loop().time() + limit_s
                async with asyncio.timeout_at(ends_at_s):
                    connection = await self._connect()
                limit_s = ends_at_s - asyncio.get_running_loop().time()
            if connection.waiting_count >= self._options.max_in_flight:
                raise Overloaded(f"{self._options.max_in_flight} calls wait for Redis already")
            return await connection.send(packed, command_count, limit_s)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self._name()} did not answer within {self._timeout_s + wait_s:g} s") from error
        except OSError as error:
            raise StoreUnavailable(f"{self._name()} cannot be reached: {explain_tls(error)}") from error
        except asyncio.CancelledError:
            if wait_s and connection is not None:
                connection.abort("the call that waited was cancelled")  # it would block the next call
            raise

    def _name(self) -> str:
        return f"Redis at {self.server}" if self.server is not None else "Redis"

    async def _connect(self) -> Connection:
        """A fresh connection, logged in. All who need one at the same time share one attempt, and its failure."""
        if self._is_closed:
            raise ConnectionError("the connection is not wanted any more")
        if self._joined >= self._options.max_in_flight:
            raise Overloaded(f"{self._options.max_in_flight} calls wait for a connection to Redis already")
        connecting = self._connecting or self._begin_connecting()
        self._joined += 1
        try:
            return await shared(connecting)
        finally:
            self._joined -= 1

    def _begin_connecting(self) -> asyncio.Task[Connection]:
        if self._connection is not None:
            self._options.stats.reconnects += 1
            self._connection = None
        self._connecting = asyncio.create_task(self._open(), name="redis-connect")
        self._connecting.add_done_callback(self._connect_ended)
        return self._connecting

    def _connect_ended(self, attempt: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if attempt.cancelled():
            return
        if attempt.exception() is None:
            self._connection = attempt.result()
            self._failures = 0
            self._options.stats.connects += 1
        else:
            self._failures += 1
            self._options.stats.failed_connects += 1

    async def _open(self) -> Connection:
        if self._failures:
            longest_s = min(_LONGEST_PAUSE_S, self._timeout_s / 2)
            pause_s = min(longest_s, _FIRST_PAUSE_S * (1 << min(self._failures, 16)))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        async with asyncio.timeout(self._timeout_s):
            server = self.server = await self._find()
            connection = await _connected(server, self._options.login, self._timeout_s)
            try:
                await _log_in(connection, self._options)
            except BaseException:
                connection.abort("login failed")
                raise
            return connection


async def shared(work: asyncio.Task[ResultT]) -> ResultT:
    """Return the result of shared work, which outlives a cancelled waiter. ConnectionError if it was cancelled."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if work.cancelled() and current is not None and not current.cancelling():
            raise ConnectionError("the connection is not wanted any more") from None
        raise


def link_to(server: Server, options: LinkOptions) -> RedisLink:
    """A link to one server."""

    async def find() -> Server:
        return server

    return RedisLink(find, options)


async def _connected(server: Server, login: Login, timeout_s: float) -> Connection:
    loop = asyncio.get_running_loop()
    if server.path:
        _, connection = await loop.create_unix_connection(Connection, server.path)
    else:
        tls = login.tls.context() if login.tls is not None else None
        # A plain Redis waits for the end of a line: only a timeout shows that it has no TLS.
        limit_s = timeout_s * _SHARE_OF_HANDSHAKE if tls is not None else None
        _, connection = await loop.create_connection(
            Connection, server.host, server.port, ssl=tls, ssl_handshake_timeout=limit_s
        )
    return connection


async def _log_in(connection: Connection, options: LinkOptions) -> None:
    login, layout = options.login, options.layout
    questions = ([pack(b"ROLE")] if options.masters_only else []) + ([layout.question()] if layout is not None else [])
    commands = [*login.commands(), *questions]
    try:
        replies = await connection.send(b"".join(commands), len(commands), options.timeout_s)
    except ConnectionError as error:
        hint = HINT_PLAIN if login.tls is None else HINT_TLS
        raise ConnectionError(f"{error}, before its first answer; {hint}") from error
    mark = replies.pop() if layout is not None else None
    for reply in replies:
        if is_error(reply):
            # A server without AUTH, or a proxy, repeats the arguments of a command that it does not know.
            raise ConnectionError(f"login was refused: {str(reply).partition(', with args')[0]}")
    if options.masters_only and replies[-1][0] != b"master":
        raise ConnectionError(f"it is not a master but a {replies[-1][0].decode()}")
    if layout is not None:
        layout.take(mark)
