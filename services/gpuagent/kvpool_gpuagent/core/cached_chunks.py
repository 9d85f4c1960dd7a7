"""Chunks that caches of engine ranks hold: as announced, while it is true, and which caches complete each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import HASH_BYTES, ChunkRange
from kvpool.core.errors import InvalidRequest
from kvpool_gpuagent.core.requests import LoadOutcome
from kvpool_gpuagent.core.sources import LoadSource

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SourceName:
    """A rank whose cache may be copied from. agent: its socket ("unix:/path"); empty for this agent."""

    session_id: bytes
    agent: str


@dataclass(frozen=True, slots=True, eq=False)
class FoundChunks:
    """N chunks of those asked for, each in B blocks.

    positions: [N] int64, ascending. block_ids, generations: [N, B] int64.
    """

    positions: Int64s
    block_ids: Int64s
    generations: Int64s


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeldChunks:
    """What one rank's cache holds of the chunks asked for. scales: its rows have separate scales."""

    source: SourceName
    layers: range
    heads: range
    scales: bool
    found: FoundChunks

    def leading(self, chunk_count: int) -> HeldChunks:
        """Return the same of the first chunks that were asked for."""
        found, end = self.found, int(np.searchsorted(self.found.positions, chunk_count))
        found = FoundChunks(found.positions[:end], found.block_ids[:end], found.generations[:end])
        return replace(self, found=found)


