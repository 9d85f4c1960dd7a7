"""Nodes, keyspaces, policies and the event log in memory."""

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvpool.core.clock import Clock
from kvpool.core.cluster import UNNUMBERED, NodeInfo, NodeLoad, RegistrationAttempt
from kvpool.core.errors import InvalidRequest, KvPoolError, LeaseLost, StaleIncarnation
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool_index.core.events import ORIGIN, LogEntry, NodeState, entry_order, pack_node
from kvpool_index.core.nodes import INCARNATION_AHEAD, OF_ANOTHER_PROCESS, NodeRecord, Renewal
from kvpool_index.ports import PROCESSES_REMEMBERED, VERSION_AHEAD_US, BoundKeyspace, NodeGrant, StreamFence


class MemoryEventLog:
    """EventLog over bounded deques. Ids count entries: 1-0, 2-0, ..."""

    def __init__(self, *, stream_count: int, max_entries: int) -> None:
        self._streams: list[deque[LogEntry]] = [deque(maxlen=max_entries) for _ in range(stream_count)]
        self._counts = [0] * stream_count
        self.malformed_count = 0
        self._grown = [asyncio.Event() for _ in range(stream_count)]

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    async def append(self, entries: Sequence[tuple[int, bytes]]) -> None:
        for stream, payload in entries:
            self.append_now(stream, payload)

    def append_now(self, stream: int, payload: bytes) -> None:
        """Append one entry; negative streams count from the last one."""
        self._counts[stream] += 1
        self._streams[stream].append(LogEntry(f"{self._counts[stream]}-0", payload))
        self._grown[stream].set()
        self._grown[stream] = asyncio.Event()

    async def tails(self) -> tuple[str, ...]:
        return tuple(f"{count}-0" if count else ORIGIN for count in self._counts)

    async def read(self, stream: int, after: str, *, limit: int, wait_s: float) -> list[LogEntry]:
        order = entry_order(after)
        if order >= (self._counts[stream], 0) and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._grown[stream].wait()
            except TimeoutError:
                return []
        entries = self._streams[stream]
        start = max(0, order[0] - (self._counts[stream] - len(entries)))  # ids count on without a gap
        return list(islice(entries, start, start + limit))

    async def is_kept(self, stream: int, entry_id: str) -> bool:
        count, kept = self._counts[stream], len(self._streams[stream])
        return count - kept <= entry_order(entry_id)[0] <= count

    def count_malformed(self) -> None:
        self.malformed_count += 1


@dataclass(slots=True)
class _Node:
    info: NodeInfo
    load: NodeLoad
    ordinal: int
    epoch: int
    fence: int
    expires_at_s: float
    attempt: RegistrationAttempt
    earlier_processes: tuple[bytes, ...]  # the latest first
    alive: bool = True
    ended: bool = False


