"""Nodes in Redis: registrations, leases and the fences of announce streams."""

import asyncio
import logging
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from kvpool.core.cluster import UNNUMBERED, NodeInfo, RegistrationAttempt
from kvpool.core.errors import (
    InvalidRequest,
    KvPoolError,
    LeaseLost,
    StaleIncarnation,
    StoreUnavailable,
)
from kvpool_index.adapters.redis_connections import ConnectionGroup
from kvpool_index.adapters.redis_lua import load_script
from kvpool_index.adapters.redis_wire import Reply, checked, pack, pack_script
from kvpool_index.core.nodes import (
    INCARNATION_AHEAD,
    MAX_INCARNATION,
    OF_ANOTHER_PROCESS,
    REFRESH_STEP_NODES,
    NodeRecord,
    Renewal,
    pack_info,
    pack_load,
    unpack_info,
    unpack_load,
)
from kvpool_index.core.redis_stats import RedisStats
from kvpool_index.ports import PROCESSES_REMEMBERED, VERSION_AHEAD_US, NodeGrant, StreamFence

_log = logging.getLogger(__name__)

_REGISTER: Final = load_script("register_node")
_RENEW: Final = load_script("renew_lease")
_OPEN: Final = load_script("open_stream")
_END: Final = load_script("end_lease")
_DECLARE: Final = load_script("declare_dead")

_RECORD: Final = struct.Struct("<QIQIQBB")  # see register_node.lua
_REGISTRATION_BYTES: Final = 20  # of a record: incarnation, ordinal, epoch; a registration changes them
_NO_INFO: Final[tuple[bytes, NodeInfo | None]] = (b"", None)
_RENEWED_AT_ONCE: Final = 256  # in one script, for which all other commands wait
_ORDINAL: Final = struct.Struct("<I")
_ORDINAL_CANDIDATES: Final = 8

_REPEAT: Final = 1  # see register_node.lua
_TOOK_OVER: Final = 2
_LOST: Final = "the node's lease has ended; register again with the same incarnation"


