"""Calls from lightllm's other processes to the one that owns the ledger: JSON over a unix socket, answered in order.

A frame is its length (u32, little endian) and that many bytes. A request is [name, arguments], an answer [true, result]
or [false, message].
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from kvpool.core.errors import InvalidRequest, ServiceUnavailable

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_FRAME_BYTES_MAX = 64 << 20
Handler = Callable[[str, list[Any]], Any]


class CallServer:
    """Serves each connection in a thread of its own; the socket is this user's only."""

    def __init__(self, path: str, connected: Callable[[], tuple[Handler, Callable[[], None]]]) -> None:
        """connected: gives, for each connection, what handles its calls and what to do when it has ended."""
        self._path, self._connected = path, connected
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(128)
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="kvpool-lightllm", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="kvpool-lightllm", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        handle, ended = self._connected()
        try:
            with connection:
                while (frame := _read(connection)) is not None:
                    _write(connection, _answer(handle, frame))
        except (OSError, InvalidRequest) as error:
            _log.debug("kvpool: a connection of lightllm ended: %s", error)
        finally:
            self._open.discard(connection)
            ended()

    def close(self) -> None:
        """End all connections. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class CallClient:
    """Calls over one connection, one at a time; made again after a break. Thread-safe."""

    def __init__(self, path: str, timeout_s: float = 10.0) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def call(self, name: str, *arguments: Any) -> Any:
        """raises: ServiceUnavailable when the owner is not there, InvalidRequest for what it refuses."""
        with self._lock:
            try:
                if self._socket is None:
                    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    self._socket.settimeout(self._timeout_s)
                    self._socket.connect(self._path)
                _write(self._socket, json.dumps([name, arguments]).encode())
                frame = _read(self._socket)
            except OSError as error:
                self._drop()
                raise ServiceUnavailable(f"the owner of the CPU cache at {self._path} is away: {error}") from None
            if frame is None:
                self._drop()
                raise ServiceUnavailable(f"the owner of the CPU cache at {self._path} has ended")
        good, result = json.loads(frame)
        if not good:
            raise InvalidRequest(str(result))
        return result

    def close(self) -> None:
        """End the connection. Idempotent."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _answer(handle: Handler, frame: bytes) -> bytes:
    try:
        name, arguments = json.loads(frame)
        return json.dumps([True, handle(name, arguments)]).encode()
    except (InvalidRequest, ValueError, TypeError) as error:
        return json.dumps([False, str(error)]).encode()


def _read(connection: socket.socket) -> bytes | None:
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (size_bytes,) = _LENGTH.unpack(head)
    if size_bytes > _FRAME_BYTES_MAX:
        raise InvalidRequest(f"a frame of {size_bytes} bytes is too long")
    return _exactly(connection, size_bytes)


def _exactly(connection: socket.socket, size_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _write(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(frame)) + frame)