class MemoryNodeDirectory:
    """NodeDirectory over a dict; leases run by the clock that is handed in."""

    def __init__(self, clock: Clock, events: MemoryEventLog) -> None:
        self._clock = clock
        self._events = events
        self._nodes: dict[bytes, _Node] = {}

    async def register(
        self,
        info: NodeInfo,
        *,
        last_incarnation: int,
        lease_ttl_ms: int,
        attempt: RegistrationAttempt = UNNUMBERED,
    ) -> NodeGrant:
        now_us = self._clock.wall_us()
        if max(info.incarnation, last_incarnation) > now_us + VERSION_AHEAD_US:
            raise InvalidRequest(INCARNATION_AHEAD)
        known = self._nodes.get(info.node_id)
        stored = known.info.incarnation if known is not None else 0
        again = known is not None and attempt.process_id != b"" and known.attempt.process_id == attempt.process_id
        if known is not None and again and attempt.number <= known.attempt.number:
            return NodeGrant(incarnation=stored, ordinal=known.ordinal, announce_epoch=known.epoch, is_repeat=True)
        replaced = known is not None and attempt.process_id in known.earlier_processes
        is_others = known is not None and known.attempt.process_id != b"" and not again and info.incarnation == stored
        if replaced or 0 < info.incarnation < stored or is_others:
            raise StaleIncarnation(f"incarnation {stored} of this node is registered")
        granted = info.incarnation or max(stored, last_incarnation, now_us) + 1
        if known is not None and again and not info.incarnation and not known.ended and stored > last_incarnation:
            granted = stored
        is_live = known is not None and known.alive and known.expires_at_s > self._clock.monotonic_s()
        same = known is not None and stored == granted and not known.ended
        node = _Node(
            info=replace(info, incarnation=granted),
            load=known.load if known is not None and same else NodeLoad(),
            ordinal=known.ordinal if known is not None and same else self._free_ordinal(),
            epoch=max(known.epoch + 1 if known is not None else 1, now_us),
            fence=known.fence if known is not None else 0,
            expires_at_s=self._clock.monotonic_s() + lease_ttl_ms / 1000,
            attempt=attempt,
            earlier_processes=_earlier_processes(known, again=again) if attempt.process_id else (),
        )
        self._nodes[info.node_id] = node
        self._log(node)
        return NodeGrant(
            incarnation=granted,
            ordinal=node.ordinal,
            announce_epoch=node.epoch,
            took_over=is_live and not again and not info.incarnation,
        )

    async def renew(self, renewals: Sequence[Renewal]) -> list[KvPoolError | None]:
        return list(map(self._renew, renewals))

    async def end(self, node_id: bytes, incarnation: int, process_id: bytes = b"") -> None:
        node = self._nodes.get(node_id)
        if node is None or node.info.incarnation != incarnation or node.ended:
            return
        _check_process(node, process_id)
        was_alive, node.alive, node.ended = node.alive, False, True
        node.expires_at_s = self._clock.monotonic_s()
        if was_alive:
            self._log(node)

    async def open_stream(
        self, node_id: bytes, incarnation: int, announce_epoch: int, process_id: bytes = b""
    ) -> StreamFence:
        node = self._held(node_id, incarnation)
        _check_process(node, process_id)
        if announce_epoch < node.epoch:
            raise LeaseLost(f"announce epoch {announce_epoch} is fenced by {node.epoch}")
        node.fence += 1
        return StreamFence(node_id=node_id, incarnation=incarnation, ordinal=node.ordinal, number=node.fence)

    async def ordinal(self, node_id: bytes, incarnation: int) -> int:
        return self._held(node_id, incarnation).ordinal

    async def snapshot(self) -> list[NodeRecord]:
        now_s = self._clock.monotonic_s()
        return [
            NodeRecord(
                info=node.info,
                load=node.load,
                ordinal=node.ordinal,
                alive=node.alive,
                ended=node.ended,
                lease_remaining_ms=int((node.expires_at_s - now_s) * 1000),
            )
            for node in self._nodes.values()
        ]

    async def declare_dead(self, node_id: bytes, incarnation: int, *, forget_after_ms: int) -> bool:
        node = self._nodes.get(node_id)
        now_s = self._clock.monotonic_s()
        if node is None or node.info.incarnation != incarnation or node.expires_at_s > now_s:
            return False
        was_alive, node.alive = node.alive, False
        if was_alive:
            self._log(node)
        elif node.expires_at_s + forget_after_ms / 1000 <= now_s:
            del self._nodes[node_id]
        return was_alive

    def check_fence(self, fence: StreamFence) -> None:
        """Raise unless the stream may change its node's entries."""
        node = self._held(fence.node_id, fence.incarnation)
        if node.fence != fence.number:
            raise LeaseLost("a later announce stream of this node has taken over")

    def _renew(self, one: Renewal) -> KvPoolError | None:
        try:
            node = self._held(one.node_id, one.incarnation)
        except (LeaseLost, StaleIncarnation) as error:
            return error
        node.expires_at_s = self._clock.monotonic_s() + one.lease_ttl_ms / 1000
        if one.load is not None:
            node.load = one.load
        return None

    def _held(self, node_id: bytes, incarnation: int) -> _Node:
        node = self._nodes.get(node_id)
        if node is not None and node.info.incarnation > incarnation:
            raise StaleIncarnation(f"incarnation {node.info.incarnation} of this node is registered")
        live = node is not None and node.alive and node.expires_at_s > self._clock.monotonic_s()
        if node is None or not live or node.info.incarnation != incarnation:
            raise LeaseLost("the node's lease has ended; register again with the same incarnation")
        return node

    def _free_ordinal(self) -> int:
        used = {node.ordinal for node in self._nodes.values()}
        while True:
            ordinal = secrets.randbits(32)
            if ordinal and ordinal not in used:
                return ordinal

    def _log(self, node: _Node) -> None:
        self._events.append_now(-1, pack_node(NodeState(info=node.info, alive=node.alive)))


def _check_process(node: _Node, process_id: bytes) -> None:
    if node.attempt.process_id not in (b"", process_id):
        raise StaleIncarnation(OF_ANOTHER_PROCESS)


