"""Metadata of a page, packed as records, trailers and the map of the disk tier have it. Pure.

A start takes ten million records into the map: they come in columns, as they lie on disk.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import PageCorrupt

_METADATA: Final = struct.Struct("<16sq16sqiqqq")
_METADATA_V1: Final = struct.Struct("<16sq16sqiq")  # before prompt_tokens and expires_us; distinguished by its length
_ABSENT: Final = bytes(_METADATA.size - _METADATA_V1.size)
METADATA_COLUMNS: Final = np.dtype(
    [
        ("parent", "V16"),
        ("index", "<i8"),
        ("head", "V16"),
        ("ttl_ms", "<i8"),
        ("priority", "<i4"),
        ("pinned_until_us", "<i8"),
        ("prompt_tokens", "<i8"),
        ("expires_us", "<i8"),
    ]
)


def pack_metadata(metadata: PageMetadata) -> bytes:
    """The bytes of one item of METADATA_COLUMNS."""
    return _METADATA.pack(
        metadata.parent_hash, metadata.chunk_index, metadata.group_head_hash, metadata.ttl_ms, metadata.priority,
        metadata.pinned_until_us, metadata.prompt_tokens, metadata.expires_us,
    )  # fmt: skip


def full_metadata(packed: bytes) -> bytes:
    """Return packed metadata in the current form. Raises PageCorrupt for bytes that no version of this code wrote."""
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
