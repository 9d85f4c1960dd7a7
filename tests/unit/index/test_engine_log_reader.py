"""The reader of the event log: what it says of outages, and that nothing in the log ends it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from kvpool.core.cluster import ChunkEvent
from kvpool.core.errors import InvalidRequest, StoreUnavailable
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, Dtype, KeyspaceSpec, KvGroup
from kvpool.testing import ManualClock, eventually
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.events import ChunkState, EntryEvents, LogEntry, pack_chunks
from kvpool_index.engine import log_reader
from kvpool_index.engine.keyspaces import KeyspaceService
from kvpool_index.engine.log_reader import LogReader
from kvpool_index.engine.nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import BoundKeyspace

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 2, 64),), dtype=Dtype.FP32, chunk_tokens=32)


class Reading:
    """A reader of a store in memory, and what came out of it."""

    def __init__(self) -> None:
        self.store = MemoryIndexStore(ManualClock(), chunk_stream_count=3)
        self.keyspaces = KeyspaceService(
            self.store.keyspaces, self.store.policies, lambda tenant: PUBLISHED_TENANT_SECRET
        )
        nodes = NodeService(self.store.nodes, IndexConfig(), ManualClock(), IndexMetrics(CollectorRegistry()))
        self.news: list[EntryEvents] = []
        self.losses = 0
        self.reader = LogReader(self.store.events, nodes, self.keyspaces, deliver=self.news.extend, lose=self.lose)

    def lose(self) -> None:
        self.losses += 1

    def chunks(self) -> list[bytes]:
        events = [event for each in self.news for _, event in each.owned]
        return [event.chunk_hash for event in events if isinstance(event, ChunkEvent)]

    async def log(self, keyspace: bytes, *chunk_hashes: bytes) -> None:
        states = [
            ChunkState(keyspace=keyspace, group_head=bytes(16), chunk_hash=each, value=b"", version=1)
            for each in chunk_hashes
        ]
        await self.store.events.append([(0, pack_chunks(states))])


@pytest.fixture
async def reading(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reading]:
    monkeypatch.setattr(log_reader, "_RETRY_S", 0.001)
    found = Reading()
    yield found
    await asyncio.gather(*found.reader.stop(), return_exceptions=True)


async def test_an_outage_is_one_line_however_many_streams_find_it_and_how_often(
    reading: Reading, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=log_reader.__name__)
    asked: list[int] = []

    async def fail(stream: int, after: str, *, limit: int, wait_s: float) -> Sequence[LogEntry]:
        asked.append(stream)
        raise StoreUnavailable("down")

    def lines(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records if record.levelno >= logging.INFO)

    def said(text: str, times: int) -> bool:
        return lines(text) == times

    await reading.reader.start()
    for outage in (1, 2):
        asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(reading.store.events, "read", fail)
            for stream in range(4):
                reading.store.events.append_now(stream, b"")  # wakes its reader
            await eventually(lambda: all(asked.count(stream) >= 3 for stream in range(4)))
            assert lines("interrupted") == outage
            assert lines("goes on") == outage - 1
        for stream in range(4):
            reading.store.events.append_now(stream, b"")
        await eventually(partial(said, "goes on", outage))


async def test_a_malformed_entry_of_chunks_is_skipped_and_counted(reading: Reading) -> None:
    opened = await reading.keyspaces.open("default", "k", SPEC)
    keyspace = opened.keyspace.keyspace_id
    await reading.reader.start()
    before = reading.reader.position
    await reading.log(keyspace, b"a" * 16)
    whole = pack_chunks([ChunkState(keyspace, bytes(16), b"c" * 16, b"v" * 20, 1)])
    odd = pack_chunks([ChunkState(keyspace, bytes(16), b"d" * 15, b"", 1)])
    await reading.store.events.append([(0, payload) for payload in (b"?", whole[:-1], odd)])
    await reading.log(keyspace, b"b" * 16)
    await eventually(lambda: reading.chunks() == [b"a" * 16, b"b" * 16])
    assert (reading.store.events.malformed_count, reading.losses) == (3, 0)
    assert await reading.reader.reaches_end()
    caught_up = [news async for news in reading.reader.catch_up(before, reading.reader.position)]
    assert None not in caught_up and [len(news.owned) for news in caught_up if news is not None] == [1, 0, 0, 0, 1]


async def test_a_malformed_entry_of_nodes_is_counted_and_a_gap(reading: Reading) -> None:
    opened = await reading.keyspaces.open("default", "k", SPEC)
    keyspace = opened.keyspace.keyspace_id
    await reading.reader.start()
    await reading.store.events.append([(3, b"[]" * 8)])
    await eventually(lambda: (reading.store.events.malformed_count, reading.losses) == (1, 1))
    await reading.log(keyspace, b"b" * 16)
    await eventually(lambda: reading.chunks() == [b"b" * 16])
    assert await reading.reader.reaches_end()


async def test_a_failure_of_another_kind_loses_no_entry(
    reading: Reading, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = await reading.keyspaces.open("default", "k", SPEC)
    keyspace = opened.keyspace.keyspace_id
    await reading.reader.start()
    await reading.log(keyspace, b"a" * 16)
    await eventually(lambda: reading.chunks() == [b"a" * 16])
    failures = 0

    async def fail(stream: int, entry_id: str) -> bool:
        nonlocal failures
        failures += 1
        raise ValueError("an answer that is none")

    with monkeypatch.context() as patch:
        patch.setattr(reading.store.events, "is_kept", fail)
        await reading.log(keyspace, b"b" * 16)
        await eventually(lambda: failures >= 2)
    await eventually(lambda: reading.chunks() == [b"a" * 16, b"b" * 16])
    assert not reading.losses


async def test_a_keyspace_of_another_version_is_hidden_and_is_asked_for_once_an_entry(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await reading.keyspaces.open("default", "k", SPEC)
    asked: list[bytes] = []

    async def by_id(keyspace: bytes) -> BoundKeyspace | None:
        asked.append(keyspace)
        if keyspace == b"n" * 16:
            raise InvalidRequest("an encoding of a later version")
        return None

    monkeypatch.setattr(reading.store.keyspaces, "by_id", by_id)
    await reading.reader.start()
    for keyspace in (b"n" * 16, b"u" * 16, opened.keyspace.keyspace_id):
        await reading.log(keyspace, *(bytes([number]) * 16 for number in range(8)))
    await eventually(lambda: len(reading.chunks()) == 8)
    assert sorted(asked) == [b"n" * 16, b"u" * 16] and not reading.losses
