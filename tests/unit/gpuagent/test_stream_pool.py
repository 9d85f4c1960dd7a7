"""Pages by bulk streams: sources in turn, stale reports, buffers that stay taken while a thread writes into them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest

from kvpool.client.index import IndexClient
from kvpool.client.transfer import PageToRead, PageToWrite
from kvpool.core.cluster import ChainMatch, NodeInfo, NodeKind, PageMetadata, RemoteSource, StaleLocation
from kvpool.core.errors import ArenaFull, DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool_gpuagent.adapters import stream_pool
from kvpool_gpuagent.adapters.bounce import PeerClients
from kvpool_gpuagent.adapters.stream_pool import StreamBuffers, StreamPool
from kvpool_gpuagent.ports import PageWish, ReadSlot, WriteSlot
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, SPEC
from tests.fixtures.patience import PATIENCE_S

Read = Callable[[PageKey], "bool | KvPoolError"]
WAIT_S = PATIENCE_S


class ScriptedPeer:
    """What answers under one endpoint."""

    def __init__(self, read: Read = lambda key: False) -> None:
        self.read = read
        self.asked: list[PageKey] = []
        self.gate: threading.Event | None = None
        self.write: Callable[[PageKey], KvPoolError | None] | None = lambda key: None

    def read_pages(
        self, keyspaces: Any, items: Sequence[PageToRead], on_page: Any, *, timeout_s: float, expected_incarnation: int
    ) -> None:
        assert expected_incarnation == 3
        for number, item in enumerate(items):
            self.asked.append(item.key)
            if self.gate is not None:
                assert self.gate.wait(PATIENCE_S)
            answer = self.read(item.key)
            item.destination[:4] = b"read"
            if isinstance(answer, KvPoolError):
                on_page(number, answer, False)
            else:
                on_page(number, None, answer)

    def write_pages(self, keyspaces: Any, items: Sequence[PageToWrite], on_page: Any, **_: Any) -> None:
        for number, item in enumerate(items):
            if self.write is None:
                return  # breaks off without a word
            error = self.write(item.key)
            on_page(number, Admission.REJECTED if error else Admission.RESERVED, error)


class ScriptedPeers:
    """Stands in for PeerClients."""

    def __init__(self, peers: dict[str, ScriptedPeer]) -> None:
        self._peers = peers
        self.threads = ThreadPoolExecutor(2)

    def get(self, endpoint: str) -> ScriptedPeer:
        return self._peers[endpoint]

    async def run(self, job: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, job)


class ScriptedIndex:
    """Places everything on one node, and knows no page."""

    def __init__(self) -> None:
        self.stale: list[StaleLocation] = []
        self.match_stream = self
        self.nodes = [NodeInfo(node_id=b"1" * 16, kind=NodeKind.PAGESTORE, bulk_endpoint="first", incarnation=3)]

    async def place(self, *_: Any, **__: Any) -> list[NodeInfo]:
        return self.nodes

    async def match(self, query: Any) -> ChainMatch:
        return ChainMatch(matched_chunks=0)

    async def report_stale(self, locations: Sequence[StaleLocation]) -> list[bool]:
        self.stale += locations
        return [True] * len(locations)


class Bench:
    def __init__(self) -> None:
        self.first, self.second, self.index = ScriptedPeer(), ScriptedPeer(), ScriptedIndex()
        self.peers = ScriptedPeers({"first": self.first, "second": self.second})
        self.buffers = StreamBuffers.of(8 * PAGE_BYTES)
        peers, index = cast(PeerClients, self.peers), cast(IndexClient, self.index)
        self.pool = StreamPool(KEYSPACE, SPEC, index, self.buffers, peers, "")

    async def acquire(self, numbers: Sequence[int], *, wait_s: float = WAIT_S) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        async with aclosing(self.pool.acquire([wish(number) for number in numbers], wait_s)) as settling:
            async for position, answer in settling:
                answers[numbers[position]] = answer
                if isinstance(answer, ReadSlot):
                    await self.pool.release([answer])
        return answers


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.pool.close()
    made.peers.threads.shutdown(wait=True)
    await eventually(lambda: made.buffers.reads.used_bytes == made.buffers.writes.used_bytes == 0)


def wish(number: int) -> PageWish:
    sources = tuple(
        RemoteSource(node_id=bytes([at]) * 16, incarnation=3, bulk_endpoint=name)
        for at, name in enumerate(("first", "second"), 1)
    )
    meta = PageMetadata(parent_hash=bytes(16), chunk_index=number, group_head_hash=bytes(16))
    return PageWish(key=key(number), metadata=meta, chain_head_hash=b"h" * 16, sources=sources)


def key(number: int) -> PageKey:
    return PageKey(KEYSPACE, bytes([number]) * 16, 0)


async def test_what_the_first_source_has_not_the_second_is_asked_for(bench: Bench) -> None:
    bench.first.read = lambda page: page == key(1)
    bench.second.read = lambda page: page == key(2)
    answers = await bench.acquire([1, 2, 3])
    assert [type(answers[number]) for number in (1, 2, 3)] == [ReadSlot, ReadSlot, type(None)]
    assert bench.second.asked == [key(2), key(3)]
    await eventually(lambda: len(bench.index.stale) == 6)
    told = {(one.location.node_id[0], one.chunk_hash[0]) for one in bench.index.stale}
    assert told == {(1, 2), (1, 3), (2, 3)}
    assert {one.location.tier for one in bench.index.stale} == {Tier.STAGING, Tier.DISK}


async def test_a_source_that_fails_is_not_stale(bench: Bench) -> None:
    bench.first.read = lambda page: ServiceUnavailable("it is down")
    bench.second.read = lambda page: True
    assert isinstance((await bench.acquire([1]))[1], ReadSlot)
    bench.second.read = lambda page: ServiceUnavailable("so is this one")
    assert "so is this one" in str((await bench.acquire([1]))[1])
    assert bench.index.stale == []


async def test_a_read_that_cannot_be_cancelled_keeps_its_buffers(bench: Bench) -> None:
    bench.first.gate = threading.Event()
    bench.first.read = lambda page: True
    acquiring = asyncio.ensure_future(bench.acquire([1, 2]))
    await eventually(lambda: bench.first.asked)
    acquiring.cancel()
    await asyncio.gather(acquiring, return_exceptions=True)
    assert bench.buffers.reads.used_bytes == 2 * PAGE_BYTES
    bench.first.gate.set()
    await eventually(lambda: bench.buffers.reads.used_bytes == 0)


async def test_time_that_is_up_when_a_thread_is_free_is_told(bench: Bench) -> None:
    bench.first.gate = threading.Event()
    holders = [asyncio.ensure_future(bench.acquire([number])) for number in (1, 2)]
    await eventually(lambda: len(bench.first.asked) == 2)
    late = asyncio.ensure_future(bench.acquire([3], wait_s=0.01))
    await eventually(lambda: bench.buffers.reads.used_bytes == 3 * PAGE_BYTES)
    asyncio.get_running_loop().call_later(0.02, bench.first.gate.set)
    assert isinstance((await late)[3], DeadlineExceeded)
    assert key(3) not in bench.first.asked
    await asyncio.gather(*holders)


async def test_a_crash_while_reading_settles_every_page(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def crash(page: PageKey) -> bool:
        raise RuntimeError("a bug")

    bench.first.read = crash
    answers = await bench.acquire([1, 2])
    assert all("a bug" in str(answer) for answer in answers.values())
    assert "reading pages by streams failed" in caplog.text


async def test_a_crash_of_one_source_waits_for_the_threads_of_others(bench: Bench) -> None:
    def crash(page: PageKey) -> bool:
        raise RuntimeError("a bug")

    bench.first.read, bench.second.gate = crash, threading.Event()
    only_second = replace(wish(2), sources=wish(2).sources[1:])
    acquiring = bench.pool.acquire([wish(1), only_second], WAIT_S)
    async with aclosing(acquiring):
        first = asyncio.ensure_future(anext(acquiring))
        await eventually(lambda: bench.second.asked and bench.first.asked)
        assert not first.done()
        bench.second.gate.set()
        await first
    await eventually(lambda: bench.buffers.reads.used_bytes == 0)


async def write(bench: Bench, numbers: Sequence[int]) -> Sequence[KvPoolError | None]:
    answers = await bench.pool.reserve([wish(number) for number in numbers], [PAGE_BYTES] * len(numbers))
    slots = [answer for answer in answers if isinstance(answer, WriteSlot)]
    assert len(slots) == len(numbers)
    return await bench.pool.commit(slots)


async def test_each_written_page_is_answered_for_itself(bench: Bench) -> None:
    bench.first.write = lambda page: ArenaFull("no room") if page == key(2) else None
    results = await write(bench, [1, 2, 3])
    assert [type(result) for result in results] == [type(None), ArenaFull, type(None)]


async def test_a_page_that_nobody_answered_for_was_not_written(bench: Bench) -> None:
    bench.first.write = None
    results = await write(bench, [1, 2])
    assert [type(result) for result in results] == [ServiceUnavailable] * 2


async def test_a_crash_while_writing_gives_the_buffers_back(bench: Bench) -> None:
    def crash(page: PageKey) -> None:
        raise RuntimeError("a bug")

    bench.first.write = crash
    with pytest.raises(RuntimeError, match="a bug"):
        await write(bench, [1])
    assert bench.buffers.writes.used_bytes == 0


async def test_without_a_pagestore_nothing_is_stored(bench: Bench) -> None:
    bench.index.nodes = []
    with pytest.raises(ServiceUnavailable, match="no pagestore is alive"):
        await bench.pool.reserve([wish(1)], [PAGE_BYTES])


async def test_more_than_the_memory_for_pages_is_refused(bench: Bench) -> None:
    with pytest.raises(ArenaFull, match="more than the agent's"):
        await bench.pool.reserve([wish(number) for number in range(5)], [PAGE_BYTES] * 5)


async def test_stores_wait_for_memory_only_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pool, "RESERVE_WAIT_S", 0.01)
    slots = await bench.pool.reserve([wish(number) for number in range(4)], [PAGE_BYTES] * 4)
    with pytest.raises(KvPoolError, match="busy"):
        await bench.pool.reserve([wish(9)], [PAGE_BYTES])
    await bench.pool.abort([slot for slot in slots if isinstance(slot, WriteSlot)])