class RedisNodeDirectory:
    """NodeDirectory over a few hashes in one slot. Leases run by the server time of the master that has the slot."""

    def __init__(
        self,
        connections: ConnectionGroup,
        stats: RedisStats,
        *,
        key_prefix: bytes,
        event_key: bytes,
        event_entries: int,
    ) -> None:
        self._connections = connections
        self._stats = stats
        self._known: dict[bytes, tuple[bytes, NodeInfo | None]] = {}  # by node, of which registration; None: malformed
        slot = key_prefix + b":{n}:"
        self._records, self._infos, self._loads = slot + b"records", slot + b"infos", slot + b"loads"
        self._ordinals, self._events = slot + b"ordinals", event_key
        self._attempts = slot + b"attempts"
        self._event_entries = b"%d" % event_entries

    async def register(
        self,
        info: NodeInfo,
        *,
        last_incarnation: int,
        lease_ttl_ms: int,
        attempt: RegistrationAttempt = UNNUMBERED,
    ) -> NodeGrant:
        candidates = b"".join(_ORDINAL.pack(1 + secrets.randbelow((1 << 32) - 1)) for _ in range(_ORDINAL_CANDIDATES))
        answer = await self._connections.run(
            _REGISTER,
            [self._records, self._infos, self._loads, self._ordinals, self._events, self._attempts],
            info.node_id,
            b"%d" % info.incarnation,
            b"%d" % last_incarnation,
            b"%d" % lease_ttl_ms,
            pack_info(info),
            candidates,
            self._event_entries,
            attempt.process_id,
            b"%d" % attempt.number,
            b"%d" % PROCESSES_REMEMBERED,
            b"%d" % VERSION_AHEAD_US,
        )
        if answer[0] == -1:
            raise StaleIncarnation(f"incarnation {answer[1]} of this node is registered")
        if answer[0] == -2:
            raise StoreUnavailable("no free ordinal was found for the node; register again")
        if answer[0] == -3:
            raise InvalidRequest(INCARNATION_AHEAD)
        incarnation, ordinal, epoch, what = answer
        return NodeGrant(
            incarnation=incarnation,
            ordinal=ordinal,
            announce_epoch=epoch,
            is_repeat=what == _REPEAT,
            took_over=what == _TOOK_OVER,
        )

    async def renew(self, renewals: Sequence[Renewal]) -> list[KvPoolError | None]:
        if not renewals:
            return []
        keys: list[bytes] = [self._records, self._loads]
        commands: list[bytes] = []
        for start in range(0, len(renewals), _RENEWED_AT_ONCE):
            words: list[bytes] = []
            for one in renewals[start : start + _RENEWED_AT_ONCE]:
                load = b"" if one.load is None else pack_load(one.load)
                words += (one.node_id, b"%d" % one.incarnation, b"%d" % one.lease_ttl_ms, load)
            commands.append(pack_script(_RENEW, keys, *words))
        replies = await self._connections.run_all(commands, [self._records] * len(commands), _RENEW)
        statuses = (status for reply in replies for status in reply)
        return [_refusal(status, one.incarnation) for status, one in zip(statuses, renewals, strict=True)]

    async def end(self, node_id: bytes, incarnation: int, process_id: bytes = b"") -> None:
        keys = [self._records, self._infos, self._ordinals, self._events, self._attempts]
        status = await self._connections.run(_END, keys, node_id, b"%d" % incarnation, self._event_entries, process_id)
        if status == -1:
            raise StaleIncarnation(OF_ANOTHER_PROCESS)

    async def open_stream(
        self, node_id: bytes, incarnation: int, announce_epoch: int, process_id: bytes = b""
    ) -> StreamFence:
        keys = [self._records, self._attempts]
        arguments = (node_id, b"%d" % incarnation, b"%d" % announce_epoch, process_id)
        answer = await self._connections.run(_OPEN, keys, *arguments)
        if answer[0] == -2:
            raise LeaseLost(f"announce epoch {announce_epoch} is fenced by a later registration")
        refusal = _refusal(answer[0], incarnation)
        if refusal is not None:
            raise refusal
        return StreamFence(node_id=node_id, incarnation=incarnation, ordinal=answer[1], number=answer[2])

    async def ordinal(self, node_id: bytes, incarnation: int) -> int:
        commands = [pack(b"TIME"), pack(b"HGET", self._records, node_id)]
        time, packed = map(checked, await self._connections.exchange(commands, [self._records, self._records]))
        return _leased(packed, incarnation, _microseconds(time))[0]

    async def snapshot(self) -> list[NodeRecord]:
        keys = [self._records, self._loads]
        commands = [pack(b"TIME"), *(pack(b"HGETALL", key) for key in keys)]
        time, *tables = await self._connections.exchange(commands, [self._records, *keys])
        now_us = _microseconds(checked(time))
        records, loads = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in map(checked, tables))
        await self._learn_infos(records)
        known = self._known
        found: list[NodeRecord] = []
        for part in _steps(records):
            for node_id, packed in part:
                info = known.get(node_id, _NO_INFO)[1]
                if info is not None:
                    _, ordinal, _, _, lease_end_us, alive, ended = _RECORD.unpack(packed)
                    load, remaining_ms = unpack_load(loads.get(node_id)), (lease_end_us - now_us) // 1000
                    found.append(NodeRecord(info, load, ordinal, alive == 1, ended == 1, remaining_ms))
            await asyncio.sleep(0)
        return found

    async def _learn_infos(self, records: Mapping[bytes, bytes]) -> None:
        """Read what nodes registered that have done so since the last time: each time their epoch grows."""
        before, changed = self._known, list[bytes]()
        for some in _steps(records):
            changed += [
                node_id
                for node_id, packed in some
                if before.get(node_id, _NO_INFO)[0]
                != (packed[:_REGISTRATION_BYTES] if len(packed) == _RECORD.size else packed)
            ]
            await asyncio.sleep(0)
        if not changed and len(before) == len(records):
            return
        known = {node_id: before[node_id] for node_id in records.keys() & before.keys()}
        for node_id in changed:
            known.pop(node_id, None)
        for start in range(0, len(changed), REFRESH_STEP_NODES):
            part = changed[start : start + REFRESH_STEP_NODES]
            infos = await self._connections.call(self._infos, b"HMGET", self._infos, *part)
            for node_id, info in zip(part, infos, strict=True):
                if info is not None:
                    known[node_id] = (_registration(records[node_id]), self._info(node_id, records[node_id], info))
        self._known = known

    def _info(self, node_id: bytes, packed: bytes, info: bytes) -> NodeInfo | None:
        try:
            found = unpack_info(info, _RECORD.unpack(packed)[0])
            if found.node_id != node_id:
                raise ValueError("it names another node")
            if found.incarnation > MAX_INCARNATION:
                raise ValueError("its incarnation is above what an index grants")
        except (ValueError, struct.error, InvalidRequest, RecursionError) as error:
            self._stats.malformed["node"] += 1
            _log.debug("the record of node %s is skipped: %s", node_id.hex(), error)
            return None
        return found

    async def declare_dead(self, node_id: bytes, incarnation: int, *, forget_after_ms: int) -> bool:
        keys = [self._records, self._infos, self._loads, self._ordinals, self._events, self._attempts]
        arguments = (node_id, b"%d" % incarnation, b"%d" % forget_after_ms, self._event_entries)
        return bool(await self._connections.run(_DECLARE, keys, *arguments))

    def fence_commands(self, fence: StreamFence) -> tuple[list[bytes], list[bytes]]:
        """Commands whose replies `check_fence` judges, and their keys; to be sent together with what the fence guards.

        A chunk at another master may be changed before the fence is read. That is no worse than a fence that is lost
        right after it was read: in either case what the later stream has written to a group keeps this one out of it.
        """
        return [pack(b"TIME"), pack(b"HGET", self._records, fence.node_id)], [self._records, self._records]

    def check_fence(self, fence: StreamFence, replies: Sequence[Reply]) -> None:
        """Raise StaleIncarnation or LeaseLost unless the stream may change its node's entries."""
        time, packed = replies
        _, number = _leased(packed, fence.incarnation, _microseconds(time))
        if number != fence.number:
            raise LeaseLost("a later announce stream of this node has taken over")


