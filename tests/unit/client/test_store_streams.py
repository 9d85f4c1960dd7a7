"""Pages by streams over scripted nodes: what is in flight is bounded, and nothing unverified reaches the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from kvpool.client.store_config import StoreConfig
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_streams import StreamTransport
from kvpool.client.store_values import ChunkPlace, KeyspaceShards, OpenedShards
from kvpool.client.transfer import OnRead, OnWritten, PageToRead, PageToWrite
from kvpool.core.cluster import ChainMatch, ChainQuery, Location, MatchRun, NodeInfo, NodeKind, StaleLocation
from kvpool.core.errors import ArenaFull, InvalidRequest, KvPoolError, Stopped
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, SPEC, chunk_hash
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.test_store_pool import Index as MatchIndex

COUNT = 12
CHAIN = ChunkPlace.chain([chunk_hash(number) for number in range(COUNT)])
SPACE = OpenedShards(space=KeyspaceShards.of("test", SPEC, 1), keyspace=KEYSPACE, hash_key=bytes(32))
WINDOW_PAGES = 3


class Node:
    """A pagestore's bulk endpoint."""

    def __init__(self) -> None:
        self.pages: dict[PageKey, bytes] = {}
        self.damaged = False  # on the wire
        self.refusals = 0  # writes for which there is no room, from now on
        self.sizes: list[int] = []  # pages of each call
        self.verified: list[PageKey] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def read_pages(self, _: object, items: Sequence[PageToRead], on_page: OnRead, *, stop: Any, **__: object) -> None:
        self.sizes.append(len(items))
        for number, item in enumerate(items):
            assert self.go_on.wait(PATIENCE_S)
            if stop.cancelled:
                on_page(number, Stopped("the caller has left"), False)
                continue
            page = self.pages.get(item.key)
            if page is not None:
                item.destination[:] = page
                if self.damaged:
                    item.destination[PAGE_BYTES // 2] ^= 1
            on_page(number, None, page is not None)

    def verify_pages(self, _: object, keys: Sequence[PageKey], **__: object) -> None:
        self.verified += keys

    def write_pages(self, _: object, items: Sequence[PageToWrite], on_page: OnWritten, **__: object) -> None:
        self.sizes.append(len(items))
        for number, item in enumerate(items):
            if self.refusals:
                self.refusals -= 1
                on_page(number, Admission.REJECTED, ArenaFull("no room now"))
            else:
                self.pages[item.key] = bytes(item.page)
                on_page(number, Admission.RESERVED, None)


class Index(MatchIndex):
    """Knows no chunk; places all on the first node."""

    def __init__(self) -> None:
        super().__init__(*[0] * 50)
        self.stale: list[StaleLocation] = []
        self.holders: list[NodeInfo] = []  # of all chunks, from now on

    def match(self, query: ChainQuery) -> ChainMatch | KvPoolError:
        if not self.holders:
            return super().match(query)
        locations = tuple(
            Location(node_id=node.node_id, incarnation=node.incarnation, tier=Tier.DISK, shards=query.shards)
            for node in self.holders
        )
        runs = (MatchRun(chunk_count=query.chunk_count, locations=locations),)
        nodes = {node.node_id: node for node in self.holders}
        return ChainMatch(matched_chunks=query.chunk_count, runs=runs, nodes=nodes)

    async def place(self, keyspace: bytes, head: bytes, *, host_id: str) -> list[NodeInfo]:
        return [NodeInfo(node_id=b"a" * 16, kind=NodeKind.PAGESTORE, bulk_endpoint="a:1", incarnation=7)]

    async def report_stale(self, locations: Sequence[StaleLocation], *, timeout_s: float) -> list[bool]:
        self.stale += locations
        return [True] * len(locations)


class Transport(StreamTransport):
    def __init__(self, index: Any, nodes: dict[str, Node], window_bytes: int) -> None:
        config = StoreConfig.of({"index_endpoints": ["unused:1"], "pagestore": "remote"}).client
        super().__init__(config, index, ThreadPoolExecutor(2), window_bytes)
        self._nodes = nodes

    def client(self, endpoint: str) -> Any:
        return nullcontext(self._nodes[endpoint])


class World:
    def __init__(self, **settings: Any) -> None:
        self.index, self.nodes = Index(), {"a:1": Node(), "b:1": Node()}
        limits = ("load_timeout_s", "store_timeout_s", "room_wait_s")
        given = {"index_endpoints": ["unused:1"], "pagestore": "remote", **dict.fromkeys(limits, PATIENCE_S)}
        self.transport = Transport(self.index, self.nodes, WINDOW_PAGES * PAGE_BYTES)
        index: Any = self.index
        self.pool = AsyncStorePages(StoreConfig.of(given | settings), "test", index=index, transport=self.transport)

    async def put(self) -> list[bool]:
        def fill(position: int, shard: int, payload: memoryview) -> None:
            payload[:] = bytes([position + 1]) * payload.nbytes

        done: list[bool] = await self.pool.put(SPACE, CHAIN, fill)
        return done

    async def get(self) -> tuple[list[bool], dict[int, bytes]]:
        taken: dict[int, bytes] = {}

        def take(position: int, shard: int, payload: memoryview) -> None:
            taken[position] = bytes(payload)

        return await self.pool.get(SPACE, CHAIN, take), taken


def right(taken: dict[int, bytes]) -> bool:
    return all(set(payload) == {position + 1} for position, payload in taken.items())


async def test_what_was_written_comes_back_at_once_and_windows_bound_the_bytes_in_flight() -> None:
    world = World()
    assert await world.put() == [True] * COUNT
    came, taken = await world.get()
    assert came == [True] * COUNT and len(taken) == COUNT and right(taken)
    assert world.nodes["a:1"].sizes == [WINDOW_PAGES] * (2 * COUNT // WINDOW_PAGES)
    assert world.transport.buffered_bytes_max == WINDOW_PAGES * PAGE_BYTES


async def test_a_page_damaged_on_the_wire_is_never_taken_and_comes_from_the_next_source() -> None:
    world = World()
    await world.put()
    first, second = world.nodes.values()
    first.damaged = True
    came, taken = await world.get()
    assert came == [False] * COUNT and not taken
    assert world.pool.counts.corrupt_pages == COUNT == len(first.verified) == len(world.index.stale) // 2
    second.pages = first.pages
    world.index.holders = [
        NodeInfo(node_id=name.encode() * 16, kind=NodeKind.PAGESTORE, bulk_endpoint=f"{name}:1", incarnation=7)
        for name in "ab"
    ]
    came, taken = await world.get()  # a miss was forgotten: the index is asked
    assert came == [True] * COUNT and right(taken)
    assert world.pool.counts.corrupt_pages == 2 * COUNT, "the first source was tried again"


async def test_pages_for_which_a_node_has_no_room_are_tried_again_while_others_are_taken() -> None:
    world = World()
    world.nodes["a:1"].refusals = 2
    assert await world.put() == [True] * COUNT


async def test_a_node_that_stays_full_costs_the_chunks_and_no_more_than_the_wait_for_room() -> None:
    world = World(room_wait_s=0.02)
    world.nodes["a:1"].refusals = 10**6
    assert await world.put() == [False] * COUNT
    assert not world.nodes["a:1"].pages and "no room" in world.pool.counts.last_failure


async def test_a_cancelled_read_ends_only_when_its_stream_has_left_the_buffers() -> None:
    world = World()
    await world.put()
    node = world.nodes["a:1"]
    node.go_on.clear()
    calls = len(node.sizes)
    taken: list[int] = []
    call = asyncio.create_task(world.pool.get(SPACE, CHAIN, lambda position, *_: taken.append(position)))
    await eventually(lambda: len(node.sizes) > calls)
    call.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done()
    node.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not taken


async def test_a_copy_of_the_callers_that_fails_raises_what_it_raised() -> None:
    world = World()

    def bad(position: int, shard: int, payload: memoryview) -> None:
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        await world.pool.put(SPACE, CHAIN, bad)
    await world.put()
    with pytest.raises(ValueError, match="no such tensor"):
        await world.pool.get(SPACE, CHAIN, bad)


def test_a_host_without_a_pagestore_must_say_so() -> None:
    with pytest.raises(InvalidRequest, match="remote"):
        StoreConfig.of({"index_endpoints": ["unused:1"]})
