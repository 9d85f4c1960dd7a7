"""What must hold at any time, and what must be left once all is calm: nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool_index.core.entries import TIERS, GroupRead, decode_value
from kvpool_pagestore.engine.store import PageStoreEngine
from tests.sim.client_parts import check_bound
from tests.sim.clients import POSITIONS, ClientNode
from tests.sim.loop import Violation
from tests.sim.nodes import World
from tests.sim.pages import GRID, KEYSPACE, KEYSPACES, SHARDS, key_of, payload, true_page
from tests.sim.pagestore_node import PageStoreNode
from tests.sim.watchers import Holding, Watcher

_ROOMY_PAGES = 64  # a disk on which all pages of a history have room

_Place = tuple[bytes, bytes, Tier]
"""Keyspace, the beginning of a chunk's hash, tier."""


def check_always(world: World, clients: list[ClientNode]) -> None:
    """Budgets, and calls that hang."""
    now_s = world.loop.time()
    for client in clients:
        if client.operation is not None and client.alive and not client.process.paused:
            check_bound(client.name, client.operation, now_s)
    for store in world.pagestores:
        if store.host.segment_bytes > store.host.budget_bytes:
            raise Violation(f"{store.name}: {store.host.segment_bytes} bytes of segments exceed the budget")
        if store.serving and store.alive and store.disk.used_bytes > store.disk.budget_bytes:
            raise Violation(f"{store.name}: {store.disk.used_bytes} bytes on disk exceed the budget")
        if store.alive and store.engine is not None:
            gauges = store.engine.gauges()
            if gauges.arena_segment_bytes > gauges.arena_capacity_bytes:
                raise Violation(f"{store.name}: the ledger counts more segment bytes than its budget")
    if world.violations:
        raise Violation(world.violations[0])


async def what_is_left(world: World, clients: list[ClientNode]) -> list[str]:
    """Everything that must vanish by itself when there are no requests and no failures."""
    left = [f"{client.name} runs {client.operation}" for client in clients if client.alive]
    for store in world.pagestores:
        if not store.serving or store.engine is None:
            left.append(f"{store.name} does not serve")
        else:
            left += [f"{store.name}: {what}" for what in _left_in(world, store.engine)]
            if store.index is not None and store.index.me() is None:
                left.append(f"{store.name} is not registered")
            elif not await _is_newest(world, store, store.engine.incarnation):
                left.append(f"{store.name} is registered as another process and has not heard of it")
    return left


async def check_calm(world: World, watchers: Sequence[Watcher] = ()) -> None:
    """The index knows exactly what the nodes hold, within the bound that reconciliation promises.

    So long it may take, too, until there are as many copies as are wanted, and until watchers know what has changed.
    """
    until_s = world.loop.time() + world.heal_s
    while wrong := [
        *[what for one in world.pagestores if (what := await _wrong_in_index(world, one) or _alone(world, one))],
        *[what for one in watchers if (what := await one.stale(partial(_holders, world)))],
    ]:
        if world.loop.time() > until_s:
            raise Violation("; ".join(wrong))
        await asyncio.sleep(1.0)


def check_pages(world: World) -> None:
    """All pages that are there are right, but for those whose medium was damaged."""
    for store in world.pagestores:
        if store.engine is None:
            raise Violation(f"{store.name} does not serve")
        ledger = store.engine.tiers.staging.table
        visible = [slot for keyspace in ledger.ready_keyspaces() for slot in ledger.ready_slots(keyspace)]
        for key, slot in ((slot.page.key, slot) for slot in visible):
            memory = store.host.segments[slot.segment.segment_id].memory
            wanted = true_page(key)
            page = bytes(memory[slot.offset : slot.offset + len(wanted)])
            if (page != wanted) if slot.sealed else (payload(page) != payload(wanted)):
                raise Violation(f"{store.name}: page {key} is staged with wrong bytes")
        for key, (page, _) in store.disk.written.items():
            if page != true_page(key) and key not in store.disk.damaged:
                raise Violation(f"{store.name}: page {key} is on disk with wrong bytes")


async def _is_newest(world: World, store: PageStoreNode, incarnation: int) -> bool:
    node = await world.redis.store.nodes.find(store.node_id)
    return node is None or node.info.incarnation <= incarnation  # None: lost, it will register again


