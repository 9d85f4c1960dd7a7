"""How engines of a GPU, and other agents of the machine, find an agent: by a file beside its socket."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvpool_server.data_directory import boot_id

_log = logging.getLogger(__name__)


def gpu_agents_beside(socket: Path) -> set[str]:
    """Return the sockets of other agents with a GPU that announce themselves in the directory of an agent's socket."""
    own = Path(os.path.realpath(socket))  # agents reach no socket by a symbolic link
    machine, found = boot_id(), set[str]()
    for path in own.parent.glob("*.json"):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it ends, or begins
            continue
        beside = path.with_name(path.name.removesuffix(".json"))  # under the name that it has for us
        if isinstance(one, dict) and one.get("device") == "cuda" and one.get("boot_id") == machine and beside != own:
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
        "boot_id": boot_id(),
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
