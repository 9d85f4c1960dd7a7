"""Bounds the memory that a message takes once it is decoded, before it is.

Two bytes on the wire, an item with nothing in it, become an object of about a hundred: a message within the limit of
the transport would take half a gigabyte before its items are counted.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvpool.core.errors import InvalidRequest

FREE_BYTES: Final = 512 << 10
"""A shorter message is not checked: it cannot take more than HEAVIEST_BYTES, whatever is in it."""

HEAVIEST_BYTES: Final = 32 << 20
"""What a decoded message may take. The largest that kvpool sends, 32,768 announced changes, takes 18 MiB."""

# More than the values take (tests/unit/wire/test_weight.py), so that the walk ends soon too.
_FIELD_BYTES: Final = 64
_MESSAGE_BYTES: Final = 128
_PACKED_BYTES: Final = 16  # of one number, which takes a byte or more on the wire
_LONGER_BYTES: Final = 32  # for each byte more of a key or a length, and for a longer number: reading them takes time
_MAX_DEPTH: Final = 100  # protobuf's own
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_LONG_VARINT: Final = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")


class _Field(NamedTuple):
    """What the content of a field with a length may be."""

    message: Descriptor | None = None
    is_packed: bool = False


def check_weight(data: bytes, message: Descriptor) -> None:
    """Raise InvalidRequest for a message that would take too much memory, or whose fields do not fit together."""
    if len(data) <= FREE_BYTES or _most(data, message) <= HEAVIEST_BYTES:
        return
    weight_bytes = decoded_size_bound(data, message, HEAVIEST_BYTES)
    if weight_bytes is None:
        raise InvalidRequest(f"{len(data)} bytes are no {message.name}")
    if weight_bytes > HEAVIEST_BYTES:
        raise InvalidRequest(
            f"a {message.name} of {len(data)} bytes would take more than {HEAVIEST_BYTES >> 20} MiB once read; "
            "split it into several with fewer items"
        )


def _most(data: bytes, message: Descriptor) -> int:
    """An upper bound that does not depend on the message's structure, found a hundred times as fast as by a walk.

    What takes more memory than its own bytes has a key, and each byte that is like the first of such a key may be one.
    """
    keys, has_packed = _keys(message)
    key_count = len(data) - len(data.translate(None, keys))
    return (_FIELD_BYTES + _MESSAGE_BYTES) * key_count + _PACKED_BYTES * len(data) * has_packed


def decoded_size_bound(data: bytes, message: Descriptor, most: int) -> int | None:
    """Bytes, estimated from above; some number beyond `most` once it is reached; None for what cannot be read.

    Fields that this release does not know count as values: what they hold stays as it is. Groups, which kvpool never
    sends, count as unreadable, because their content could not be bounded without reading it.
    """
    weight = 0
    outer: list[tuple[int, int, dict[int, _Field]]] = []
    at, end, fields = 0, len(data), _fields(message)
    while weight <= most:
        if at == end:
            if not outer:
                return weight
            at, end, fields = outer.pop()
            continue
        weight += _FIELD_BYTES
        key, at = data[at], at + 1
        if key >= 0x80:
            start = at - 1
            key, at = _varint(data, start, end)
            weight += _LONGER_BYTES * (at - start - 1)
        kind = key & 7
        if kind == _VARINT:
            if at < end and data[at] < 0x80:
                at += 1
            else:
                found = _LONG_VARINT.match(data, at)
                at = found.end() if found is not None else end + 1
                weight += _LONGER_BYTES
        elif kind == _DELIMITED:
            if at < end and data[at] < 0x80:
                length, start = data[at], at + 1
            else:
                length, start = _varint(data, at, end)
                weight += _LONGER_BYTES * (start - at - 1)
            at = start + length
            field = fields.get(key >> 3)
            if field is not None and at <= end:
                if field.is_packed:
                    weight += _PACKED_BYTES * length
                elif field.message is not None:
                    weight += _MESSAGE_BYTES
                    outer.append((at, end, fields))
                    at, end, fields = start, at, _fields(field.message)
        else:
            at += {_FIXED64: 8, _FIXED32: 4}.get(kind, len(data))
        if at > end or len(outer) > _MAX_DEPTH:
            return None
    return weight


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; beyond `end` if it does not."""
    number = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            break
    return 0, end + 1


@cache  # descriptors are as many as the API has messages
def _fields(message: Descriptor) -> dict[int, _Field]:
    """By number, those whose content is more than one value."""
    found = {}
    for field in message.fields:
        if field.message_type is not None:
            found[field.number] = _Field(message=field.message_type)
        elif field.is_repeated and not _is_text(field):
            found[field.number] = _Field(is_packed=True)
    return found


@cache
def _keys(message: Descriptor) -> tuple[bytes, bool]:
    """What keys of messages and of repeated values begin with, in it and in what is in it; whether it has numbers."""
    begins, has_packed = set[int](), False
    known, unseen = {message.full_name}, [message]
    while unseen:
        for field in unseen.pop().fields:
            inner = field.message_type
            if inner is not None and inner.full_name not in known:
                known.add(inner.full_name)
                unseen.append(inner)
            if inner is not None or field.is_repeated:
                begins.add((field.number << 3 | _DELIMITED) & 0x7F)
            has_packed |= inner is None and field.is_repeated and not _is_text(field)
    return bytes(begins | {begin | 0x80 for begin in begins}), has_packed


def _is_text(field: FieldDescriptor) -> bool:
    return field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
