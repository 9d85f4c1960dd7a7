"""Pulls into one GPU: prepared beside the copies of the one before, on all streams, and not begun before their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from kvpool.client.engine_requests import LoadRequest
from kvpool.core.elements import Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import eventually
from kvpool_gpuagent.adapters.gpu import peers as gpu_peers
from kvpool_gpuagent.adapters.gpu.runtime import Int64s, Mark, Stream
from kvpool_gpuagent.kernels.peer_pull import pull_rows
from kvpool_gpuagent.ports import PulledBytes
from tests.fixtures import layout_presets as presets
from tests.fixtures.host_gpu import HostRuntime, HostStream
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import CHUNKS, PeerHost, Rank, peer_host

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)


class CountedStream(HostStream):
    def __init__(self, runtime: HostRuntime) -> None:
        super().__init__(runtime)
        self.marks = self.synchronized = 0

    def mark(self) -> Mark:
        self.marks += 1
        return super().mark()

    def synchronize(self) -> None:
        self.synchronized += 1
        super().synchronize()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[CountedStream]:
    """What any runtime made."""
    made: list[CountedStream] = []

    def stream(runtime: HostRuntime, *, urgent: bool) -> Stream:
        made.append(CountedStream(runtime))
        return made[-1]

    monkeypatch.setattr(HostRuntime, "stream", stream)
    return made


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of each table that any runtime made for kernels to read."""
    counts: list[int] = []
    host_table = HostRuntime.host_table

    def counted(runtime: HostRuntime, count: int) -> Tensor:
        counts.append(count)
        return host_table(runtime, count)

    monkeypatch.setattr(HostRuntime, "host_table", counted)
    return counts


async def two_ranks(host: PeerHost) -> tuple[Rank, Rank]:
    """A source that has announced all chunks, and a rank of the same agent."""
    source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=48)
    rank = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=48)
    source.announce()
    await host.announced()
    return source, rank


async def begin_three(host: PeerHost, rank: Rank, tables: list[int]) -> list[LoadRequest]:
    """Loads of which the first is copied and does not end, and the others are prepared."""
    tables.clear()
    host.hold()
    handles = [await rank.begin_load(rank.span())]
    await host.copying()
    for places in (range(4, 8), range(8, 12)):
        handles.append(await rank.begin_load(rank.span(places=places)))
    await eventually(lambda: len(tables) == 3)  # none reads the slots of another
    return handles


async def test_a_pull_is_prepared_beside_the_copies_of_the_one_before(tables: list[int]) -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        handles = await begin_three(host, rank, tables)
        before = rank.rows(range(4, 12))
        assert host.devices[0].runtime.held_waits == 1
        host.release()
        for handle in handles:
            assert (await handle.done(PATIENCE_S)).tokens.gpu == CHUNKS * 32
        assert before != rank.rows(range(4, 12)) == 2 * source.rows(range(CHUNKS))
        assert (await rank.load()).tokens.gpu == CHUNKS * 32
        assert len(tables) == 3  # used again


async def test_what_cannot_be_prepared_ahead_is_tried_again_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        host.hold()
        first = await rank.begin_load(rank.span())
        await host.copying()
        failed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fail(runtime: HostRuntime, count: int) -> Tensor:
            loop.call_soon_threadsafe(failed.set)
            raise RuntimeError("there is no memory")

        with monkeypatch.context() as patch:
            patch.setattr(HostRuntime, "host_table", fail)
            second = await rank.begin_load(rank.span(places=range(4, 8)))
            await asyncio.wait_for(failed.wait(), PATIENCE_S)
        host.release()
        for handle in (first, second):
            assert (await handle.done(PATIENCE_S)).tokens.gpu == CHUNKS * 32
        assert rank.rows(range(4, 8)) == source.rows(range(CHUNKS))


async def test_all_streams_are_waited_for(streams: list[CountedStream]) -> None:
    async with peer_host() as host:
        _, rank = await two_ranks(host)
        made = len(streams)
        await rank.load()
        assert [stream.marks for stream in streams[made:]] == [1] * len(streams[made:])
        assert len(streams[made:]) > 1


