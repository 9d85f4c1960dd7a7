"""Prefixes loaded from GPU caches of other ranks, through real agents on host memory: every byte is right, or not
loaded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool.client.gpuagent import EngineSession
from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import NotServed, ServiceUnavailable
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import eventually
from kvpool_gpuagent.core.sources import LoadSource
from tests.fixtures import layout_presets as presets
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import CHUNKS, PROMPT, PeerHost, Rank, peer_host


def make_spec(**changes: Any) -> KeyspaceSpec:
    values: dict[str, Any] = {"groups": (KvGroup(2, 2, 16),), "dtype": Dtype.BF16, "chunk_tokens": 32}
    return KeyspaceSpec(model_id="m", model_revision="r", **(values | changes))


SPEC = make_spec()
TP2 = make_spec(groups=(KvGroup(4, 4, 64),), dtype=Dtype.FP32)  # heads are shards of their own


async def two_ranks(host: PeerHost, **options: Any) -> tuple[Rank, Rank]:
    """A source of which all chunks are announced, and a rank at the last agent."""
    last = len(host.agents) - 1
    source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16, engine_id=b"one")
    rank = await host.rank(SPEC, presets.vllm_hnd_layout, agent=last, block_count=16, engine_id=b"two", **options)
    source.announce()
    await host.announced()
    return source, rank


async def store(rank: Rank, chunks: range) -> None:
    """In the pool of the rank's agent."""
    await (await rank.session.store(rank.span(chunks))).done(PATIENCE_S)


@pytest.mark.parametrize("agents", [1, 2])
async def test_a_prefix_of_another_rank_is_matched_and_loaded(agents: int) -> None:
    async with peer_host(agents) as host:
        source, rank = await two_ranks(host)
        assert await rank.sources() == [(CHUNKS, "GPU")]
        assert await rank.sources(3) == [(1, "GPU")]
        assert rank.rows(range(CHUNKS)) != source.rows(range(CHUNKS))
        result = await rank.load()
        assert (result.loaded_chunks, result.error) == (CHUNKS, None)
        assert (result.tokens.gpu, result.tokens.total) == (CHUNKS * 32, CHUNKS * 32)
        assert result.copy_s > 0
        assert rank.rows(range(CHUNKS)) == source.rows(range(CHUNKS))
        assert rank.agent.metric("loaded_tokens_total", source="gpu") == CHUNKS * 32
        assert rank.agent.engine.bandwidths.bytes_per_s(LoadSource.GPU) > 0
        assert host.devices[agents - 1].launched == 1


async def test_skipped_tokens_stay_as_they_were() -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        before = rank.rows(range(CHUNKS))
        result = await rank.load(range(1, CHUNKS), skip=11)
        assert (result.loaded_chunks, result.tokens.gpu) == (3, 3 * 32 - 11)
        token_bytes = len(before) // (CHUNKS * 32)
        kept = (32 + 11) * token_bytes
        assert rank.rows(range(CHUNKS)) == before[:kept] + source.rows(range(CHUNKS))[kept:]


async def test_ranks_of_a_group_complete_each_other_and_a_whole_cache_comes_first() -> None:
    async with peer_host(3) as host:
        halves = [
            await host.rank(
                TP2, presets.vllm_nhd_layout, agent=part, heads=range(2 * part, 2 * part + 2), block_count=16
            )
            for part in range(2)
        ]
        rank = await host.rank(TP2, presets.vllm_nhd_layout, agent=2, block_count=16)
        halves[0].announce()
        await host.announced()
        assert await rank.sources() == []
        halves[1].announce(PROMPT.hashes[:3], range(3))
        await host.announced(3, agent=1)
        assert await rank.sources() == [(3, "GPU")]
        result = await rank.load(range(3))
        assert result.tokens.gpu == 3 * 32
        for half in halves:
            assert _rows_of_heads(rank, range(3), half.layout.head_range) == half.rows(range(3))
        whole = await host.rank(TP2, presets.vllm_hnd_layout, block_count=16)
        whole.announce(PROMPT.hashes, [3, 2, 1, 0])
        await host.announced(session=1)
        assert await rank.sources() == [(CHUNKS, "GPU")]
        await rank.load()
        assert rank.rows(range(CHUNKS)) == whole.rows([3, 2, 1, 0])


