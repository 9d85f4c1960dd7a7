"""The file of `kvpool cache export`: pages of a prefix-closed set of chunks, each verifiable, the whole authentic.

    head      magic 8, version u16, flags u16 (0), manifest length u32
    manifest  JSON, UTF-8, at most 64 KiB; then BLAKE3-128 of head and manifest
    chunk     kind 1 u8, fields (see _CHUNK), BLAKE3-128 of those bytes; then the page of each shard named, in order
    end       kind 2 u8, chunks u64, page bytes u64, BLAKE3-256 of all bytes before it, MAC of that digest

Integers are little endian. Nothing follows the end. Sizes of pages are never read from the file: they follow from the
keyspace. The MAC is keyed with the keyspace's chunk-hash key, so where a tenant secret is set, only its
holders can make a file that is accepted. See docs/export-format.md.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from blake3 import blake3

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ExportRefused, KvPoolError
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec, decode_keyspace, encode_keyspace, keyspace_id
from kvpool.core.page import page_bytes
from kvpool.core.payload import payload_bytes
from kvpool.core.retention import PINNED_FOREVER_US, PRIORITY_MAX

MAGIC: Final = b"\x89KVPX\r\n\x1a"
VERSION: Final = 3  # with pages of version 3
MANIFEST_BYTES_MAX: Final = 64 << 10
CHUNK_BYTES_MAX: Final = 1 << 30
"""Pages of one chunk together; a keyspace of larger ones is refused."""
SUM_BYTES: Final = 16
_HEAD: Final = struct.Struct("<8sHHI")
_CHUNK: Final = struct.Struct("<B16s16s16sQQiQQQQ")
_END: Final = struct.Struct("<BQQ")
_KIND_CHUNK: Final = 1
_KIND_END: Final = 2
_DIGEST_BYTES: Final = 32
HEAD_BYTES: Final = _HEAD.size
CHUNK_HEAD_BYTES: Final = _CHUNK.size + SUM_BYTES
END_BYTES: Final = _END.size + 2 * _DIGEST_BYTES
_CHECK_MAGIC: Final = b"kvpool export key check 1\0"
_MAC_MAGIC: Final = b"kvpool export mac 1\0"


class Digest(Protocol):
    """A running BLAKE3-256."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Go on with these bytes."""
        ...

    def digest(self) -> bytes:
        """32 bytes, of all so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Whose pages a file has. key_check distinguishes chunk-hash keys without revealing them."""

    name: str  # of the keyspace, where it was exported
    tenant: str
    spec: KeyspaceSpec
    key_check: bytes  # 16 bytes
    created_by: str = ""

    @property
    def keyspace(self) -> bytes:
        """The 16-byte id."""
        return keyspace_id(encode_keyspace(self.tenant, self.spec))

    @property
    def grid(self) -> ShardGrid:
        """Of the keyspace."""
        return ShardGrid.of(self.spec)

    def payload_sizes(self) -> tuple[int, ...]:
        """Exact payload bytes of pages, by shard. raises: ExportRefused where a whole chunk would be too large."""
        grid = self.grid
        sizes = tuple(payload_bytes(self.spec, grid, shard) for shard in range(grid.shard_count))
        chunk_bytes = pages_bytes(sizes, grid.all_shards)
        if chunk_bytes > CHUNK_BYTES_MAX:
            raise ExportRefused(
                f"a chunk of this keyspace has {chunk_bytes} bytes, at most {CHUNK_BYTES_MAX} are taken"
            )
        return sizes

    def check_shards(self, shards: int) -> None:
        """raises: ExportRefused unless pages of these shards make a whole chunk."""
        grid = self.grid
        if shards & ~grid.valid_shards or not grid.covers(shards, grid.all_shards):
            raise ExportRefused(f"the shards {shards:#x} of a chunk make no whole chunk of the {grid.describe()}")

    def pack(self) -> bytes:
        """Head, manifest and their sum."""
        grid = self.grid
        document = {
            "keyspace": self.name,
            "encoding": encode_keyspace(self.tenant, self.spec).hex(),
            "keyspace_id": self.keyspace.hex(),
            "layer_groups": grid.layer_groups,
            "splits": list(grid.splits),
            "key_check": self.key_check.hex(),
            "created_by": self.created_by,
        }
        text = json.dumps(document, indent=1).encode()
        packed = _HEAD.pack(MAGIC, VERSION, 0, len(text)) + text
        return packed + _sum(packed)


def pages_bytes(payload_sizes: Sequence[int], shards: int) -> int:
    """Exact bytes of the pages of some shards (a bitmap). payload_sizes: by shard."""
    return sum(page_bytes(payload_sizes[shard]) for shard in shards_in(shards))


def manifest_bytes(head: bytes) -> int:
    """Length of the manifest and its sum, which follow a head. raises: ExportRefused for what is no such file."""
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise ExportRefused("this is no file that `kvpool cache export` wrote (the first bytes are others)")
    _, version, flags, size_bytes = _HEAD.unpack_from(head)
    if version != VERSION or flags:
        raise ExportRefused(
            f"the file has format version {version}, flags {flags}; this kvpool reads version {VERSION}"
        )
    if not 0 < size_bytes <= MANIFEST_BYTES_MAX:
        raise ExportRefused(f"the manifest would have {size_bytes} bytes, at most {MANIFEST_BYTES_MAX}")
    return int(size_bytes) + SUM_BYTES