def _earlier_processes(known: _Node | None, *, again: bool) -> tuple[bytes, ...]:
    if known is None or again or not known.attempt.process_id:
        return known.earlier_processes if known is not None else ()
    return (known.attempt.process_id, *known.earlier_processes)[: PROCESSES_REMEMBERED - 1]


class MemoryKeyspaceRegistry:
    """KeyspaceRegistry over dicts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_name: dict[tuple[str, str], BoundKeyspace] = {}
        self._by_id: dict[bytes, BoundKeyspace] = {}
        self._used_at_s: dict[bytes, float] = {}  # by id

    async def bind(self, keyspace: BoundKeyspace) -> tuple[BoundKeyspace, bool]:
        bound = self._by_name.setdefault((keyspace.tenant, keyspace.name), keyspace)
        self._by_id.setdefault(bound.keyspace_id, bound)
        if bound.keyspace_id == keyspace.keyspace_id:
            self._used_at_s[bound.keyspace_id] = self._clock.monotonic_s()
        return bound, bound is keyspace

    async def restore(self, tenant: str, keyspaces: Sequence[BoundKeyspace], *, limit: int) -> int:
        refused = 0
        for keyspace in keyspaces:
            if keyspace.keyspace_id not in self._by_id:
                if sum(known.tenant == tenant for known in self._by_id.values()) >= limit:
                    refused += 1
                    continue
                self._by_id[keyspace.keyspace_id] = keyspace
            self._used_at_s[keyspace.keyspace_id] = self._clock.monotonic_s()
        return refused

    async def touch(self, tenant: str, keyspace_ids: Sequence[bytes]) -> None:
        now_s = self._clock.monotonic_s()
        self._used_at_s.update({each: now_s for each in keyspace_ids if each in self._by_id})

    async def idle(self, tenant: str, idle_s: float) -> list[bytes]:
        return [each for each, known in self._by_id.items() if known.tenant == tenant and self._is_idle(each, idle_s)]

    async def forget(self, tenant: str, keyspaces: Sequence[BoundKeyspace], *, idle_s: float) -> list[bytes]:
        idle = {each.keyspace_id for each in keyspaces if self._is_idle(each.keyspace_id, idle_s)}
        for keyspace_id in idle:
            del self._by_id[keyspace_id], self._used_at_s[keyspace_id]
        for name in {(tenant, each.name) for each in keyspaces if each.keyspace_id in idle}:
            bound = self._by_name.get(name)
            if bound is not None and bound.keyspace_id in idle:
                del self._by_name[name]
        return list(idle)

    def _is_idle(self, keyspace_id: bytes, idle_s: float) -> bool:
        used_at_s = self._used_at_s.get(keyspace_id)
        return used_at_s is not None and used_at_s + idle_s <= self._clock.monotonic_s()

    async def by_id(self, keyspace_id: bytes) -> BoundKeyspace | None:
        return self._by_id.get(keyspace_id)

    async def by_ids(self, keyspace_ids: Sequence[bytes]) -> list[BoundKeyspace | None]:
        return list(map(self._by_id.get, keyspace_ids))

    async def count(self, tenant: str) -> int:
        names = sum(owner == tenant for owner, _ in self._by_name)
        return max(names, sum(known.tenant == tenant for known in self._by_id.values()))

    async def of_tenant(self, tenant: str) -> list[BoundKeyspace]:
        return [bound for (owner, _), bound in sorted(self._by_name.items()) if owner == tenant]


class MemoryPolicyRegistry:
    """PolicyRegistry over a dict."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._policies: dict[bytes, VersionedPolicy] = {}
        self._version = 0

    async def set(self, keyspace: bytes, policy: KeyspacePolicy) -> int:
        self._version = max(self._version, self._clock.wall_us()) + 1
        self._policies[keyspace] = VersionedPolicy(keyspace=keyspace, policy=policy, version=self._version)
        return self._version

    async def restore(self, policies: Sequence[VersionedPolicy]) -> None:
        for one in policies:
            if one.version > self._clock.wall_us() + VERSION_AHEAD_US:
                continue
            known = self._policies.get(one.keyspace)
            if known is None or known.version < one.version:
                self._policies[one.keyspace] = one
                self._version = max(self._version, one.version)

    async def get(self, keyspaces: Sequence[bytes]) -> list[VersionedPolicy]:
        return [self._policies[keyspace] for keyspace in keyspaces if keyspace in self._policies]

    async def version(self) -> int:
        return self._version
