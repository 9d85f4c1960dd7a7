"""The commands that read a chain from Redis, made for all its groups at once: most of a match's own work otherwise.

Each asks for the field MARK first, which only a group that is split has. The chunks of such a group are read in a
second round, from its parts. The mark is a field of its own, because replies that are equal are parsed once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool.core.cluster import CHAIN_GROUP_CHUNKS
from kvpool.core.location_digest import FIELD_BYTES, PART_COUNT, part_of, range_of
from kvpool_index.core.entries import HASH_BYTES, GroupRead

MARK: Final = b"s"
"""The field of a split group that counts its chunks."""

UNDIGESTED: Final = b"u"
"""The field of a part whose digests are yet to be computed."""

_MARK_WORD: Final = b"$1\r\ns\r\n"
_TAG_BYTES: Final = 3  # hexadecimal digits of a digest range, in a key's hash tag
_FIELD_WORD: Final = b"$%d\r\n%b\r\n" % (FIELD_BYTES, bytes(FIELD_BYTES))
_FIELD_AT: Final = _FIELD_WORD.index(bytes(FIELD_BYTES))
_GROUP_BYTES: Final = HASH_BYTES * CHAIN_GROUP_CHUNKS
_KEPT_BLANKS: Final = 64  # by keyspace and length; 0.3 KiB for each group, so that all together stay below 10 MiB
_HASH: Final = np.dtype(f"V{HASH_BYTES}")
_FIELD: Final = np.dtype(f"V{FIELD_BYTES}")


def range_tag(number: int) -> bytes:
    """The hash tag of a digest range."""
    return b"{%03x}" % number


def group_key(key_prefix: bytes, keyspace: bytes, group_head: bytes) -> bytes:
    """The key of a chain group."""
    return key_prefix + b":c:" + range_tag(range_of(group_head)) + keyspace + group_head


def split_groups_key(key_prefix: bytes, number: int) -> bytes:
    """The key of the set of a range's groups that are split and have a chunk."""
    return key_prefix + b":p:" + range_tag(number)


def part_keys(key_prefix: bytes, place: bytes) -> list[bytes]:
    """The keys of all parts of a split group. place: its keyspace and the hash of its head."""
    before = split_groups_key(key_prefix, range_of(place)) + place
    return [before + part.to_bytes() for part in range(PART_COUNT)]


def read_command(key: bytes, fields: Sequence[bytes]) -> bytes:
    """One HMGET, packed. Every field but the mark has eight bytes, so that it is a few joins."""
    joined = b"\r\n$8\r\n".join(fields)
    count, size = len(fields) + 3, len(key)
    return b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n%b$8\r\n%b\r\n" % (count, size, key, _MARK_WORD, joined)


def read_groups(key_prefix: bytes, keyspace: bytes, groups: Sequence[GroupRead]) -> tuple[list[bytes], list[bytes]]:
    """The commands that read these groups, and their keys."""
    keys = [group_key(key_prefix, keyspace, group.head) for group in groups]
    return [read_command(key, group.fields) for key, group in zip(keys, groups, strict=True)], keys


def read_parts(key_prefix: bytes, keyspace: bytes, group: GroupRead) -> tuple[list[bytes], list[bytes]]:
    """The commands that read a split group, one for each chunk, and their keys."""
    before = split_groups_key(key_prefix, range_of(group.head)) + keyspace + group.head
    keys = [before + part_of(field).to_bytes() for field in group.fields]
    start = b"*3\r\n$4\r\nHGET\r\n$%d\r\n" % (len(before) + 1)
    return [b"%b%b\r\n$8\r\n%b\r\n" % (start, *each) for each in zip(keys, group.fields, strict=True)], keys


@dataclass(frozen=True, slots=True)
class PackedReads:
    """Commands in one piece, as a single master gets them; a Cluster has to know each and its key."""

    packed: bytes | bytearray
    count: int
    key_at: int  # of each command, where its key begins
    key_bytes: int

    def split(self) -> tuple[list[bytes], list[bytes]]:
        """The commands, which are all of one size, and their keys."""
        if not self.count:
            return [], []
        joined, size = bytes(self.packed), len(self.packed) // self.count
        commands = [joined[at : at + size] for at in range(0, len(joined), size)]
        return commands, [command[self.key_at : self.key_at + self.key_bytes] for command in commands]


def read_whole_groups(key_prefix: bytes, keyspace: bytes, hashes: bytes) -> PackedReads:
    """The same for whole groups: hashes of 16 chunks each. Equal to read_groups, at a twentieth of its cost."""
    count = len(hashes) // _GROUP_BYTES
    if not count:
        return PackedReads(b"", 0, 0, 0)
    blank, size, key_at, key_bytes = _blank_reads(key_prefix, keyspace, count)
    packed = bytearray(blank)
    head_at = key_at + key_bytes - HASH_BYTES
    field_at = head_at + HASH_BYTES + len(b"\r\n") + len(_MARK_WORD) + _FIELD_AT
    tag_at = head_at - len(keyspace) - len(b"}") - _TAG_BYTES
    high, low = hashes[HASH_BYTES - 2 :: _GROUP_BYTES].hex(), hashes[HASH_BYTES - 1 :: _GROUP_BYTES].hex()
    for digit, digits in enumerate((high[::2], high[1::2], low[::2])):  # of each range_of: hexadecimal, as range_tag
        packed[tag_at + digit :: size] = digits.encode()
    # Opaque items of a hash's and a field's size: copied each at once, not byte by byte.
    np.ndarray((count,), _HASH, packed, head_at, (size,))[:] = np.ndarray((count,), _HASH, hashes, 0, (_GROUP_BYTES,))
    fields = np.ndarray((count, CHAIN_GROUP_CHUNKS), _FIELD, hashes, 0, (_GROUP_BYTES, HASH_BYTES))
    np.ndarray((count, CHAIN_GROUP_CHUNKS), _FIELD, packed, field_at, (size, len(_FIELD_WORD)))[:] = fields
    return PackedReads(packed, count, key_at, key_bytes)


@functools.lru_cache(_KEPT_BLANKS)
def _blank_reads(key_prefix: bytes, keyspace: bytes, count: int) -> tuple[bytes, int, int, int]:
    """So many commands with gaps for what differs, and the size of each, where its key begins and the key's size."""
    before = key_prefix + b":c:{"
    key_bytes = len(before) + _TAG_BYTES + len(b"}") + len(keyspace) + HASH_BYTES
    start = b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n" % (CHAIN_GROUP_CHUNKS + 3, key_bytes)
    key = before + bytes(_TAG_BYTES) + b"}" + keyspace + bytes(HASH_BYTES)
    command = start + key + b"\r\n" + _MARK_WORD + _FIELD_WORD * CHAIN_GROUP_CHUNKS
    return command * count, len(command), len(start), key_bytes
