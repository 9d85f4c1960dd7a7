"""What of the GPU cache a worker has announced: an agent that was started again has to hear all of it again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from kvpool.client.block_generations import BlockGenerations, Int64s
from kvpool.core.chunks import HASH_BYTES


class CachedBlocks(NamedTuple):
    """Chunks in blocks of the GPU cache. hashes: [C * 16] bytes. blocks, generations: [C, blocks of a chunk], the
    generations that the blocks had when their bytes were known to be the chunks'."""

    hashes: bytes
    blocks: Int64s
    generations: Int64s


class AnnouncedChunks:
    """Belongs to the engine's thread."""

    def __init__(self, generations: BlockGenerations) -> None:
        self._generations = generations
        self._chunks: OrderedDict[bytes, tuple[Int64s, Int64s]] = OrderedDict()  # the oldest first
        self._new: list[CachedBlocks] = []
        self._session: object = None  # that has heard of all but the new ones

    def add(self, hashes: bytes, blocks: Int64s) -> None:
        """Chunks are whole in these blocks now. blocks: [C * blocks of a chunk]."""
        blocks = blocks.reshape(len(hashes) // HASH_BYTES, -1)
        generations = self._generations.of(blocks)
        self._new.append(CachedBlocks(hashes, blocks, generations))
        for row in range(len(blocks)):
            chunk_hash = hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES]
            self._chunks[chunk_hash] = blocks[row], generations[row]
            self._chunks.move_to_end(chunk_hash)
        while len(self._chunks) > self._generations.block_count // blocks.shape[1]:  # more are not in the cache
            self._chunks.popitem(last=False)

    def take(self, session: object | None) -> CachedBlocks | None:
        """Return what this session of the agent has not heard yet; None if that is nothing, or without a session."""
        new, self._new = self._new, []
        if session is not self._session:
            self._session = session
            new = self._current()
        if session is None or not new:
            return None
        return CachedBlocks(
            b"".join(one.hashes for one in new),
            np.concatenate([one.blocks for one in new]),
            np.concatenate([one.generations for one in new]),
        )

    def _current(self) -> list[CachedBlocks]:
        """All chunks whose blocks have not been written since."""
        if not self._chunks:
            return []
        blocks, generations = (np.stack(rows) for rows in zip(*self._chunks.values(), strict=True))
        valid = (self._generations.of(blocks) == generations).all(axis=1)
        hashes = [chunk_hash for chunk_hash, one in zip(self._chunks, valid, strict=True) if one]
        return [CachedBlocks(b"".join(hashes), blocks[valid], generations[valid])] if hashes else []
