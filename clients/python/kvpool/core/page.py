"""A page as it lies on every medium: header, then payload.

Header, 64 bytes, little endian: magic `KVPG`, version u8, codec u8, page key (keyspace id 16, chunk hash 16, shard
u16), payload length u64, then the 16-byte xxh3-128 digest (canonical, big endian) of those first 48 bytes followed by
the payload.

Everything works in place on a buffer that begins with the header (a slot may be longer than its page). The xxhash wheel
lets go of the GIL for inputs of about 100 KiB and more, so that threads of one process seal and verify side by side;
one digest a page has each ask for the GIL once. A table of sums of 256 KiB blocks, as in version 2, asked 32 times for
a page of 8 MiB: up to a switch interval each time where another thread computes in Python.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from kvpool.core.errors import InvalidRequest

MAGIC = b"KVPG"
VERSION = 3  # 2 had a table of sums behind the payload, 1 another order of rows in payloads
HEADER_BYTES = 64
KEY_BYTES = 34
SLOT_ALIGNMENT_BYTES = 4096

_KEY = struct.Struct("<16s16sH")
_FIELDS = struct.Struct("<4sBB34sQ")

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


class PageFault(Enum):
    """Why a page must not be used."""

    WRONG_MAGIC = 1
    WRONG_VERSION = 2
    WRONG_KEY = 3
    WRONG_CODEC = 4
    WRONG_LENGTH = 5
    BAD_DIGEST = 6

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


def page_bytes(payload_len: int) -> int:
    """Header and payload."""
    return HEADER_BYTES + payload_len


def slot_bytes(payload_len: int) -> int:
    """Arena bytes of a page: rounded up to 4 KiB."""
    return -(-page_bytes(payload_len) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def payload_view(buffer: Buffer, payload_len: int) -> memoryview:
    """The payload of a page in a slot, without a copy."""
    return _view(buffer, payload_len)[HEADER_BYTES : HEADER_BYTES + payload_len]


def seal(buffer: Buffer, key: PageKey, codec: int, payload_len: int) -> None:
    """Write the header over a payload that is in place: from here on the page verifies.

    raises: InvalidRequest if it does not fit.
    """
    view = _view(buffer, payload_len)
    fields = _FIELDS.pack(MAGIC, VERSION, codec, key.pack(), payload_len)
    view[:HEADER_BYTES] = fields + _digest(fields, view[HEADER_BYTES : page_bytes(payload_len)])


def verify(buffer: Buffer, key: PageKey, codec: int | None = None, payload_len: int | None = None) -> PageFault | None:
    """None if the buffer begins with exactly the page asked for, with every byte as it was sealed; else why not."""
    view = _view(buffer)
    if len(view) < HEADER_BYTES:
        return PageFault.WRONG_LENGTH
    magic, version, found_codec, packed_key, size_bytes = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        return PageFault.WRONG_MAGIC
    if version != VERSION:
        return PageFault.WRONG_VERSION
    if packed_key != key.pack():
        return PageFault.WRONG_KEY
    if codec is not None and found_codec != codec:
        return PageFault.WRONG_CODEC
    if (payload_len is not None and size_bytes != payload_len) or page_bytes(size_bytes) > len(view):
        return PageFault.WRONG_LENGTH
    if _digest(view[: _FIELDS.size], view[HEADER_BYTES : page_bytes(size_bytes)]) != view[_FIELDS.size : HEADER_BYTES]:
        return PageFault.BAD_DIGEST
    return None


def _digest(fields: bytes | memoryview, payload: memoryview) -> bytes:
    digest = xxh3_128(fields)
    digest.update(payload)
    return digest.digest()


def _view(buffer: Any, payload_len: int | None = None) -> memoryview:
    view = memoryview(buffer)
    if view.ndim != 1 or view.itemsize != 1:
        view = view.cast("B")
    if payload_len is not None and (payload_len < 0 or page_bytes(payload_len) > len(view)):
        raise InvalidRequest(f"a page of {payload_len} payload bytes does not fit a buffer of {len(view)} bytes")
    return view
