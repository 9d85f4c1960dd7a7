"""A node's standing with the index: its registration, its lease, and what it announces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from kvpool.client.index import IndexClient
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.core.cluster import (
    LocationChange,
    NodeInfo,
    NodeLease,
    NodeLoad,
    RegistrationAttempt,
    RemoteSource,
    StaleLocation,
    stale_locations,
)
from kvpool.core.errors import (
    DeadlineExceeded,
    KeyspaceUnknown,
    KvPoolError,
    LeaseLost,
    ServiceUnavailable,
    StaleIncarnation,
    StoreUnavailable,
    WireVersionRefused,
)
from kvpool.core.page import PageKey
from kvpool_server.node.announce_queue import AnnounceQueue
from kvpool_server.node.announcer import Announcer
from kvpool_server.node.chunk_directory import ChunkDirectory, LocationTruth, NoLocations
from kvpool_server.node.lease_stream import LeaseStream
from kvpool_server.node.reconciler import Reconciler

_log = logging.getLogger(__name__)
_DROP_TIMEOUT_S = 600.0  # of all locations in a keyspace: a million take half a minute
_UNREACHED: tuple[type[KvPoolError], ...] = (*TRANSIENT, StoreUnavailable, DeadlineExceeded)
_LATER: tuple[type[KvPoolError], ...] = (*_UNREACHED, WireVersionRefused)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinkConfig:
    """Bounds of a node's link to the index."""

    pending_max: int = 65_536  # chunks and tiers that wait to be announced; more: announced with their ranges
    batch_max: int = 512
    in_flight_max: int = 2  # batches sent and not acknowledged; a second one only if it is full
    linger_s: float = 0.02  # changes of one chunk that come within it are merged
    ack_timeout_s: float = 10.0  # no acknowledgement for so long, or for two leases: the stream is taken for dead
    reconcile_interval_s: float = 60.0  # everything held is compared with what the index knows so often
    reconcile_share: float = 0.25  # of the event loop's time, while it is compared
    stale_pending_max: int = 4096
    stale_linger_s: float = 0.05
    end_timeout_s: float = 1.0  # of ending the lease


