"""Sets of chunks in which every chunk comes after the one before it in its chain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpool.core.chunks import GROUP_CHUNKS, ROOT_HASH
from kvpool.core.cluster import PageMetadata

CHUNKS_MAX: Final = 1 << 32


class ChainCheck:
    """Whether chunks come as a prefix-closed set: each after the chunk before it, none twice."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[int, bytes]] = {}  # index and group head, by hash

    def __contains__(self, chunk_hash: bytes) -> bool:
        return chunk_hash in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def fault(self, chunk_hash: bytes, metadata: PageMetadata) -> str:
        """Why a chunk cannot come now; empty if it can."""
        index, parent = metadata.chunk_index, metadata.parent_hash
        if chunk_hash in self._seen:
            return "it is there twice"
        if chunk_hash == ROOT_HASH or len(self._seen) >= CHUNKS_MAX:
            return "it cannot be a chunk"
        before = self._seen.get(parent)
        if (parent == ROOT_HASH) != (index == 0) or (index and (before is None or before[0] != index - 1)):
            return "the chunk before it is not there"
        head = before[1] if before is not None and index % GROUP_CHUNKS else chunk_hash
        return "" if metadata.group_head_hash == head else "the head of its group is another chunk"

    def add(self, chunk_hash: bytes, metadata: PageMetadata) -> None:
        """It has come."""
        self._seen[chunk_hash] = (metadata.chunk_index, metadata.group_head_hash)


def in_chain_order(parents: dict[bytes, bytes]) -> Iterable[bytes]:
    """Chunk hashes, each after its parent and a chain at a stretch; none whose chain does not reach its root."""
    children: dict[bytes, list[bytes]] = {}
    for chunk_hash, parent in parents.items():
        children.setdefault(parent, []).append(chunk_hash)
    stack = sorted(children.pop(ROOT_HASH, ()), reverse=True)
    while stack:
        chunk_hash = stack.pop()
        yield chunk_hash
        stack += sorted(children.pop(chunk_hash, ()), reverse=True)
