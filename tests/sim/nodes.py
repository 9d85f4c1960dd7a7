"""Simulated service processes: the real engines and servicers on simulated memory, disk, threads and network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from kvpool.core.cluster import NodeInfo, NodeKind, RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, KeyspaceSpec
from kvpool.core.page import PageKey
from kvpool.v1 import index_pb2_grpc, pagestore_pb2_grpc
from kvpool_index.config import IndexConfig
from kvpool_index.engine import IndexEngine
from kvpool_index.metrics import IndexMetrics
from kvpool_index.servicer import IndexServicer
from kvpool_pagestore import main as pagestore_main
from kvpool_pagestore.adapters.index_link import NodeIndexLink
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.engine import PageStoreEngine
from kvpool_pagestore.engine_parts import EngineParts, EngineWorkers
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.servicer.control import PageStoreServicer
from kvpool_pagestore.servicer.session import SessionLimits
from kvpool_server.lifecycle import Stop
from tests.sim.disk import SimDisk, SimPageStore
from tests.sim.host import SimArena, SimHost, SimSegmentMap
from tests.sim.loop import Process, SimKilled, SimLoop, current_process
from tests.sim.network import Network
from tests.sim.pages import KEYSPACE, SPEC, TENANT, true_page
from tests.sim.redis import SimIndexStore, SimRedis
from tests.sim.threads import SimWorkers, pause_s, wait_for


class SimClock:
    """A process's clocks: monotonic ones agree in speed, wall clocks are off by `wall_offset_s`."""

    def __init__(self, loop: SimLoop, wall_offset_s: float = 0.0) -> None:
        self._loop = loop
        self.wall_offset_s = wall_offset_s

    def monotonic_s(self) -> float:
        return self._loop.now_s

    def wall_us(self) -> int:
        return 1_000_000_000_000_000 + round((self._loop.now_s + self.wall_offset_s) * 1e6)


@cache
def _pagestore_metrics() -> PageStoreMetrics:
    return PageStoreMetrics(CollectorRegistry())


@cache
def _index_metrics() -> IndexMetrics:
    return IndexMetrics(CollectorRegistry())


@dataclass(slots=True, kw_only=True)
class World:
    """Everything that a history plays with."""

    loop: SimLoop
    rng: Random
    network: Network
    redis: SimRedis
    indexes: list[IndexNode] = field(default_factory=list)
    pagestores: list[PageStoreNode] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    lease_ttl_ms: int = 3000
    heal_s: float = 40.0  # within it the index must agree with the nodes, once nothing goes wrong any more

    def some_s(self, most_s: float) -> float:
        return self.rng.random() * most_s


