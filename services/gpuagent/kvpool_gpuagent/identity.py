"""An agent's data directory: its lock and its node id."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

from kvpool.core.errors import StartupFailed


class DataDirectory:
    """Locked for as long as the process runs, so that two agents never share a node id."""

    def __init__(self, path: Path) -> None:
        """Raises StartupFailed naming the path and the cure."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(
                f"data_dir {path} cannot be used ({error.strerror}); make it writable or configure another"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise StartupFailed(f"data_dir {path} is in use by another agent; configure another") from None
        self.node_id = self._read_node_id(path / "node-id")

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    @staticmethod
    def _read_node_id(path: Path) -> bytes:
        if not path.exists():
            scratch = path.with_suffix(".tmp")
            scratch.write_text(f"{uuid.uuid4()}\n")
            scratch.replace(path)
        try:
            return uuid.UUID(path.read_text().strip()).bytes
        except ValueError as error:
            raise StartupFailed(f"{path} holds no UUID; remove it to get a new node id") from error


def host_identity(configured: str) -> str:
    """The configured host id, or the kernel's boot id: equal for all processes of this machine."""
    return configured or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
