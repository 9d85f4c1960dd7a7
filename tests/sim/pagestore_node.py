"""Simulated pagestore processes: the real engine and servicer on a simulated machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2_grpc
from kvpool_pagestore import main as pagestore_main
from kvpool_pagestore.adapters.index_link import IndexPlacement, NodeIndexLink
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.core.events import DiskChanged, PageEvent
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.core.writeback import DirtyPage, WriteQueue
from kvpool_pagestore.engine.parts import EngineParts, EngineWorkers
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.store import PageStoreEngine
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.servicer.control import PageStoreServicer
from kvpool_pagestore.servicer.session import SessionLimits
from kvpool_server.lifecycle import Stop
from tests.sim.disk import SimDisk, SimPageStore
from tests.sim.host import SimArena, SimHost, SimSegmentMap
from tests.sim.loop import Process, SimKilled
from tests.sim.nodes import SimClock, World
from tests.sim.pages import GRID, LARGEST_BYTES, SLOT_BYTES, TENANT, true_page
from tests.sim.peers import SimPeers
from tests.sim.threads import SimWorkers, is_on_thread, pause_s

SESSION_FDS: dict[Process, Callable[[int], None]] = {}
"""Closes a session file's descriptor for the process that owns it."""


@cache
def _pagestore_metrics() -> PageStoreMetrics:
    return PageStoreMetrics(CollectorRegistry())