def manifest_of(head: bytes, rest: bytes) -> Manifest:
    """The manifest of a file. raises: ExportRefused naming what does not fit."""
    if len(rest) != manifest_bytes(head) or rest[-SUM_BYTES:] != _sum(head + rest[:-SUM_BYTES]):
        raise ExportRefused("the manifest is damaged or cut off")
    try:
        document = json.loads(rest[:-SUM_BYTES])
        tenant, spec = decode_keyspace(bytes.fromhex(_text(document, "encoding")))
        manifest = Manifest(
            name=_text(document, "keyspace"),
            tenant=tenant,
            spec=spec,
            key_check=bytes.fromhex(_text(document, "key_check")),
            created_by=_text(document, "created_by"),
        )
        claimed = bytes.fromhex(_text(document, "keyspace_id"))
        cut = (document["layer_groups"], tuple(document["splits"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportRefused(f"the manifest cannot be read: {error}") from error
    except ExportRefused:
        raise
    except KvPoolError as error:
        raise ExportRefused(f"the keyspace of the manifest is refused: {error.message}") from error
    grid = manifest.grid
    if claimed != manifest.keyspace or len(manifest.key_check) != SUM_BYTES:
        raise ExportRefused("the manifest contradicts itself about its keyspace")
    if cut != (grid.layer_groups, grid.splits):
        raise ExportRefused(
            f"its pages lie on a grid of {cut[0]} layer groups x {cut[1]} parts, which this kvpool cuts "
            f"{grid.layer_groups} x {grid.splits}; import with the version that exported "
            f"({manifest.created_by or 'unknown'})"
        )
    return manifest


def pack_chunk(chunk_hash: bytes, metadata: PageMetadata, shards: int) -> bytes:
    """What precedes the pages of a chunk. shards: the bitmap of those whose pages follow."""
    fields = _CHUNK.pack(
        _KIND_CHUNK,
        chunk_hash,
        metadata.parent_hash,
        metadata.group_head_hash,
        metadata.chunk_index,
        metadata.ttl_ms,
        metadata.priority,
        metadata.pinned_until_us,
        metadata.prompt_tokens,
        metadata.expires_us,
        shards,
    )
    return fields + _sum(fields)


def chunk_of(packed: bytes) -> tuple[bytes, PageMetadata, int]:
    """A chunk's hash, what is kept beside its pages, and the bitmap of their shards. raises: ExportRefused."""
    if len(packed) != CHUNK_HEAD_BYTES or packed[0] != _KIND_CHUNK or packed[-SUM_BYTES:] != _sum(packed[:-SUM_BYTES]):
        raise ExportRefused("the head of a chunk is damaged or cut off")
    _, chunk_hash, parent, group_head, index, ttl_ms, priority, pinned_us, prompt_tokens, expires_us, shards = (
        _CHUNK.unpack(packed[:-SUM_BYTES])
    )
    if max(ttl_ms, pinned_us, prompt_tokens, expires_us, index) > PINNED_FOREVER_US or abs(priority) > PRIORITY_MAX:
        raise ExportRefused(f"what is kept beside chunk {chunk_hash.hex()} is out of range")
    metadata = PageMetadata(
        parent_hash=parent,
        chunk_index=index,
        group_head_hash=group_head,
        ttl_ms=ttl_ms,
        priority=priority,
        pinned_until_us=pinned_us,
        prompt_tokens=prompt_tokens,
        expires_us=expires_us,
    )
    return chunk_hash, metadata, shards


def is_end(kind: bytes) -> bool:
    """Whether the next record, by its first byte, is the last one."""
    return kind == bytes([_KIND_END])


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What the end of a file says of all before it."""

    chunk_count: int
    pages_bytes: int
    digest: bytes  # 32 bytes; BLAKE3-256 of all before the end
    mac: bytes  # 32 bytes

    def pack(self) -> bytes:
        """The last bytes of a file."""
        return _END.pack(_KIND_END, self.chunk_count, self.pages_bytes) + self.digest + self.mac


def end_of(packed: bytes) -> End:
    """raises: ExportRefused."""
    if len(packed) != END_BYTES or packed[0] != _KIND_END:
        raise ExportRefused("the end of the file is missing: it was cut off; export it again")
    _, chunk_count, pages_bytes = _END.unpack_from(packed)
    digests = packed[_END.size :]
    return End(
        chunk_count=chunk_count,
        pages_bytes=pages_bytes,
        digest=digests[:_DIGEST_BYTES],
        mac=digests[_DIGEST_BYTES:],
    )


def new_digest() -> Digest:
    """For all bytes before the end of a file."""
    return blake3()


def key_check(hash_key: bytes) -> bytes:
    """16 bytes that are equal for equal chunk-hash keys and tell nothing else of them."""
    return blake3(_CHECK_MAGIC, key=hash_key).digest(SUM_BYTES)


def mac_of(hash_key: bytes, digest: bytes, chunk_count: int, pages_bytes: int) -> bytes:
    """32 bytes that only who has the chunk-hash key can make."""
    counts = _END.pack(_KIND_END, chunk_count, pages_bytes)
    return blake3(_MAC_MAGIC + counts + digest, key=hash_key).digest(_DIGEST_BYTES)


def _text(document: Any, name: str) -> str:
    value = document[name]
    if not isinstance(value, str) or len(value) > MANIFEST_BYTES_MAX:
        raise ValueError(f"{name} is no text")
    return value


def _sum(data: bytes) -> bytes:
    return blake3(data).digest(SUM_BYTES)
