"""Simulated pagestore processes: the real engine and servicer on a simulated machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry

import kvpool_pagestore.core.page_table
import kvpool_pagestore.engine.store
import kvpool_pagestore.engine.writeback
from kvpool.core.cluster import UNNUMBERED, NodeInfo, NodeKind, NodeLease, RegistrationAttempt
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2_grpc
from kvpool_pagestore.adapters.index_link import NodeIndexLink
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.core.events import DiskChanged, PageEvent
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.segments import SegmentTable
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.core.writeback import DirtyPage, WriteBackLimits, WriteQueue
from kvpool_pagestore.engine.parts import EngineParts, EngineWorkers
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.store import PageStoreEngine
from kvpool_pagestore.main import adopt_incarnation
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
        self.process_id = b""  # of the last registration
        self._committed: dict[int, PageRecord] = {}  # by id: kept, so that no other record gets it
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
        disk = self.engine.tiers.disk if self.engine is not None else None
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
        link = _IndexLink(self, config)
        parts = EngineParts(
            arena=arena,
            store=store,
            disk_live_bytes=self.disk.budget_bytes,
            peers=SimPeers(world, self),
            index=link,
            placement=link,
            workers=self._make_workers(),
            clock=SimClock(loop, self.shape.wall_offset_s),
            first_segment_id=((self.number + 1) << 40) + (self.starts << 16) + 1,
        )
        with self._watched_parts():
            engine = self.engine = PageStoreEngine(config, parts, _pagestore_metrics())
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
        await adopt_incarnation(config, parts, engine, node, last_incarnation, stop)
        self.index = link
        self._listen(config, engine, arena)
        self.serving = True
        engine.replication.start()
        engine.drain.start()
        if self.world.prepares:
            engine.preparation.start()
        await stop.wait()
        if stop.failure is not None:  # superseded: the process ends
            await self._check_successor()
            self.crash()

    def _check_old_memory(self, engine: PageStoreEngine) -> None:
        """What clients keep of an earlier process's memory is in the budget of this one from its start."""
        counted_bytes = engine.gauges().arena_segment_bytes
        if self.host.segment_bytes > counted_bytes:
            self.host.fail(f"{self.host.segment_bytes} bytes of segments are there, {counted_bytes} are counted")

    async def _check_successor(self) -> None:
        """Only another process may end this one, not a registration of its own that came late or twice."""
        redis = self.world.redis
        if await redis.store.nodes.find(self.node_id) is None:
            return
        own = self.process_id == redis.store.nodes.attempts[self.node_id].process_id
        if self.process_id and own and not redis.has_forgotten:
            self.world.violations.append(f"{self.name} was ended by a registration of its own")

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

    @contextmanager
    def _watched_parts(self) -> Iterator[None]:
        """An engine that is made meanwhile is made of parts that this node watches."""
        with (
            mock.patch.object(kvpool_pagestore.core.page_table, "SegmentTable", partial(_WatchedSegments, self)),
            mock.patch.object(kvpool_pagestore.engine.store, "PageTable", partial(_WatchedPages, self)),
            mock.patch.object(kvpool_pagestore.engine.writeback, "WriteQueue", partial(_WatchedWrites, self)),
        ):
            self._committed = {}
            yield

    def slot_freed(self, segment_id: int, offset: int, size_bytes: int) -> None:
        """Poison every slot that becomes free, and check that no one is touching it."""
        self.host.check_free(segment_id, offset, size_bytes)
        segment = self.host.segments.get(segment_id)
        if segment is not None:
            segment.memory[offset : offset + 256] = b"\xdd" * 256

    def page_committed(self, record: PageRecord) -> None:
        """Nothing may evict the page before it is durable on a disk that works."""
        self._committed[id(record)] = record

    def write_refused(self, record: PageRecord) -> None:
        """The disk has refused the page: it may be full of what is in use."""
        self._committed.pop(id(record), None)

    def page_evicted(self, record: PageRecord) -> None:
        """Check that what is evicted is durable, unless the disk was behind when it was committed, or refused it."""
        disk, key = self.disk, record.key
        lost = key not in disk.written and key not in disk.deleted and not disk.ever_failed
        if self.shape.disk_pages and lost and id(record) in self._committed:
            self.world.violations.append(f"{self.name}: page {key} was evicted before it was durable")

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
        """Nothing is announced as durable that is not."""
        events, disk = engine.events, self.disk
        publish = events.publish

        def published(event: PageEvent) -> None:
            if isinstance(event, DiskChanged) and event.present:
                for key, _ in event.pages:
                    if key not in disk.written and key not in disk.deleted:
                        self.world.violations.append(f"{self.name}: page {key} was announced as durable and is not")
            publish(event)

        events.publish = published  # type: ignore[method-assign]


class _WatchedSegments(SegmentTable):
    """Has its node look at what is evicted and freed."""

    def __init__(self, node: PageStoreNode, *, on_evict: Callable[[Slot], None], **how: Any) -> None:
        def evicted(slot: Slot) -> None:
            node.page_evicted(slot.page)
            on_evict(slot)

        super().__init__(on_evict=evicted, **how)
        self._node = node

    def free(self, slot: Slot) -> None:
        segment_id, offset, size_bytes = slot.segment.segment_id, slot.offset, slot.size_bytes
        super().free(slot)
        self._node.slot_freed(segment_id, offset, size_bytes)


class _WatchedPages(PageTable):
    """Has its node look at commits."""

    def __init__(self, node: PageStoreNode, *parts: Any) -> None:
        super().__init__(*parts)
        self._node = node

    def finish_commit(self, slot: Slot, *, verified: bool, dirty: bool, sealed: bool = True) -> bool:
        if dirty or not self.is_disk_behind:
            self._node.page_committed(slot.page)
        return super().finish_commit(slot, verified=verified, dirty=dirty, sealed=sealed)


class _WatchedWrites(WriteQueue):
    """Has its node look at failures."""

    def __init__(self, node: PageStoreNode, limits: WriteBackLimits) -> None:
        super().__init__(limits)
        self._node = node

    def failed(self, page: DirtyPage, error: KvPoolError, now_s: float, *, is_disk_out: bool = False) -> None:
        self._node.write_refused(page.record)
        super().failed(page, error, now_s, is_disk_out=is_disk_out)


def _has_had(disk: SimDisk, key: PageKey) -> bool:
    """Whether a disk has what a page has, or had it until its owner gave it up."""
    known = {*disk.written, *disk.deleted}
    present = sum(1 << shard for shard in range(GRID.shard_count) if key._replace(shard=shard) in known)
    return GRID.covers(present, 1 << key.shard)


class _IndexLink(NodeIndexLink):
    """Notes as which process the node registers, and sees that a drain that is done has left no page behind."""

    def __init__(self, owner: PageStoreNode, config: PageStoreConfig) -> None:
        super().__init__(config.index_endpoints, config.index_timeout_ms / 1e3, config.reconcile_interval_ms / 1e3)
        self._owner, owner.process_id = owner, b""
        register = self._client.register_node

        async def registered(node: NodeInfo, *, attempt: RegistrationAttempt = UNNUMBERED, **how: Any) -> NodeLease:
            owner.process_id = attempt.process_id
            return await register(node, attempt=attempt, **how)

        self._client.register_node = registered  # type: ignore[method-assign]

    async def leave(self) -> None:
        self._owner.check_drained()
        await super().leave()
