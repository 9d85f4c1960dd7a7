"""Calls from lightllm's other processes to the one that owns the ledger: JSON over a unix socket, answered in order.

A frame is its length (u32, little endian) and that many bytes. The server's first frame names the owner, and each start
of one has another name. A request is [name, arguments], an answer [true, result] or [false, message].
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from kvpool.core.errors import InvalidRequest, KvPoolError, ServiceUnavailable

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_FRAME_BYTES_MAX = 64 << 20
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TRUSTED_USERS = (0,)  # beside this process's own
Handler = Callable[[str, list[Any]], Any]


class CallServer:
    """Serves each connection in a thread of its own; the socket is this user's only."""

    def __init__(self, path: str, connected: Callable[[int], Handler | None]) -> None:
        """connected: what handles the calls of a process, by its id; None if it is gone already."""
        self._path, self._connected = path, connected
        self._name = secrets.token_hex(16)
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
        try:
            with connection:
                handle = self._connected(_peer_process(connection))
                if handle is None:
                    return
                _write(connection, json.dumps(self._name).encode())
                while (frame := _read(connection)) is not None:
                    _write(connection, _answer(handle, frame))
        except (OSError, InvalidRequest) as error:
            _log.debug("kvpool: a connection of lightllm ended: %s", error)
        finally:
            self._open.discard(connection)

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
    """Calls over one connection, one at a time; made again after a break, and after a fork. Thread-safe.

    It stays with the owner that it met first: page numbers of that one mean other pages to another.
    """

    def __init__(self, path: str, timeout_s: float = 10.0) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._socket: socket.socket | None = None
        self._owner = ""

    def call(self, name: str, *arguments: Any) -> Any:
        """raises: ServiceUnavailable when the owner is not there, InvalidRequest for what it refuses."""
        if os.getpid() != self._pid:  # the connection is the parent's, and a thread of it may have had the lock
            self._lock, self._pid = threading.Lock(), os.getpid()
            self._drop()
        with self._lock:
            try:
                connection = self._connect()
                _write(connection, json.dumps([name, arguments]).encode())
                frame = _read(connection)
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

    def _connect(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self._timeout_s)
        self._socket.connect(self._path)
        _peer_process(self._socket)
        hello = _read(self._socket)
        if hello is None:
            raise ConnectionResetError("it hung up")
        owner = str(json.loads(hello))
        self._owner = self._owner or owner
        if owner != self._owner:
            self._drop()
            raise ServiceUnavailable("the owner of the CPU cache is another one than before; restart this process")
        return self._socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _answer(handle: Handler, frame: bytes) -> bytes:
    try:
        name, arguments = json.loads(frame)
        return json.dumps([True, handle(name, arguments)]).encode()
    except (KvPoolError, ValueError, TypeError) as error:
        return json.dumps([False, str(error)]).encode()
    except Exception as error:
        _log.exception("kvpool: a call of lightllm failed")
        return json.dumps([False, repr(error)]).encode()


def _peer_process(connection: socket.socket) -> int:
    """The id of the process at the other end. raises: PermissionError for another user's."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid not in (os.geteuid(), *_TRUSTED_USERS):
        raise PermissionError(f"the socket belongs to user {uid}, process {pid}")
    return int(pid)


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
