"""Removing pages at an operator's request: whole keyspaces, or those that match a selection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import chain

from kvpool.core.errors import InvalidRequest, StoreFault, StoreUnavailable
from kvpool.core.page import PageKey
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook
from kvpool_pagestore.engine.context import EngineContext, Tiers
from kvpool_pagestore.engine.inventory import Announcer, Inventory, staged_parts

_PAGES_A_TURN = 512  # dropped between two turns of the event loop: each takes some 10 us


class Clearing:
    """One clear at a time. one_at_a_time: held while the writes of a keyspace are held back."""

    def __init__(self, tiers: Tiers, announcer: Announcer, inventory: Inventory) -> None:
        self._table = tiers.staging.table
        self._disk = tiers.disk
        self._write_back = tiers.write_back
        self._announcer = announcer
        self._inventory = inventory
        self.one_at_a_time = asyncio.Lock()  # the end of one would let writes start beneath another

    async def clear(self, keyspaces: Sequence[bytes]) -> int:
        """How many pages there were. Raises StoreFault."""
        page_count, cleared = 0, list[bytes]()
        try:
            async with self.one_at_a_time:
                for keyspace in keyspaces:
                    page_count += await self._clear_one(keyspace)
                    cleared.append(keyspace)
        finally:
            for keyspace in cleared:  # apart from the lock: an index that cannot be reached holds up no other call
                # What was stored while this ran is announced again.
                await self._announcer.drop_keyspace(keyspace, partial(self._inventory.of_keyspace, keyspace))
        return page_count

    async def _clear_one(self, keyspace: bytes) -> int:
        disk, write_back = self._disk, self._write_back
        shards: dict[bytes, int] = {}  # by chunk hash, the bitmap of those that were in staging
        count = 0

        def drop(keys: Iterable[PageKey]) -> None:
            nonlocal count
            for key in keys:
                before = shards.get(key.chunk_hash, 0)
                shards[key.chunk_hash] = before | 1 << key.shard
                count += not before >> key.shard & 1
                self._table.drop(key)

        drop(self._table.coming_keys(keyspace))
        for slots in staged_parts(self._table, keyspace, _PAGES_A_TURN):
            drop([slot.page.key for slot in slots])
            await asyncio.sleep(0)

        def gone(chunks: Sequence[tuple[bytes, int]]) -> None:  # from disk; what was read from there meanwhile goes too
            nonlocal count
            count += sum((stored & ~shards.get(chunk_hash, 0)).bit_count() for chunk_hash, stored in chunks)
            self._table.drop_chunks(keyspace, chunks)

        if disk is not None and write_back is not None:
            # What is being written must be on disk before it is deleted there.
            await write_back.hold(keyspace)
            try:
                await disk.delete_keyspace(keyspace, gone)
            finally:
                write_back.unhold(keyspace)
        return count


_log = logging.getLogger(__name__)

MAX_EVICT_CHUNKS = 4096
_EVICTED_A_TURN = 256  # of the event loop: a few milliseconds
_DELETED_AT_ONCE = 4096  # pages


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictTarget:
    """What is to be evicted; see the proto message EvictRequest."""

    keyspace: bytes
    chunk_hashes: Sequence[bytes] = ()
    whole_keyspace: bool = False
    staging_only: bool = False
    with_pinned: bool = False

    def __post_init__(self) -> None:
        if self.whole_keyspace == bool(self.chunk_hashes):
            raise InvalidRequest("name chunk hashes or set whole_keyspace, and not both")
        if len(self.chunk_hashes) > MAX_EVICT_CHUNKS:
            raise InvalidRequest(
                f"{len(self.chunk_hashes)} chunks in one Evict, at most {MAX_EVICT_CHUNKS}; split the request"
            )


@dataclass(slots=True, kw_only=True)
class Evicted:
    """Pages given up, and those that stayed: pinned, or (staging only) not durable here."""

    page_count: int = 0
    pinned_count: int = 0
    undurable_count: int = 0


@dataclass(slots=True, kw_only=True)
class EvictPreview:
    """What an eviction would do; see the proto message PreviewEvictResponse."""

    evicted: Evicted
    chunk_count: int = 0
    staging_bytes: int = 0
    disk_bytes: int = 0


class _Verdict(Enum):
    """What becomes of one page."""

    GOES = auto()
    PINNED = auto()
    UNDURABLE = auto()
    NOT_MEANT = auto()  # it is not in staging, and only staging is to be freed


class Evicting:
    """one_at_a_time: held while writes of a keyspace are held back."""

    def __init__(
        self,
        keyspaces: KeyspaceBook,
        tiers: Tiers,
        announcer: Announcer,
        one_at_a_time: asyncio.Lock,
        context: EngineContext,
    ) -> None:
        self._keyspaces = keyspaces
        self._announcer = announcer
        self._tasks = context.tasks
        self._table = tiers.staging.table
        self._disk = tiers.disk
        self._write_back = tiers.write_back
        self._one_at_a_time = one_at_a_time
        self._clock = context.clock

    async def evict(self, tenant: str, target: EvictTarget) -> Evicted:
        """What became of it; the index knows, if it can be reached. It goes on when the caller leaves.

        Raises StoreFault: what was named is not served any more, but may still be on disk.
        """
        known = self._keyspaces.find(target.keyspace)
        if known is None or known.tenant != tenant:
            return Evicted()  # as if it did not exist
        evicted = await self._tasks.finish(self._evict_exclusive(known, target), "evict")
        try:
            await self._announcer.wait_announced()
        except StoreUnavailable as error:
            _log.warning("evicted, but the index does not know yet: %s", error)
        return evicted

    async def preview(self, tenant: str, target: EvictTarget) -> EvictPreview:
        """What `evict` would do with the pages that are here now; nothing is changed."""
        preview = EvictPreview(evicted=Evicted())
        known = self._keyspaces.find(target.keyspace)
        if known is None or known.tenant != tenant:
            return preview
        now_us = self._clock.wall_us()
        for part in self._parts(known, target):
            await asyncio.sleep(0)
            for chunk_hash in part:
                page_count = preview.evicted.page_count
                for key in self._table.keys(known.keyspace, chunk_hash):
                    if self._judge(key, target, now_us, preview.evicted):
                        size_bytes = known.page_bytes(key.shard)
                        preview.staging_bytes += size_bytes * (self._table.find(key) is not None)
                        preview.disk_bytes += size_bytes * (not target.staging_only and self._is_on_disk(key))
                preview.chunk_count += preview.evicted.page_count > page_count
        return preview

    async def _evict_exclusive(self, keyspace: Keyspace, target: EvictTarget) -> Evicted:
        async with self._one_at_a_time:
            if target.staging_only or self._disk is None or self._write_back is None:
                return await self._evict(keyspace, target)
            # What is being written must be on disk before it is deleted there.
            await self._write_back.hold(keyspace.keyspace)
            try:
                return await self._evict(keyspace, target)
            finally:
                self._write_back.unhold(keyspace.keyspace)

    async def _evict(self, keyspace: Keyspace, target: EvictTarget) -> Evicted:
        evicted = Evicted()
        on_disk: list[PageKey] = []
        now_us = self._clock.wall_us()
        for part in self._parts(keyspace, target):
            await asyncio.sleep(0)
            for key in chain.from_iterable(self._table.keys(keyspace.keyspace, chunk_hash) for chunk_hash in part):
                if not self._judge(key, target, now_us, evicted):
                    continue
                self._table.drop(key)
                # In the same turn, or a reader would bring the page back from the disk before it is deleted there.
                if not target.staging_only and self._disk is not None and key in self._disk.map:
                    self._disk.forget((key,))
                    on_disk.append(key)
        if on_disk:
            await self._delete(on_disk)
        _log.info(
            "evicted %d pages of keyspace %s as asked, %d pinned and %d that are not durable stay",
            evicted.page_count,
            keyspace.keyspace.hex(),
            evicted.pinned_count,
            evicted.undurable_count,
        )
        return evicted

    def _parts(self, keyspace: Keyspace, target: EvictTarget) -> Iterator[Sequence[bytes]]:
        """Hashes of the chunks that are meant and were here when the first part was asked for, each once.

        A part is what one turn of the event loop can take: a disk may have a million chunks.
        """
        chunks_a_turn = max(1, _EVICTED_A_TURN // keyspace.grid.shard_count)
        chosen, named = list(target.chunk_hashes), set[bytes]()
        if target.whole_keyspace:
            chosen = self._table.ready_chunks(target.keyspace)
            chosen += [key.chunk_hash for key in self._table.coming_keys(target.keyspace)]
        for start in range(0, len(chosen), chunks_a_turn):
            part = [one for one in dict.fromkeys(chosen[start : start + chunks_a_turn]) if one not in named]
            named.update(part)
            yield part
        on_disk = self._disk.map.name_parts(chunks_a_turn) if target.whole_keyspace and self._disk is not None else ()
        for names in on_disk:
            yield [name[16:] for name in names if name.startswith(target.keyspace) and name[16:] not in named]

    def _is_on_disk(self, key: PageKey) -> bool:
        return self._disk is not None and key in self._disk.map

    def _pinned_until_us(self, key: PageKey) -> int:
        metadata = self._table.metadata(key)
        return metadata.pinned_until_us if metadata is not None else 0

    def _judge(self, key: PageKey, target: EvictTarget, now_us: int, counted: Evicted) -> bool:
        """Whether a page goes; `counted` then counts it, or as one that stays."""
        verdict = self._verdict(key, target, now_us)
        counted.page_count += verdict is _Verdict.GOES
        counted.pinned_count += verdict is _Verdict.PINNED
        counted.undurable_count += verdict is _Verdict.UNDURABLE
        return verdict is _Verdict.GOES

    def _verdict(self, key: PageKey, target: EvictTarget, now_us: int) -> _Verdict:
        if not target.with_pinned and self._pinned_until_us(key) > now_us:
            return _Verdict.PINNED
        if not target.staging_only:
            return _Verdict.GOES
        slot = self._table.find(key)
        if slot is None:
            return _Verdict.NOT_MEANT
        is_durable = not slot.dirty and self._disk is not None and key in self._disk
        return _Verdict.GOES if is_durable else _Verdict.UNDURABLE

    async def _delete(self, keys: Sequence[PageKey]) -> None:
        """All of them are forgotten, whatever fails. Raises the first fault."""
        assert self._disk is not None
        fault: StoreFault | None = None
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            try:
                await self._disk.delete(keys[start : start + _DELETED_AT_ONCE])
            except StoreFault as error:
                fault = fault or error
        if fault is not None:
            raise fault
