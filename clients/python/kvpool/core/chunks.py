"""Chunk hashes: a keyed chain over token ids, so that equal hashes mean equal tokens from position 0 on.

`h_i = BLAKE3-128(key = hash key, h_{i-1} || tokens_i as little-endian u32 || extra_i)`, where `h_{-1}` is 16 zero bytes
and `extra_i` the sorted records of the chunk: type u8, length u32 little endian, bytes. Only full chunks have a hash.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvpool.core.errors import InvalidRequest
from kvpool.core.retention import NO_RETENTION, Retention

HASH_BYTES = 16
ROOT_HASH = bytes(HASH_BYTES)
GROUP_CHUNKS = 16
"""Consecutive chunks of a chain that the index keeps together, under the hash of the first of them."""

EXTRA_LORA = 1
EXTRA_MULTIMODAL = 2
EXTRA_SALT = 3

_RECORD_HEAD = struct.Struct("<BI")
_OFFSET = struct.Struct("<q")
_MAX_TOKEN = (1 << 32) - 1

RunT = TypeVar("RunT")
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """What else than tokens the KV of a chunk depends on.

    type: 1 (LoRA adapter), 2 (multimodal) or 3 (salt). data: bytes that identify it (a content hash, not a name that
    may be reused). Records of a chunk are sorted, so whatever position matters must be inside: see `multimodal_extra`.
    """

    type: int
    data: bytes

    def __post_init__(self) -> None:
        if self.type not in (EXTRA_LORA, EXTRA_MULTIMODAL, EXTRA_SALT):
            raise InvalidRequest(f"extra type must be 1 (LoRA), 2 (multimodal) or 3 (salt), got {self.type!r}")
        if not 0 < len(self.data) <= _MAX_TOKEN:
            raise InvalidRequest("extra data must be bytes and not empty")

    def encode(self) -> bytes:
        return _RECORD_HEAD.pack(self.type, len(self.data)) + self.data


def multimodal_extra(content_hash: bytes, item_start_token: int, chunk_start_token: int) -> Extra:
    """The record of an image, sound or the like in one chunk that it touches.

    Placeholder tokens of two items may be equal and records are sorted, so without the item's place (relative to the
    chunk, negative if it began in an earlier one) two images in exchanged order would hash alike.
    """
    return Extra(EXTRA_MULTIMODAL, _OFFSET.pack(item_start_token - chunk_start_token) + content_hash)


def chunk_hashes(
    hash_key: bytes,
    tokens: Tokens,
    chunk_tokens: int,
    parent: bytes = ROOT_HASH,
    extras: Sequence[Sequence[Extra]] | None = None,
) -> list[bytes]:
    """Hashes of all full chunks of `tokens`; a rest shorter than a chunk is ignored.

    hash_key: 32 bytes, see `keyspace.derive_hash_key`. tokens: [T] ids in [0, 2**32). parent: hash of the chunk before
    tokens[0]. extras: one sequence of records per full chunk, in order. raises: InvalidRequest naming the argument.
    """
    if len(hash_key) != 32:
        raise InvalidRequest(f"hash_key must have 32 bytes, got {len(hash_key)}")
    if len(parent) != HASH_BYTES:
        raise InvalidRequest(f"parent must have {HASH_BYTES} bytes, got {len(parent)}")
    if chunk_tokens <= 0:
        raise InvalidRequest(f"chunk_tokens must be > 0, got {chunk_tokens}")
    raw = token_ids(tokens).tobytes()
    step = 4 * chunk_tokens
    count = len(raw) // step
    if extras is not None and len(extras) != count:
        raise InvalidRequest(f"extras must have one entry for each of the {count} full chunks, got {len(extras)}")
    hashes: list[bytes] = []
    for index in range(count):
        data = parent + raw[index * step : (index + 1) * step]
        if extras is not None and extras[index]:
            data += encode_extras(extras[index])
        parent = blake3(data, key=hash_key).digest(HASH_BYTES)
        hashes.append(parent)
    return hashes


def page_hashes(hashes: bytes, pages: int) -> bytes:
    """Hashes of the pages of chunks that have several, one chunk's after the other's: [C * pages * 16] bytes.

    hashes: [C * 16] bytes, of the chunks. pages: at most 256; see `geometry.KvGroup`. The number of a page is XORed
    into the first and the last byte of its chunk's hash: tables that keep one end of a hash tell pages apart, and 112
    of 128 bits still name the prompt.
    """
    if pages == 1:
        return hashes
    of_pages = np.frombuffer(hashes, np.uint8).reshape(-1, 1, HASH_BYTES).repeat(pages, axis=1)
    of_pages[:, :, [0, -1]] ^= np.arange(pages, dtype=np.uint8)[:, None]
    return of_pages.tobytes()


def chunk_runs(
    runs: Iterable[tuple[int, RunT]], pages: int, farther: Callable[[RunT, RunT], RunT]
) -> list[tuple[int, RunT]]:
    """Make runs of whole chunks out of runs of their pages, the first of which is a chunk's first page.

    runs: number of pages and value of each. Returns the number of chunks and value of each. A chunk with pages of
    several runs belongs to the farthest one, and to the later one of two that are equally far.
    """
    found: list[tuple[int, RunT]] = []
    begun, farthest = 0, None  # pages of a chunk that is not whole yet, and the farthest of their runs
    for count, run in runs:
        farthest = run if farthest is None else farther(farthest, run)
        taken = min(count, pages - begun) if begun else 0
        begun, count = begun + taken, count - taken
        if 0 < begun < pages:
            continue
        if begun:
            found.append((1, farthest))
        whole, begun = divmod(count, pages)
        if whole and found and found[-1][1] is run:
            found[-1] = found[-1][0] + whole, run
        elif whole:
            found.append((whole, run))
        farthest = run if begun else None
    return found


def encode_extras(extras: Iterable[Extra]) -> bytes:
    """The bytes of a chunk's records, in canonical order."""
    return b"".join(extra.encode() for extra in sorted(extras))