def _rows_of_heads(rank: Rank, places: range, heads: range) -> bytes:
    found, memory = bytearray(), rank.memory()
    for block in rank.blocks_of(places).reshape(-1).tolist():
        for token in range(rank.layout.block_tokens):
            for layer in rank.layout.layers:
                for plane in layer.planes:
                    for head in heads:
                        handle, where = rank.row(plane, block, token, head)
                        found += memory[handle][where].tobytes()
    return bytes(found)


async def test_a_rank_with_part_of_the_heads_takes_them_out_of_a_whole_cache() -> None:
    async with peer_host(2) as host:
        source = await host.rank(TP2, presets.vllm_nhd_layout, block_count=16)
        rank = await host.rank(TP2, presets.vllm_nhd_layout, agent=1, heads=range(2, 4), block_count=16)
        source.announce()
        await host.announced()
        assert (await rank.load()).loaded_chunks == CHUNKS
        assert rank.rows(range(CHUNKS)) == _rows_of_heads(source, range(CHUNKS), range(2, 4))


async def test_a_chunk_whose_block_was_given_away_is_not_offered() -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        source.generations.raise_blocks(source.blocks_of([2])[0, 1:2])
        assert await rank.sources() == [(2, "GPU")]
        source.generations.raise_all()
        assert await rank.sources() == []
        await eventually(lambda: not host.agents[0].engine.sessions[0].cached)  # entries that are over are dropped


async def test_a_block_given_away_during_the_copy_counts_as_not_loaded() -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        host.hold(1)
        loading = asyncio.ensure_future(rank.load())
        await host.copying(1)
        source.generations.raise_blocks(source.blocks_of([2])[0, :1])
        host.release(1)
        result = await loading
        assert result.loaded_chunks == 2
        assert result.failed_chunks == (2, 3)
        assert result.error is not None
        assert result.tokens.gpu == result.tokens.total == 2 * 32
        assert rank.rows(range(2)) == source.rows(range(2))


async def test_what_changed_or_is_not_on_a_gpu_comes_from_the_pool() -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        twin = await host.rank(SPEC, presets.vllm_nhd_layout, agent=1, block_count=16)  # what the pool has comes of it
        for own, theirs in zip(twin.memory(), source.memory(), strict=True):
            own[:] = theirs
        await store(twin, range(3))
        source.generations.raise_blocks(source.blocks_of([1])[0])
        assert await rank.sources() == [(1, "GPU"), (1, "STAGING"), (2, "GPU")]
        result = await rank.load()
        assert (result.loaded_chunks, result.tokens.gpu, result.tokens.staging) == (CHUNKS, 3 * 32, 32)
        assert rank.rows(range(CHUNKS)) == source.rows(range(CHUNKS))


async def test_progress_of_layers_speaks_of_the_whole_load() -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        source.generations.raise_blocks(source.blocks_of([1])[0])
        told: list[tuple[int, tuple[int, ...]]] = []
        result = await rank.load(on_progress=lambda layers, failed: told.append((layers, failed)))
        assert result.loaded_chunks == 1
        assert all(failed == (1, 2, 3) for _, failed in told)


async def test_an_engines_own_cache_is_no_source_for_it() -> None:
    async with peer_host(2) as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16, engine_id=b"one")
        source.announce()
        await host.announced()
        same = await host.rank(SPEC, presets.vllm_nhd_layout, agent=1, block_count=16, engine_id=b"one")
        assert await same.sources() == []
        assert await source.sources() == []
        result = await same.load()
        assert result.loaded_chunks == 0


async def test_a_gpu_that_no_link_leads_to_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer_host(2) as host:
        _, rank = await two_ranks(host)

        async def refuse(*_: object) -> Any:
            raise NotServed("these GPUs have no link")

        with monkeypatch.context() as patch:
            patch.setattr(host.devices[1], "pull", refuse)
            assert await rank.sources() == [(CHUNKS, "GPU")]
            assert (await rank.load()).loaded_chunks == 0
        assert await rank.sources() == []
        assert (await rank.load()).loaded_chunks == 0


async def test_an_engine_that_does_not_name_itself_is_offered_pages_alone() -> None:
    async with peer_host(2) as host:
        source, _ = await two_ranks(host)
        nameless = Rank(host.gpu, SPEC, source.layout, host.agents[1], "nameless")
        host.ranks.append(nameless)
        await nameless.open()
        assert await nameless.sources() == []


