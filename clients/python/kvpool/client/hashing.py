"""The chunk hashes of one prompt, and what requests derive from them: parents, group heads, usable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvpool.core.chunks import GROUP_CHUNKS, HASH_BYTES, ROOT_HASH, Extra, Tokens, chunk_hashes, group_head_index
from kvpool.core.errors import InvalidRequest


@dataclass
class Prompt:
    """A prompt as the pool sees it: the chained hashes of its full chunks.

    token_count:   of the whole prompt, the rest that fills no chunk included.
    packed:        [C * 16] bytes, hashes of all C full chunks.
    pooled_chunks: leading chunks that are in the pool as far as this process knows. Loads and stores keep it up to
                   date, and a store begins behind them unless it names its chunks.
    """

    chunk_tokens: int
    token_count: int
    packed: bytes
    pooled_chunks: int = field(default=0, compare=False)

    @classmethod
    def of(
        cls, hash_key: bytes, tokens: Tokens, chunk_tokens: int, extras: Sequence[Sequence[Extra]] | None = None
    ) -> Prompt:
        """Hash a prompt from its first token on. raises: InvalidRequest naming the argument."""
        return cls(chunk_tokens, len(tokens), b"".join(chunk_hashes(hash_key, tokens, chunk_tokens, extras=extras)))

    def extended(self, hash_key: bytes, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Prompt:
        """A longer prompt that begins with this one: only new chunks are hashed.

        tokens: of the whole prompt. extras: of the new full chunks.
        """
        if len(tokens) < self.token_count:
            raise InvalidRequest(f"the prompt has {len(tokens)} tokens, fewer than the {self.token_count} hashed")
        rest = tokens[self.chunk_count * self.chunk_tokens :]
        parent = self.parent_hash(self.chunk_count)
        added = chunk_hashes(hash_key, rest, self.chunk_tokens, parent=parent, extras=extras)
        return Prompt(self.chunk_tokens, len(tokens), self.packed + b"".join(added), self.pooled_chunks)

    @cached_property
    def hashes(self) -> tuple[bytes, ...]:
        """One by one, in order."""
        ends = range(HASH_BYTES, len(self.packed) + 1, HASH_BYTES)
        return tuple([self.packed[end - HASH_BYTES : end] for end in ends])

    def packed_hashes(self, first_chunk: int, end_chunk: int) -> bytes:
        """[(end_chunk - first_chunk) * 16] bytes."""
        return self.packed[first_chunk * HASH_BYTES : end_chunk * HASH_BYTES]

    @property
    def chunk_count(self) -> int:
        """Full chunks."""
        return len(self.packed) // HASH_BYTES

    @property
    def head_hash(self) -> bytes:
        """Hash of chunk 0, for placement; empty if there is no full chunk."""
        return self.packed[:HASH_BYTES]

    def parent_hash(self, chunk_index: int) -> bytes:
        """Hash of the chunk before; 16 zero bytes for chunk 0."""
        return self.packed_hashes(chunk_index - 1, chunk_index) if chunk_index else ROOT_HASH

    def group_head_hashes(self, first_chunk: int, chunk_count: int) -> tuple[bytes, ...]:
        """Heads of the chain groups that the chunks fall into, each once, in order."""
        if not chunk_count:
            return ()
        heads = range(group_head_index(first_chunk), first_chunk + chunk_count, GROUP_CHUNKS)
        return tuple([self.packed_hashes(head, head + 1) for head in heads])

    def usable_tokens(self, matched_chunks: int) -> int:
        """Tokens that may come from cache: never the prompt's last one, because an engine must compute one at least."""
        return max(0, min(matched_chunks * self.chunk_tokens, self.token_count - 1))

    def chunks_of(self, tokens: int) -> int:
        """Chunks that hold the first `tokens` tokens, the last one perhaps in part."""
        return -(-tokens // self.chunk_tokens)
