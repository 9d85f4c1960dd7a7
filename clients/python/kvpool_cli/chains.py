"""The chunks that token sequences are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.client.index import IndexClient, NamedKeyspace, OpenedKeyspace
from kvpool.core.chunks import chunk_hashes
from kvpool_cli.errors import CommandFailed
from kvpool_cli.targets import keyspace_of_name

CHUNKS_A_CALL = 4096
"""Of Pin and Evict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The full chunks of a token sequence in one keyspace."""

    named: NamedKeyspace
    opened: OpenedKeyspace
    token_count: int
    hashes: tuple[bytes, ...]

    def batches(self, first_chunk: int = 0) -> Iterator[list[bytes]]:
        """Hashes from a chunk on, as many as one call may name."""
        for start in range(first_chunk, len(self.hashes), CHUNKS_A_CALL):
            yield list(self.hashes[start : start + CHUNKS_A_CALL])


async def chain_of(index: IndexClient, keyspace_name: str, tokens: Sequence[int]) -> Chain:
    """The chunks of tokens. Raises CommandFailed for a keyspace that there is not, or without a full chunk."""
    named = await keyspace_of_name(index, keyspace_name)
    opened = await index.open_keyspace(named.name, named.spec)
    hashes = chunk_hashes(opened.hash_key, tokens, named.spec.chunk_tokens)
    if not hashes:
        raise CommandFailed(
            f"{len(tokens)} tokens are less than a chunk of {named.spec.chunk_tokens}: only full chunks are kept"
        )
    return Chain(named=named, opened=opened, token_count=len(tokens), hashes=tuple(hashes))
