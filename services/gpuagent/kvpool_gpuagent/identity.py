"""An agent's identity: its data directory with lock and node id, its host, and how engines of a GPU find it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from kvpool.core.errors import StartupFailed

_log = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
    return configured or _BOOT_ID.read_text().strip()


def gpu_agents_beside(socket: Path) -> set[str]:
    """Return the sockets of other agents with a GPU that announce themselves in the directory of an agent's socket."""
    own = Path(os.path.realpath(socket))  # agents reach no socket by a symbolic link
    boot_id, found = _BOOT_ID.read_text().strip(), set[str]()
    for path in own.parent.glob("*.json"):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it ends, or begins
            continue
        beside = path.with_name(path.name.removesuffix(".json"))  # under the name that it has for us
        if isinstance(one, dict) and one.get("device") == "cuda" and one.get("boot_id") == boot_id and beside != own:
            found.add(str(beside))
    return found


def announce(socket: Path, *, device: str, device_uuid: str, host_id: str) -> Callable[[], None]:
    """Announce to engines of this machine which GPU's agent listens on a socket, by a JSON file beside it.

    device: cpu or cuda. device_uuid: of the GPU; empty for cpu. returns: what takes the file away. An agent that cannot
    write it serves the engines that name it.
    """
    path = socket.with_name(f"{socket.name}.json").absolute()
    values = {
        "pid": os.getpid(),
        "socket": str(socket.absolute()),
        "device": device,
        "device_uuid": device_uuid,
        "host_id": host_id,
        "boot_id": _BOOT_ID.read_text().strip(),
    }
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        hidden.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        hidden.replace(path)
    except OSError as error:
        _log.warning("engines cannot find this agent by its GPU: %s cannot be written (%s)", path, error.strerror)

    def withdraw() -> None:
        path.unlink(missing_ok=True)

    return withdraw
