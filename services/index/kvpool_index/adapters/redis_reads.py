"""The commands that read a chain from Redis, made for all its groups at once: most of a match's own work otherwise."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import CHAIN_GROUP_CHUNKS
from kvpool.core.location_digest import FIELD_BYTES, RANGE_COUNT, range_of
from kvpool_index.core.groups import HASH_BYTES, GroupRead

_TAG_BYTES: Final = 3  # hexadecimal digits of a digest range, in a key's hash tag
_FIELD_WORD: Final = b"$%d\r\n%b\r\n" % (FIELD_BYTES, bytes(FIELD_BYTES))
_FIELD_AT: Final = _FIELD_WORD.index(bytes(FIELD_BYTES))
_GROUP_BYTES: Final = HASH_BYTES * CHAIN_GROUP_CHUNKS
_TAGS: Final[npt.NDArray[np.uint8]] = np.frombuffer(
    b"".join(b"%03x" % number for number in range(RANGE_COUNT)), np.uint8
).reshape(RANGE_COUNT, _TAG_BYTES)


def range_tag(number: int) -> bytes:
    """The hash tag of a digest range."""
    return b"{%03x}" % number


def group_key(key_prefix: bytes, keyspace: bytes, group_head: bytes) -> bytes:
    """The key of a chain group."""
    return key_prefix + b":c:" + range_tag(range_of(group_head)) + keyspace + group_head


def read_command(key: bytes, fields: Sequence[bytes]) -> bytes:
    """One HMGET, packed. Every field has eight bytes, so that it is a few joins."""
    joined = b"\r\n$8\r\n".join(fields)
    return b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n$8\r\n%b\r\n" % (len(fields) + 2, len(key), key, joined)


def read_groups(key_prefix: bytes, keyspace: bytes, groups: Sequence[GroupRead]) -> tuple[list[bytes], list[bytes]]:
    """The commands that read these groups, and their keys."""
    keys = [group_key(key_prefix, keyspace, group.head) for group in groups]
    return [read_command(key, group.fields) for key, group in zip(keys, groups, strict=True)], keys


def read_whole_groups(key_prefix: bytes, keyspace: bytes, hashes: bytes) -> tuple[list[bytes], list[bytes]]:
    """The same for whole groups: hashes of 16 chunks each. Equal to read_groups, at a tenth of its cost."""
    count = len(hashes) // _GROUP_BYTES
    before = key_prefix + b":c:{"
    key_bytes = len(before) + _TAG_BYTES + 1 + len(keyspace) + HASH_BYTES
    start = b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n" % (CHAIN_GROUP_CHUNKS + 2, key_bytes)
    head_at = len(start) + key_bytes - HASH_BYTES
    fields_at = head_at + HASH_BYTES + 2
    template = b"".join(
        (start, before, bytes(_TAG_BYTES), b"}", keyspace, bytes(HASH_BYTES), b"\r\n", _FIELD_WORD * CHAIN_GROUP_CHUNKS)
    )
    chunks = np.frombuffer(hashes, np.uint8).reshape(count, CHAIN_GROUP_CHUNKS, HASH_BYTES)
    heads = chunks[:, 0]
    ranges = (heads[:, -2].astype(np.uint16) << 4) | (heads[:, -1] >> 4)  # range_of
    packed = np.empty((count, len(template)), np.uint8)
    packed[:] = np.frombuffer(template, np.uint8)
    tag_at = len(start) + len(before)
    packed[:, tag_at : tag_at + _TAG_BYTES] = _TAGS[ranges]
    packed[:, head_at : head_at + HASH_BYTES] = heads
    words = packed[:, fields_at:].reshape(count, CHAIN_GROUP_CHUNKS, len(_FIELD_WORD))  # a view
    words[:, :, _FIELD_AT : _FIELD_AT + FIELD_BYTES] = chunks[:, :, :FIELD_BYTES]
    joined, size = packed.tobytes(), len(template)
    commands = [joined[at : at + size] for at in range(0, len(joined), size)]
    key_at = len(start)
    return commands, [command[key_at : key_at + key_bytes] for command in commands]