def _left_in(world: World, engine: PageStoreEngine) -> list[str]:
    ledger, disk, gauges = engine.tiers.staging.table, engine.tiers.disk, engine.gauges()
    left = [
        f"{name} = {value}"
        for name, value in (
            ("sessions", gauges.sessions),
            ("quarantined sessions", gauges.quarantined_sessions),
            ("leases", gauges.leases),
            ("arena_quarantined_bytes", gauges.arena_quarantined_bytes),
            ("arena_dirty_bytes", gauges.arena_dirty_bytes),
            ("writer_bytes", ledger.writer_bytes),
            ("dirty pages", engine.dirty_page_count),
            ("flights", engine.pages.flight_count),
        )
        if value
    ]
    left += [f"page {key} is written or on its way" for key in _all_keys(world) if ledger.is_coming(key)]
    for segment in ledger.space.segments:
        for slot in segment.slots:
            if slot.pins or slot.readers or slot.orphaned_leases:
                left.append(f"slot {segment.segment_id}+{slot.offset}: {slot.pins} pins, {slot.readers} readers")
    if disk is not None:
        left += [f"disk reads {key}" for key in _all_keys(world) if disk.is_read(key)]
        if disk.fault:
            left.append(f"the disk tier is out of service: {disk.fault}")
        if disk.promised_bytes:
            left.append(f"{disk.promised_bytes} promised bytes")
    return left


def _all_keys(world: World) -> Iterator[PageKey]:
    """Every page that a client of this world may name."""
    for keyspace in KEYSPACES.values():
        for chain in world.chains:
            for position in range(POSITIONS):
                yield from (key_of(chain, position, shard, keyspace) for shard in range(SHARDS))


async def _wrong_in_index(world: World, store: PageStoreNode) -> str:
    """What the store of the index has wrong of a node, without any replica's cache in between; empty if nothing."""
    if not store.serving or store.engine is None:
        return f"{store.name} does not serve"
    truth: Counter[_Place] = Counter()
    tiers = store.engine.tiers
    for key in (page.key for page in tiers.staging.table.ready_pages()):
        truth[key.keyspace, key.chunk_hash[:8], Tier.STAGING] |= 1 << key.shard
    if tiers.disk is not None:
        for chunk in tiers.disk.map.chunks():
            truth[chunk.keyspace, chunk.chunk_hash[:8], Tier.DISK] |= chunk.shards
    found = await _known(world, store)
    missing = {at: shards for at, shards in truth.items() if shards & ~found.get(at, 0)}
    surplus = {at: shards for at, shards in found.items() if shards & ~truth.get(at, 0)}
    if not missing and not surplus:
        return ""
    return f"{store.name}: the index lacks {missing} and has {surplus} instead"


async def _holders(world: World, chunk: bytes) -> set[Holding]:
    """Where a chunk of the first tenant is, by the beginning of its hash."""
    return {
        (store.node_id, tier, shards)
        for store in world.pagestores
        for (keyspace, known, tier), shards in (await _known(world, store)).items()
        if keyspace == KEYSPACE and known == chunk
    }


def _alone(world: World, store: PageStoreNode) -> str:
    """Pages on a node's disk that are on no other's though there should be two copies, and there is room for them."""
    disks = [one.engine.tiers.disk for one in world.pagestores if one.engine is not None and one is not store]
    if world.copies < 2 or store.engine is None or any(one.shape.disk_pages < _ROOMY_PAGES for one in world.pagestores):
        return ""
    own = store.engine.tiers.disk
    alone = [
        chunk
        for chunk in (own.map.chunks() if own is not None else ())
        if not any(
            GRID.covers(there.shards, chunk.shards)
            for disk in disks
            if disk is not None and (there := disk.map.chunk(chunk.keyspace, chunk.chunk_hash)) is not None
        )
    ]
    return f"{store.name}: there is only one copy of {alone}" if alone else ""


async def _known(world: World, store: PageStoreNode) -> dict[_Place, int]:
    """Locations of a node as the store of the index has them."""
    memory = world.redis.store
    node = await memory.nodes.find(store.node_id)
    if node is None:
        return {}
    found: dict[_Place, int] = {}
    for keyspace, head, chunk in [named.entry async for step in memory.locations.chunks() for named in step]:
        (value,) = await memory.locations.read(keyspace, [GroupRead(head, [chunk])])
        for entry in decode_value(value, GRID.all_shards):
            if entry.ordinal == node.ordinal:
                for tier, shards in zip(TIERS, entry.shards, strict=True):
                    if shards:
                        found[keyspace, chunk, tier] = shards & GRID.valid_shards
    return found