class NodeLink:
    """Registers a node, keeps its lease, announces its locations; survives restarts of the index and of its store.

    load:          figures for each renewal.
    truth:         what the node holds, for comparing it with what the index knows: after registering, and then every
                   reconcile_interval_s. Where they differ, all that the node holds of a bucket range is announced.
    on_policy_version: called with the version of all keyspace policies after each renewal; never blocks.
    on_superseded: called once when a newer process of this node is registered: stop serving. The link has ended then.
    """

    def __init__(
        self,
        index: IndexClient,
        node: NodeInfo,
        *,
        last_incarnation: int = 0,
        load: Callable[[], NodeLoad],
        truth: LocationTruth,
        on_superseded: Callable[[StaleIncarnation], None],
        on_policy_version: Callable[[int], None] = lambda version: None,
        config: NodeLinkConfig | None = None,
    ) -> None:
        self._index = index
        self._node = node
        self._last_incarnation = last_incarnation
        self._load = load
        self._on_superseded = on_superseded
        self._on_policy_version = on_policy_version
        self._leases = LeaseStream(index.endpoints)
        self._is_idle = isinstance(truth, NoLocations)
        bounds = self._config = config or NodeLinkConfig()
        directory = ChunkDirectory(truth)
        self._queue = AnnounceQueue(
            directory,
            pending_max=bounds.pending_max,
            batch_max=bounds.batch_max,
            in_flight_max=bounds.in_flight_max,
        )
        self._announcer = Announcer(
            index, node.node_id, self._queue, on_acknowledged=self._acknowledged, linger_s=bounds.linger_s
        )
        self._reconciler = Reconciler(
            index,
            node.node_id,
            self._queue,
            directory,
            truth,
            lease=self._held,
            wake=self._announcer.wake,
            interval_s=bounds.reconcile_interval_s,
            share=bounds.reconcile_share,
        )
        self._reports = _StaleReports(
            index, pending_max=bounds.stale_pending_max, batch_max=bounds.batch_max, linger_s=bounds.stale_linger_s
        )
        self._lease: NodeLease | None = None
        self._attempt = RegistrationAttempt(process_id=secrets.token_bytes(16))
        self._registering = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._superseded: StaleIncarnation | None = None
        self._is_registration_right = True  # False: the index may have facts of an update that failed

    @property
    def incarnation(self) -> int:
        """The granted incarnation; 0 before `start` has returned."""
        return self._lease.incarnation if self._lease else 0

    @property
    def pending_count(self) -> int:
        """Chunks and tiers that wait to be announced."""
        return self._queue.pending_count

    @property
    def reconciler(self) -> Reconciler:
        """For its figures, and to have everything compared now."""
        return self._reconciler

    async def start(
        self, timeout_s: float | None = None, *, adopt: Callable[[int], Awaitable[None]] | None = None
    ) -> NodeLease:
        """Register, trying again until it succeeds; then keep the lease and announce in the background.

        timeout_s: None waits without a limit. adopt: makes the granted incarnation the node's own; nothing is
        announced under it before. raises: DeadlineExceeded; StaleIncarnation, InvalidRequest and the like at once; what
        `adopt` raises, after which it may be called again.
        """
        await self._reconciler.load()
        try:
            async with asyncio.timeout(timeout_s):
                lease = await self._register()
        except TimeoutError:
            raise DeadlineExceeded(f"the index did not register this node within {timeout_s:g} s") from None
        if adopt is not None:
            await adopt(lease.incarnation)
        self._lease = lease
        self._reconciler.start_round(unsure=True)
        self._spawn(self._keep_lease, "lease")
        self._spawn(self._keep_announcing, "announcer")
        self._spawn(self._reconciler.run, "reconciler")
        self._spawn(self._reports.run, "stale reports")
        return lease

    def announce(self, changes: Sequence[LocationChange]) -> None:
        """Queue changes, in order. Never blocks; changes of one chunk may be merged. Call on the event loop."""
        self._reconciler.note(changes)
        self._announcer.add(changes)

    async def wait_announced(self, timeout_s: float = 30.0) -> None:
        """Return when everything announced before the call is acknowledged; StoreUnavailable if that is not known."""
        if self._superseded is not None:
            raise StaleIncarnation(self._superseded.message)
        try:
            async with asyncio.timeout(timeout_s):
                await self._announcer.wait_acknowledged()
        except TimeoutError:
            raise StoreUnavailable(f"the index acknowledged nothing within {timeout_s:g} s") from None

    async def drop_keyspace(self, keyspace: bytes) -> None:
        """Remove this node's locations of a keyspace from the index. raises: StoreUnavailable, ServiceUnavailable."""
        self._reconciler.drop_keyspace(keyspace)
        # An addition that is still on its way would come back after the drop, until the next reconciliation.
        with contextlib.suppress(StoreUnavailable):
            await self.wait_announced(self._index.endpoints.config.call_timeout_s)
        await self._index.get_info()  # one that cannot be reached is not tried again for ten minutes
        with contextlib.suppress(KeyspaceUnknown):
            await self._index.drop_keyspace_locations(keyspace, self._node.node_id, timeout_s=_DROP_TIMEOUT_S)

    def report_stale(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        """Queue a report that `source` did not hold a page that it was said to hold, in any tier. Never blocks."""
        self._reports.add_page(key, group_head_hash, source)

    async def update(self, node: NodeInfo | None = None) -> None:
        """Register changed facts (None: those that hold). If it fails they are as before, soon to the index too."""
        async with self._registering:
            before, self._node = self._node, node or self._node
            try:
                self._lease = await self._register()
            except BaseException:
                self._node, self._is_registration_right = before, False
                raise
            self._is_registration_right = True
        self._announcer.break_stream("the node registered again")

    async def close(self) -> None:
        """Stop, and end the lease so that the node's locations leave every match at once. Idempotent."""
        await self._stop()
        if self._lease is None or self._superseded is not None:
            return
        try:
            await self._index.end_lease(
                self._node.node_id, self.incarnation, self._lease.process_id, timeout_s=self._config.end_timeout_s
            )
        except KvPoolError as error:
            _log.info("the lease was not ended and will run out by itself: %s", error)
        self._lease = None

    async def _stop(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._leases.close()

    def _spawn(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        self._tasks.append(asyncio.create_task(self._supervise(work, name), name=f"node link {name}"))

    async def _supervise(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        backoff = self._backoff()
        while True:
            try:
                return await work()
            except StaleIncarnation as error:
                return self._supersede(error)
            except Exception:
                _log.exception("the node link's %s failed and starts again", name)
            await asyncio.sleep(backoff.next_s())

    def _supersede(self, error: StaleIncarnation) -> None:
        if self._superseded is None:
            self._superseded = error
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            self._on_superseded(error)

    async def _register(self) -> NodeLease:
        backoff = self._backoff()
        while True:
            try:
                node = replace(self._node, incarnation=self.incarnation)
                attempt = self._attempt = replace(self._attempt, number=self._attempt.number + 1)
                lease = await self._index.register_node(node, last_incarnation=self._last_incarnation, attempt=attempt)
                info = await self._index.get_info()
                self._queue.limit_items(max(1, info.max_batch_items))
                self._reports.limit_items(max(1, info.max_batch_items))
                self._last_incarnation = max(self._last_incarnation, lease.incarnation)
                return lease
            except _LATER as error:
                _log.warning("the index did not register this node and is asked again: %s", error)
            await asyncio.sleep(backoff.next_s())

    async def _register_again(self, lost: NodeLease) -> None:
        """Both tasks may see that the lease is lost; one of them registers."""
        async with self._registering:
            if self._lease is not lost:
                return
            _log.warning("the lease of incarnation %d was lost: registering it again", lost.incarnation)
            self._lease = await self._register()
        self._reconciler.start_round(unsure=True)
        self._announcer.break_stream("the node registered again")

    async def _keep_lease(self) -> None:
        backoff = self._backoff()
        while True:
            pause_s = self._held().renew_interval_ms / 1e3
            try:
                if not self._is_registration_right:
                    await self.update()
                pause_s = await self._renew(self._held())
                backoff.reset()
            except StaleIncarnation:
                raise
            except KvPoolError as error:
                pause_s = min(pause_s, backoff.next_s())
                _log.warning("the lease was not renewed, next try in %.1f s: %s", pause_s, error)
            self._check_progress()
            await asyncio.sleep(pause_s)

    async def _renew(self, lease: NodeLease) -> float:
        """Seconds until the next renewal."""
        try:
            load = replace(self._load(), reconcile_age_ms=max(1, int(self._reconciler.age_s * 1e3)))
            renewal = await self._leases.renew(
                self._node.node_id,
                lease.incarnation,
                None if self._is_idle else load,
                timeout_s=lease.lease_ttl_ms / 3e3 / self._index.endpoints.count,
            )
            self._on_policy_version(renewal.policy_version)
            return (renewal.renew_interval_ms or lease.renew_interval_ms) / 1e3
        except LeaseLost:
            await self._register_again(lease)
        return 0.0

    def _check_progress(self) -> None:
        silent_s = asyncio.get_running_loop().time() - self._announcer.last_progress_s
        if self._queue.in_flight and silent_s > min(self._config.ack_timeout_s, 2 * self._held().lease_ttl_ms / 1e3):
            self._announcer.break_stream(f"no acknowledgement for {silent_s:.0f} s")

    async def _keep_announcing(self) -> None:
        backoff = self._backoff()
        while True:
            lease = self._held()
            acknowledged = self._queue.acknowledged
            try:
                await self._announce(lease)
            except StaleIncarnation:
                raise
            except _LATER as error:
                _log.info("the announce stream broke: %s", error)
            except Exception as error:
                _log.exception("announcing failed and starts afresh: %s", error)
                self._queue.discard_in_flight()
            if self._lease is not lease or self._queue.acknowledged != acknowledged:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _announce(self, lease: NodeLease) -> None:
        try:
            await self._announcer.run(lease)
        except LeaseLost:
            await self._register_again(lease)

    def _acknowledged(self) -> None:
        self._reconciler.acknowledged()

    def _held(self) -> NodeLease:
        if self._lease is None:
            raise ServiceUnavailable("this node link is closed")
        return self._lease

    def _backoff(self) -> Backoff:
        config = self._index.endpoints.config
        return Backoff(config.backoff_initial_s, config.backoff_max_s)


class _StaleReports:
    """Reports of wrong locations on their way to the index: best effort, bounded, never waited for.

    The oldest reports are forgotten when it is full: an unreported location costs each reader one miss.
    """

    def __init__(self, index: IndexClient, *, pending_max: int, batch_max: int, linger_s: float) -> None:
        self._index = index
        self._pending: deque[StaleLocation] = deque(maxlen=pending_max)
        self._batch_max = batch_max
        self._linger_s = linger_s
        self._work = asyncio.Event()

    def limit_items(self, items_max: int) -> None:
        """Send at most so many at once from now on."""
        self._batch_max = min(self._batch_max, items_max)

    def add_page(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        """Queue a report that `source` did not hold a page that it was said to hold, in any tier."""
        self._pending.extend(stale_locations(key, group_head_hash, source))
        self._work.set()

    async def run(self) -> None:
        """Send reports until cancelled."""
        config = self._index.endpoints.config
        backoff = Backoff(config.backoff_initial_s, config.backoff_max_s)
        while True:
            await self._work.wait()
            self._work.clear()
            await asyncio.sleep(self._linger_s)
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(self._batch_max, len(self._pending)))]
                try:
                    await self._index.report_stale(batch)
                    backoff.reset()
                except _UNREACHED:
                    room = (self._pending.maxlen or 0) - len(self._pending)
                    self._pending.extendleft(reversed(batch[-room:] if room else []))
                    await asyncio.sleep(backoff.next_s())
                except KvPoolError as error:
                    _log.warning("the index refuses %d reports of stale locations: %s", len(batch), error)
