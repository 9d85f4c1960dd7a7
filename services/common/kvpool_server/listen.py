"""Addresses a service can listen on, and clear words when it cannot."""

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvpool.core.errors import StartupFailed

_MAX_UNIX_PATH_BYTES: Final = 107  # sun_path without its final NUL

_WILDCARDS: Final = ("0.0.0.0", "::")

_REMEDIES: Final = {
    errno.EADDRINUSE: "it is in use; stop the process that listens there or configure another port",
    errno.EACCES: "permission denied; configure a port above 1023, or a directory this user may write",
    errno.EADDRNOTAVAIL: "no interface of this host has that address; configure one that exists, or 0.0.0.0",
    errno.ENOENT: "its directory does not exist; create it or configure another path",
    errno.EROFS: "its directory is read-only; configure another path",
}


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """host:port; port 0 asks for a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `host:port` or `[v6]:port`. Raises ValueError."""
        host, separator, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"expected host:port, got {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(name: str, text: str) -> TcpAddress:
    """Read the address of the setting `name`. Raises StartupFailed."""
    try:
        return TcpAddress.parse(text)
    except ValueError as error:
        raise StartupFailed(f"bad configuration: {name}: {error}") from error


def advertised_host(listen_host: str, advertise_host: str) -> str:
    """Where others reach a listener: its own address, or `advertise_host` if that is a wildcard."""
    return advertise_host if listen_host in _WILDCARDS else listen_host


def startup_error(address: object, error: OSError) -> StartupFailed:
    """Say which address cannot be listened on, why, and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, f"{os.strerror(error.errno) if error.errno else error}")
    return StartupFailed(f"cannot listen on {address}: {remedy}")


def check_tcp(address: TcpAddress) -> None:
    """Raise StartupFailed when `address` cannot be bound now.

    Asked before gRPC binds, because gRPC says only that it failed, and fills stderr with its own lines.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except socket.gaierror as error:
        raise StartupFailed(f"cannot listen on {address}: unknown host; configure an address of this host") from error
    except OSError as error:
        raise startup_error(address, error) from error


def claim_unix_path(path: Path) -> None:
    """Make room for a new socket at `path`: the socket of a dead process is removed, anything else is refused.

    Raises StartupFailed. Does not guard against two processes that start on one path in the same instant.
    """
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise StartupFailed(
            f"socket path {path} is longer than {_MAX_UNIX_PATH_BYTES} bytes; configure a shorter directory"
        )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return check_directory(path.parent)
    except OSError as error:
        raise startup_error(path, error) from error
    if not stat.S_ISSOCK(mode):
        raise StartupFailed(f"cannot listen on {path}: a file is in the way; move it or configure another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            pass
        except BlockingIOError:  # its queue is full, so someone is there
            raise startup_error(path, OSError(errno.EADDRINUSE, "")) from None
        except OSError as error:
            raise startup_error(path, error) from error
        else:
            raise startup_error(path, OSError(errno.EADDRINUSE, ""))
    try:
        path.unlink()
    except OSError as error:
        raise startup_error(path, error) from error


def check_directory(directory: Path) -> None:
    """Raise StartupFailed unless files can be made in `directory`."""
    if not directory.is_dir():
        raise StartupFailed(f"directory {directory} does not exist; create it or configure another")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StartupFailed(f"directory {directory} is not writable by uid {os.getuid()}; change its owner or mode")


def restricted_umask(group_access: bool = False) -> int:
    """Set the umask under which a new socket is usable by this user alone, or by its group too; returns the old one."""
    return os.umask(0o117 if group_access else 0o177)
