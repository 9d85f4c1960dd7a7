"""A Redis Cluster: keys in 16,384 slots, which masters share and move between each other.

We ask for the slots and follow redirections ourselves: redis-py's Cluster client does both inside a pipeline of its
own, which is what costs too much, and cannot be given our connections.
"""

import asyncio
import itertools
import logging
import random
from binascii import crc_hqx
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvpool.core.errors import KvPoolError, StoreUnavailable
from kvpool_index.adapters.redis_connections import ConnectionGroup
from kvpool_index.adapters.redis_link import LinkOptions, RedisLink, ReplicaWait, link_to, shared
from kvpool_index.adapters.redis_lua import Script
from kvpool_index.adapters.redis_url import Server
from kvpool_index.adapters.redis_wire import Reply, checked, is_error, is_redirection, pack

_log = logging.getLogger(__name__)

SLOT_COUNT: Final = 16384
_REFRESH_PAUSE_S: Final = 0.1


def slot_of(key: bytes) -> int:
    """The slot of a key: of what is between its first { and the next }, if that is anything, else of all of it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) & (SLOT_COUNT - 1)


class SlotMap:
    """Which master owns which slot, as far as is known. Asked for on first use, and again when it proves wrong."""

    def __init__(self, seeds: Sequence[Server], options: LinkOptions) -> None:
        self._seeds = seeds
        self._options = options
        self._links: dict[Server, RedisLink] = {}
        self._owners: list[Server | None] = []
        self._refreshing: asyncio.Task[None] | None = None
        self._cause = "none has any"
        self.on_change: list[Callable[[frozenset[Server]], None]] = []

    @property
    def masters(self) -> frozenset[Server]:
        """All owners of slots."""
        return frozenset(owner for owner in self._owners if owner is not None)

    async def load(self) -> None:
        """Load the slots, once. Raises StoreUnavailable if no member of the Cluster answers."""
        if self._owners:
            return
        self.refresh_soon(pause_s=0.0)
        assert self._refreshing is not None
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await shared(self._refreshing)
        except OSError as error:
            raise StoreUnavailable("no member of the Cluster reports its slots in time") from error
        if not self._owners:
            raise StoreUnavailable(f"no member of the Cluster reports its slots: {self._cause}")

    def owner(self, key: bytes) -> Server:
        """The master that has a key. Raises StoreUnavailable if its slot has none."""
        owner = self.find(key)
        if owner is None:
            raise StoreUnavailable(f"slot {slot_of(key)} of the Cluster has no master")
        return owner

    def find(self, key: bytes) -> Server | None:
        """The master that has a key; None if its slot has none as far as is known, and then the map is asked for."""
        owner = self._owners[slot_of(key)]
        if owner is None:
            self.refresh_soon()
        return owner

    def moved(self, slot: int, owner: Server) -> None:
        """Take over what a redirection says, and ask for the rest."""
        if self._owners and self._owners[slot] != owner:
            self._owners[slot] = owner
            self.refresh_soon()

    def refresh_soon(self, *, pause_s: float = _REFRESH_PAUSE_S) -> None:
        """Ask again in the background; once, however many find that they should."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(pause_s), name="redis-slots")
            self._refreshing.add_done_callback(self._refreshed)

    async def close(self) -> None:
        """End what runs in the background; idempotent."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        for link in self._links.values():
            await link.close()

    def _refreshed(self, done: "asyncio.Task[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("the slots of the Cluster cannot be read", exc_info=error)

    async def _refresh(self, pause_s: float) -> None:
        try:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            await self._ask_members()
        finally:
            # Here, not in a callback: a wrong map that is found before the callback runs would not be asked for.
            self._refreshing = None

    async def _ask_members(self) -> None:
        """Ask all members that are known, and take the first answer."""
        asked = [asyncio.create_task(self._ask(server)) for server in {*self._seeds, *self.masters}]
        try:
            for each in asyncio.as_completed(asked):
                try:
                    found = await each
                except KvPoolError as error:
                    self._cause = str(error)
                    continue
                if any(found):
                    return self._take(found)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return None

    async def _ask(self, server: Server) -> list[Server | None]:
        link = self._links.get(server)
        if link is None:
            link = self._links[server] = link_to(server, self._options)
        owners: list[Server | None] = [None] * SLOT_COUNT
        ranges = await link.call(b"CLUSTER", b"SLOTS")
        try:
            for first, last, master, *_ in ranges:
                # A member that does not know its own address leaves it out.
                owner = Server((master[0] or b"").decode() or server.host, master[1])
                owners[first : last + 1] = [owner] * (last + 1 - first)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise StoreUnavailable(f"{server} is not a member of a Cluster, by its answer") from error
        return owners

    def _take(self, found: list[Server | None]) -> None:
        before, self._owners = self.masters, found
        masters = self.masters
        self._options.stats.masters = len(masters)
        if before and masters - before:
            self._options.stats.failovers += 1
            _log.warning("masters of the Cluster: %s", ", ".join(sorted(map(str, masters))))
        for changed in self.on_change:
            changed(masters)


_QUICK_ROUNDS: Final = 3  # of redirections without a pause; one is what a call usually needs
_PAUSE_S: Final = 0.02
_OUT_OF_REACH: Final = ("CLUSTERDOWN", "MASTERDOWN", "LOADING")
_ASKING: Final = pack(b"ASKING")


class ClusterGroup(ConnectionGroup):
    """One connection to each master that is needed."""

    def __init__(self, slots: SlotMap, options: LinkOptions, replicas: ReplicaWait | None) -> None:
        self._slots = slots
        self._options = options
        self._replicas = replicas
        self._links: dict[Server, RedisLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        slots.on_change.append(self._leave_others)

    async def exchange(
        self,
        commands: Sequence[bytes],
        keys: Sequence[bytes],
        *,
        scripts: Sequence[Script] = (),
        wait_s: float = 0.0,
        try_again: bool = True,
    ) -> list[Reply]:
        ends_at_s = asyncio.get_running_loop().time() + self._options.timeout_s + wait_s
        await self._slots.load()
        parts: dict[Server, list[int]] = {}
        for at, key in enumerate(keys):
            parts.setdefault(self._slots.owner(key), []).append(at)
        replies: list[Reply] = [None] * len(commands)
        sends = [self._send(owner, commands, keys, part, replies, scripts, wait_s) for owner, part in parts.items()]
        await _all(sends)
        if any(map(is_error, replies)):
            await self._redirect(commands, keys, replies, scripts, wait_s, ends_at_s, try_again=try_again)
        return replies

    async def exchange_reachable(self, commands: Sequence[bytes], keys: Sequence[bytes]) -> list[Reply]:
        """An error only if every master was asked and none serves its slots, or the masters are not known."""
        ends_at_s = asyncio.get_running_loop().time() + self._options.timeout_s
        await self._slots.load()
        parts: dict[Server, list[int]] = {}
        for at, key in enumerate(keys):
            if (owner := self._slots.find(key)) is not None:
                parts.setdefault(owner, []).append(at)
        replies: list[Reply] = [None] * len(commands)
        sends = (self._send_if_reachable(owner, commands, keys, part, replies) for owner, part in parts.items())
        failures: list[StoreUnavailable] = []
        for result in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(result, StoreUnavailable):
                failures.append(result)
            elif result is not None:
                raise result
        if len(failures) == len(parts) and self._slots.masters <= parts.keys():
            raise failures[0] if failures else StoreUnavailable("no slot of the Cluster has a master")
        if any(map(is_error, replies)):
            with suppress(StoreUnavailable):
                await self._redirect(commands, keys, replies, (), 0.0, ends_at_s)
            replies = [None if _is_out_of_reach(reply) else reply for reply in replies]
            if self._slots.masters <= parts.keys() and all(reply is None for reply in replies):
                raise StoreUnavailable("no master of the Cluster serves its slots just now")
        return replies

    async def masters(self) -> list[RedisLink]:
        await self._slots.load()
        return [self._link(server) for server in sorted(self._slots.masters, key=str)]

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        await asyncio.gather(*self._closing)

    async def _send(
        self,
        server: Server,
        commands: Sequence[bytes],
        keys: Sequence[bytes],
        part: Sequence[int],
        replies: list[Reply],
        scripts: Sequence[Script],
        wait_s: float,
    ) -> None:
        """Send some of the commands to one master and put their replies where they belong."""
        chosen = commands if len(part) == len(commands) else [commands[at] for at in part]
        if self._replicas is not None:
            chosen = [*chosen, _mark(keys[part[0]])]
        link = self._link(server)
        try:
            answers = await link.exchange(chosen, scripts=scripts, wait_s=wait_s, replicas=self._replicas)
        except StoreUnavailable:
            self._slots.refresh_soon()  # another master may own its slots by now
            raise
        if self._replicas is not None and not is_redirection(marked := answers.pop()):
            checked(marked)
        for at, answer in zip(part, answers, strict=True):
            replies[at] = answer

    async def _send_if_reachable(
        self,
        server: Server,
        commands: Sequence[bytes],
        keys: Sequence[bytes],
        part: Sequence[int],
        replies: list[Reply],
    ) -> StoreUnavailable | None:
        """As `_send`; returns why the master did not answer. One that is known to be lost is not waited for."""
        link = self._link(server)
        if link.is_failing:
            link.connect_soon()
            self._slots.refresh_soon()
            return StoreUnavailable(f"Redis at {server} cannot be reached")
        try:
            await self._send(server, commands, keys, part, replies, (), 0.0)
        except StoreUnavailable as error:
            return error
        return None

    async def _redirect(
        self,
        commands: Sequence[bytes],
        keys: Sequence[bytes],
        replies: list[Reply],
        scripts: Sequence[Script],
        wait_s: float,
        ends_at_s: float,
        *,
        try_again: bool = True,
    ) -> None:
        """Send again what was not run because its slot has moved, is on the move or was split by a move."""
        try:
            async with asyncio.timeout_at(ends_at_s):
                for round_number in itertools.count():
                    moves = self._moves(keys, replies)
                    if not try_again:
                        moves = {at: move for at, move in moves.items() if not move[2]}
                    if not moves:
                        return
                    if round_number >= _QUICK_ROUNDS or any(pause for _, _, pause in moves.values()):
                        await asyncio.sleep(_PAUSE_S)
                    parts: dict[tuple[Server, bool], list[int]] = {}
                    for at, (server, asking, _) in moves.items():
                        parts.setdefault((server, asking), []).append(at)
                    await _all(
                        self._send_asking(server, commands, part, replies, scripts)
                        if asking
                        else self._send(server, commands, keys, part, replies, scripts, wait_s)
                        for (server, asking), part in parts.items()
                    )
        except TimeoutError as error:
            raise StoreUnavailable("the Cluster went on redirecting until the time was over") from error

    async def _send_asking(
        self,
        server: Server,
        commands: Sequence[bytes],
        part: Sequence[int],
        replies: list[Reply],
        scripts: Sequence[Script],
    ) -> None:
        """Send commands to the master that their slot is moving to. ASKING holds for the one command after it."""
        link = self._link(server)
        if scripts:
            await link.exchange([pack(b"SCRIPT", b"LOAD", script.source) for script in scripts])
        doubled = [command for at in part for command in (_ASKING, commands[at])]
        answers = await link.exchange(doubled, replicas=self._replicas)
        for at, answer in zip(part, answers[1::2], strict=True):
            replies[at] = answer

    def _moves(self, keys: Sequence[bytes], replies: Sequence[Reply]) -> dict[int, tuple[Server, bool, bool]]:
        """Return for each redirection where its command goes, whether by ASKING, and whether after a pause."""
        moves: dict[int, tuple[Server, bool, bool]] = {}
        redirections = self._options.stats.redirections
        for at, reply in enumerate(replies):
            if not is_error(reply):
                continue
            kind, *words = str(reply).split(" ")
            if kind == "MOVED":
                target = _target(words[1], self._slots.owner(keys[at]))
                self._slots.moved(int(words[0]), target)
                moves[at] = (target, False, False)
                redirections["moved"] += 1
            elif kind == "ASK":
                moves[at] = (_target(words[1], self._slots.owner(keys[at])), True, False)
                redirections["ask"] += 1
            elif kind == "TRYAGAIN":
                moves[at] = (self._slots.owner(keys[at]), False, True)
                redirections["try_again"] += 1
            elif kind in ("CLUSTERDOWN", "READONLY", "MASTERDOWN"):
                self._slots.refresh_soon()
        return moves

    def _link(self, server: Server) -> RedisLink:
        link = self._links.get(server)
        if link is None:
            link = self._links[server] = link_to(server, self._options)
        return link

    def _leave_others(self, masters: frozenset[Server]) -> None:
        """Close the connections to servers that own nothing any more."""
        for server in self._links.keys() - masters:
            task = asyncio.create_task(self._links.pop(server).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class Cluster:
    """RedisDeployment of the masters of a Cluster."""

    kind = "cluster"

    def __init__(self, seeds: Sequence[Server], options: LinkOptions) -> None:
        self._options = options
        self._slots = SlotMap(seeds, options)
        self._groups: list[ClusterGroup] = []

    def connection_group(self, replicas: ReplicaWait | None = None) -> ConnectionGroup:
        group = ClusterGroup(self._slots, self._options, replicas)
        self._groups.append(group)
        return group

    async def refresh(self) -> None:
        """Nothing: a wrong slot map shows by a redirection or a lost master."""

    async def close(self) -> None:
        await self._slots.close()
        for group in self._groups:
            await group.close()


def _is_out_of_reach(reply: Reply) -> bool:
    return is_redirection(reply) or (is_error(reply) and str(reply).startswith(_OUT_OF_REACH))


def _target(address: str, sender: Server) -> Server:
    """Where a redirection leads; a member that does not know its own address means itself."""
    host, _, port = address.rpartition(":")
    return Server(host or sender.host, int(port))


def _mark(key: bytes) -> bytes:
    """Return a write beside a key, which no reader looks at.

    A master waits for replicas on behalf of what this connection wrote, and commands that find everything as it is to
    be have written nothing: it would not wait for what another connection wrote before, which is not confirmed.
    """
    before, brace, rest = key.partition(b"{")
    tag = brace + rest[: rest.index(b"}") + 1]
    return pack(b"SET", before.rsplit(b":", 2)[0] + b":w:" + tag, b"", b"PX", b"1000")


async def _all(sends: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all, so that nothing is left running; then raise the first failure."""
    pending = list(sends)
    if len(pending) == 1:
        return await pending[0]
    for result in await asyncio.gather(*pending, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
    return None