def group_head_index(chunk_index: int) -> int:
    """Index of the chunk whose hash heads the chain group of the chunk at `chunk_index` (0-based in its chain)."""
    return chunk_index - chunk_index % GROUP_CHUNKS


def token_ids(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """[T] ids as they are hashed, checked. raises: InvalidRequest unless they are integers in [0, 2**32)."""
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError):
        raise InvalidRequest("tokens must be a flat sequence of integers") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest(
            f"tokens must be a flat sequence of integers in [0, 2**32), got {array.dtype} {array.shape}"
        )
    if array.dtype != np.uint32 and array.size:
        lowest, highest = int(array.min()), int(array.max())
        if lowest < 0 or highest > _MAX_TOKEN:
            raise InvalidRequest(f"tokens must lie in [0, 2**32), got {lowest if lowest < 0 else highest}")
    return array.astype("<u4", copy=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkRange:
    """Consecutive chunks of one chain, and where their tokens lie in an engine's paged cache: one store, load or lease.

    chunk_hashes:      [C * 16] bytes.
    block_ids:         [C, chunk_tokens / block_tokens] int64.
    first_chunk_index: of the first of them in its chain.
    parent_hash:       of the chunk before the first.
    group_head_hashes: heads of the 16-chunk groups that the chunks fall into, in order.
    chain_head_hash:   of chunk 0; may be empty for a load.
    retention:         of all chunks.
    prompt_tokens:     of the whole prompt; 0 if unknown.
    skip_tokens:       loads only: so many leading tokens of the first chunk are the engine's own and stay untouched.
    """

    chunk_hashes: bytes
    block_ids: Int64s
    first_chunk_index: int
    parent_hash: bytes
    group_head_hashes: tuple[bytes, ...]
    chain_head_hash: bytes = b""
    retention: Retention = NO_RETENTION
    prompt_tokens: int = 0
    skip_tokens: int = 0

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_hashes) // HASH_BYTES

    @property
    def chunks(self) -> range:
        """Their indexes in the chain."""
        return range(self.first_chunk_index, self.first_chunk_index + self.chunk_count)

    def chunk_hash(self, position: int) -> bytes:
        """16 bytes, of the chunk at `position` in the range."""
        return self.chunk_hashes[position * HASH_BYTES : (position + 1) * HASH_BYTES]

    def group_head(self, position: int) -> bytes:
        """Head of the group that the chunk at `position` in the range falls into."""
        first_group = self.first_chunk_index // GROUP_CHUNKS
        return self.group_head_hashes[(self.first_chunk_index + position) // GROUP_CHUNKS - first_group]

    def part(self, chunks: range) -> ChunkRange:
        """Return the chunks at these consecutive positions in the range, at least one."""
        first_group = self.first_chunk_index // GROUP_CHUNKS
        first, last = self.first_chunk_index + chunks.start, self.first_chunk_index + chunks.stop - 1
        return replace(
            self,
            chunk_hashes=self.chunk_hashes[chunks.start * HASH_BYTES : chunks.stop * HASH_BYTES],
            block_ids=self.block_ids[chunks.start : chunks.stop],
            first_chunk_index=first,
            parent_hash=self.chunk_hash(chunks.start - 1) if chunks.start else self.parent_hash,
            group_head_hashes=self.group_head_hashes[
                first // GROUP_CHUNKS - first_group : last // GROUP_CHUNKS + 1 - first_group
            ],
            skip_tokens=0 if chunks.start else self.skip_tokens,
        )

    @property
    def hashes(self) -> list[bytes]:
        """Chunk hashes, in order."""
        packed = self.chunk_hashes
        return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]