async def test_rows_as_the_codec_has_them_are_not_offered_to_a_cache_of_the_models() -> None:
    spec = make_spec(codec=Codec.INT8_GROUP8)
    async with peer_host(2) as host:
        source = await host.rank(spec, presets.lightllm_quantized_layout, block_tokens=1, block_count=128)
        rank = await host.rank(spec, presets.vllm_nhd_layout, agent=1, block_count=16)
        alike = await host.rank(spec, presets.block_scales_layout, agent=1, block_count=16)
        source.announce()
        await host.announced()
        assert await rank.sources() == []
        assert await alike.sources() == [(CHUNKS, "GPU")]
        assert (await alike.load()).tokens.gpu == CHUNKS * 32


@pytest.mark.parametrize("agents", [1, 2])
async def test_a_source_that_ends_takes_its_chunks_with_it(agents: int) -> None:
    async with peer_host(agents) as host:
        source, rank = await two_ranks(host)
        await rank.load()  # so that its cache is mapped
        await source.session.close()
        assert await rank.sources() == []
        result = await rank.load()
        assert result.loaded_chunks == 0
        await source.open()
        assert await rank.sources() == []  # a new session has announced nothing
        source.announce()
        await eventually(lambda: any(session.cached for session in host.agents[0].engine.sessions))
        assert await rank.sources() == [(CHUNKS, "GPU")]
        assert (await rank.load()).loaded_chunks == CHUNKS
        assert rank.rows(range(CHUNKS)) == source.rows(range(CHUNKS))


@pytest.mark.parametrize("agents", [1, 2])
async def test_a_source_that_ends_during_the_copy_costs_the_load_its_chunks_and_no_more(agents: int) -> None:
    async with peer_host(agents) as host:
        source, rank = await two_ranks(host)
        host.hold(agents - 1)
        loading = asyncio.ensure_future(rank.load())
        await host.copying(agents - 1)
        closing = asyncio.ensure_future(source.session.close())
        await asyncio.sleep(0)
        host.release(agents - 1)
        result = await loading
        assert result.loaded_chunks in (0, CHUNKS)  # whichever came first
        if result.loaded_chunks:
            assert rank.rows(range(CHUNKS)) == source.rows(range(CHUNKS))
        await closing


async def test_a_load_is_cancelled_while_it_waits_for_its_pull() -> None:
    async with peer_host(2) as host:
        _, rank = await two_ranks(host)
        host.hold(1)
        handles = [await rank.begin_load(rank.span())]
        await host.copying(1)
        handles.append(await rank.begin_load(rank.span()))
        await eventually(lambda: host.devices[1].launched == 2)
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(0.01)
        assert not handles[0].released  # a copy that has begun ends first
        host.release(1)
        for handle in handles:
            await asyncio.wait_for(handle.wait_released(), PATIENCE_S)


async def test_a_malformed_announcement_is_refused_and_the_session_goes_on() -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        source.session.announce_cached(b"".join(PROMPT.hashes[:2]), [0, 1, 2, 3], [0] * 4)
        assert (await source.load()).loaded_chunks == 0  # the answer comes after the announcement was looked at
        assert await rank.sources() == [(CHUNKS, "GPU")]


async def test_an_announcement_of_more_chunks_than_a_request_may_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with peer_host(max_request_chunks=CHUNKS - 1) as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16)
        monkeypatch.setattr(EngineSession, "max_request_chunks", CHUNKS)  # as an engine that does not ask what may be
        source.announce()
        source.announce(PROMPT.hashes[:1], range(1))
        await host.announced(1)
        (session,) = host.agents[0].engine.sessions
        assert session.cached is not None and len(session.cached) == 1


async def test_many_chunks_are_announced_in_parts() -> None:
    async with peer_host(max_request_chunks=CHUNKS - 1) as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16)
        source.announce()
        await host.announced()
        (session,) = host.agents[0].engine.sessions
        assert session.cached is not None
        found = session.cached.find(PROMPT.hashes)
        assert found.block_ids.reshape(-1).tolist() == source.blocks_of(range(CHUNKS)).reshape(-1).tolist()


async def test_a_match_without_an_index_finds_what_gpus_hold() -> None:
    async with peer_host(2) as host:
        _, rank = await two_ranks(host)

        def fail(query: object) -> Any:
            raise ServiceUnavailable("the index is gone")

        host.indexes[1].answer = fail
        assert await rank.sources() == [(CHUNKS, "GPU")]
