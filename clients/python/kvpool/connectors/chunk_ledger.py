"""Which chunks an engine's own cache holds, in which blocks, and which blocks may be reused. Pure bookkeeping.

A block is free, taken (being filled or loaded into, not yet findable) or bound to a chunk. Blocks that are pinned are
never handed out again: a gather or scatter may still touch them, whatever became of the request that asked for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class HeldChunk:
    """A chunk that is in the engine's own cache."""

    chunk_hash: bytes
    block: int
    pooled: bool = False  # known to be in the pool, so it need not be stored


class ChunkLedger:
    """Least-recently-used chunks over `block_count` blocks of one chunk each. Not thread-safe."""

    def __init__(self, block_count: int) -> None:
        if block_count <= 0:
            raise ValueError(f"block_count must be > 0, got {block_count}")
        self.block_count = block_count
        self._free = list(range(block_count - 1, -1, -1))
        self._chunks: OrderedDict[bytes, HeldChunk] = OrderedDict()  # least recently used first
        self._pins = [0] * block_count
        self._taken: set[int] = set()
        self._bound: set[int] = set()

    @property
    def held_count(self) -> int:
        """Chunks that can be found."""
        return len(self._chunks)

    @property
    def pinned_count(self) -> int:
        """Blocks that must not be reused now."""
        return sum(1 for pins in self._pins if pins)

    def find(self, chunk_hashes: Iterable[bytes]) -> list[HeldChunk]:
        """The longest held prefix of a chain. The chunks count as used now, the first of the chain as the last used."""
        found: list[HeldChunk] = []
        for chunk_hash in chunk_hashes:
            chunk = self._chunks.get(chunk_hash)
            if chunk is None:
                break
            found.append(chunk)
        for chunk in reversed(found):  # a chunk is of no use without those before it, so it goes first
            self._chunks.move_to_end(chunk.chunk_hash)
        return found

    def take(self, count: int) -> list[int]:
        """Up to `count` blocks to fill: free ones, then those of the least recently used chunks that are not pinned.

        In ascending order: neighbours are copied together.
        """
        blocks: list[int] = []
        while len(blocks) < count and self._free:
            blocks.append(self._free.pop())
        for chunk in list(self._chunks.values()) if len(blocks) < count else ():
            if len(blocks) == count:
                break
            if not self._pins[chunk.block]:
                del self._chunks[chunk.chunk_hash]
                self._bound.remove(chunk.block)
                blocks.append(chunk.block)
        self._taken.update(blocks)
        return sorted(blocks)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Taken blocks that were not bound after all. One that is pinned becomes free with its last pin."""
        for block in blocks:
            self._taken.remove(block)
            if not self._pins[block]:
                self._free.append(block)

    def bind(self, chunk_hash: bytes, block: int, *, pooled: bool) -> HeldChunk:
        """The taken block holds this chunk now. If another block does so already, that one stays and is returned."""
        known = self._chunks.get(chunk_hash)
        if known is not None:
            self.give_back([block])
            known.pooled = known.pooled or pooled
            return known
        self._taken.remove(block)
        self._bound.add(block)
        chunk = self._chunks[chunk_hash] = HeldChunk(chunk_hash, block, pooled)
        return chunk

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks, which must be taken or bound, from being reused; pins add up."""
        for block in blocks:
            self._pins[block] += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        """Drop one pin of each."""
        for block in blocks:
            if not self._pins[block]:
                raise ValueError(f"block {block} is not pinned")
            self._pins[block] -= 1
            if not self._pins[block] and block not in self._taken and block not in self._bound:
                self._free.append(block)
