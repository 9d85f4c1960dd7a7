"""Whether a service says that it serves, for the HEALTHCHECK of a container: `-m kvpool_server.health_probe ADDRESS`.

Exit code 0: SERVING; 1: anything else, one line on stderr says what. It is run every few seconds in every container,
and importing grpc costs more than all that an idle service does, so it speaks the one call of grpc.health.v1 by itself:
HTTP/2 without compression of headers, one stream, read until the answer. For the same reason it imports little, runs
without the site module and stands alone: `typing` and `runpy` would cost twice what the rest does.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

EXIT_SERVING = 0
EXIT_NOT_SERVING = 1
TIMEOUT_S = 3.0

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATH = "/grpc.health.v1.Health/Check"
_UNIX = "unix:"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_STATUS_NAMES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}

_FRAME_HEADER_BYTES = 9
_MAX_FRAME_BYTES = 1 << 14  # what a peer may send before it is given another limit
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM = _ACK = 0x1
_END_HEADERS = 0x4
_PADDED = 0x8
_STREAM = 1
_GRPC_PREFIX_BYTES = 5  # compressed flag and length


class ProbeFailed(Exception):
    """No answer that can be read; the message says why."""


def probe(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Name of the status of the server as a whole. Raises ProbeFailed.

    address: host:port, where a wildcard host means this machine, or unix:PATH.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        with _connect(address, timeout_s) as connection:
            connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _request())
            return _status_name(_read_answer(connection, deadline_s))
    except TimeoutError:
        raise ProbeFailed(f"no answer from {address} within {timeout_s} s") from None
    except OSError as error:
        raise ProbeFailed(f"cannot reach {address}: {error.strerror or error}") from error


def _connect(address: str, timeout_s: float) -> socket.socket:
    if address.startswith(_UNIX):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.removeprefix(_UNIX))
        except OSError:
            connection.close()
            raise
        return connection
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit():
        raise ProbeFailed(f"expected host:port or unix:path, got {address!r}")
    return socket.create_connection((_WILDCARDS.get(host, host), int(port)), timeout_s)


def _request() -> bytes:
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", _PATH),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    block = b"".join(_literal(name) + _literal(value)[1:] for name, value in headers)
    # The request names no service: the server as a whole, an empty message.
    message = bytes(_GRPC_PREFIX_BYTES)
    return _frame(_HEADERS, _END_HEADERS, _STREAM, block) + _frame(_DATA, _END_STREAM, _STREAM, message)


def _literal(text: str) -> bytes:
    """HPACK: a literal that is not indexed, its new name; without the first byte a value. Shorter than 127 bytes."""
    return bytes((0, len(text))) + text.encode("ascii")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _read_answer(connection: socket.socket, deadline_s: float) -> bytes:
    """The body of the response; empty if the server refused the call."""
    body = b""
    while True:
        header = _read(connection, _FRAME_HEADER_BYTES, deadline_s)
        length = int.from_bytes(header[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", header[3:])
        if length > _MAX_FRAME_BYTES:
            raise ProbeFailed(f"a frame of {length} bytes: this is not a gRPC server")
        payload = _read(connection, length, deadline_s)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY or (kind == _RST_STREAM and stream == _STREAM):
            raise ProbeFailed("the server ended the call")
        elif stream == _STREAM and kind == _DATA:
            body += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
        if stream == _STREAM and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return body


def _read(connection: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size_bytes:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        connection.settimeout(remaining_s)
        part = connection.recv(size_bytes - len(data))
        if not part:
            raise ProbeFailed("the server closed the connection")
        data += part
    return data


def _status_name(body: bytes) -> str:
    """Return the name of the status in a HealthCheckResponse, whose only field is 1."""
    message = body[_GRPC_PREFIX_BYTES:]
    if not body:
        return "refused"
    if len(body) < _GRPC_PREFIX_BYTES:
        raise ProbeFailed("the answer is not a message")
    if not message:  # the default is not sent
        return _STATUS_NAMES[0]
    if message[0] != 0x08 or len(message) != 2:
        raise ProbeFailed("the answer is not a HealthCheckResponse")
    return _STATUS_NAMES.get(message[1], f"status {message[1]}")


def main(argv: list[str], environ: dict[str, str] | os._Environ[str]) -> int:
    """argv: addresses, or names of variables that may hold one; the first that is there is asked."""
    addresses = [word if ":" in word else environ.get(word, "") for word in argv]
    address = next(filter(None, addresses), "")
    if not address:
        sys.stderr.write("usage: python -m kvpool_server.health_probe HOST:PORT | unix:PATH | VARIABLE ...\n")
        return EXIT_NOT_SERVING
    try:
        status = probe(address)
    except ProbeFailed as error:
        status = str(error)
    if status != "SERVING":
        sys.stderr.write(f"{status}\n")
        return EXIT_NOT_SERVING
    return EXIT_SERVING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
