"""Pages by bulk streams: sources in turn, what is true and what is stale, buffers that stay taken while a thread writes
into them."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, cast

import numpy as np
import pytest

from kvpool.client.index import IndexClient
from kvpool.client.transfer import PageToRead, PageToWrite
from kvpool.core.cluster import ChainMatch, NodeInfo, NodeKind, RemoteSource, StaleLocation
from kvpool.core.errors import ArenaFull, DeadlineExceeded, KvPoolError, Overloaded, PageCorrupt, ServiceUnavailable
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import HEADER_BYTES, PageKey, seal, verify
from kvpool.core.spans import PageSpan
from kvpool.testing import eventually
from kvpool_gpuagent.adapters import stream_pool
from kvpool_gpuagent.adapters.page_streams import PeerClients
from kvpool_gpuagent.adapters.stream_pool import StreamBuffers, StreamPool
from kvpool_gpuagent.core.sources import LoadSource
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, PAYLOAD_BYTES, SPEC, fill_page
from tests.fixtures.patience import PATIENCE_S

Read = Callable[[PageKey], "bool | KvPoolError"]
WAIT_S = PATIENCE_S
HEAD = b"h" * 16


class ScriptedPeer:
    """What answers under one endpoint."""

    def __init__(self, read: Read = lambda key: False) -> None:
        self.read = read
        self.asked: list[PageKey] = []
        self.verified: list[PageKey] = []
        self.spoil: Callable[[PageKey, memoryview], None] = lambda key, page: None
        self.written: list[PageToWrite] = []
        self.pages: list[bytes] = []
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
            if isinstance(answer, KvPoolError):
                on_page(number, answer, False)
            else:
                if answer:
                    fill_page(item.destination, item.key)
                    self.spoil(item.key, item.destination)
                on_page(number, None, answer)

    def verify_pages(self, keyspaces: Any, keys: Sequence[PageKey], **_: Any) -> None:
        self.verified += keys

    def write_pages(self, keyspaces: Any, items: Sequence[PageToWrite], on_page: Any, **_: Any) -> None:
        for number, item in enumerate(items):
            if self.write is None:
                return  # breaks off without a word
            self.written.append(item)
            self.pages.append(bytes(item.page))
            error = self.write(item.key)
            on_page(number, Admission.REJECTED if error else Admission.RESERVED, error)


class ScriptedPeers:
    """Stands in for PeerClients."""

    def __init__(self, peers: dict[str, ScriptedPeer]) -> None:
        self._peers = peers
        self.threads = ThreadPoolExecutor(2)

    @contextmanager
    def client(self, endpoint: str) -> Iterator[ScriptedPeer]:
        yield self._peers[endpoint]

    async def run(self, job: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, job)


class ScriptedIndex:
    """Places everything on one node, and knows no page."""

    def __init__(self) -> None:
        self.stale: list[StaleLocation] = []
        self.match_stream = self
        self.present_chunks = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.nodes = [NodeInfo(node_id=b"1" * 16, kind=NodeKind.PAGESTORE, bulk_endpoint="first", incarnation=3)]

    async def place(self, *_: Any, **__: Any) -> list[NodeInfo]:
        await self.answers.wait()
        return self.nodes

    async def match(self, query: Any, *, timeout_s: float) -> ChainMatch:
        self.match_timeout_s = timeout_s
        return ChainMatch(matched_chunks=self.present_chunks)

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

    async def acquire(
        self, numbers: Sequence[int], *, wait_s: float = WAIT_S
    ) -> dict[int, LoadSource | KvPoolError | None]:
        """What settled each page: where it came from, or why it is not to be had."""
        answers: dict[int, LoadSource | KvPoolError | None] = {}
        async with aclosing(self.pool.acquire(span(numbers), wait_s)) as settling:
            async for answer in settling:
                for page, source in zip(answer.slots.pages.tolist(), answer.slots.sources.tolist(), strict=True):
                    answers[numbers[page]] = LoadSource(source)
                answers.update({numbers[page]: error for page, error in answer.failed})
                await self.pool.release(answer.slots)
        return answers


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.pool.close()
    made.peers.threads.shutdown(wait=True)
    await eventually(lambda: made.buffers.reads.used_bytes == made.buffers.writes.used_bytes == 0)


SOURCES = tuple(
    RemoteSource(node_id=bytes([at]) * 16, incarnation=3, bulk_endpoint=name)
    for at, name in enumerate(("first", "second"), 1)
)


def span(numbers: Sequence[int], sources: Sequence[tuple[RemoteSource, ...]] = ()) -> PageSpan:
    """One page of each chunk. sources: of each chunk; else both."""
    return PageSpan(
        keyspace=KEYSPACE,
        chunk_hashes=b"".join(key(number).chunk_hash for number in numbers),
        first_chunk_index=1,
        parent_hash=b"p" * 16,
        group_heads=b"h" * 16,
        positions=np.arange(len(numbers), dtype=np.int32),
        shards=np.zeros(len(numbers), dtype=np.uint8),
        sources=tuple((1, some) for some in sources) or ((len(numbers), SOURCES),),
    )


def key(number: int) -> PageKey:
    return PageKey(KEYSPACE, bytes([number]) * 16, 0)


async def test_what_the_first_source_has_not_the_second_is_asked_for(bench: Bench) -> None:
    bench.first.read = lambda page: page == key(1)
    bench.second.read = lambda page: page == key(2)
    answers = await bench.acquire([1, 2, 3])
    assert answers == {1: LoadSource.REMOTE, 2: LoadSource.REMOTE, 3: None}
    assert bench.second.asked == [key(2), key(3)]
    await eventually(lambda: len(bench.index.stale) == 6)
    told = {(one.location.node_id[0], one.chunk_hash[0]) for one in bench.index.stale}
    assert told == {(1, 2), (1, 3), (2, 3)}
    assert {one.location.tier for one in bench.index.stale} == {Tier.STAGING, Tier.DISK}


async def test_a_source_that_fails_is_not_stale(bench: Bench) -> None:
    bench.first.read = lambda page: ServiceUnavailable("it is down")
    bench.second.read = lambda page: True
    assert await bench.acquire([1]) == {1: LoadSource.REMOTE}
    bench.second.read = lambda page: ServiceUnavailable("so is this one")
    assert "so is this one" in str((await bench.acquire([1]))[1])
    assert bench.index.stale == []


def wrong_key(page_key: PageKey, page: memoryview) -> None:
    fill_page(page, key(page_key.chunk_hash[0] + 100))


def wrong_payload(page_key: PageKey, page: memoryview) -> None:
    page[HEADER_BYTES + PAYLOAD_BYTES - 1] ^= 1


def wrong_header(page_key: PageKey, page: memoryview) -> None:
    page[20] ^= 1


def wrong_length(page_key: PageKey, page: memoryview) -> None:
    seal(page, page_key, SPEC.codec, 64)


SPOILS = [wrong_key, wrong_payload, wrong_header, wrong_length]


@pytest.mark.parametrize("spoil", SPOILS)
async def test_a_page_that_fails_its_check_is_asked_of_the_next_source_and_reported(
    bench: Bench, spoil: Callable[[PageKey, memoryview], None]
) -> None:
    bench.first.read = bench.second.read = lambda page: True
    bench.first.spoil = lambda page_key, page: spoil(page_key, page) if page_key == key(2) else None
    assert await bench.acquire([1, 2]) == {1: LoadSource.REMOTE, 2: LoadSource.REMOTE}
    assert bench.second.asked == [key(2)]
    assert bench.first.verified == [key(2)] and not bench.second.verified
    await eventually(lambda: len(bench.index.stale) == 2)
    assert {(one.location.node_id[0], one.chunk_hash) for one in bench.index.stale} == {(1, key(2).chunk_hash)}


@pytest.mark.parametrize("spoil", SPOILS)
async def test_a_page_that_is_true_nowhere_is_a_miss_that_says_so(
    bench: Bench, spoil: Callable[[PageKey, memoryview], None]
) -> None:
    bench.first.read = lambda page: True
    bench.first.spoil = spoil
    answers = await bench.acquire([1])
    assert isinstance(answers[1], PageCorrupt)
    await eventually(lambda: len(bench.index.stale) == 4)  # the second source has nothing


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
    acquiring = bench.pool.acquire(span([1, 2], [SOURCES, SOURCES[1:]]), WAIT_S)
    async with aclosing(acquiring):
        first = asyncio.ensure_future(anext(acquiring))
        await eventually(lambda: bench.second.asked and bench.first.asked)
        assert not first.done()
        bench.second.gate.set()
        await first
    await eventually(lambda: bench.buffers.reads.used_bytes == 0)


async def write(bench: Bench, numbers: Sequence[int]) -> dict[int, type[KvPoolError]]:
    """Why pages were not written, by number."""
    pages = span(numbers)
    answer = await bench.pool.reserve(pages, HEAD)
    assert answer.slots.pages.tolist() == list(range(len(numbers)))
    for number, address in zip(numbers, answer.slots.addresses.tolist(), strict=True):
        ctypes.memset(address + HEADER_BYTES, number, PAYLOAD_BYTES)
    return {numbers[index]: type(error) for index, error in await bench.pool.commit(pages, answer.slots)}


async def test_each_written_page_is_answered_for_itself(bench: Bench) -> None:
    bench.first.write = lambda page: ArenaFull("no room") if page == key(2) else None
    assert await write(bench, [1, 2, 3]) == {2: ArenaFull}


async def test_pages_are_sealed_and_sent_with_what_is_kept_beside_them(bench: Bench) -> None:
    assert await write(bench, [1, 2]) == {}
    assert [item.key for item in bench.first.written] == [key(1), key(2)]
    for number, page in zip((1, 2), bench.first.pages, strict=True):
        assert verify(page, key(number), SPEC.codec) is None
        assert page[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] == bytes([number]) * PAYLOAD_BYTES
    assert [item.metadata.chunk_index for item in bench.first.written] == [1, 2]
    assert [item.metadata.parent_hash for item in bench.first.written] == [b"p" * 16, key(1).chunk_hash]


async def test_what_the_cluster_has_is_not_written_again(bench: Bench) -> None:
    bench.index.present_chunks = 2
    answer = await bench.pool.reserve(span([1, 2, 3]), HEAD)
    assert (answer.exists.tolist(), answer.slots.pages.tolist()) == ([0, 1], [2])
    await bench.pool.abort(answer.slots)


async def test_a_page_that_nobody_answered_for_was_not_written(bench: Bench) -> None:
    bench.first.write = None
    assert await write(bench, [1, 2]) == {1: ServiceUnavailable, 2: ServiceUnavailable}


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
        await bench.pool.reserve(span([1]), HEAD)


async def test_more_than_the_memory_for_pages_is_refused(bench: Bench) -> None:
    with pytest.raises(ArenaFull, match="more than the agent's"):
        await bench.pool.reserve(span(range(5)), HEAD)


async def test_stores_wait_for_memory_only_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await bench.pool.reserve(span(range(4)), HEAD)
    assert bench.index.match_timeout_s == stream_pool.RESERVE_WAIT_S, "not that of a match that an engine waits for"
    monkeypatch.setattr(stream_pool, "RESERVE_WAIT_S", 0.01)
    with pytest.raises(KvPoolError, match="busy"):
        await bench.pool.reserve(span([9]), HEAD)
    await bench.pool.abort(answer.slots)


async def test_a_store_waits_only_for_a_while_for_an_index_that_does_not_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_pool, "RESERVE_WAIT_S", 0.0)
    bench.index.answers.clear()
    with pytest.raises(Overloaded):
        await bench.pool.reserve(span([1]), HEAD)
    assert bench.buffers.writes.used_bytes == 0