class IndexNode:
    """One index replica."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"index{number}"
        self.endpoint = f"{self.name}:1"
        self.process = world.loop.process(self.name)
        self.process.alive = False
        self.starts = 0

    def start(self) -> None:
        world = self.world
        self.starts += 1
        self.process = world.loop.process(f"{self.name}#{self.starts}")
        self.process.context.copy().run(self._start)

    def crash(self) -> None:
        self.world.loop.kill(self.process)

    def _start(self) -> None:
        world = self.world
        engine = IndexEngine(
            store=SimIndexStore(world.redis),
            config=IndexConfig(lease_ttl_ms=world.lease_ttl_ms),
            clock=SimClock(world.loop),
            metrics=_index_metrics(),
            secret_of=lambda tenant: PUBLISHED_TENANT_SECRET,
            version="sim",
        )
        servicer = IndexServicer(engine, lambda: TENANT)
        world.network.listen(
            self.endpoint,
            self.process,
            lambda server: index_pb2_grpc.add_IndexServiceServicer_to_server(servicer, server),
        )
        for name, work in engine.background_work():
            world.loop.spawn(self.process, work, name)


@dataclass(slots=True, kw_only=True)
class PageStoreShape:
    """Sizes of a simulated pagestore."""

    arena_slots: int
    segment_slots: int
    disk_pages: int  # 0: no disk tier
    wall_offset_s: float = 0.0


class PageStoreNode:
    """One pagestore's machine and the process that runs on it now."""

    def __init__(self, world: World, number: int, shape: PageStoreShape) -> None:
        self.world = world
        self.number = number
        self.shape = shape
        self.name = f"store{number}"
        self.node_id = bytes([number + 1]) * 16
        self.endpoint = f"{self.name}:1"
        self.bulk_endpoint = f"{self.name}:2"
        slot_bytes = _slot_bytes()
        self.host = SimHost(self.name, shape.arena_slots * slot_bytes)
        self.disk = SimDisk(max(1, shape.disk_pages) * len(_a_page()))
        self.process = world.loop.process(self.name)
        self.process.alive = False
        self.starts = 0
        self.engine: PageStoreEngine | None = None
        self.index: NodeIndexLink | None = None
        self.serving = False
        self.stop: Stop | None = None
        self._workers: list[SimWorkers] = []

    @property
    def alive(self) -> bool:
        return self.process.alive

    def start(self) -> asyncio.Task[None]:
        world = self.world
        self.starts += 1
        self.serving = False
        self.process = world.loop.process(f"{self.name}#{self.starts}")
        task = world.loop.spawn(self.process, self._serve(self.process), f"{self.name} main")
        task.add_done_callback(self._ended, context=self.process.context.copy())
        return task

    def crash(self) -> None:
        self.world.loop.kill(self.process)
        self.engine = None
        self.serving = False
        for holders in self.host.session_files.values():
            holders.discard(self.process)

    def abandon(self) -> None:
        """Unwind the threads of all processes that ran here."""
        for workers in self._workers:
            workers.abandon()
        self._workers.clear()

    # Inside

    def _ended(self, main: asyncio.Task[None]) -> None:
        """A process that cannot start, or fails, ends; its supervisor starts it again."""
        error = None if main.cancelled() else main.exception()
        if isinstance(error, SimKilled):
            return
        if error is not None and not isinstance(error, KvPoolError):
            self.world.violations.append(f"{self.name} failed: {error!r}")
        if self.process.alive:
            self.crash()

    def _config(self) -> PageStoreConfig:
        slot_bytes = _slot_bytes()
        return PageStoreConfig(
            data_dir=Path("/nowhere"),
            index_endpoints=tuple(index.endpoint for index in self.world.indexes),
            arena_bytes=self.shape.arena_slots * slot_bytes,
            segment_bytes=self.shape.segment_slots * slot_bytes,
            disk_bytes=self.disk.budget_bytes if self.shape.disk_pages else 0,
            batch_pages=4,
            linger_ms=5,
            write_retry_ms=50,
            write_retry_max_ms=400,
            heartbeat_interval_ms=300,
            quarantine_grace_ms=200,
            quarantine_poll_ms=50,
            pull_timeout_ms=3000,
            index_timeout_ms=500,
            index_start_wait_ms=500,
            reconcile_interval_ms=8000,
            max_leases=8,
            tenant=TENANT,
        )

    async def _serve(self, process: Process) -> None:
        """What kvpool_pagestore.main does, with simulated parts."""
        world, config, loop = self.world, self._config(), self.world.loop
        arena = SimArena(self.host, process)
        store = self._store(process) if self.shape.disk_pages else None
        link = pagestore_main._index(config)
        assert isinstance(link, NodeIndexLink)
        parts = EngineParts(
            arena=arena,
            store=store,
            disk_live_bytes=self.disk.budget_bytes,
            peers=SimPeers(world, self),
            index=link,
            workers=self._make_workers(),
            clock=SimClock(loop, self.shape.wall_offset_s),
            first_segment_id=((self.number + 1) << 40) + (self.starts << 16) + 1,
        )
        engine = self.engine = PageStoreEngine(config, parts, _pagestore_metrics())
        self._watch_slots(engine)
        self._watch_promises(engine)
        stop = self.stop = Stop()
        last_incarnation = await engine.load(arena.old_sessions(), arena.old_bytes)
        node = NodeInfo(
            node_id=self.node_id,
            kind=NodeKind.PAGESTORE,
            host_id=self.name,
            endpoint=self.endpoint,
            bulk_endpoint=self.bulk_endpoint,
            local_socket=self.endpoint,
            capacity_bytes=config.arena_bytes,
        )
        await pagestore_main._adopt_incarnation(config, parts, engine, node, last_incarnation, stop)
        self.index = link
        limits = SessionLimits(
            node_id=self.node_id,
            descriptor_socket=Path(self.endpoint),
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            max_leases=config.max_leases,
            max_requests_in_flight=config.max_requests_in_flight,
        )
        servicer = PageStoreServicer(engine, lambda: TENANT, limits)
        world.network.listen(
            self.endpoint,
            process,
            lambda server: pagestore_pb2_grpc.add_PageStoreServiceServicer_to_server(servicer, server),
        )
        SimSegmentMap.servers[self.endpoint] = (process, self.host, arena, engine.sessions.descriptor)
        SESSION_FDS[process] = arena.close_fd
        self.serving = True
        await stop.wait()
        if stop.failure is not None:  # superseded: the process ends
            self.crash()

    def _store(self, process: Process) -> SimPageStore:
        world = self.world

        def pause() -> None:
            if world.rng.random() < 0.5:
                pause_s(world.loop, world.some_s(0.01))

        def check(key: PageKey, page: bytes) -> None:
            if page != true_page(key):
                world.violations.append(f"{self.name}: page {key} became durable with wrong bytes")

        return SimPageStore(self.disk, rng=world.rng, pause=pause, alive=lambda: process.alive, check=check)

    def _make_workers(self) -> EngineWorkers:
        def workers(threads: int, most_s: float, blocking: float) -> SimWorkers:
            made = SimWorkers(
                self.world.loop, threads=threads, delay_s=lambda: self.world.some_s(most_s), blocking=blocking
            )
            self._workers.append(made)
            return made

        return EngineWorkers(
            verify=workers(2, 0.004, 0.0),
            read=workers(2, 0.004, 0.4),
            write=workers(2, 0.004, 0.4),
            pull=workers(2, 0.002, 1.0),
        )

    def _watch_slots(self, engine: PageStoreEngine) -> None:
        """Poison every slot that becomes free, and see that nobody is touching it."""
        space, host = engine._ledger.space, self.host
        free = space.free

        def freed(slot: Any) -> None:
            segment_id, offset, size_bytes = slot.segment.segment_id, slot.offset, slot.size_bytes
            free(slot)
            host.check_free(segment_id, offset, size_bytes)
            segment = host.segments.get(segment_id)
            if segment is not None:
                segment.memory[offset : offset + 256] = b"\xdd" * 256

        space.free = freed  # type: ignore[method-assign]

    def _watch_promises(self, engine: PageStoreEngine) -> None:
        """Nothing is announced as durable that is not; nothing is evicted before it is durable on a disk that works."""
        announcer, ledger, space, disk = engine._announcer, engine._ledger, engine._ledger.space, self.disk
        announce, evict, finish_commit = announcer.disk, space._on_evict, ledger.finish_commit
        committed: dict[int, PageRecord] = {}  # by id: kept, so that no other record gets it

        def announced(key: PageKey, group_head_hash: bytes, present: bool) -> None:
            if present and key not in disk.written and key not in disk.deleted:
                self.world.violations.append(f"{self.name}: page {key} was announced as durable and is not")
            announce(key, group_head_hash, present)

        def evicted(slot: Any) -> None:
            key = slot.page.key
            lost = key not in disk.written and key not in disk.deleted and not disk.ever_failed
            if self.shape.disk_pages and lost and id(slot.record) in committed:
                self.world.violations.append(f"{self.name}: page {key} was evicted before it was durable")
            evict(slot)

        def finished(slot: Slot, **how: bool) -> bool:
            committed[id(slot.page)] = slot.page
            return finish_commit(slot, **how)

        announcer.disk = announced  # type: ignore[method-assign]
        ledger.finish_commit = finished  # type: ignore[method-assign]
        space._on_evict = evicted