def _leased(packed: bytes | None, wanted: int, now_us: int) -> tuple[int, int]:
    """Ordinal and latest stream number of a record whose lease runs. Raises StaleIncarnation, LeaseLost."""
    if packed is None:
        raise LeaseLost(_LOST)
    if len(packed) != _RECORD.size:
        raise LeaseLost(_LOST)
    incarnation, ordinal, _, number, lease_end_us, alive, _ = _RECORD.unpack(packed)
    if incarnation > wanted:
        raise StaleIncarnation(f"incarnation {incarnation} of this node is registered")
    if incarnation != wanted or not alive or lease_end_us <= now_us:
        raise LeaseLost(_LOST)
    return ordinal, number


def _refusal(status: int, incarnation: int) -> KvPoolError | None:
    if status == -1:
        return StaleIncarnation(f"a newer incarnation than {incarnation} of this node is registered")
    return LeaseLost(_LOST) if status == 0 else None


def _registration(packed: bytes) -> bytes:
    """Return the part of a record that differs between registrations; all of it if no index wrote it."""
    return packed[:_REGISTRATION_BYTES] if len(packed) == _RECORD.size else packed


def _steps(records: Mapping[bytes, bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
    """The records, REFRESH_STEP_NODES at a time."""
    rest = iter(records.items())
    while part := list(islice(rest, REFRESH_STEP_NODES)):
        yield part


def _microseconds(time: Reply) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])
