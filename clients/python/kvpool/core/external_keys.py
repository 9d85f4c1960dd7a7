"""Names that other caches give to their entries, as chunk hashes and keyspaces of the pool.

An engine that hands over names instead of tokens (a digest of its own, a tuple of fields) shares pages with engines
that use the same names, and with no others. Its bytes may be canonical, or opaque objects of any size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from kvpool.core.chunks import HASH_BYTES
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.grid import LARGEST_PAGE_BYTES
from kvpool.core.keyspace import Dtype, KeyspaceSpec
from kvpool.core.payload import ShardPayload

SMALLEST_CELL_BYTES = 4096
MAX_CELLS = 0xFFFF
_OBJECT_TOKENS = 16  # the least that a keyspace may have; an object is one block of them, whatever it holds
_LENGTH = struct.Struct("<I")
_NAME_MAGIC = b"kvpool foreign name 1\0"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [offset, offset + size) of an object."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


def foreign_chunk_hash(hash_key: bytes, parts: Iterable[bytes]) -> bytes:
    """16 bytes for a name of several parts, under the keyspace's 32-byte hash key; equal only for equal parts."""
    if len(hash_key) != 32:
        raise InvalidRequest(f"hash_key must have 32 bytes, got {len(hash_key)}")
    return blake3(_joined(parts), key=hash_key).digest(HASH_BYTES)


def salt_of(engine: str, parts: Iterable[object]) -> bytes:
    """A keyspace salt of at most 64 bytes: the engine's name and a digest of whatever else must be equal."""
    digest = blake3(_joined(str(part).encode() for part in parts)).digest(HASH_BYTES)
    return engine.encode()[:32] + b" " + digest.hex().encode()[:24]


def _joined(parts: Iterable[bytes]) -> bytes:
    return _NAME_MAGIC + b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def object_keyspace(
    *, engine: str, kind: str, model_id: str, model_revision: str, size_bytes: int, salt: bytes
) -> KeyspaceSpec:
    """The keyspace of objects of exactly `size_bytes` bytes. One of at most LARGEST_PAGE_BYTES is one page: what a page
    takes beside its bytes holds a load up as much as copying them. Larger ones are cut to make pages of a usual size.

    kind: what the engine calls their arrangement. raises: InvalidRequest for objects of no bytes.
    """
    if size_bytes <= 0:
        raise InvalidRequest(f"objects must have at least one byte, got {size_bytes}")
    cell_bytes = SMALLEST_CELL_BYTES
    if size_bytes <= LARGEST_PAGE_BYTES:
        cell_bytes *= -(-size_bytes // SMALLEST_CELL_BYTES)
    while -(-size_bytes // cell_bytes) > MAX_CELLS:
        cell_bytes *= 2
    return KeyspaceSpec(
        model_id=model_id,
        model_revision=model_revision,
        # Sizes of opaque payloads come from cell_bytes alone, and a head has less than 16 MiB.
        groups=(KvGroup(layers=-(-size_bytes // cell_bytes), kv_heads=1, head_dim=SMALLEST_CELL_BYTES),),
        dtype=Dtype.INT8,
        chunk_tokens=_OBJECT_TOKENS,
        payload=PayloadKind.OPAQUE,
        opaque=OpaqueLayout(
            engine=engine,
            layout_id=f"{kind}, {size_bytes} bytes",
            isa="",
            block_tokens=_OBJECT_TOKENS,
            cell_bytes=cell_bytes,
        ),
        salt=salt,
    )


def object_range(shape: ShardPayload, size_bytes: int) -> ByteRange:
    """Bytes of an object that a shard of its keyspace holds, at the start of its payload; the rest of that is zeros."""
    begin = shape.layers.start * shape.row_bytes
    return ByteRange(begin, min(size_bytes, shape.layers.stop * shape.row_bytes) - begin)
