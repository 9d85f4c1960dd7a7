"""What is kept beside a page, packed: as records, trailers and the map of the disk tier have it. Pure.

A start takes a million records into the map. They come as they lie on disk, and nothing is made of one before somebody
asks for it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import PageCorrupt
from kvpool.core.page import PageKey

_METADATA: Final = struct.Struct("<16sq16sqiqqq")
_METADATA_V1: Final = struct.Struct("<16sq16sqiq")  # before prompt_tokens and expires_us; told apart by its length
METADATA_BYTES: Final = _METADATA.size
_ABSENT: Final = bytes(_METADATA.size - _METADATA_V1.size)
_GROUP_HEAD: Final = slice(24, 40)
_PINNED: Final = slice(52, 60)
_EXPIRES: Final = slice(68, 76)
_NEVER: Final = bytes(8)


def pack_metadata(kept: PageMetadata) -> bytes:
    """METADATA_BYTES bytes."""
    return _METADATA.pack(
        kept.parent_hash, kept.chunk_index, kept.group_head_hash, kept.ttl_ms, kept.priority, kept.pinned_until_us,
        kept.prompt_tokens, kept.expires_us,
    )  # fmt: skip


def full_metadata(packed: bytes) -> bytes:
    """The same as this version packs it. Raises PageCorrupt for bytes that no version of this code wrote."""
    if len(packed) == _METADATA_V1.size:
        packed += _ABSENT
    if len(packed) != _METADATA.size:
        raise PageCorrupt(f"{len(packed)} bytes are no page metadata")
    return packed


def unpack_metadata(packed: bytes) -> PageMetadata:
    """Raises PageCorrupt as `full_metadata` does."""
    parent, index, head, ttl_ms, priority, pinned_us, tokens, expires_us = _METADATA.unpack(full_metadata(packed))
    return PageMetadata(
        parent_hash=parent, chunk_index=index, group_head_hash=head, ttl_ms=ttl_ms, priority=priority,
        pinned_until_us=pinned_us, prompt_tokens=tokens, expires_us=expires_us,
    )  # fmt: skip


def group_head(packed: bytes) -> bytes:
    """The group's head hash alone."""
    return packed[_GROUP_HEAD]


def has_an_end(packed: bytes) -> bool:
    """Whether the page's pin or its life ends some time: of most, neither does."""
    return packed[_PINNED] != _NEVER or packed[_EXPIRES] != _NEVER


class StoredPage(NamedTuple):
    """One page of the disk tier as a scan finds it, nothing of it unpacked: a start finds a million."""

    packed_key: bytes
    page_bytes: int
    packed_metadata: bytes

    @classmethod
    def of(cls, *, key: PageKey, page_bytes: int, metadata: PageMetadata) -> StoredPage:
        """From what is not packed."""
        return cls(key.pack(), page_bytes, pack_metadata(metadata))

    @property
    def key(self) -> PageKey:
        return PageKey.unpack(self.packed_key)

    @property
    def metadata(self) -> PageMetadata:
        return unpack_metadata(self.packed_metadata)