SESSION_FDS: dict[Process, Callable[[int], None]] = {}
"""Closes a session file's descriptor for the process that owns it."""


class SimPeers:
    """A pagestore's ports.PeerPages: pulls run on the other node's engine, page by page and half by half."""

    def __init__(self, world: World, owner: PageStoreNode) -> None:
        self._world = world
        self._owner = owner

    def pull(
        self,
        source: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[Any],
        deadline_s: float,
        on_page: Callable[[int, KvPoolError | None, bool], None],
        stop: Any = None,
    ) -> None:
        loop = self._world.loop
        answers: asyncio.Queue[tuple[int, KvPoolError | None, bytes | None, bool]] = asyncio.Queue()
        puller = current_process()
        serving = self._begin(source, [item.key for item in items], deadline_s, answers, puller)
        unsettled = set(range(len(items)))
        ends_at_s = loop.time() + deadline_s
        broken: KvPoolError | None = None if serving else ServiceUnavailable("nobody listens there")
        if stop is not None:
            stop.on_stop(lambda: loop.call_soon_threadsafe(answers.put_nowait, (-1, None, None, False)))
        try:
            while unsettled and broken is None and not (stop is not None and stop.stopped):
                index, error, data, last = wait_for(loop, _next(answers, ends_at_s - loop.time()))
                if index < 0:
                    broken = error
                elif data is not None:
                    data = self._travelled(data)
                    offset = len(items[index].destination) - len(data) if last else 0
                    items[index].destination[offset : offset + len(data)] = data
                    if last:
                        unsettled.discard(index)
                        on_page(index, None, True)
                else:
                    unsettled.discard(index)
                    on_page(index, error, False)
        finally:
            if serving:
                serving()
        for index in unsettled:
            on_page(index, broken or ServiceUnavailable("the pull was stopped"), False)

    def push(
        self,
        target: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[Any],
        deadline_s: float,
        *,
        require_durable: bool,
        on_page: Callable[[int, KvPoolError | None], None],
    ) -> None:
        for index in range(len(items)):  # replication is not simulated
            on_page(index, ServiceUnavailable("nobody takes pages here"))

    def close(self) -> None:
        pass

    def _travelled(self, data: bytes) -> bytes:
        """What arrives: sometimes not what was sent."""
        network = self._world.network
        if not network.chance(network.faults.flipped):
            return data
        at = int(network.rng.random() * len(data))
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    def _begin(
        self, source: RemoteSource, keys: Sequence[PageKey], deadline_s: float, answers: Any, puller: Process
    ) -> Callable[[], None] | None:
        """Have the other node serve; returns what ends that."""
        world = self._world
        node = next((one for one in world.pagestores if one.bulk_endpoint == source.bulk_endpoint), None)
        if node is None or not node.serving or not node.alive:
            return None
        server, engine = node.process, node.engine
        assert engine is not None
        last_s = [0.0]

        def send(index: int, error: KvPoolError | None, data: bytes | None, last: bool) -> None:
            answer = (index, error, data, last)
            last_s[0] = world.network.send(server, puller, last_s[0], lambda: answers.put_nowait(answer))

        def died() -> None:
            send(-1, ServiceUnavailable("the peer died"), None, False)

        tasks: list[asyncio.Task[None]] = []
        over = [False]

        def begin() -> None:
            if not over[0]:
                tasks.append(world.loop.spawn(server, _serve_pull(world, engine, source, keys, deadline_s, send)))

        def end_there() -> None:
            over[0] = True
            for task in tasks:
                task.cancel()

        def end() -> None:
            if died in server.on_kill:
                server.on_kill.remove(died)
            if end in puller.on_kill:
                puller.on_kill.remove(end)
            world.network.send(puller, server, 0.0, end_there)

        server.on_kill.append(died)
        puller.on_kill.append(end)
        world.network.send(puller, server, 0.0, begin)
        return end


