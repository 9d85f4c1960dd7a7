"""What lies in the RocksDB of a pagestore, and the trailers behind the pages that say the same. Pure.

| family | key | value |
|---|---|---|
| records | page key (34) | PageRecord: where the page is, its size, its metadata |
| salvaged | page key, number of the write (u64 BE, inverted) | a record, while a salvage goes on: the newest first |
| values | name | small values of the node, the remembered keyspaces (`keyspace:` + encoding) |

A trailer fills the last TRAILER_BYTES of a page's blocks, so that its record can be restored when RocksDB has lost it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from hmac import compare_digest
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import PageCorrupt
from kvpool.core.page import KEY_BYTES, PageKey
from kvpool_pagestore.core.extents import TRAILER_BYTES, Extent
from kvpool_pagestore.core.kept_metadata import METADATA_COLUMNS, full_metadata, pack_metadata, unpack_metadata

RECORDS: Final = "records"
SALVAGED: Final = "salvaged"
VALUES: Final = "values"
FORMAT_NAME: Final = b"format"
LOG_NAME: Final = b"log"  # written when a log file is to be left

_VERSION: Final = 2
_RECORD: Final = struct.Struct("<BQQH")
_EXTENT: Final = struct.Struct("<III")
_ONE_EXTENT: Final = np.dtype(
    [
        ("version", "u1"),
        ("page_bytes", "<u8"),
        ("number", "<u8"),
        ("count", "<u2"),
        ("file", "<u4"),
        ("start", "<u4"),
        ("blocks", "<u4"),
    ]
)
_PLAIN: Final = np.dtype([("head", _ONE_EXTENT), ("metadata", METADATA_COLUMNS)])  # a record with one extent
_PLAIN_BYTES: Final = _PLAIN.itemsize
TRAILER_MAGIC: Final = b"KVPT"
_TRAILER: Final = struct.Struct(f"<4s{KEY_BYTES}sH")
_TRAILER_EXTENTS: Final = 5
_TAG_BYTES: Final = 16
_FILE_SHIFT: Final = np.uint64(32)
_START_MASK: Final = np.uint64((1 << 32) - 1)
_INVERTED: Final = struct.Struct(">Q")
_NUMBER_MAX: Final = (1 << 64) - 1
_KEYSPACE_PREFIX: Final = b"keyspace:"
_NAMED_PREFIX: Final = b"named:"


@dataclass(frozen=True, slots=True)
class PageRecord:
    """Where a page is, and its metadata."""

    page_bytes: int
    number: int  # of the write: the higher one of two is the newer
    extents: tuple[Extent, ...]
    metadata: PageMetadata

    def encode(self) -> bytes:
        head = _RECORD.pack(_VERSION, self.page_bytes, self.number, len(self.extents))
        return head + b"".join(_EXTENT.pack(*extent) for extent in self.extents) + pack_metadata(self.metadata)

    @classmethod
    def decode(cls, encoded: bytes) -> PageRecord:
        """Raises PageCorrupt for bytes that no version of this code wrote."""
        page_bytes, extents = decode_place(encoded)
        end = _RECORD.size + len(extents) * _EXTENT.size
        return cls(page_bytes, _RECORD.unpack_from(encoded)[2], extents, unpack_metadata(encoded[end:]))


class UsedBlocks(NamedTuple):
    """Extents of some records, and the highest number of a write among them. 12 bytes an extent."""

    places: npt.NDArray[np.uint64]  # file in the upper half, first block in the lower
    counts: npt.NDArray[np.uint32]
    last_number: int

    @classmethod
    def joined(cls, parts: Iterable[UsedBlocks]) -> UsedBlocks:
        """All of them, by file and first block. Takes the parts as they come."""
        places, counts, last_number = array("Q"), array("I"), 0
        for part in parts:
            places.frombytes(part.places.tobytes())
            counts.frombytes(part.counts.tobytes())
            last_number = max(last_number, part.last_number)
        found, sizes = np.frombuffer(places, np.uint64), np.frombuffer(counts, np.uint32)
        if len(sizes) and (sizes == sizes[0]).all():  # of pages of one size: ten million are sorted in half the time
            return cls(np.sort(found), sizes, last_number)
        order = np.argsort(found)
        return cls(found[order], sizes[order], last_number)

    def merged(self) -> UsedBlocks:
        """Extents with their neighbours in one. `joined` only."""
        if not len(self.places):
            return self
        ends = self.places + self.counts
        begins = np.flatnonzero(np.concatenate([[True], self.places[1:] != ends[:-1]]))
        counts = ends[np.append(begins[1:], len(ends)) - 1] - self.places[begins]
        return UsedBlocks(self.places[begins], counts.astype(np.uint32), self.last_number)

    def extents(self, count: int) -> Iterator[list[Extent]]:
        """As objects, so many at a time."""
        for start in range(0, len(self.places), count):
            rows = zip(
                self.places[start : start + count].tolist(), self.counts[start : start + count].tolist(), strict=True
            )
            yield [Extent(at >> 32, at & 0xFFFFFFFF, blocks) for at, blocks in rows]

    @property
    def files(self) -> set[int]:
        """In which there are any. `joined` only."""
        found, at = set[int](), 0
        while at < len(self.places):
            found.add(file := int(self.places[at]) >> 32)
            at = self._end(file)
        return found

    def of_file(self, file: int) -> npt.NDArray[np.int64]:
        """[N, 3] file, start and count of the extents in one file. `joined` only."""
        begin, end = int(np.searchsorted(self.places, np.uint64(file << 32))), self._end(file)
        starts = (self.places[begin:end] & _START_MASK).astype(np.int64)
        return np.stack([np.full(len(starts), file), starts, self.counts[begin:end].astype(np.int64)], axis=1)

    def _end(self, file: int) -> int:
        return int(np.searchsorted(self.places, np.uint64(file << 32) | _START_MASK, side="right"))


class RecordColumns(NamedTuple):
    """All that a scan needs of encoded records, in columns of one length but for `used`."""

    page_bytes: npt.NDArray[np.int64]
    metadata: npt.NDArray[np.void]  # METADATA_COLUMNS
    used: UsedBlocks

    @classmethod
    def of(cls, encoded: Sequence[bytes]) -> RecordColumns:
        """Those of one extent, nearly all, are taken apart together. Raises PageCorrupt."""
        if set(map(len, encoded)) <= {_PLAIN_BYTES}:
            table: npt.NDArray[np.void] = np.frombuffer(b"".join(encoded), _PLAIN)
            head = table["head"]
            if np.any(head["version"] != _VERSION) or np.any(head["count"] != 1):
                raise PageCorrupt(f"there are records that are none of version {_VERSION}")
            places = head["file"].astype(np.uint64) << _FILE_SHIFT | head["start"]
            used = UsedBlocks(places, head["blocks"], int(head["number"].max(initial=0)))
            return cls(head["page_bytes"].astype(np.int64), table["metadata"], used)
        sizes, places, counts, metadata, last_number = list[int](), list[int](), list[int](), list[bytes](), 0
        for each in encoded:
            page_bytes, extents = decode_place(each)
            sizes.append(page_bytes)
            places += [extent.file << 32 | extent.start for extent in extents]
            counts += [extent.block_count for extent in extents]
            metadata.append(full_metadata(each[_RECORD.size + len(extents) * _EXTENT.size :]))
            last_number = max(last_number, _RECORD.unpack_from(each)[2])
        used = UsedBlocks(np.array(places, np.uint64), np.array(counts, np.uint32), last_number)
        return cls(np.array(sizes, np.int64), np.frombuffer(b"".join(metadata), METADATA_COLUMNS), used)


def decode_place(encoded: bytes) -> tuple[int, tuple[Extent, ...]]:
    """Page bytes and extents of an encoded record: all that a read needs. Raises PageCorrupt as `decode` does."""
    try:
        version, page_bytes, _, count = _RECORD.unpack_from(encoded)
        if version != _VERSION:
            raise PageCorrupt(f"a page record has version {version}, not {_VERSION}")
        if count == 1:  # nearly always
            return page_bytes, (Extent._make(_EXTENT.unpack_from(encoded, _RECORD.size)),)
        end = _RECORD.size + count * _EXTENT.size
        extents = tuple(Extent._make(fields) for fields in _EXTENT.iter_unpack(encoded[_RECORD.size : end]))
        if len(extents) != count:
            raise PageCorrupt("a page record is cut off")
        return page_bytes, extents
    except struct.error as error:
        raise PageCorrupt(f"{len(encoded)} bytes are no page record of version {_VERSION}") from error


def salvaged_key(key: PageKey, number: int) -> bytes:
    """Key in `salvaged`: rows of a page lie together, the newest write first."""
    return key.pack() + _INVERTED.pack(_NUMBER_MAX - number)


def page_of_salvaged_key(key: bytes) -> bytes:
    """The packed page key of a key in `salvaged`."""
    return key[:KEY_BYTES]


@dataclass(frozen=True, slots=True)
class Trailer:
    """What a trailer says of the page before it."""

    key: PageKey
    record: PageRecord  # without extents if they are too many for a trailer


def pack_trailer(trailer: Trailer, secret: bytes) -> bytes:
    """TRAILER_BYTES bytes. It cannot be written without the secret: a page could contain what looks like one."""
    record = trailer.record
    if len(record.extents) > _TRAILER_EXTENTS:
        record = replace(record, extents=())
    encoded = record.encode()
    fields = _TRAILER.pack(TRAILER_MAGIC, trailer.key.pack(), len(encoded)) + encoded
    body = fields.ljust(TRAILER_BYTES - _TAG_BYTES, b"\0")
    return body + blake2b(body, key=secret, digest_size=_TAG_BYTES).digest()


def unpack_trailer(block_end: bytes, secret: bytes) -> Trailer | None:
    """What TRAILER_BYTES bytes say; None if they are no trailer of this tier, or a damaged one."""
    if not block_end.startswith(TRAILER_MAGIC):
        return None
    body, tag = block_end[:-_TAG_BYTES], block_end[-_TAG_BYTES:]
    if not compare_digest(blake2b(body, key=secret, digest_size=_TAG_BYTES).digest(), tag):
        return None
    _, packed, size = _TRAILER.unpack_from(body)
    return Trailer(PageKey.unpack(packed), PageRecord.decode(body[_TRAILER.size : _TRAILER.size + size]))


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
