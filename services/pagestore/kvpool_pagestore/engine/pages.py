"""What sessions do with pages: reserve, commit, abort, acquire, release."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from kvpool.core.errors import InvalidRequest, KeyspaceUnknown, KvPoolError, PageMissing, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.core.events import PagesRead
from kvpool_pagestore.core.keyspaces import check_page
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord, Slot, SpaceNeed
from kvpool_pagestore.engine.commits import Commits
from kvpool_pagestore.engine.context import EngineContext, Tiers
from kvpool_pagestore.engine.fetch import Acquired, Acquisition, Flights, OnAcquired, PageRequest
from kvpool_pagestore.engine.local_pages import LocalPages
from kvpool_pagestore.engine.retention import RetentionManager
from kvpool_pagestore.engine.sessions import PeerSession

_log = logging.getLogger(__name__)


def _admission(answer: ReserveAnswer) -> str:
    if isinstance(answer, Admission):
        return answer.name
    return "RESERVED" if isinstance(answer, Grant) else "REJECTED"


ReserveAnswer = Grant | Admission | KvPoolError
"""A lease, EXISTS or PENDING, or why the page is not admitted."""


class PageCalls:
    """Calls of sessions on pages. Each change of the page table is one step on the loop; threads touch the bytes."""

    def __init__(
        self,
        tiers: Tiers,
        flights: Flights,
        commits: Commits,
        retention: RetentionManager,
        local: LocalPages,
        context: EngineContext,
    ) -> None:
        self._tracer = context.tracer
        self._table = tiers.staging.table
        self._space = tiers.staging.space
        self._disk = tiers.disk
        self._write_back = tiers.write_back
        self._flights = flights
        self._retention = retention
        self._local = local
        self._events = context.events
        self._tasks = context.tasks
        self._metrics = context.metrics
        self._commit_time = context.metrics.request_duration.labels("commit")
        self._commits = commits

    @property
    def flight_count(self) -> int:
        """Pages that are on their way to readers: from disk, from a peer, or to be sealed."""
        return self._flights.count

    async def make_durable(self, key: PageKey) -> KvPoolError | None:
        """Wait until a visible page is on disk, whatever the plan of its keyspace says; None, or why it is not."""
        if self._disk is None or self._write_back is None:
            return StoreFault("this node has no disk tier")
        slot = self._table.find(key)
        if key in self._disk or slot is None:
            return None if key in self._disk else PageMissing(f"page {key} is not here any more")
        self._table.pin(slot)
        try:
            page = self._write_back.take(slot)
            if page is None:
                return StoreFault(f"page {key} could not be made durable: too much waits for the disk already")
            (error,) = await self._write_back.wait_durable([page], failures_before=page.failures)
            return error
        finally:
            self._table.unpin(slot)

    def view(self, grant: Grant) -> memoryview:
        """The page's bytes in its slot."""
        return self._space.view(grant.slot)

    async def reserve(self, peer: PeerSession, items: Sequence[PageRecord]) -> list[ReserveAnswer]:
        """Reserve slots; return an answer per item, in order. Raises SessionUnknown if the session ends meanwhile."""
        with self._metrics.request_duration.labels("reserve").time():
            changed: list[PageKey] = []
            answers = [await self._reserve_one(peer, index, item, changed) for index, item in enumerate(items)]
            try:
                await self._retention.keep(changed)  # one sync for all of them
            except KvPoolError as error:
                here = {item.key for item in items}.intersection(changed)
                answers = [
                    error if answer is Admission.EXISTS and item.key in here else answer
                    for item, answer in zip(items, answers, strict=True)
                ]
        for label, count in Counter(map(_admission, answers)).items():
            self._metrics.reserved_pages.labels(label).inc(count)
        reach("pagestore.reserve.granted")
        return answers

    def verify_written(self, peer: PeerSession, lease_id: int) -> KvPoolError | None:
        """Look at a page that this session has written, for `commit_verified`. For a thread; None for a lease that has
        ended, which the commit refuses."""
        slot = peer.session.writes.get(lease_id)
        return self._commits.verify(slot) if slot is not None else None

    async def commit_verified(
        self, peer: PeerSession, lease_id: int, fault: KvPoolError | None, *, durable: bool
    ) -> KvPoolError | None:
        """Make a page visible that `verify_written` has looked at. durable: as for `commit`."""
        peer.check_live()
        slot = self._table.begin_commit(peer.session, lease_id)
        if not isinstance(slot, Slot):
            return slot
        with self._commit_time.time():
            (error,) = await self._commits.durable(self._commits.finish_verified([slot], [fault], durable))
        return error

    async def commit(
        self, peer: PeerSession, lease_ids: Sequence[int], *, durable: bool = False, sealed: bool = True
    ) -> list[KvPoolError | None]:
        """Verify written pages and make them visible; per lease None or why not. It ends even if the caller leaves.

        Not sealed: only the payloads are in place. They are not verified, and sealed here before they leave this host's
        memory or go to a session that does not trust the arena. Raises InvalidRequest if this session does not.

        durable: answer only when the pages are on disk, as for keyspaces under write-through. The error of a page that
        could not be made durable is its answer; the page is visible in staging all the same, and tried again as long as
        it is not evicted.
        """
        peer.check_live()
        if not sealed and not peer.session.trusts_arena:
            raise InvalidRequest("commit: only a session that trusts the arena may leave pages unsealed")
        begun = [self._table.begin_commit(peer.session, lease_id) for lease_id in lease_ids]
        slots = [one for one in begun if isinstance(one, Slot)]
        with self._commit_time.time():
            if not sealed:
                committed = self._commits.finish_unsealed(slots)
            else:
                committed = await self._tasks.finish(self._commits.finish(slots, durable), "commit") if slots else []
            faults = iter(await self._commits.durable(committed))
        return [next(faults) if isinstance(one, Slot) else one for one in begun]

    def abort(self, peer: PeerSession, lease_ids: Sequence[int]) -> None:
        """Give slots back unwritten; unknown leases are ignored."""
        for lease_id in lease_ids if peer.live else ():  # else the message was late: the peer may be writing
            self._table.abort(peer.session, lease_id)

    def acquire(
        self, peer: PeerSession, wanted: Sequence[PageRequest], *, wait_s: float, on_acquired: OnAcquired
    ) -> None:
        """Lease pages as they become ready; `on_acquired` gets every item once.

        Raises SessionUnknown, and InvalidRequest for a shard that does not exist; then nothing was begun.
        """
        peer.check_live()
        for index, one in enumerate(wanted):
            keyspace = peer.keyspace(one.key.keyspace)
            if keyspace is not None and one.key.shard >= keyspace.grid.shard_count:
                raise InvalidRequest(f"item {index}: shard {one.key.shard} is not in the keyspace's grid")

        self.drop_expired(one.key for one in wanted)
        self.fetch(peer, wanted, wait_s=wait_s, on_acquired=on_acquired)

    def drop_expired(self, keys: Iterable[PageKey]) -> None:
        """Forget those of the pages that are past their time: a request for them must fail from now on."""
        if self._retention.may_expire:
            for key in keys:
                self._retention.drop_expired(key)

    def fetch(self, peer: PeerSession, items: Sequence[PageRequest], *, wait_s: float, on_acquired: OnAcquired) -> None:
        """Lease pages that have been checked as they become ready, wherever they have to come from."""
        started_s = time.perf_counter()

        def answered(acquired: Sequence[Acquired], final: bool) -> None:
            if final:
                peer.acquisitions.discard(acquisition)
                self._metrics.request_duration.labels("acquire").observe(time.perf_counter() - started_s)
            if read := [one.grant.slot.page for one in acquired if one.grant is not None]:
                self._events.publish(PagesRead(read))
            on_acquired(acquired, final)

        acquisition = Acquisition(peer, items, self._table, self._flights, self._metrics, answered, self._tracer.here())
        peer.acquisitions.add(acquisition)
        acquisition.start(wait_s)

    def release(self, peer: PeerSession, lease_ids: Sequence[int], corrupt_ids: Sequence[int] = ()) -> None:
        """End read leases; pages that a reader found corrupt are dropped, from disk too if they fail there."""
        if not peer.live:
            return  # the message was late: what the session held is quarantined as a whole
        for lease_id in corrupt_ids:
            slot = peer.session.reads.get(lease_id)
            if slot is not None and not slot.deleted:
                self._drop_corrupt(slot, peer)
        for lease_id in (*lease_ids, *corrupt_ids):
            self._table.release(peer.session, lease_id)

    async def verify(self, peer: PeerSession, keys: Sequence[PageKey]) -> list[KvPoolError | bool]:
        """Verify pages that a reader received corrupt, and drop those that fail. Per page whether it is here, and good.

        Raises SessionUnknown.
        """
        peer.check_live()
        answers: list[KvPoolError | bool] = []
        for key in keys:
            keyspace = peer.keyspace(key.keyspace)
            if keyspace is None:
                answers.append(KeyspaceUnknown(f"the session has not named keyspace {key.keyspace.hex()}"))
            elif key.shard >= keyspace.grid.shard_count:
                answers.append(False)
            else:
                answers.append(await self._local.recheck(keyspace, key))
        return answers

    # Inside

    async def _reserve_one(
        self, peer: PeerSession, index: int, item: PageRecord, changed: list[PageKey]
    ) -> ReserveAnswer:
        keyspace = peer.keyspace(item.key.keyspace)
        if keyspace is None:
            return KeyspaceUnknown(f"item {index}: the session has not named keyspace {item.key.keyspace.hex()}")
        try:
            check_page(keyspace, item.key, item.page_bytes)
        except InvalidRequest as error:
            return InvalidRequest(f"item {index}: {error}", item_index=index)
        self._retention.drop_expired(item.key)
        metadata = self._retention.prepared(item.key, item.metadata)
        if self._disk is not None and item.key in self._disk:
            self._disk.map.touch(item.key)
            return self._retention.extend(item.key, item.page_bytes, metadata, changed) or Admission.EXISTS
        record = PageRecord(item.key, item.page_bytes, metadata)

        def attempt() -> Grant | Admission | KvPoolError | SpaceNeed:
            peer.check_live()
            return self._table.reserve(peer.session, record)

        with self._retention.seeking_room(item.key):
            answer: ReserveAnswer = await self._space.find(keyspace.tenant, item.page_bytes, attempt)
        if answer is Admission.EXISTS:
            return self._retention.extend(item.key, item.page_bytes, metadata, changed) or Admission.EXISTS
        if isinstance(answer, KvPoolError):
            self._retention.turned_down(item.key)
        return answer

    def _drop_corrupt(self, slot: Slot, peer: PeerSession) -> None:
        key = slot.page.key
        self._metrics.verification_failures.labels("reader").inc()
        _log.error("page %s fails verification at %s and is dropped", key, peer.session.peer_name)
        self._table.drop(key)
        keyspace = peer.keyspace(key.keyspace)
        assert keyspace is not None  # it has a lease of the page
        self._local.start_recheck(keyspace, key)
