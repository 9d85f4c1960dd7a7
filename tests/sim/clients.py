"""Simulated engines: the real client library, storing and loading pages of a few chains, and watching what they get."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.page_items import AcquireItem, ReserveItem, Slot
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import ChainMatch, ChainQuery, RemoteSource
from kvpool.core.errors import KeyspaceUnknown, KvPoolError, LeaseLost, PageCorrupt, StaleIncarnation
from kvpool.core.page import PageKey
from kvpool.core.spans import PageGrants, PageSpan
from tests.sim.client_parts import ClientCounts, Operation, check_bound, sources_of
from tests.sim.host import Hold
from tests.sim.loop import Violation
from tests.sim.nodes import World
from tests.sim.pages import (
    KEYSPACES,
    OTHER_TENANT,
    PAGE_BYTES,
    SHARDS,
    SPEC,
    TENANT,
    chunk_hash,
    key_of,
    metadata,
    payload,
    true_page,
)
from tests.sim.pagestore_node import PageStoreNode

POSITIONS = 4  # chunks of a chain


class ClientNode:
    """One engine's process beside one pagestore."""

    def __init__(self, world: World, name: str, store: PageStoreNode) -> None:
        self.world = world
        self.name = name
        self.store = store
        self.tenant = world.tenants.get(name, TENANT)
        self.keyspace = KEYSPACES[self.tenant]
        self.process = world.loop.process(name)
        self.process.alive = False
        self.starts = 0
        self.counts = ClientCounts()
        self.leaving = False
        self.operation: Operation | None = None
        self.task: asyncio.Task[None] | None = None
        self._session: PageStoreSession | None = None
        self._last_incarnation = 0
        self._expected_incarnation = 0  # what the first of the sessions that follow each other was opened with
        self._old_matches: dict[int, ChainMatch] = {}  # by chain

    @property
    def alive(self) -> bool:
        return self.process.alive

    def start(self, operations: int) -> None:
        self.starts += 1
        self.process = self.world.loop.process(f"{self.name}#{self.starts}")
        self.operation = None
        self._session = None
        self.task = self.world.loop.spawn(self.process, self._run(operations), self.name)

    def crash(self) -> None:
        self.world.loop.kill(self.process)
        self.store.host.process_gone(self.process)
        self.operation = None

    # Inside

    async def _run(self, operations: int) -> None:
        config = ClientConfig(
            index_endpoints=tuple(index.endpoint for index in self.world.indexes),
            call_timeout_s=2.0,
            connect_timeout_s=2.0,
            backoff_initial_s=0.02,
            backoff_max_s=0.3,
        )
        self._config = config
        self._index = IndexClient(config)
        self._control = PageStoreControl(self.store.endpoint, config)
        named = False
        while operations > 0 and not self.leaving:
            operations -= 1
            try:
                if not named:
                    await self._timed("open keyspace", self._index.open_keyspace("sim", SPEC))
                    named = True
                await self._timed("connect", self._connect())
                await self._operate()
            except KvPoolError:
                self.counts.errors += 1
                await asyncio.sleep(self.world.some_s(0.3))
            await asyncio.sleep(self.world.some_s(0.05))
        if self._session is not None:
            await self._timed("close", self._session.close())
        await self._index.close()
        await self._control.close()

    async def load_all(self, chain: int) -> None:
        """Load a chain, whatever there is of it: used when all is calm."""
        self.leaving = True
        self._index = IndexClient(self._config)  # that of `_run` is closed
        await self._timed("open keyspace", self._index.open_keyspace("sim", SPEC))
        await self._timed("connect", self._connect())
        await self._timed("load", self._load(chain, POSITIONS))
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._index.close()

    async def _timed(self, name: str, work: object) -> None:
        self.operation = Operation(name, self.world.loop.time())
        self.counts.operations += 1
        try:
            await work  # type: ignore[misc]
        finally:
            operation, self.operation = self.operation, None
            if operation is not None:
                check_bound(self.name, operation, self.world.loop.time())

    async def _connect(self) -> None:
        session = self._session
        if session is None:
            expected = self._last_incarnation if self.world.rng.random() < 0.7 else 0
            plan = SessionPlan(
                endpoint=self.store.endpoint,
                peer_name=self.name,
                keyspaces=((self.keyspace, SPEC),),
                trusts_arena=self.name in self.world.agents,
                expected_incarnation=expected,
            )
            try:
                self._session = await PageStoreSession.open(plan, self._config)
            except StaleIncarnation:
                self._last_incarnation = 0  # the next try takes any
                raise
            self._last_incarnation, self._expected_incarnation = self._session.incarnation, expected
            if expected not in (0, self._session.incarnation):
                raise self._violation(f"a session that expected incarnation {expected} got {self._session.incarnation}")
        elif session.broken.is_set():
            if self.world.only_slow:
                raise self._violation("its session ended, and nothing was wrong but that disks were slow")
            # All copies of earlier operations have ended: the holds of this client are gone.
            drained = self.world.rng.random() < 0.8
            self._session = None  # after a failure: a new one, and the kernel reports the old one when we leave
            self._session = await session.reopen(drained=drained)
            expected = self._expected_incarnation
            if expected not in (0, self._session.incarnation):
                raise self._violation(f"incarnation {self._session.incarnation} serves a peer that expects {expected}")

    async def _operate(self) -> None:
        rng = self.world.rng
        chain = rng.choice(self.world.chains)
        count = 1 + int(rng.random() * POSITIONS)
        if self.world.tenants and rng.random() < 0.1:
            await self._timed("trespass", self._trespass(chain, count))
            return
        choice = rng.random()
        if choice < 0.45:
            await self._timed("store", self._store(chain, count))
        elif choice < 0.90:
            await self._timed("load", self._load(chain, count))
        elif choice < 0.97:
            await self._timed("flush", self._flush())
        elif choice < 0.985:
            hashes = [key_of(chain, position, 0).chunk_hash for position in range(count)]
            evict = self._control.evict(self.keyspace, hashes, staging_only=choice < 0.975, timeout_s=5.0)
            await self._timed("evict", evict)
        else:
            await self._timed("clear", self._control.clear(timeout_s=5.0))

    # Storing

    async def _store(self, chain: int, count: int) -> None:
        session, rng = self._session, self.world.rng
        assert session is not None
        keys = [key_of(chain, position, shard, self.keyspace) for position in range(count) for shard in range(SHARDS)]
        # A longer prompt than that of its first store changes what is kept beside a page.
        tokens = rng.choice((0, 16 * count))
        items = [
            ReserveItem(key, PAGE_BYTES[key.shard], metadata(chain, at // SHARDS, tokens))
            for at, key in enumerate(keys)
        ]
        is_agent = self.name in self.world.agents
        if is_agent and rng.random() < 0.3:
            await session.prepare(0)
        if is_agent and rng.random() < 0.5:
            answer = await session.reserve_span(self._span(chain, count, tokens))
            granted = [(keys[page], slot) for page, slot in _slots(answer.granted)]
        else:
            results = await session.reserve(items)
            granted = [(key, one.slot) for key, one in zip(keys, results, strict=True) if one.slot is not None]
        sealed = not is_agent or rng.random() < 0.3
        holds = [self._hold(slot, writes=True) for _, slot in granted]
        torn: set[int] = set()
        try:
            for key, slot in granted:
                if await self._write(session, key, slot, sealed=sealed, whole=not sealed or rng.random() < 0.95):
                    torn.add(slot.lease_id)
        finally:
            for hold in holds:
                self.store.host.let_go(hold)
        leases = [slot.lease_id for _, slot in granted]
        if not leases:
            return
        if rng.random() < 0.1:
            session.abort_soon(leases)
            return
        errors = dict(await session.commit(leases, sealed=sealed))
        for index, (key, slot) in enumerate(granted):
            error = errors.get(index)
            if error is None:
                if slot.lease_id in torn:
                    raise self._violation(f"page {key} was committed before all its bytes were there")
                self.counts.stored += 1
            elif isinstance(error, PageCorrupt) and slot.lease_id not in torn:
                raise self._violation(f"page {key} was written whole, and its commit found it corrupt")
            elif isinstance(error, LeaseLost):
                raise self._violation(f"the lease of page {key} was lost on a live session")

    async def _write(self, session: PageStoreSession, key: PageKey, slot: Slot, *, sealed: bool, whole: bool) -> bool:
        """Write a page in two halves; True if the second one is left out. Not sealed: its payload alone."""
        page = true_page(key)
        half = len(page) // 2
        if not sealed:
            page = (b"\xbb" * 64 + payload(page)).ljust(len(page), b"\xbb")
        view = session.slot_view(*slot.place)
        view[:half] = b"\xaa" * half
        await asyncio.sleep(self._copy_s())
        view[:half] = page[:half]
        if not whole:
            view[half:] = b"\xaa" * (len(page) - half)
            return True
        view[half:] = page[half:]
        return False

    # Loading

    async def _load(self, chain: int, count: int) -> None:
        session = self._session
        assert session is not None
        sources = await self._sources(chain, count)
        items = [
            AcquireItem(
                key_of(chain, position, shard, self.keyspace), sources.get(position, ()), metadata(chain, position)
            )
            for position in range(count)
            for shard in range(SHARDS)
        ]
        if self.name in self.world.agents and self.world.rng.random() < 0.5:
            await self._load_span(session, chain, count, [item.key for item in items], sources)
            return
        async with session.acquire(items, wait_s=2.0) as results:
            async for result in results:
                if result.slot is None:
                    self.counts.misses += 1
                    continue
                self.counts.hits += 1
                await self._read(session, items[result.item_index].key, result.slot)

    async def _load_span(
        self,
        session: PageStoreSession,
        chain: int,
        count: int,
        keys: Sequence[PageKey],
        sources: dict[int, tuple[RemoteSource, ...]],
    ) -> None:
        span = replace(
            self._span(chain, count, 0), sources=tuple((1, sources.get(position, ())) for position in range(count))
        )
        async with session.acquire_span(span, wait_s=2.0) as answers:
            async for answer in answers:
                self.counts.misses += len(answer.failed)
                self.counts.hits += answer.granted.count
                for page, slot in _slots(answer.granted):
                    await self._read(session, keys[page], slot)

    def _span(self, chain: int, count: int, tokens: int) -> PageSpan:
        """Both shards of the first chunks of a chain."""
        return PageSpan(
            keyspace=self.keyspace,
            chunk_hashes=b"".join(chunk_hash(chain, position) for position in range(count)),
            first_chunk_index=0,
            parent_hash=bytes(16),
            group_heads=chunk_hash(chain, 0),
            positions=np.repeat(np.arange(count, dtype=np.int32), SHARDS),
            shards=np.tile(np.arange(SHARDS, dtype=np.uint8), count),
            prompt_tokens=tokens,
        )

    async def _read(self, session: PageStoreSession, key: PageKey, slot: Slot) -> None:
        """Read a page in two halves and compare every byte; then give it back."""
        page = true_page(key)
        half = len(page) // 2
        hold = self._hold(slot, writes=False)
        try:
            view = session.slot_view(*slot.place)
            first = bytes(view[:half])
            if not self.leaving:
                await asyncio.sleep(self._copy_s())
            read = first + bytes(view[half:])
            if (payload(read) != payload(page)) if self.name in self.world.agents else (read != page):
                raise self._violation(f"page {key} was read with wrong bytes")
        finally:
            self.store.host.let_go(hold)
        doubtful = self.world.rng.random() < 0.02  # a reader with bad memory of its own
        if doubtful:
            await session.release([], corrupt_lease_ids=[slot.lease_id])
        elif self.world.rng.random() < 0.3:
            await session.release([slot.lease_id])
        else:
            session.release_soon([slot.lease_id])

    async def _sources(self, chain: int, count: int) -> dict[int, tuple[RemoteSource, ...]]:
        """Where else the pages are said to be; sometimes by an old answer."""
        rng = self.world.rng
        if rng.random() < 0.2:
            return {}
        old = self._old_matches.get(chain)
        if old is None or rng.random() < 0.85:
            hashes = b"".join(chunk_hash(chain, position) for position in range(count))
            try:
                old = await self._index.match(ChainQuery(keyspace=self.keyspace, chunk_hashes=hashes))
            except KvPoolError:
                self.counts.errors += 1
                return {}
        self._old_matches[chain] = old
        return sources_of(old, self.store.node_id)

    async def _trespass(self, chain: int, count: int) -> None:
        """Whatever is asked of another tenant's keyspace, the answer is as if there were none."""
        theirs = KEYSPACES[OTHER_TENANT if self.tenant == TENANT else TENANT]
        hashes = [chunk_hash(chain, position) for position in range(count)]
        choice = self.world.rng.random()
        if choice < 0.4:
            try:
                found = await self._index.match(ChainQuery(keyspace=theirs, chunk_hashes=b"".join(hashes)))
            except KeyspaceUnknown:
                return
            raise self._violation(f"a match found {found.matched_chunks} chunks of another tenant")
        if choice < 0.6:
            evicted = await self._control.evict(theirs, hashes, timeout_s=5.0)
            if evicted.page_count or evicted.pinned_count or evicted.undurable_count:
                raise self._violation("pages of another tenant were evicted")
            return
        assert self._session is not None
        keys = [key_of(chain, position, 0, theirs) for position in range(count)]
        items = [AcquireItem(key, (), metadata(chain, position)) for position, key in enumerate(keys)]
        async with self._session.acquire(items, wait_s=1.0) as results:
            async for result in results:
                if result.slot is not None:
                    raise self._violation(f"page {items[result.item_index].key} of another tenant was leased")

    async def _flush(self) -> None:
        """What a flush says is durable must be on the medium, unless the owner has deleted it on purpose."""
        outcome = await self._control.flush(timeout_s=10.0)
        del outcome

    def _copy_s(self) -> float:
        """What half a copy takes: sometimes long, whatever has become of the session meanwhile."""
        return self.world.some_s(1.0 if self.world.rng.random() < 0.06 else 0.02)

    def _hold(self, slot: Slot, *, writes: bool) -> Hold:
        return self.store.host.hold(self.process, slot.segment_id, slot.offset, slot.page_bytes, writes=writes)

    def _violation(self, what: str) -> Violation:
        self.world.violations.append(f"{self.name}: {what}")
        return Violation(self.world.violations[-1])


def _slots(grants: PageGrants) -> list[tuple[int, Slot]]:
    """The pages of a span that were granted, by their numbers."""
    columns = (grants.pages, grants.lease_ids, grants.segment_ids, grants.offsets)
    return [
        (page, Slot(lease_id=lease_id, segment_id=segment_id, offset=offset, page_bytes=PAGE_BYTES[page % SHARDS]))
        for page, lease_id, segment_id, offset in zip(*(column.tolist() for column in columns), strict=True)
    ]


@dataclass(slots=True)
class Tally:
    """Counts of many clients."""

    clients: Sequence[ClientNode] = field(default_factory=list)

    def total(self) -> ClientCounts:
        total = ClientCounts()
        for client in self.clients:
            total.stored += client.counts.stored
            total.hits += client.counts.hits
            total.misses += client.counts.misses
            total.errors += client.counts.errors
            total.operations += client.counts.operations
        return total
