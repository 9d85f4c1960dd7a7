"""Watchers that lose events together do not all begin afresh together."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable

from prometheus_client import CollectorRegistry

from kvpool.core.cluster import ChunkEvent, IndexEvent, ResyncEvent
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.events import ENTRY_BYTES, ENTRY_CHUNKS, ChunkState, pack_entries, unpack_chunks
from kvpool_index.engine.index import IndexEngine
from kvpool_index.metrics import IndexMetrics
from tests.fixtures.virtual_time import run_virtually

WATCHERS = 20
SPEC = KeyspaceSpec(model_id="m", model_revision="1", groups=(KvGroup(1, 2, 8),), dtype=Dtype.FP32, chunk_tokens=16)


def test_a_gap_of_the_log_reaches_watchers_one_after_the_other() -> None:
    drawn: list[float] = []

    def uniform(low: float, high: float) -> float:
        assert (low, high) == (0.0, 2.0)
        drawn.append(high * len(drawn) / WATCHERS)
        return drawn[-1]

    async def play() -> list[float]:
        store = MemoryIndexStore(ManualClock())
        engine = IndexEngine(
            store=store,
            config=IndexConfig(),
            clock=ManualClock(),
            metrics=IndexMetrics(CollectorRegistry()),
            secret_of=lambda tenant: PUBLISHED_TENANT_SECRET,
            version="test",
            uniform=uniform,
        )
        watches = [engine.watch("t", "", b"", for_replica=True) for _ in range(WATCHERS)]
        for watch in watches:
            await resync(watch)
        began_s = asyncio.get_running_loop().time()
        store.events._counts = [count + 5 for count in store.events._counts]  # entries that came and went
        for stream in range(store.events.stream_count):
            store.events.append_now(stream, b"")

        async def time_of(watch: Awaitable[None]) -> float:
            await watch
            return asyncio.get_running_loop().time() - began_s

        found = sorted(await asyncio.gather(*(time_of(resync(watch)) for watch in watches)))
        for watch in watches:
            await watch.aclose()
        await engine.close()
        return found

    times = run_virtually(play())
    assert len(drawn) >= WATCHERS
    assert len({round(each, 3) for each in times}) == WATCHERS and times[-1] < 5


async def resync(watch: AsyncGenerator[IndexEvent, None]) -> None:
    async for event in watch:
        if isinstance(event.event, ResyncEvent):
            return


def test_entries_of_the_log_are_bounded_in_chunks_and_bytes() -> None:
    for value_bytes, count in ((5, 1000), (29 * 64, 100), (0, 1), (300, 65), (13, 0)):
        states = [
            ChunkState(
                keyspace=b"k" * 16, group_head=b"h" * 16, chunk_hash=b"c" * 16, value=bytes(value_bytes), version=at
            )
            for at in range(count)
        ]
        payloads = list(pack_entries(states))
        assert [state for payload in payloads for state in unpack_chunks(payload)] == states
        assert all(len(payload) <= ENTRY_BYTES for payload in payloads)
        sizes = [len(list(unpack_chunks(payload))) for payload in payloads]
        assert all(0 < size <= ENTRY_CHUNKS for size in sizes)
        full = ENTRY_BYTES // (59 + value_bytes)
        assert len(payloads) <= -(-count // min(ENTRY_CHUNKS, full))


def test_a_late_event_that_may_be_older_than_a_lost_one_does_not_follow_a_resync() -> None:
    """Its chunk would look to the receiver, which has forgotten all, as it was before what it lost."""

    async def play() -> list[int | str]:
        store = MemoryIndexStore(ManualClock())
        engine = IndexEngine(
            store=store,
            config=IndexConfig(watch_buffer_events=2),
            clock=ManualClock(),
            metrics=IndexMetrics(CollectorRegistry()),
            secret_of=lambda tenant: PUBLISHED_TENANT_SECRET,
            version="test",
        )
        await engine.open_keyspace("t", "k", SPEC)
        keyspace = keyspace_id(encode_keyspace("t", SPEC))

        async def log(*versions: int) -> None:
            for version in versions:
                state = ChunkState(
                    keyspace=keyspace, group_head=b"h" * 16, chunk_hash=b"c" * 16, value=b"", version=version
                )
                for payload in pack_entries([state]):
                    store.events.append_now(0, payload)
            await asyncio.sleep(1.0)

        watch = engine.watch("t", "", b"")
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(1.0)
        await log(10)
        seen: list[int | str] = [_shown(await first)]
        await log(11, 13, 14)  # more than the buffer takes
        await log(12, 15)
        seen += [_shown(await anext(watch)) for _ in range(2)]
        await watch.aclose()
        await engine.close()
        return seen

    assert run_virtually(play()) == [10, "resync", 15]


def _shown(event: IndexEvent) -> int | str:
    return event.event.version if isinstance(event.event, ChunkEvent) else "resync"
