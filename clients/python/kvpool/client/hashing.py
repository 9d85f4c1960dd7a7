"""The chunk hashes of one prompt, and what requests derive from them: parents, group heads, usable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.chunks import ROOT_HASH, Extra, Tokens, chunk_hashes, group_head_index
from kvpool.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Chain:
    """Full chunks of one prompt. token_count: of the whole prompt, the rest that fills no chunk included."""

    chunk_tokens: int
    token_count: int
    hashes: tuple[bytes, ...]

    @classmethod
    def of(
        cls, hash_key: bytes, tokens: Tokens, chunk_tokens: int, extras: Sequence[Sequence[Extra]] | None = None
    ) -> Chain:
        """Hash a prompt from its first token on. raises: InvalidRequest naming the argument."""
        return cls(chunk_tokens, len(tokens), tuple(chunk_hashes(hash_key, tokens, chunk_tokens, extras=extras)))

    def extended(self, hash_key: bytes, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Chain:
        """The chain of a longer prompt that begins with this one: only new chunks are hashed.

        tokens: of the whole prompt. extras: of the new full chunks.
        """
        if len(tokens) < self.token_count:
            raise InvalidRequest(f"the prompt has {len(tokens)} tokens, fewer than the {self.token_count} hashed")
        parent = self.hashes[-1] if self.hashes else ROOT_HASH
        rest = tokens[len(self.hashes) * self.chunk_tokens :]
        added = chunk_hashes(hash_key, rest, self.chunk_tokens, parent=parent, extras=extras)
        return Chain(self.chunk_tokens, len(tokens), (*self.hashes, *added))

    @property
    def chunk_count(self) -> int:
        """Full chunks."""
        return len(self.hashes)

    @property
    def head_hash(self) -> bytes:
        """Hash of chunk 0, for placement; empty if there is no full chunk."""
        return self.hashes[0] if self.hashes else b""

    def parent_hash(self, chunk_index: int) -> bytes:
        """Hash of the chunk before; 16 zero bytes for chunk 0."""
        return self.hashes[chunk_index - 1] if chunk_index else ROOT_HASH

    def group_head_hashes(self, first_chunk: int, chunk_count: int) -> tuple[bytes, ...]:
        """Heads of the chain groups that the chunks fall into, each once, in order."""
        indexes = sorted({group_head_index(index) for index in range(first_chunk, first_chunk + chunk_count)})
        return tuple(self.hashes[index] for index in indexes)

    def usable_tokens(self, matched_chunks: int) -> int:
        """Tokens that may come from cache: never the prompt's last one, because an engine must compute one at least."""
        return max(0, min(matched_chunks * self.chunk_tokens, self.token_count - 1))

    def chunks_of(self, tokens: int) -> int:
        """Chunks that hold the first `tokens` tokens, the last one perhaps in part."""
        return -(-tokens // self.chunk_tokens)
