"""Reserve and acquire for spans: one pass over many pages of a chain, and no object for a page that is at hand."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import InvalidRequest, KeyspaceUnknown, KvPoolError
from kvpool.core.fault_points import reach
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.core.spans import NO_GRANTS, NO_PAGES, PageGrants, PageSpan, SpanAnswer
from kvpool_pagestore.core.events import PagesRead
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.slots import PageRecord, Slot, SpaceNeed, slot_bytes_for
from kvpool_pagestore.engine.context import EngineContext, Tiers
from kvpool_pagestore.engine.fetch import Acquired, PageRequest, Source
from kvpool_pagestore.engine.pages import PageCalls
from kvpool_pagestore.engine.retention import RetentionManager
from kvpool_pagestore.engine.sessions import PeerSession

OnAnswer = Callable[[SpanAnswer, bool], None]
"""Gets pages as they are answered, each once; True with the last ones. Called on the loop."""

SOURCE_NUMBERS = {Source.STAGING: 1, Source.DISK: 2, Source.REMOTE: 3}  # of kvpool.v1.Source


@dataclass(slots=True)
class _Answered:
    """What became of pages so far. source: number of where they were found; 0 for writes."""

    pages: list[int] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    sources: bytearray = field(default_factory=bytearray)
    exists: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    failed: list[tuple[int, KvPoolError | None]] = field(default_factory=list)
    changed: list[PageKey] = field(default_factory=list)  # of those that exist: see RetentionManager.keep

    def answer(self) -> SpanAnswer:
        granted = NO_GRANTS
        if self.pages:
            segments = [slot.segment for slot in self.slots]
            granted = PageGrants(
                pages=np.array(self.pages, np.int32),
                lease_ids=np.array(self.lease_ids, np.int64),
                segment_ids=np.array([segment.segment_id for segment in segments], np.int64),
                offsets=np.array([slot.offset for slot in self.slots], np.int64),
                sources=np.frombuffer(bytes(self.sources) or bytes(len(self.pages)), np.uint8),
            )
        return SpanAnswer(
            granted=granted,
            exists=np.array(self.exists, np.int32) if self.exists else NO_PAGES,
            pending=np.array(self.pending, np.int32) if self.pending else NO_PAGES,
            failed=tuple(self.failed),
        )


class SpanCalls:
    """Calls of sessions on spans. What is not at hand goes the way of `PageCalls`, page by page."""

    def __init__(
        self,
        tiers: Tiers,
        retention: RetentionManager,
        pages: PageCalls,
        context: EngineContext,
    ) -> None:
        self._table = tiers.staging.table
        self._space = tiers.staging.space
        self._disk = tiers.disk
        self._retention = retention
        self._pages = pages
        self._events = context.events
        self._metrics = context.metrics
        # Looked up once: the labels of a metric take as long to find as a page.
        self._reserve_time, self._acquire_time = map(context.metrics.request_duration.labels, ("reserve", "acquire"))
        self._staged_pages = context.metrics.acquired_pages.labels(Source.STAGING.value)
        self._staged_bytes = context.metrics.acquired_bytes.labels(Source.STAGING.value)
        self._reserved, self._existing, self._pending, self._rejected = (
            context.metrics.reserved_pages.labels(label) for label in ("RESERVED", "EXISTS", "PENDING", "REJECTED")
        )

    async def reserve(self, peer: PeerSession, span: PageSpan) -> SpanAnswer:
        """Write leases. Raises KeyspaceUnknown, InvalidRequest for a shard that does not exist, SessionUnknown if the
        session ends meanwhile."""
        keyspace = _checked(peer, span)
        with self._reserve_time.time():
            answered = await self._reserve(peer, keyspace, span)
            try:
                await self._retention.keep(answered.changed)  # one sync for all of them
            except KvPoolError as error:
                keys, unsaid = span.page_keys, set(answered.changed)
                answered.failed += [(page, error) for page in answered.exists if keys[page] in unsaid]
                answered.exists = [page for page in answered.exists if keys[page] not in unsaid]
        self._reserved.inc(len(answered.pages))
        self._existing.inc(len(answered.exists))
        self._pending.inc(len(answered.pending))
        self._rejected.inc(len(answered.failed))
        reach("pagestore.reserve.granted")
        return answered.answer()

    def acquire(self, peer: PeerSession, span: PageSpan, *, wait_s: float, on_answer: OnAnswer) -> None:
        """Lease pages: what is in staging at once, the rest as it becomes ready; `on_answer` gets every page once.

        Raises SessionUnknown, KeyspaceUnknown, and InvalidRequest for a shard that does not exist; then nothing was
        begun.
        """
        peer.check_live()
        keyspace = _checked(peer, span)
        started_s = time.perf_counter()
        keys = span.page_keys
        self._pages.drop_expired(keys)
        leases = self._table.acquire_ready(peer.session, keys)
        if leases.slots:
            self._events.publish(PagesRead([slot.page for slot in leases.slots]))
        self._count(span, keyspace, leases.pages, len(leases.refused), leases.refusal)
        staged = _Answered(leases.pages, leases.lease_ids, leases.slots, bytearray(b"\1") * len(leases.pages))
        staged.failed = [(page, leases.refusal) for page in leases.refused]
        if not leases.absent:
            self._acquire_time.observe(time.perf_counter() - started_s)
            on_answer(staged.answer(), True)
            return
        if staged.pages or staged.failed:
            on_answer(staged.answer(), False)
        absent = leases.absent

        def fetched(acquired: Sequence[Acquired], final: bool) -> None:
            on_answer(_fetched(acquired, absent), final)

        items = _items(span, absent)
        self._pages.fetch(peer, items, wait_s=wait_s, on_acquired=fetched)

    # Inside

    async def _reserve(self, peer: PeerSession, keyspace: Keyspace, span: PageSpan) -> _Answered:
        keys, answered = span.page_keys, _Answered()
        self._pages.drop_expired(keys)
        metadata = self._retention.prepared_all(span.keyspace, span.metadata)
        size_bytes = {shard: keyspace.page_bytes(shard) for shard in set(span.shards.tolist())}
        records = [
            PageRecord(key, size_bytes[key.shard], metadata[position])
            for key, position in zip(keys, span.positions.tolist(), strict=True)
        ]
        peer.check_live()
        self._space.look_for_growth()
        slot_sizes = {slot_bytes_for(size) for size in size_bytes.values()}
        together = max(slot_sizes) if len(slot_sizes) == 1 and len(set(keys)) == len(keys) else 0
        pages: Sequence[int] = range(len(records))
        while pages := self._reserve_ready(peer, records, pages, together, answered):
            page, pages = pages[0], pages[1:]
            answer = await self._find(peer, keyspace, records[page])
            self._note(page, records[page], answer, peer.session.last_lease_id, answered)
        for each in slot_sizes:
            self._space.grow_ahead(keyspace.tenant, each)
        return answered

    def _reserve_ready(
        self,
        peer: PeerSession,
        records: Sequence[PageRecord],
        pages: Sequence[int],
        slot_bytes: int,
        answered: _Answered,
    ) -> Sequence[int]:
        """Reserve some of the pages; return the rest, which begins with one for which room must be made.

        slot_bytes: of all pages, if they are different ones with slots of one size; else 0.
        """
        session, answers = peer.session, None
        # Where some are on disk, room for others could be made of them.
        if slot_bytes and not any(self._is_on_disk(records[page].key) for page in pages):
            lease_id = session.last_lease_id
            answers = self._table.reserve_all(session, [records[page] for page in pages], slot_bytes)
        if answers is not None:
            left: list[int] = []
            for page, found in zip(pages, answers, strict=True):
                if found is None:
                    left.append(page)
                    continue
                lease_id += isinstance(found, Slot)
                self._note(page, records[page], found, lease_id, answered)
            return left
        with self._events.merged():
            for at, page in enumerate(pages):
                record = records[page]
                if self._is_on_disk(record.key):
                    self._note(page, record, Admission.EXISTS, 0, answered)
                    continue
                answer = self._table.reserve_slot(session, record, slot_bytes_for(record.page_bytes))
                if isinstance(answer, SpaceNeed):
                    return pages[at:]
                self._note(page, record, answer, session.last_lease_id, answered)
        return ()

    def _note(
        self,
        page: int,
        record: PageRecord,
        answer: Slot | Admission | KvPoolError,
        lease_id: int,
        answered: _Answered,
    ) -> None:
        """What a page got. lease_id: on its slot, if it got one."""
        if isinstance(answer, Slot):
            answered.pages.append(page)
            answered.lease_ids.append(lease_id)
            answered.slots.append(answer)
            return
        if isinstance(answer, KvPoolError):
            self._retention.turned_down(record.key)
        elif answer is Admission.EXISTS:
            changed = answered.changed
            answer = self._retention.extend(record.key, record.page_bytes, record.metadata, changed) or answer
        if isinstance(answer, KvPoolError):
            answered.failed.append((page, answer))
        else:
            (answered.exists if answer is Admission.EXISTS else answered.pending).append(page)

    def _is_on_disk(self, key: PageKey) -> bool:
        """Whether the page needs no slot; its store counts as a use."""
        disk = self._disk
        if disk is None or key not in disk:
            return False
        disk.map.touch(key)
        return True

    async def _find(self, peer: PeerSession, keyspace: Keyspace, record: PageRecord) -> Slot | Admission | KvPoolError:
        """Reserve a page for which room must be made. Nothing is awaited after it was granted."""

        def attempt() -> Slot | Admission | KvPoolError | SpaceNeed:
            peer.check_live()
            return self._table.reserve_slot(peer.session, record, slot_bytes_for(record.page_bytes))

        with self._retention.seeking_room(record.key):
            answer: Slot | Admission | KvPoolError = await self._space.find(keyspace.tenant, record.page_bytes, attempt)
            peer.check_live()
        return answer

    def _count(
        self, span: PageSpan, keyspace: Keyspace, granted: list[int], refused: int, refusal: KvPoolError | None
    ) -> None:
        if granted:
            shards = span.shards.tobytes()
            counts = Counter(map(shards.__getitem__, granted))
            size_bytes = sum(count * keyspace.page_bytes(shard) for shard, count in counts.items())
            self._staged_pages.inc(len(granted))
            self._staged_bytes.inc(size_bytes)
        if refusal is not None:
            self._metrics.missed_pages.labels(refusal.reason).inc(refused)


def _checked(peer: PeerSession, span: PageSpan) -> Keyspace:
    keyspace = peer.keyspace(span.keyspace)
    if keyspace is None:
        raise KeyspaceUnknown(f"the session has not named keyspace {span.keyspace.hex()}")
    shard_count = keyspace.grid.shard_count
    if span.page_count and max(span.shards.tobytes()) >= shard_count:
        page = int(span.shards.argmax())
        raise InvalidRequest(f"shards: shard {int(span.shards[page])} of page {page} is not one of {shard_count}")
    return keyspace


def _items(span: PageSpan, pages: Sequence[int]) -> list[PageRequest]:
    """Pages that are not in staging, as items."""
    keys = span.page_keys
    if not span.sources:
        return [PageRequest(key=keys[page]) for page in pages]
    metadata: tuple[PageMetadata, ...] = span.metadata
    positions, sources = span.positions.tolist(), span.chunk_sources
    return [
        PageRequest(
            key=keys[page],
            metadata=metadata[positions[page]],
            sources=sources[positions[page]],
        )
        for page in pages
    ]


def _fetched(acquired: Sequence[Acquired], pages: Sequence[int]) -> SpanAnswer:
    """Answered items; item i is page `pages[i]`."""
    answered = _Answered()
    for one in acquired:
        page = pages[one.item_index]
        if one.grant is None or one.source is None:
            answered.failed.append((page, one.error))
        else:
            answered.pages.append(page)
            answered.lease_ids.append(one.grant.lease_id)
            answered.slots.append(one.grant.slot)
            answered.sources.append(SOURCE_NUMBERS[one.source])
    return answered.answer()
