"""The identity of a node: its data directory with a lock and a node id, and the machine that it runs on."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

from kvpool.core.errors import StartupFailed


class DataDirectory:
    """Locked for as long as the process runs, so that two processes never share a node id or what lies beside it."""

    def __init__(self, path: Path, owner: str) -> None:
        """owner: what a process that has the directory is called. Raises StartupFailed naming the path and the cure."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(
                f"data_dir {path} cannot be used ({error.strerror}); make it writable or configure another"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise StartupFailed(f"data_dir {path} is in use by another {owner}; configure another") from None
        self.node_id = _node_id(path / "node-id")

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._lock_fd)


def _node_id(path: Path) -> bytes:
    try:
        if not path.exists():
            scratch = path.with_suffix(".tmp")
            with scratch.open("w", encoding="ascii") as file:
                file.write(f"{uuid.uuid4()}\n")
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
            sync_directory(path.parent)
        return uuid.UUID(path.read_text(encoding="ascii").strip()).bytes
    except OSError as error:
        raise StartupFailed(f"{path} cannot be read or written ({error.strerror}); repair the directory") from error
    except ValueError as error:
        raise StartupFailed(f"{path} holds no UUID; remove it to get a new node id") from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def boot_id() -> str:
    """Return the kernel's boot id: equal for all processes of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