@dataclass(slots=True, kw_only=True)
class PageStoreShape:
    """Sizes of a simulated pagestore."""

    arena_slots: int
    segment_slots: int
    disk_pages: int  # 0: no disk tier
    wall_offset_s: float = 0.0
    linger_ms: int = 5  # dirty pages wait so long for others to be written with


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
        self.host = SimHost(self.name, shape.arena_slots * SLOT_BYTES)
        self.disk = SimDisk(max(1, shape.disk_pages) * LARGEST_BYTES)
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

    def check_drained(self) -> None:
        """Durable pages are on another node's disk too; or they were, and that node has given them up since."""
        disk = self.engine._disk if self.engine is not None else None
        names = disk.map.names() if disk is not None and disk.is_readable else ()
        others = [one.disk for one in self.world.pagestores if one is not self]
        for key in [key for key in self.disk.written if key.keyspace + key.chunk_hash in names]:
            if not any(_has_had(one, key) for one in others) and key not in self.disk.damaged:
                self.world.violations.append(f"{self.name} is drained, and no other node has page {key}")
        self.world.drains_done += 1

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
        return PageStoreConfig(
            data_dir=Path("/nowhere"),
            index_endpoints=tuple(index.endpoint for index in self.world.indexes),
            arena_bytes=self.shape.arena_slots * SLOT_BYTES,
            segment_bytes=self.shape.segment_slots * SLOT_BYTES,
            disk_bytes=self.disk.budget_bytes if self.shape.disk_pages else 0,
            batch_pages=4,
            linger_ms=self.shape.linger_ms,
            write_retry_ms=50,
            write_retry_max_ms=400,
            heartbeat_interval_ms=300,
            quarantine_grace_ms=200,
            quarantine_poll_ms=50,
            pull_timeout_ms=3000,
            index_timeout_ms=500,
            index_start_wait_ms=500,
            reconcile_interval_ms=8000,
            push_timeout_ms=3000,
            replication_factor=self.world.copies,
            sweep_interval_ms=4000,
            hot_uses_per_minute=0,
            max_leases=8,
            prepared_segment_bytes=self.shape.segment_slots * SLOT_BYTES,
            tenant=TENANT,
        )

    async def _serve(self, process: Process) -> None:
        """What kvpool_pagestore.main does, with simulated parts."""
        world, config, loop = self.world, self._config(), self.world.loop
        arena = SimArena(self.host, process)
        store = self._store(process) if self.shape.disk_pages else None
        link = pagestore_main._index(config, tls=None)
        assert isinstance(link, NodeIndexLink)
        parts = EngineParts(
            arena=arena,
            store=store,
            disk_live_bytes=self.disk.budget_bytes,
            peers=SimPeers(world, self),
            index=link,
            placement=_Placement(self, link),
            workers=self._make_workers(),
            clock=SimClock(loop, self.shape.wall_offset_s),
            first_segment_id=((self.number + 1) << 40) + (self.starts << 16) + 1,
        )
        engine = self.engine = PageStoreEngine(config, parts, _pagestore_metrics())
        self._watch_slots(engine)
        self._watch_promises(engine)
        self._say_late_words(engine)
        stop = self.stop = Stop()
        last_incarnation = await engine.load(arena.old_sessions())
        self._check_old_memory(engine)
        node = NodeInfo(
            node_id=self.node_id,
            kind=NodeKind.PAGESTORE,
            host_id=self.name,
            endpoint=self.endpoint,
            bulk_endpoint=self.bulk_endpoint,
            local_socket=f"/run/{self.name}.sock",
            capacity_bytes=config.arena_bytes,
        )
        await pagestore_main._adopt_incarnation(config, parts, engine, node, last_incarnation, stop)
        self.index = link
        self._listen(config, engine, arena)
        self.serving = True
        engine.replication.start()
        engine.drain.start()
        if self.world.prepares:
            engine.preparation.start()
        await stop.wait()
        if stop.failure is not None:  # superseded: the process ends
            self._check_successor(link)
            self.crash()

    def _check_old_memory(self, engine: PageStoreEngine) -> None:
        """What clients keep of an earlier process's memory is in the budget of this one from its start."""
        counted_bytes = engine._table.space.segment_total_bytes
        if self.host.segment_bytes > counted_bytes:
            self.host.fail(f"{self.host.segment_bytes} bytes of segments are there, {counted_bytes} are counted")

    def _check_successor(self, link: NodeIndexLink) -> None:
        """Only another process may end this one, not a registration of its own that came late or twice."""
        registered, redis = self._registered(), self.world.redis
        own = link._link is not None and registered is not None and link._link._attempt.process_id
        if own and own == registered.attempt.process_id and not redis.has_forgotten:
            self.world.violations.append(f"{self.name} was ended by a registration of its own")

    def _registered(self) -> Any:
        return self.world.redis.store.nodes._nodes.get(self.node_id)

    def _listen(self, config: PageStoreConfig, engine: PageStoreEngine, arena: SimArena) -> None:
        limits = SessionLimits(
            node_id=self.node_id,
            descriptor_socket=Path(self.endpoint),
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            max_leases=config.max_leases,
            max_requests_in_flight=config.max_requests_in_flight,
            arena_bytes=config.arena_bytes,
        )
        servicer = PageStoreServicer(engine, self.world.tenant_of_call, limits)
        self.world.network.listen(
            self.endpoint,
            self.process,
            lambda server: pagestore_pb2_grpc.add_PageStoreServiceServicer_to_server(servicer, server),
        )
        SimSegmentMap.servers[self.endpoint] = (self.process, self.host, arena, engine.sessions.descriptor)
        SESSION_FDS[self.process] = arena.close_fd

    def _store(self, process: Process) -> SimPageStore:
        world = self.world

        def pause() -> None:
            if world.rng.random() < 0.5:
                pause_s(world.loop, world.some_s(0.01))

        def check(key: PageKey, page: bytes) -> None:
            if page != true_page(key):
                world.violations.append(f"{self.name}: page {key} became durable with wrong bytes")

        def sync(duration_s: float) -> None:
            if not is_on_thread():
                world.violations.append(f"{self.name}: its loop waits for the disk")
            pause_s(world.loop, duration_s)

        return SimPageStore(self.disk, rng=world.rng, pause=pause, sync=sync, alive=lambda: process.alive, check=check)

    def _make_workers(self) -> EngineWorkers:
        def workers(threads: int, most_s: float, blocking: float) -> SimWorkers:
            def share() -> float:
                return 1.0 if blocking and self.disk.sync_s else blocking

            made = SimWorkers(
                self.world.loop, threads=threads, delay_s=lambda: self.world.some_s(most_s), blocking=share
            )
            self._workers.append(made)
            return made

        return EngineWorkers(
            verify=workers(2, 0.004, 0.0),
            read=workers(2, 0.004, 0.4),
            write=workers(2, 0.004, 0.4),
            pull=workers(2, 0.002, 1.0),
            push=workers(2, 0.002, 1.0),
            seal=workers(2, 0.004, 0.0),
            prepare=workers(2, 0.02, 0.0),
        )

    def _watch_slots(self, engine: PageStoreEngine) -> None:
        """Poison every slot that becomes free, and check that no one is touching it."""
        space, host = engine._table.space, self.host
        free = space.free

        def freed(slot: Any) -> None:
            segment_id, offset, size_bytes = slot.segment.segment_id, slot.offset, slot.size_bytes
            free(slot)
            host.check_free(segment_id, offset, size_bytes)
            segment = host.segments.get(segment_id)
            if segment is not None:
                segment.memory[offset : offset + 256] = b"\xdd" * 256

        space.free = freed  # type: ignore[method-assign]

    def _say_late_words(self, engine: PageStoreEngine) -> None:
        """A session that ends in the middle of its words: those already read are served afterwards, and do nothing."""
        rng, loop, sessions = self.world.rng, self.world.loop, engine.sessions
        end = sessions.end

        def ended(peer: PeerSession, cause: str, error: KvPoolError | None = None) -> None:
            writes, reads = list(peer.session.writes), list(peer.session.reads)
            end(peer, cause, error)
            if (writes or reads) and rng.random() < 0.3:
                loop.call_later(self.world.some_s(0.01), engine.pages.abort, peer, writes)
                loop.call_later(self.world.some_s(0.01), engine.pages.release, peer, reads)

        sessions.end = ended  # type: ignore[method-assign]

    def _watch_promises(self, engine: PageStoreEngine) -> None:
        """Nothing is announced as durable that is not; nothing is evicted before it is durable on a disk that works,
        unless that was behind when the page was committed, or has refused it: it may be full of what is in use."""
        events, ledger, space, disk = engine.events, engine._table, engine._table.space, self.disk
        publish, evict, finish_commit = events.publish, space._on_evict, ledger.finish_commit
        committed: dict[int, PageRecord] = {}  # by id: kept, so that no other record gets it

        def published(event: PageEvent) -> None:
            if isinstance(event, DiskChanged) and event.present:
                for key, _ in event.pages:
                    if key not in disk.written and key not in disk.deleted:
                        self.world.violations.append(f"{self.name}: page {key} was announced as durable and is not")
            publish(event)

        def evicted(slot: Any) -> None:
            key = slot.page.key
            lost = key not in disk.written and key not in disk.deleted and not disk.ever_failed
            if self.shape.disk_pages and lost and id(slot.record) in committed:
                self.world.violations.append(f"{self.name}: page {key} was evicted before it was durable")
            evict(slot)

        def finished(slot: Slot, **how: bool) -> bool:
            if how["dirty"] or not ledger.is_disk_behind:
                committed[id(slot.page)] = slot.page
            return finish_commit(slot, **how)

        events.publish = published  # type: ignore[method-assign]
        ledger.finish_commit = finished  # type: ignore[method-assign]
        space._on_evict = evicted
        if engine._write_back is not None:
            _watch_failures(engine._write_back._queue, committed)


def _watch_failures(queue: WriteQueue, committed: dict[int, PageRecord]) -> None:
    """Take out of `committed` what the disk has refused."""
    failed = queue.failed

    def refused(page: DirtyPage, *how: Any, **more: Any) -> None:
        committed.pop(id(page.record), None)
        failed(page, *how, **more)

    queue.failed = refused  # type: ignore[method-assign]


def _has_had(disk: SimDisk, key: PageKey) -> bool:
    """Whether a disk has what a page has, or had it until its owner gave it up."""
    known = {*disk.written, *disk.deleted}
    present = sum(1 << shard for shard in range(GRID.shard_count) if key._replace(shard=shard) in known)
    return GRID.covers(present, 1 << key.shard)


class _Placement(IndexPlacement):
    """Sees that a drain that is done has left no page behind."""

    def __init__(self, node: PageStoreNode, link: NodeIndexLink) -> None:
        super().__init__(link)
        self._node = node

    async def leave(self) -> None:
        self._node.check_drained()
        await super().leave()