async def test_a_failure_waits_for_all_streams(streams: list[CountedStream], monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer_host() as host:
        _, rank = await two_ranks(host)
        made = len(streams)

        def fail(*arguments: object, **options: object) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        with monkeypatch.context() as patch:
            patch.setattr(gpu_peers, "pull_rows", fail)
            assert (await rank.load()).tokens.gpu == 0
        assert [stream.synchronized for stream in streams[made:]] == [1] * len(streams[made:])
        assert len(streams[made:]) > 1
        assert (await rank.load()).tokens.gpu == CHUNKS * 32


async def test_copies_get_all_streams_of_the_pull(
    streams: list[CountedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only they and the kernel write: the rows of both are right."""
    monkeypatch.setattr(gpu_peers, "PEER_RUN_BYTES", 256)
    used: list[int] = []
    copy: Callable[..., None] = HostRuntime.copy_peer_runs

    def copy_peer_runs(
        runtime: HostRuntime, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, streams: Sequence[Stream]
    ) -> None:
        used.append(len(set(map(id, streams))))
        copy(runtime, destinations, sources, sizes_bytes, streams)

    monkeypatch.setattr(HostRuntime, "copy_peer_runs", copy_peer_runs)
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        kept = rank.rows(range(CHUNKS))[: 11 * len(rank.rows([0])) // 32]
        made = len(streams)
        assert (await rank.load(skip=11)).tokens.gpu == CHUNKS * 32 - 11
        assert used == [len(streams[made:])]
        assert rank.rows(range(CHUNKS)) == kept + source.rows(range(CHUNKS))[len(kept) :]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What threads of pulls did: "launch" a kernel, "fail" to, and "end", when a pull's copy had ended."""
    done: list[str] = []

    def launch(*arguments: Any, **options: Any) -> None:
        done.append("launch")
        pull_rows(*arguments, **options)

    def end(*arguments: Any) -> PulledBytes:
        done.append("end")
        return PulledBytes(*arguments)

    monkeypatch.setattr(gpu_peers, "pull_rows", launch)
    monkeypatch.setattr(gpu_peers, "PulledBytes", end)
    return done


async def test_the_next_pull_is_launched_before_the_one_before_has_ended(tables: list[int], order: list[str]) -> None:
    async with peer_host() as host:
        source, rank = await two_ranks(host)
        handles = await begin_three(host, rank, tables)
        host.release()
        for handle in handles:
            assert (await handle.done(PATIENCE_S)).tokens.gpu == CHUNKS * 32
        assert order == ["launch", "end", "launch", "launch", "end", "end"]
        assert rank.rows(range(12)) == 3 * source.rows(range(CHUNKS))


async def test_a_launch_ahead_that_fails_is_the_failure_of_that_pull_alone(
    tables: list[int], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_third(*arguments: Any, **options: Any) -> None:
        if order.count("launch") == 2 and "fail" not in order:
            order.append("fail")
            raise RuntimeError("an illegal memory access was encountered")
        order.append("launch")
        pull_rows(*arguments, **options)

    monkeypatch.setattr(gpu_peers, "pull_rows", fail_third)
    async with peer_host() as host:
        _, rank = await two_ranks(host)
        handles = await begin_three(host, rank, tables)
        host.release()
        assert [(await handle.done(PATIENCE_S)).tokens.gpu for handle in handles] == [CHUNKS * 32, CHUNKS * 32, 0]
        assert order == ["launch", "end", "launch", "fail", "end"]
        assert (await rank.load()).tokens.gpu == CHUNKS * 32


async def test_a_pull_that_was_stopped_is_not_launched_ahead(tables: list[int], order: list[str]) -> None:
    async with peer_host() as host:
        _, rank = await two_ranks(host)
        before = rank.rows(range(8, 12))
        handles = await begin_three(host, rank, tables)
        host.devices[0].stops[2].cancel()
        host.release()
        assert [(await handle.done(PATIENCE_S)).tokens.gpu for handle in handles] == [CHUNKS * 32, CHUNKS * 32, 0]
        assert order == ["launch", "end", "launch", "end"]
        assert rank.rows(range(8, 12)) == before
