"""Frames of the raw unix socket over which processes hand each other file descriptors.

gRPC passes no descriptors, so arena segments, session files and engine caches travel here. One exchange a connection:
the client sends one request frame, the server one reply frame, and both close. Little endian, no pickle.

Request, 56 bytes: magic, version u8, kind u8, 2 zero bytes, token (32 bytes, one-time, from the gRPC session),
id u64, size u64 (OFFER only, else 0). An OFFER carries exactly one descriptor, a FETCH none.

Reply, 28 bytes: magic, version u8, ok u8, 2 zero bytes, size u64, 8 zero bytes, reason length u16, message
length u16; then reason (ASCII) and message (UTF-8), both empty when ok. The reply to a FETCH that is ok carries
exactly one descriptor, any other reply none. Descriptors travel with the first byte of their frame.
"""

import enum
import struct
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import InvalidRequest

TOKEN_BYTES: Final = 32
MAX_REASON_BYTES: Final = 64
MAX_MESSAGE_BYTES: Final = 1024

_MAGIC: Final = b"KVFD"
_VERSION: Final = 1
_REQUEST: Final = struct.Struct("<4sBB2x32sQQ")
_REPLY: Final = struct.Struct("<4sBB2xQ8xHH")

REQUEST_BYTES: Final = _REQUEST.size
REPLY_HEADER_BYTES: Final = _REPLY.size


class FdKind(enum.IntEnum):
    """What a client wants."""

    FETCH = 1  # a descriptor of the server's
    OFFER = 2  # the server to take a descriptor


@dataclass(frozen=True, slots=True)
class FdRequest:
    """A request frame."""

    kind: FdKind
    token: bytes  # TOKEN_BYTES
    id: int  # names the object, within the token's session
    size_bytes: int = 0  # of the offered object; 0 for FETCH


@dataclass(frozen=True, slots=True)
class FdReplyHeader:
    """The fixed part of a reply frame."""

    ok: bool
    size_bytes: int
    reason_bytes: int
    message_bytes: int


def pack_request(request: FdRequest) -> bytes:
    """Raises InvalidRequest for a token or number that does not fit its field."""
    if len(request.token) != TOKEN_BYTES:
        raise InvalidRequest(f"a descriptor token has {TOKEN_BYTES} bytes, got {len(request.token)}")
    try:
        return _REQUEST.pack(_MAGIC, _VERSION, request.kind, request.token, request.id, request.size_bytes)
    except struct.error as error:
        raise InvalidRequest(f"descriptor id and size must be unsigned 64 bit numbers: {error}") from error


def unpack_request(frame: bytes) -> FdRequest:
    """Read exactly REQUEST_BYTES. Raises InvalidRequest for anything that `pack_request` would not have written."""
    magic, version, kind, token, number, size_bytes = _REQUEST.unpack(frame)
    if magic != _MAGIC or version != _VERSION:
        raise InvalidRequest(f"not a version {_VERSION} descriptor request; client and server must be of one version")
    if kind not in tuple(FdKind):
        raise InvalidRequest(f"unknown kind of descriptor request {kind}")
    return FdRequest(FdKind(kind), token, number, size_bytes)


def pack_reply(size_bytes: int) -> bytes:
    """The reply to a request that was granted."""
    return _REPLY.pack(_MAGIC, _VERSION, 1, size_bytes, 0, 0)


def pack_refusal(reason: str, message: str) -> bytes:
    """The reply to a request that failed: a KvPoolError's reason and message, cut to the frame's limits."""
    reason_data = reason.encode("ascii", "replace")[:MAX_REASON_BYTES]
    message_data = message.encode()[:MAX_MESSAGE_BYTES]
    return _REPLY.pack(_MAGIC, _VERSION, 0, 0, len(reason_data), len(message_data)) + reason_data + message_data


def unpack_reply_header(frame: bytes) -> FdReplyHeader:
    """Read exactly REPLY_HEADER_BYTES. Raises InvalidRequest when no kvpool server wrote this."""
    magic, version, ok, size_bytes, reason_bytes, message_bytes = _REPLY.unpack(frame)
    if magic != _MAGIC or version != _VERSION or reason_bytes > MAX_REASON_BYTES or message_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"not a version {_VERSION} descriptor reply; client and server must be of one version")
    return FdReplyHeader(ok == 1, size_bytes, reason_bytes, message_bytes)