class CachedChunks:
    """What one engine rank has announced of its cache. An entry lasts until a block's generation is another one, or
    until the chunk or one of its blocks is announced again: there are never more entries than blocks."""

    def __init__(self, table: Int64s, blocks_per_chunk: int) -> None:
        """table: [blocks] int64, the generations; the engine raises them at any time."""
        self._table, self._blocks_per_chunk = table, blocks_per_chunk
        self._entries: dict[bytes, tuple[Int64s, Int64s]] = {}  # blocks and their generations
        self._chunk_of_block: dict[int, bytes] = {}

    def announce(self, chunk_hashes: bytes, block_ids: Int64s, generations: Int64s) -> None:
        """The engine says that chunks lie in blocks. block_ids, generations: [C * B]. Raises InvalidRequest."""
        count, width = len(chunk_hashes) // HASH_BYTES, self._blocks_per_chunk
        if len(chunk_hashes) % HASH_BYTES or block_ids.size != count * width or generations.size != count * width:
            raise InvalidRequest(
                f"cached: {len(chunk_hashes)} bytes of hashes, {block_ids.size} blocks and {generations.size} "
                f"generations do not fit: a chunk has {HASH_BYTES} bytes and {width} blocks"
            )
        self._check(block_ids)
        for at in range(count):
            chunk_hash = chunk_hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            blocks = block_ids[at * width : (at + 1) * width].copy()  # a view would keep the whole message
            for known in {chunk_hash, *(self._chunk_of_block.get(block, b"") for block in blocks.tolist())}:
                self._drop(known)
            self._entries[chunk_hash] = blocks, generations[at * width : (at + 1) * width].copy()
            self._chunk_of_block.update(dict.fromkeys(blocks.tolist(), chunk_hash))

    def find(self, hashes: Sequence[bytes]) -> FoundChunks:
        """Return which of these chunks are in the cache now, as far as the generations say."""
        known = [position for position, chunk_hash in enumerate(hashes) if chunk_hash in self._entries]
        shape = (len(known), self._blocks_per_chunk)
        blocks, generations = np.empty(shape, np.int64), np.empty(shape, np.int64)
        for row, position in enumerate(known):
            blocks[row], generations[row] = self._entries[hashes[position]]
        valid: Bools = (self._table[blocks] == generations).all(axis=1)
        for row in np.flatnonzero(~valid).tolist():
            self._drop(hashes[known[row]])
        return FoundChunks(np.array(known, dtype=np.int64)[valid], blocks[valid], generations[valid])

    def generations(self, block_ids: Int64s) -> Int64s:
        """Return the generations of blocks as they are now, in the same shape. Raises InvalidRequest."""
        self._check(block_ids)
        now: Int64s = self._table[block_ids]
        return now

    def __len__(self) -> int:
        return len(self._entries)

    def _check(self, block_ids: Int64s) -> None:
        if block_ids.size and not 0 <= int(block_ids.min()) <= int(block_ids.max()) < self._table.size:
            raise InvalidRequest(
                f"block_ids must lie in [0, {self._table.size}), got {int(block_ids.min())} to {int(block_ids.max())}"
            )

    def _drop(self, chunk_hash: bytes) -> None:
        entry = self._entries.pop(chunk_hash, None)
        if entry is not None:
            for block in entry[0].tolist():
                if self._chunk_of_block.get(block) == chunk_hash:
                    del self._chunk_of_block[block]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What is taken from one cache. rows: [M] int64, of its found chunks."""

    held: HeldChunks
    rows: Int64s

    @property
    def positions(self) -> Int64s:
        """[M] int64, of the chunks."""
        return self.held.found.positions[self.rows]


def covering(
    caches: Sequence[HeldChunks], layers: range, heads: range, *, scales: bool, chunk_count: int
) -> tuple[Bools, list[Share]]:
    """Choose caches that together have all layers and heads of chunks, each (layer, head) of a chunk from one cache.

    returns: [chunk_count], which chunks there are, and their shares of caches. Caches that have more of the layers and
    heads come first: parts complete each other only where no cache has all.
    """
    area, rows_of = np.zeros(chunk_count, dtype=np.int64), list[tuple[HeldChunks, Int64s]]()
    taken: list[tuple[range, range, Bools]] = []
    common = [(common_range(held.layers, layers), common_range(held.heads, heads), held) for held in caches]
    common.sort(key=lambda part: -len(part[0]) * len(part[1]))
    for part_layers, part_heads, held in common:
        if held.scales != scales or not part_layers or not part_heads or not held.found.positions.size:
            continue
        free = np.ones(chunk_count, dtype=np.bool_)
        for other_layers, other_heads, chunks in taken:
            if common_range(part_layers, other_layers) and common_range(part_heads, other_heads):
                free &= ~chunks
        rows = np.flatnonzero(free[held.found.positions])
        chosen = np.zeros(chunk_count, dtype=np.bool_)
        chosen[held.found.positions[rows]] = True
        area += chosen * (len(part_layers) * len(part_heads))
        taken.append((part_layers, part_heads, chosen))
        rows_of.append((held, rows))
    complete: Bools = area == len(layers) * len(heads)
    shares = [Share(held, rows[complete[held.found.positions[rows]]]) for held, rows in rows_of]
    return complete, [share for share in shares if share.rows.size]


def common_range(left: range, right: range) -> range:
    """Return what both have; empty if that is nothing."""
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


@dataclass(frozen=True, slots=True, eq=False)
class PulledChunks:
    """What a pull for a load brought. loaded: [C], which chunks of the load are in and count. copy_s: on the GPU."""

    loaded: Bools
    size_bytes: int
    copy_s: float

    @property
    def left(self) -> range:
        """Positions from the first to the last chunk that did not come; those between them are loaded with them."""
        missing = np.flatnonzero(~self.loaded)
        return range(int(missing[0]), int(missing[-1]) + 1) if missing.size else range(0)


def with_pulled(rest: LoadOutcome, span: ChunkRange, chunk_tokens: int, pulled: PulledChunks) -> LoadOutcome:
    """Return the outcome of a load whose chunks, but for those of `pulled.left`, were pulled. rest: of these."""
    left = pulled.left
    loaded = span.chunk_count if rest.loaded_chunks == len(left) else left.start + rest.loaded_chunks
    from_gpu = loaded - rest.loaded_chunks
    skipped = span.skip_tokens if from_gpu and 0 not in left else 0
    return replace(
        rest,
        chunk_count=span.chunk_count,
        loaded_chunks=loaded,
        copying_s=rest.copying_s + pulled.copy_s,
        tokens=rest.tokens | {LoadSource.GPU: from_gpu * chunk_tokens - skipped},
    )
