"""The chunks that token sequences are made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from kvpool.client.index import IndexClient, NamedKeyspace, OpenedKeyspace
from kvpool.core.chunks import HASH_BYTES, chunk_hashes, group_head_index, page_hashes
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool_cli.errors import CommandFailed
from kvpool_cli.targets import keyspace_of_name

CHUNKS_A_CALL = 4096
"""Of Pin and Evict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The full chunks of a token sequence in one keyspace.

    hashes: of the chunks' pages, `pages` for each chunk, one chunk's after the other's.
    """

    named: NamedKeyspace
    opened: OpenedKeyspace
    hashes: tuple[bytes, ...]

    @property
    def pages(self) -> int:
        """Of a chunk; see KvGroup."""
        return self.named.spec.group.pages

    @property
    def chunk_count(self) -> int:
        """Full chunks."""
        return len(self.hashes) // self.pages

    def batches(self, first_chunk: int = 0) -> Iterator[list[bytes]]:
        """Hashes from a chunk on, as many as one call may name."""
        for start in range(first_chunk * self.pages, len(self.hashes), CHUNKS_A_CALL):
            yield list(self.hashes[start : start + CHUNKS_A_CALL])


async def chain_of(index: IndexClient, keyspace_name: str, tokens: Sequence[int]) -> Chain:
    """The chunks of tokens. Raises CommandFailed for a keyspace that there is not, or without a full chunk."""
    chain = await possibly_empty_chain_of(index, keyspace_name, tokens)
    if not chain.hashes:
        chunk_tokens = chain.named.spec.chunk_tokens
        raise CommandFailed(f"{len(tokens)} tokens are less than a chunk of {chunk_tokens}: only full chunks are kept")
    return chain


async def possibly_empty_chain_of(index: IndexClient, keyspace_name: str, tokens: Sequence[int]) -> Chain:
    """As chain_of, but tokens may be less than a chunk."""
    named = await keyspace_of_name(index, keyspace_name)
    opened = await index.open_keyspace(named.name, named.spec)
    hashes = chunk_hashes(opened.hash_key, tokens, named.spec.chunk_tokens)
    of_pages = page_hashes(b"".join(hashes), named.spec.group.pages)
    starts = range(0, len(of_pages), HASH_BYTES)
    return Chain(
        named=named,
        opened=opened,
        hashes=tuple(of_pages[start : start + HASH_BYTES] for start in starts),
    )


async def matches(index: IndexClient, chain: Chain) -> AsyncIterator[ChainMatch]:
    """Match a chain, one part after another where it is longer than one question may be, up to its first miss.

    Yields each part's answer, in pages.
    """
    limit = (await index.get_info()).max_match_chunks
    for first in range(0, len(chain.hashes), limit):
        part = chain.hashes[first : first + limit]
        answer = await index.match(
            ChainQuery(
                keyspace=chain.opened.keyspace,
                chunk_hashes=b"".join(part),
                first_chunk_index=first,
                group_head_hash=chain.hashes[group_head_index(first)],
            )
        )
        yield answer
        if answer.matched_chunks < len(part):
            return
