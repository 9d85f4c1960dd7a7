"""What lies in the RocksDB of a pagestore: column families, keys and records. Pure.

| family | key | value |
|---|---|---|
| records | page key (34) | PageRecord: where the page is, its size, its metadata |
| members | volume (u32 BE), page key | empty: pages that were written to a volume, perhaps not there any more |
| values | name | small values of the node, the remembered keyspaces (`keyspace:` + encoding) |
| volume-<n> | batch (u64 BE), page key | page bytes of a table volume: header, payload, sum table |

The number of the batch in front of the page key makes the table files of a volume follow each other, so that none ever
has to be compacted into another.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import PageCorrupt
from kvpool.core.page import PageKey
from kvpool_pagestore.core.kept_metadata import full_metadata, pack_metadata, unpack_metadata
from kvpool_pagestore.ports import PageMetadata

RECORDS: Final = "records"
MEMBERS: Final = "members"
VALUES: Final = "values"
FORMAT_NAME: Final = b"format"
LAST_VOLUME_NAME: Final = b"last volume"
LOG_NAME: Final = b"log"  # written when a log file is to be left

_RECORD_VERSION: Final = 1
_RECORD: Final = struct.Struct("<BIQQ")
_VOLUME: Final = struct.Struct(">I")
_BATCH: Final = struct.Struct(">Q")
_VOLUME_FAMILY: Final = re.compile(r"volume-(\d{1,10})")
_KEYSPACE_PREFIX: Final = b"keyspace:"
_NAMED_PREFIX: Final = b"named:"


@dataclass(frozen=True, slots=True)
class PageRecord:
    """Where a page is, and what is kept beside it."""

    volume: int
    position: int  # in the volume: its byte offset in a file, the number of its batch in a table volume
    page_bytes: int
    metadata: PageMetadata

    @property
    def place(self) -> tuple[int, int]:
        """Where its bytes are: what stays the same when only the metadata changes."""
        return self.volume, self.position

    def encode(self) -> bytes:
        head = _RECORD.pack(_RECORD_VERSION, self.volume, self.position, self.page_bytes)
        return head + pack_metadata(self.metadata)

    @classmethod
    def decode(cls, encoded: bytes) -> PageRecord:
        """Raises PageCorrupt for bytes that no version of this code wrote."""
        if len(encoded) < _RECORD.size or encoded[0] != _RECORD_VERSION:
            raise PageCorrupt(f"{len(encoded)} bytes are no page record of version {_RECORD_VERSION}")
        _, volume, position, page_bytes = _RECORD.unpack_from(encoded)
        return cls(volume, position, page_bytes, unpack_metadata(encoded[_RECORD.size :]))


def decode_kept(encoded: bytes) -> tuple[int, bytes]:
    """Page bytes and packed metadata of an encoded record: what a scan needs. Raises PageCorrupt as `decode` does."""
    if len(encoded) < _RECORD.size or encoded[0] != _RECORD_VERSION:
        raise PageCorrupt(f"{len(encoded)} bytes are no page record of version {_RECORD_VERSION}")
    return _RECORD.unpack_from(encoded)[3], full_metadata(encoded[_RECORD.size :])


def volume_family(volume: int) -> str:
    """Name of a table volume's column family."""
    return f"volume-{volume}"


def volume_of_family(name: str) -> int | None:
    """The volume of a column family, None for the small families."""
    match = _VOLUME_FAMILY.fullmatch(name)
    return int(match[1]) if match else None


def payload_key(batch: int, key: PageKey) -> bytes:
    """Key of a page's bytes in a table volume."""
    return _BATCH.pack(batch) + key.pack()


def member_bounds(volume: int) -> tuple[bytes, bytes]:
    """First possible member key of a volume and a key after its last one."""
    return _VOLUME.pack(volume), _VOLUME.pack(volume + 1)


def member_key(volume: int, key: PageKey) -> bytes:
    """Key of a page in `members`."""
    return _VOLUME.pack(volume) + key.pack()


def member_page(member: bytes) -> PageKey:
    """The page of a member key."""
    return PageKey.unpack(member[_VOLUME.size :])


def keyspace_value_key(encoding: bytes) -> bytes:
    """Key in `values` by which a keyspace is remembered. It holds the encoding, so that keeping it is idempotent."""
    return _KEYSPACE_PREFIX + encoding


def keyspace_of_value_key(key: bytes) -> bytes | None:
    """The encoding of a remembered keyspace, None for other values."""
    return key[len(_KEYSPACE_PREFIX) :] if key.startswith(_KEYSPACE_PREFIX) else None


def named_value_key(name: str) -> bytes:
    """Key in `values` of a small value of the node."""
    return _NAMED_PREFIX + name.encode()


def keyspace_bounds(keyspace: bytes) -> tuple[bytes, bytes]:
    """First possible page key of a keyspace and a key after its last one."""
    return keyspace, keyspace + b"\xff" * 19  # what follows in a page key is 18 bytes long
