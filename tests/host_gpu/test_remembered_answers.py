"""What other agents have said of chunks is used by the load that follows, and never believed beyond generations."""

from __future__ import annotations

import pytest

from kvpool.client.hashing import Prompt
from kvpool.core.elements import Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent.core.cached_chunks import HeldChunks
from kvpool_gpuagent.engine import host_caches
from kvpool_gpuagent.servicer import SharedCaches
from tests.fixtures import layout_presets as presets
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.peer_ranks import CHUNKS, PROMPT, PeerHost, Rank, peer_host

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=32)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each question to another agent: how many chunks it named."""
    counts: list[int] = []
    find = SharedCaches.find

    def counted(lender: SharedCaches, wanted: gpuagent_pb2.FindCachedChunksRequest) -> list[HeldChunks]:
        counts.append(len(wanted.chunk_hashes) // 16)
        return find(lender, wanted)

    monkeypatch.setattr(SharedCaches, "find", counted)
    monkeypatch.setattr(host_caches, "REMEMBER_S", 3600.0)  # a busy machine may be away for longer than it is
    return counts


async def two_ranks(host: PeerHost) -> tuple[Rank, Rank]:
    """A source that has announced all chunks, and a rank at the last agent."""
    source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16)
    rank = await host.rank(SPEC, presets.vllm_nhd_layout, agent=len(host.agents) - 1, block_count=16)
    source.announce()
    await host.announced()
    return source, rank


async def test_a_load_that_was_matched_asks_no_agent_again(asked: list[int]) -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        assert await rank.sources() == [(CHUNKS, "GPU")]
        for count in (CHUNKS, 2):  # all of it, and its leading chunks alone
            assert (await rank.load(range(count))).tokens.gpu == count * 32
        assert rank.rows(range(CHUNKS)) == source.rows(range(CHUNKS))
        assert asked == [CHUNKS]


async def test_a_load_of_which_not_all_is_remembered_asks(asked: list[int]) -> None:
    async with peer_host(2) as host:
        source = await host.rank(SPEC, presets.vllm_nhd_layout, block_count=16)
        rank = await host.rank(SPEC, presets.vllm_nhd_layout, agent=1, block_count=16)
        source.announce(PROMPT.hashes[:2], range(2))
        await host.announced(2)
        assert await rank.sources() == [(2, "GPU")]
        source.announce()
        await host.announced()
        assert (await rank.load()).tokens.gpu == CHUNKS * 32
        assert (await rank.load(range(1, CHUNKS))).tokens.gpu == 3 * 32  # begins elsewhere
        assert asked == [CHUNKS, CHUNKS, CHUNKS - 1]


async def test_what_has_changed_since_the_match_does_not_count_and_is_asked_for_again(asked: list[int]) -> None:
    async with peer_host(3) as host:
        source, rank = await two_ranks(host)
        assert await rank.sources() == [(CHUNKS, "GPU")]
        source.generations.raise_blocks(source.blocks_of([2])[0, :1])
        twin = await host.rank(SPEC, presets.vllm_hnd_layout, agent=1, block_count=16)
        twin.announce()
        await host.announced(agent=1)
        result = await rank.load()
        assert (result.loaded_chunks, result.tokens.gpu) == (2, 2 * 32)
        assert rank.rows(range(2)) == source.rows(range(2))
        asked.clear()
        assert (await rank.load()).tokens.gpu == CHUNKS * 32
        assert asked == [CHUNKS, CHUNKS]
        assert rank.rows([2]) == twin.rows([2])


async def test_an_answer_is_not_used_for_longer_than_it_may_be(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_caches, "REMEMBER_S", 0.0)
    async with peer_host(2) as host:
        _, rank = await two_ranks(host)
        assert await rank.sources() == [(CHUNKS, "GPU")]
        assert (await rank.load()).tokens.gpu == CHUNKS * 32
        assert asked == [CHUNKS, CHUNKS]


async def test_the_oldest_answers_are_forgotten_first(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_caches, "_MAX_REMEMBERED", 1)
    async with peer_host(2) as host:
        _, rank = await two_ranks(host)
        assert await rank.sources() == [(CHUNKS, "GPU")]
        assert await rank.sources(3) == [(1, "GPU")]
        assert (await rank.load()).tokens.gpu == CHUNKS * 32
        assert asked == [CHUNKS, 1, CHUNKS]


async def test_prompts_that_begin_alike_have_an_answer_each(asked: list[int]) -> None:
    async with peer_host(2) as host:
        source, rank = await two_ranks(host)
        assert await rank.sources() == [(CHUNKS, "GPU")]
        other = Prompt(32, 3 * 32 + 1, b"".join([*PROMPT.hashes[:2], b"o" * 16]))
        await rank.session.match(other.hashes, 0, timeout_s=PATIENCE_S)
        assert (await rank.load()).tokens.gpu == CHUNKS * 32
        assert rank.rows(range(CHUNKS)) == source.rows(range(CHUNKS))
        assert asked == [CHUNKS, 3]
