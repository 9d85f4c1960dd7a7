"""Codec of the bulk page frames: the proto wire format of PageFrame and WritePagesRequest around raw buffers.

The payload piece (`data`, field 15) is the last field, so that a sender joins a small stock-encoded head with a view of
the arena (one copy), and a receiver views the piece inside the received bytes (none). What travels is exactly what
protobuf would write; whatever is arranged differently on arrival (fields out of order, a repeated `data`, groups) is
legal protobuf too and is left to the stock parser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvpool.core.errors import InvalidRequest
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.weight import check_weight

MIN_FRAME_BYTES: Final = 64 << 10
MAX_FRAME_BYTES: Final = 4 << 20
DEFAULT_FRAME_BYTES: Final = 1 << 20
MAX_MESSAGE_BYTES: Final = MAX_FRAME_BYTES + (64 << 10)
"""Limit for grpc.max_receive_message_length on bulk channels and servers: the largest piece and its head."""

_TAIL_BYTES: Final = 32 << 10
_TAIL_SHARE: Final = 32
"""The end of a page goes with the piece before it if it is at most so long, and such a part of a frame: header and sums
make a page of 2 MiB a few bytes longer than two frames of 1 MiB, and a third frame would cost as much as those."""

_LAST_FIELD: Final = 15  # `data` of PageFrame, `frame` of WritePagesRequest
_LENGTH_DELIMITED: Final = 2
_LAST_TAG: Final = bytes([_LAST_FIELD << 3 | _LENGTH_DELIMITED])
_MAX_VARINT_BYTES: Final = 10
_MAX_HEAD_FIELDS: Final = 64  # a head has seven; longer ones are left to the stock parser

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BulkFrame:
    """A PageFrame taken apart: `head` is the message without `data`, `data` the piece (a flat byte view)."""

    head: pb.PageFrame
    data: Buffer = b""


def page_pieces(page_bytes: int, frame_bytes: int) -> Iterator[tuple[int, int]]:
    """Where each piece of a page begins and ends."""
    begin, tail_bytes = 0, min(_TAIL_BYTES, frame_bytes // _TAIL_SHARE)
    while begin < page_bytes:
        end = begin + frame_bytes
        if page_bytes - end <= tail_bytes:
            end = page_bytes
        yield begin, end
        begin = end


def encode_page_frame(frame: BulkFrame) -> bytes:
    """The wire bytes of a PageFrame. `head.data` must be unset."""
    head = frame.head.SerializeToString()
    if not len(frame.data):  # proto3 leaves an empty field out
        return head
    return b"".join((head, _LAST_TAG, varint(len(frame.data)), frame.data))


def decode_page_frame(message: bytes) -> BulkFrame:
    """Take a PageFrame apart; `data` views `message`. Raises InvalidRequest."""
    return _frame_from(memoryview(message))


def encode_write_request(request: BulkFrame | pb.WritePagesOpen) -> bytes:
    """The wire bytes of a WritePagesRequest."""
    if isinstance(request, pb.WritePagesOpen):
        return pb.WritePagesRequest(open=request).SerializeToString()
    head, data = request.head.SerializeToString(), request.data
    if not len(data):
        return b"".join((_LAST_TAG, varint(len(head)), head))
    data_prefix = _LAST_TAG + varint(len(data))
    frame_bytes = len(head) + len(data_prefix) + len(data)
    return b"".join((_LAST_TAG, varint(frame_bytes), head, data_prefix, data))


def decode_write_request(message: bytes) -> BulkFrame | pb.WritePagesOpen:
    """Take a WritePagesRequest apart: a frame's `data` views `message`. Raises InvalidRequest."""
    view = memoryview(message)
    if message[:1] == _LAST_TAG and (length := _read_varint(view, 1)) is not None:
        size, start = length
        if start + size == len(view):
            return _frame_from(view[start:])
    check_weight(message, pb.WritePagesRequest.DESCRIPTOR)
    try:
        request = pb.WritePagesRequest.FromString(message)
    except DecodeError as error:
        raise InvalidRequest(f"not a WritePagesRequest: {error}") from error
    kind = request.WhichOneof("kind")
    if kind == "open":
        return request.open
    if kind == "frame":
        return _without_data(request.frame)
    raise InvalidRequest("a WritePagesRequest must carry `open` or `frame`")


def _frame_from(view: memoryview) -> BulkFrame:
    start = _find_last_field(view)
    try:
        if start is None:
            return _without_data(pb.PageFrame.FromString(bytes(view)))
        head_bytes, data_start = start
        head = pb.PageFrame.FromString(bytes(view[:head_bytes]))
        return BulkFrame(head, view[data_start:])
    except DecodeError as error:
        raise InvalidRequest(f"not a PageFrame: {error}") from error


def _without_data(frame: pb.PageFrame) -> BulkFrame:
    data = frame.data
    frame.ClearField("data")
    return BulkFrame(frame, data)


def _find_last_field(view: memoryview) -> tuple[int, int] | None:
    """Bytes before field 15 and the start of its value, if it is length-delimited and ends the message; else None.

    Skips over the fields before it; that they are well-formed is checked by the stock parser, which gets them.
    """
    position = 0
    for _ in range(_MAX_HEAD_FIELDS):
        field_start = position
        tag = _read_varint(view, position)
        if tag is None:
            return None
        value, position = tag
        field, wire_type = value >> 3, value & 7
        if wire_type == 0:
            skipped = _read_varint(view, position)
            if skipped is None:
                return None
            position = skipped[1]
        elif wire_type == _LENGTH_DELIMITED:
            length = _read_varint(view, position)
            if length is None:
                return None
            size, position = length
            if field == _LAST_FIELD:
                return (field_start, position) if position + size == len(view) else None
            position += size
        elif wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
        else:  # groups and unknown wire types
            return None
        if field == _LAST_FIELD or field == 0:
            return None
    return None


def _read_varint(view: memoryview, position: int) -> tuple[int, int] | None:
    """(value, position after it), or None if it is cut off or too long."""
    value = shift = 0
    for byte in view[position : position + _MAX_VARINT_BYTES]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return None


def varint(value: int) -> bytes:
    """A number >= 0 as protobuf writes it."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
