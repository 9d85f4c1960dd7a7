"""A page as it lies on every medium: header, payload, sum table.

Header, 64 bytes, little endian: magic `KVPG`, version u8, codec u8, page key (keyspace id 16, chunk hash 16, shard
u16), payload length u64, then the 16-byte xxh3-128 digest (canonical, big endian) of those first 48 bytes and the sum
table. The sum table follows the payload: one xxh3-64 (u64, seed 0) for each 256 KiB block, the last one short.

Everything works in place on a buffer that begins with the header (a slot may be longer than its page). Blocks have 256
KiB because the xxhash wheel lets go of the GIL only for inputs of about 100 KiB and more: threads of one process sum
and verify side by side. Measured with xxhash 4.1.0 on 2 busy cores, best of many: 18.9 GB/s on one thread, 31.4 on two
(blocks of 64 KiB: 16.6 and 18.7; two processes: 32.9).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvpool.core.errors import InvalidRequest

MAGIC = b"KVPG"
VERSION = 2  # 1 had another order of rows in payloads
HEADER_BYTES = 64
KEY_BYTES = 34
SUM_BLOCK_BYTES = 256 << 10
SUM_BYTES = 8
SLOT_ALIGNMENT_BYTES = 4096

_KEY = struct.Struct("<16s16sH")
_FIELDS = struct.Struct("<4sBB34sQ")
_DIGEST_BYTES = 16

Buffer = memoryview | bytes | bytearray | npt.NDArray[np.uint8]


class _KeyFields(NamedTuple):
    keyspace: bytes
    chunk_hash: bytes
    shard: int


class PageKey(_KeyFields):
    """Identity of a page everywhere. keyspace, chunk_hash: 16 bytes each; shard: number in the grid.

    A tuple, because it is hashed and compared many times for each page, which tuples do without running Python code.
    """

    __slots__ = ()

    def __new__(cls, keyspace: bytes, chunk_hash: bytes, shard: int) -> PageKey:
        if len(keyspace) != 16 or len(chunk_hash) != 16:
            raise InvalidRequest(
                f"page key wants 16 bytes each of keyspace id and chunk hash, got {len(keyspace)} and {len(chunk_hash)}"
            )
        if not 0 <= shard <= 0xFFFF:
            raise InvalidRequest(f"page key shard must be a u16, got {shard}")
        return super().__new__(cls, keyspace, chunk_hash, shard)

    def pack(self) -> bytes:
        """34 bytes: keyspace id, chunk hash, shard u16 little endian."""
        return _KEY.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> PageKey:
        """raises: InvalidRequest unless there are 34 bytes."""
        if len(packed) != KEY_BYTES:
            raise InvalidRequest(f"page key must have {KEY_BYTES} bytes, got {len(packed)}")
        return cls(*_KEY.unpack(packed))

    def __str__(self) -> str:
        return f"{self.keyspace.hex()}/{self.chunk_hash.hex()}/{self.shard}"


class PageFaultKind(IntEnum):
    """Why a page must not be used."""

    WRONG_MAGIC = 1
    WRONG_VERSION = 2
    WRONG_KEY = 3
    WRONG_CODEC = 4
    WRONG_LENGTH = 5
    BAD_DIGEST = 6
    BAD_SUM = 7


@dataclass(frozen=True, slots=True)
class PageFault:
    """A verification failure, as a value. block: number of the payload block, only for BAD_SUM."""

    kind: PageFaultKind
    block: int | None = None

    def __str__(self) -> str:
        name = self.kind.name.lower().replace("_", " ")
        return name if self.block is None else f"{name} of block {self.block}"


@dataclass(frozen=True, slots=True)
class PageHeader:
    """Parsed, not verified, header fields. codec: its number, which this version may not know."""

    key: PageKey
    codec: int
    payload_bytes: int
    digest: bytes


def block_count(payload_len: int) -> int:
    """Sum-table blocks of a payload."""
    return -(-payload_len // SUM_BLOCK_BYTES)


def page_bytes(payload_len: int) -> int:
    """Header, payload and sum table."""
    return HEADER_BYTES + payload_len + SUM_BYTES * block_count(payload_len)


def slot_bytes(payload_len: int) -> int:
    """Arena bytes of a page: rounded up to 4 KiB."""
    return -(-page_bytes(payload_len) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def pack_header(key: PageKey, codec: int, payload_len: int, sum_table: bytes | memoryview) -> bytes:
    """The 64 header bytes of a page whose sum table is known."""
    fields = _FIELDS.pack(MAGIC, VERSION, codec, key.pack(), payload_len)
    return fields + xxh3_128_digest(fields + bytes(sum_table))


def parse_header(buffer: Buffer) -> PageHeader | PageFault:
    """Header fields of anything that claims to be a page; not verified beyond magic and version."""
    view = _view(buffer)
    if len(view) < HEADER_BYTES:
        return PageFault(PageFaultKind.WRONG_LENGTH)
    magic, version, codec, key, payload_len = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        return PageFault(PageFaultKind.WRONG_MAGIC)
    if version != VERSION:
        return PageFault(PageFaultKind.WRONG_VERSION)
    return PageHeader(PageKey.unpack(key), codec, payload_len, bytes(view[_FIELDS.size : HEADER_BYTES]))


def payload_view(buffer: Buffer, payload_len: int) -> memoryview:
    """The payload of a page in a slot, without a copy."""
    return _view(buffer, payload_len)[HEADER_BYTES : HEADER_BYTES + payload_len]


def write_sums(buffer: Buffer, payload_len: int, blocks: range | None = None) -> None:
    """Fill in sum-table entries of payload that is in place: all, or those of some blocks (to go range by range)."""
    view = _view(buffer, payload_len)
    chosen = range(block_count(payload_len)) if blocks is None else _check_blocks(blocks, payload_len)
    at = HEADER_BYTES + payload_len + SUM_BYTES * chosen.start
    struct.pack_into(f"<{len(chosen)}Q", view, at, *_sums(view, payload_len, chosen))


def write_header(buffer: Buffer, key: PageKey, codec: int, payload_len: int) -> None:
    """Write the header over a complete sum table. Last: from here on the page verifies."""
    view = _view(buffer, payload_len)
    view[:HEADER_BYTES] = pack_header(key, codec, payload_len, _sum_table(view, payload_len))


def seal(buffer: Buffer, key: PageKey, codec: int, payload_len: int) -> None:
    """Make a page of payload that is in place: sum table, then header. raises: InvalidRequest if it does not fit."""
    write_sums(buffer, payload_len)
    write_header(buffer, key, codec, payload_len)


def verify_header(
    buffer: Buffer, key: PageKey, codec: int | None = None, payload_len: int | None = None
) -> PageFault | None:
    """Check header and sum table against the key (and codec, length) asked for. The payload is not looked at."""
    view = _view(buffer)
    if codec is not None and payload_len is not None and page_bytes(payload_len) <= len(view):
        # Nearly always all is well; a third of the time that it takes to say what is not.
        fields = _FIELDS.pack(MAGIC, VERSION, codec, key.pack(), payload_len)
        end = page_bytes(payload_len)
        digest = xxh3_128_digest(fields + view[HEADER_BYTES + payload_len : end])
        if view[:HEADER_BYTES] == fields + digest:
            return None
    header = parse_header(view)
    if isinstance(header, PageFault):
        return header
    if header.key != key:
        return PageFault(PageFaultKind.WRONG_KEY)
    if codec is not None and header.codec != codec:
        return PageFault(PageFaultKind.WRONG_CODEC)
    size_bytes = header.payload_bytes
    if (payload_len is not None and size_bytes != payload_len) or page_bytes(size_bytes) > len(view):
        return PageFault(PageFaultKind.WRONG_LENGTH)
    if xxh3_128_digest(bytes(view[: _FIELDS.size]) + bytes(_sum_table(view, size_bytes))) != header.digest:
        return PageFault(PageFaultKind.BAD_DIGEST)
    return None


def verify_blocks(buffer: Buffer, payload_len: int, blocks: range | None = None) -> PageFault | None:
    """Check payload blocks (all, or a range of them) against a sum table that `verify_header` found good."""
    view = _view(buffer, payload_len)
    chosen = range(block_count(payload_len)) if blocks is None else _check_blocks(blocks, payload_len)
    at = HEADER_BYTES + payload_len + SUM_BYTES * chosen.start
    expected = struct.unpack_from(f"<{len(chosen)}Q", view, at)
    found = _sums(view, payload_len, chosen)
    if tuple(found) == expected:
        return None
    bad = next(block for block, ours, theirs in zip(chosen, found, expected, strict=True) if ours != theirs)
    return PageFault(PageFaultKind.BAD_SUM, bad)


def verify(buffer: Buffer, key: PageKey, codec: int | None = None, payload_len: int | None = None) -> PageFault | None:
    """None if the buffer begins with exactly the page asked for, with every byte as it was sealed; else why not."""
    view = _view(buffer)
    fault = verify_header(view, key, codec, payload_len)
    if fault is not None:
        return fault
    return verify_blocks(view, _FIELDS.unpack_from(view)[4])


def _sums(view: memoryview, payload_len: int, blocks: range) -> list[int]:
    digest, step = xxh3_64_intdigest, SUM_BLOCK_BYTES
    end = HEADER_BYTES + payload_len
    first = HEADER_BYTES + blocks.start * step
    last = HEADER_BYTES + blocks.stop * step
    return [digest(view[at : min(at + step, end)]) for at in range(first, last, step)]


def _sum_table(view: memoryview, payload_len: int) -> memoryview:
    return view[HEADER_BYTES + payload_len : page_bytes(payload_len)]


def _check_blocks(blocks: range, payload_len: int) -> range:
    if blocks.step != 1 or blocks.start < 0 or blocks.stop > block_count(payload_len):
        raise InvalidRequest(f"blocks {blocks} are outside of a payload of {payload_len} bytes")
    return blocks if len(blocks) else range(0)


def _view(buffer: Any, payload_len: int | None = None) -> memoryview:
    view = memoryview(buffer)
    if view.ndim != 1 or view.itemsize != 1:
        view = view.cast("B")
    if payload_len is not None and (payload_len < 0 or page_bytes(payload_len) > len(view)):
        raise InvalidRequest(f"a page of {payload_len} payload bytes does not fit a buffer of {len(view)} bytes")
    return view
