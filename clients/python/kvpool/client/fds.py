"""Client side of descriptor passing: fetch a descriptor from a server's unix socket, or offer it one.

The calls block for at most `timeout_s`; from asyncio use `asyncio.to_thread`. See kvpool.wire.fd_frames.
"""

import array
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.wire.fd_frames import (
    REPLY_HEADER_BYTES,
    FdKind,
    FdReplyHeader,
    FdRequest,
    pack_request,
    unpack_reply_header,
)
from kvpool.wire.status import error_from_reason

_UNIX_SCHEME: Final = "unix:"
_FD_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * _FD_BYTES)  # one is expected; more are received to be closed


@dataclass(frozen=True, slots=True)
class FetchedFd:
    """A descriptor that now belongs to the caller, who closes it."""

    fd: int  # close-on-exec
    size_bytes: int


def descriptor_path(endpoint: str, announced: str) -> str:
    """Where the descriptor socket lies for us that a server, reached at `endpoint`, announces as `announced`.

    Beside the socket that we reached it by, if it is there: containers mount a directory of sockets where they like,
    and what a server announces is the path that it knows itself.
    """
    if not endpoint.startswith(_UNIX_SCHEME) or not announced:
        return announced
    beside = Path(endpoint.removeprefix(_UNIX_SCHEME)).with_name(Path(announced).name)
    return str(beside) if beside.exists() else announced


def fetch_fd(path: Path | str, token: bytes, number: int, *, timeout_s: float = 5.0) -> FetchedFd:
    """The descriptor that the server at `path` calls `number` in the session of `token`.

    Raises the KvPoolError that the server answers, ServiceUnavailable when nothing answers, DeadlineExceeded.
    """
    with _Exchange(path, timeout_s) as exchange:
        exchange.send(FdRequest(FdKind.FETCH, token, number), None)
        header = exchange.receive()
        if len(exchange.fds) != 1:
            raise ServiceUnavailable(f"{path} sent {len(exchange.fds)} descriptors instead of one")
        return FetchedFd(exchange.fds.pop(), header.size_bytes)


def offer_fd(path: Path | str, token: bytes, number: int, size_bytes: int, fd: int, *, timeout_s: float = 5.0) -> None:
    """Hand the server at `path` a duplicate of `fd`, an object of `size_bytes` that the session calls `number`.

    Returns once the server has taken it; the caller keeps its own `fd`. Raises as `fetch_fd` does.
    """
    with _Exchange(path, timeout_s) as exchange:
        exchange.send(FdRequest(FdKind.OFFER, token, number, size_bytes), fd)
        exchange.receive()


class _Exchange:
    """One connection: a request, a reply. Descriptors that were not taken from `fds` are closed at the end."""

    def __init__(self, path: Path | str, timeout_s: float) -> None:
        self.fds: list[int] = []
        self._path = path
        self._timeout_s = timeout_s
        self._ends_at_s = time.monotonic() + timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> "_Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for fd in self.fds:
            os.close(fd)

    def send(self, request: FdRequest, fd: int | None) -> None:
        frame = pack_request(request)
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._limit()
            self._socket.connect(os.fspath(self._path))
            # A frame is far smaller than an empty socket buffer, so it goes out whole.
            self._socket.sendmsg([frame], ancillary)
        except OSError as error:
            raise self._failed(error) from error

    def receive(self) -> FdReplyHeader:
        """The reply's header, when it is ok. Raises the error in it otherwise."""
        header = unpack_reply_header(self._read(REPLY_HEADER_BYTES))
        if not header.ok:
            text = self._read(header.reason_bytes + header.message_bytes)
            reason, message = text[: header.reason_bytes], text[header.reason_bytes :]
            raise error_from_reason(reason.decode("ascii", "replace"), message.decode("utf-8", "replace"))
        return header

    def _read(self, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            try:
                self._limit()
                part, ancillary, _, _ = self._socket.recvmsg(
                    size_bytes - len(data), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise self._failed(error) from error
            self._keep_fds(ancillary)
            if not part:
                raise ServiceUnavailable(f"{self._path} closed the connection without an answer")
            data += part
        return data

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(array.array("i", data[: len(data) - len(data) % _FD_BYTES]))

    def _limit(self) -> None:
        remaining_s = self._ends_at_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining_s)

    def _failed(self, error: OSError) -> KvPoolError:
        if isinstance(error, TimeoutError | BlockingIOError):
            return DeadlineExceeded(f"{self._path} did not answer within {self._timeout_s:g} s")
        return ServiceUnavailable(f"{self._path} cannot be reached ({error.strerror})")
