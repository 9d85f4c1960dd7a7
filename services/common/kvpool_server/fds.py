"""Server side of descriptor passing: a raw unix socket on the event loop. See kvpool.wire.fd_frames.

Nothing here trusts a peer: `accept` lets in our own user, or with group access those who may write to the socket; a
frame has a fixed size, a connection has a time limit and carries one exchange, connections are counted, and every
descriptor that arrives is either handed to the owner or closed.
"""

import array
import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.wire.fd_frames import (
    REQUEST_BYTES,
    FdKind,
    FdRequest,
    pack_refusal,
    pack_reply,
    unpack_request,
)
from kvpool_server.listen import claim_unix_path, restricted_umask, startup_error
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

_UCRED: Final = struct.Struct("3i")  # pid, uid, gid
_FD_BYTES: Final = array.array("i").itemsize
# Room for a few more than the one descriptor that is allowed; beyond it the kernel installs none.
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(8 * _FD_BYTES)
_BACKLOG: Final = 64


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who connected, as the kernel says. The pid is 0 when it is not visible in this PID namespace."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class FdGrant:
    """A descriptor for a peer. The server duplicates it into the peer, and closes its own if `close_after`."""

    fd: int
    size_bytes: int
    close_after: bool = False


# Both are called on the event loop and must not block. They refuse by raising a KvPoolError, which the peer gets.
# A token is a secret: compare it with hmac.compare_digest.
FetchHandler = Callable[[PeerCredentials, bytes, int], FdGrant]  # peer, token, id
# peer, token, id, size in bytes, descriptor; owns the descriptor once it returns, never when it raises.
OfferHandler = Callable[[PeerCredentials, bytes, int, int, int], None]


class FdServer:
    """Listens on a unix socket of mode 0600 and hands descriptors out and in.

    `on_offer` None: offers are refused. `group_access`: not our own user alone, but those whom the kernel lets write
    to a socket of mode 0660. Use from one event loop.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_fetch: FetchHandler | None = None,
        on_offer: OfferHandler | None = None,
        group_access: bool = False,
        connection_limit: int = 64,
        timeout_s: float = 5.0,
    ) -> None:
        self._path = path
        self._on_fetch = on_fetch
        self._on_offer = on_offer
        self._group_access = group_access
        self._connection_limit = connection_limit
        self._timeout_s = timeout_s
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Bind and listen; call on the event loop. Raises StartupFailed."""
        claim_unix_path(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        old_umask = restricted_umask(self._group_access)
        try:
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise startup_error(self._path, error) from error
        finally:
            os.umask(old_umask)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening, drop every connection and remove the socket file. Idempotent."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for connection in list(self._connections):
            connection.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        assert self._listener is not None, "the reader is removed before the listener"
        try:
            peer_socket, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, say: the peer stays in the backlog, so look again only after a while.
            _log.error("cannot accept a descriptor connection", extra=fields(error=error))
            self._pause_accepting()
            return
        peer_socket.setblocking(False)
        peer = _credentials(peer_socket)
        allowed = self._group_access or peer.uid == os.getuid()
        if not allowed or len(self._connections) >= self._connection_limit:
            _log.warning("descriptor connection refused", extra=fields(pid=peer.pid, uid=peer.uid))
            peer_socket.close()
            return
        self._connections.add(_Connection(peer_socket, peer, self._timeout_s, self._answer, self._connections.discard))

    def _pause_accepting(self) -> None:
        loop = asyncio.get_running_loop()
        listener = self._listener
        if listener is None:
            return
        loop.remove_reader(listener)

        def resume() -> None:
            if self._listener is listener:
                loop.add_reader(listener, self._accept)

        loop.call_later(0.1, resume)

    def _answer(self, peer: PeerCredentials, request: FdRequest, fds: list[int]) -> FdGrant | None:
        """Do what a request asks; takes out of `fds` what has an owner now. Raises KvPoolError."""
        if request.kind is FdKind.FETCH:
            if fds:
                raise InvalidRequest("a FETCH carries no descriptor")
            if self._on_fetch is None:
                raise InvalidRequest("this socket hands out no descriptors")
            return self._on_fetch(peer, request.token, request.id)
        if len(fds) != 1:
            raise InvalidRequest(f"an OFFER carries exactly one descriptor, got {len(fds)}")
        if self._on_offer is None:
            raise InvalidRequest("this socket takes no descriptors")
        self._on_offer(peer, request.token, request.id, request.size_bytes, fds[0])
        fds.clear()
        return None


Answer = Callable[[PeerCredentials, FdRequest, list[int]], FdGrant | None]


class _Connection:
    """One exchange with one peer: reads a frame, answers, closes."""

    def __init__(
        self,
        peer_socket: socket.socket,
        peer: PeerCredentials,
        timeout_s: float,
        answer: Answer,
        on_close: "Callable[[_Connection], None]",
    ) -> None:
        self._socket = peer_socket
        self._peer = peer
        self._answer = answer
        self._on_close = on_close
        self._frame = b""
        self._fds: list[int] = []  # received and not yet owned by anyone else
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self.close)
        self._loop.add_reader(peer_socket, self._readable)

    def close(self) -> None:
        """Drop the connection and every descriptor that was not taken."""
        self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._on_close(self)

    def _readable(self) -> None:
        try:
            part, ancillary, flags, _ = self._socket.recvmsg(
                REQUEST_BYTES - len(self._frame), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(array.array("i", data[: len(data) - len(data) % _FD_BYTES]))
        self._frame += part
        # An honest peer sends at most one descriptor, so a truncated list or a longer one is the end at once.
        if not part or flags & socket.MSG_CTRUNC or len(self._fds) > 1:
            self.close()
        elif len(self._frame) == REQUEST_BYTES:
            self._finish()

    def _finish(self) -> None:
        grant: FdGrant | None = None
        try:
            try:
                grant = self._answer(self._peer, unpack_request(self._frame), self._fds)
                reply = pack_reply(grant.size_bytes if grant else 0)
            except KvPoolError as error:
                reply = pack_refusal(error.reason, error.message)
            except Exception:
                _log.exception("unexpected error in a descriptor request", extra=fields(pid=self._peer.pid))
                reply = pack_refusal(KvPoolError.reason, "internal error; the server's log has the details")
            self._send(reply, grant)
        finally:
            if grant is not None and grant.close_after:
                os.close(grant.fd)
            self.close()

    def _send(self, reply: bytes, grant: FdGrant | None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [grant.fd]))] if grant else []
        try:
            # The socket is fresh and a reply small, so it never fills the buffer.
            self._socket.sendmsg([reply], rights)
        except OSError as error:
            _log.warning("descriptor peer left before its answer", extra=fields(pid=self._peer.pid, error=error))


def _credentials(peer_socket: socket.socket) -> PeerCredentials:
    data = peer_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(data))
