"""Session files: a lock that the kernel drops when a peer process is gone.

The owner of the arena creates a file, locks it, and hands the open file description to the peer by SCM_RIGHTS; then
it closes its own copy. From then on the lock is held by exactly those processes that have the peer's descriptor. When
the last of them exits, however it ends, the kernel drops the lock, and the owner sees that on a fresh open. Works
across PID namespaces and restarts of the owner, and cannot mistake a reused pid for the peer.

Close the owner's copy with os.close, never LOCK_UN: that would unlock the description for the peer too.
"""

import fcntl
import os
import re
from pathlib import Path
from typing import Final

_SESSION_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
_PREFIX: Final = "session-"
_SUFFIX: Final = ".lock"


def session_path(directory: Path, session_id: str) -> Path:
    """Where the file of a session lies. Raises ValueError for an id that is not 1 to 64 of [0-9A-Za-z_-]."""
    if _SESSION_ID.fullmatch(session_id) is None:
        raise ValueError(f"session id must be 1 to 64 of [0-9A-Za-z_-], got {session_id!r}")
    return directory / f"{_PREFIX}{session_id}{_SUFFIX}"


def create_session_file(directory: Path, session_id: str) -> int:
    """A new descriptor (close-on-exec) that holds the session's lock; the caller owns it.

    Raises FileExistsError when the session already has a file: ids are used once.
    """
    path = session_path(directory, session_id)
    hidden = directory / f".new-{session_id}"
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Locked before it gets its name, so that no reader ever sees a session that seems dead.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(hidden, path)
    except BaseException:
        os.close(fd)
        raise
    finally:
        hidden.unlink()
    return fd


def peer_alive(directory: Path, session_id: str) -> bool:
    """Whether some process still has the session's descriptor. False when the file was removed."""
    try:
        fd = os.open(session_path(directory, session_id), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two callers who look at the same time do not take each other for the peer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def remove_session_file(directory: Path, session_id: str) -> None:
    """Forget the session. A file that is already gone is fine."""
    session_path(directory, session_id).unlink(missing_ok=True)


def list_session_files(directory: Path) -> list[str]:
    """The ids of all sessions that have a file, sorted; half-created ones of a crash are not among them."""
    ids: list[str] = []
    for entry in directory.iterdir():
        name = entry.name
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            ids.append(name.removeprefix(_PREFIX).removesuffix(_SUFFIX))
    return sorted(ids)