async def _next(answers: asyncio.Queue[Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            return await answers.get()
    except TimeoutError:
        return -1, DeadlineExceeded("the pull took too long"), None, False


async def _serve_pull(
    world: World,
    engine: PageStoreEngine,
    source: RemoteSource,
    keys: Sequence[PageKey],
    deadline_s: float,
    send: Callable[[int, KvPoolError | None, bytes | None, bool], None],
) -> None:
    """What kvpool_pagestore.bulk_servicer does for a read stream, one page after the other."""
    from kvpool_pagestore.engine_pages import WantedPage

    try:
        engine.check_incarnation(source.incarnation)
        if source.incarnation != engine.incarnation:
            world.violations.append(f"incarnation {engine.incarnation} served what {source.incarnation} was asked for")
        peer = engine.sessions.open_internal(TENANT, [(KEYSPACE, SPEC)])
    except KvPoolError as error:
        send(-1, error, None, False)
        return
    try:
        for index, key in enumerate(keys):
            settled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            def on_acquired(acquired: Sequence[Any], final: bool, settled: asyncio.Future[Any] = settled) -> None:
                for one in acquired:
                    if not settled.done():
                        settled.set_result(one)

            engine.pages.acquire(peer, [WantedPage(key=key)], wait_s=deadline_s, on_acquired=on_acquired)
            one = await settled
            if world.loop.trace is not None:
                world.loop.trace(f"{current_process()} serves {key}: {one.error or bool(one.grant)}")
            if one.grant is None:
                send(index, one.error, None, True)
                continue
            view = engine.pages.view(one.grant)
            half = len(view) // 2
            first = bytes(view[:half])
            send(index, None, first, False)
            await asyncio.sleep(world.some_s(0.005))
            second = bytes(view[half:])
            if first + second != true_page(key):
                world.violations.append(f"page {key} changed while a peer was reading it")
            send(index, None, second, True)
            engine.pages.release(peer, [one.grant.lease_id])
    except KvPoolError as error:
        send(-1, error, None, False)
    finally:
        engine.sessions.close(peer)


def _slot_bytes() -> int:
    from tests.sim.pages import SLOT_BYTES

    return SLOT_BYTES


def _a_page() -> bytes:
    from tests.sim.pages import key_of

    return true_page(key_of(0, 0, 0))
