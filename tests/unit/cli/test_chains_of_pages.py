"""Commands about a prompt in a keyspace whose chunks have several pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvpool.client.hashing import Prompt
from kvpool.client.index import NamedKeyspace, OpenedKeyspace
from kvpool.connectors.vllm.kv_groups import page_chain
from kvpool.core.chunks import HASH_BYTES, group_head_index
from kvpool.core.cluster import ChainMatch, ChainQuery, Location, MatchRun
from kvpool.core.geometry import AttentionKind
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.outcome import Tier
from kvpool_cli import chains, match, route
from kvpool_cli.errors import CommandFailed

PAGES, CHUNK, KEY = 3, 16, b"k" * 32
GROUP = KvGroup(2, 1, 16, AttentionKind.GROUPED_WINDOW, 64, pages=PAGES)
SPEC = KeyspaceSpec("m", "r", (GROUP,), Dtype.BF16, chunk_tokens=CHUNK)
TOKENS = list(range(12 * CHUNK + 5))
PAGE_HASHES = page_chain(Prompt.of(KEY, TOKENS, CHUNK), PAGES).hashes


class Index:
    """Has the first pages of the prompt, the first ten in memory."""

    def __init__(self, pages: int) -> None:
        self.pages = pages

    async def open_keyspace(self, *_: Any) -> OpenedKeyspace:
        return OpenedKeyspace(keyspace=b"i" * 16, hash_key=KEY, grid=ShardGrid.of(SPEC), created=False)

    async def get_info(self) -> Any:
        return type("Info", (), {"max_match_chunks": 16})()

    async def match(self, query: ChainQuery) -> ChainMatch:
        first = query.first_chunk_index
        count = len(query.chunk_hashes) // HASH_BYTES
        assert query.chunk_hashes == b"".join(PAGE_HASHES[first : first + count])
        assert query.group_head_hash == PAGE_HASHES[group_head_index(first)]
        runs = []
        for tier, pages in ((Tier.STAGING, range(10)), (Tier.DISK, range(10, self.pages))):
            found = range(max(first, pages.start), min(first + count, pages.stop))
            if found:
                place = Location(node_id=b"n" * 16, incarnation=1, tier=tier, shards=(1 << 64) - 1)
                runs.append(MatchRun(chunk_count=len(found), locations=(place,)))
        return ChainMatch(matched_chunks=sum(run.chunk_count for run in runs), runs=tuple(runs))


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(29)

    async def keyspace_of_name(*_: Any) -> NamedKeyspace:
        return NamedKeyspace(name="m-layer0x3", keyspace=b"i" * 16, spec=SPEC)

    @asynccontextmanager
    async def open_index(_: Any) -> AsyncIterator[Index]:
        yield made

    monkeypatch.setattr(chains, "keyspace_of_name", keyspace_of_name)
    for command in (match, route):
        monkeypatch.setattr(command, "open_index", open_index)
    return made


def test_a_prompt_has_all_pages_of_its_chunks(index: Any) -> None:
    chain = asyncio.run(chains.chain_of(index, "m-layer0x3", TOKENS))
    assert chain.hashes == PAGE_HASHES
    assert (chain.chunk_count, chain.pages) == (12, PAGES)
    assert [one for batch in chain.batches(10) for one in batch] == list(PAGE_HASHES[30:]), "of the last two chunks"


def test_a_chunk_is_held_where_all_its_pages_are(index: Any) -> None:
    found = asyncio.run(match.look_up(index, "m-layer0x3", TOKENS))
    assert (found.chunk_count, found.matched_chunks) == (12, 9), "of the tenth chunk one page is missing"
    # The index is asked about 16 pages at a time.
    assert [(run.first_chunk, run.chunk_count, run.tier) for run in found.runs] == [
        (0, 3, Tier.STAGING), (3, 2, Tier.DISK), (5, 4, Tier.DISK)
    ]  # fmt: skip


def test_no_route_is_chosen_by_pages(index: Any) -> None:
    with pytest.raises(CommandFailed, match="full attention"):
        asyncio.run(route.look_up(index, "m-layer0x3", TOKENS, with_unmatched=False))


def test_a_keyspace_with_one_page_a_chunk_is_as_before(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def keyspace_of_name(*_: Any) -> NamedKeyspace:
        return NamedKeyspace(name="m", keyspace=b"i" * 16, spec=replace(SPEC, groups=(replace(GROUP, pages=1),)))

    monkeypatch.setattr(chains, "keyspace_of_name", keyspace_of_name)
    chain = asyncio.run(chains.chain_of(index, "m", TOKENS))
    assert chain.hashes == Prompt.of(KEY, TOKENS, CHUNK).hashes
