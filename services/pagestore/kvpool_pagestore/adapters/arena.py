"""Arena segments as files on a shared-memory file system, and the locks that tell whether a peer still maps them.

The files have names, not only descriptors, because an owner that restarts must find the memory its peers still map.
Names also tell which prepared segments no peer can map: those of a process that was killed are freed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kvpool.core.errors import ArenaFull, StartupFailed
from kvpool_pagestore.ports import SessionLocks

_log = logging.getLogger(__name__)

_PREFIX = "segment-"
_UNSHARED = ".unshared"  # ends the name of a prepared segment until a peer gets its descriptor
_LOCK_NAME = "lock"
_SWEEP_PATIENCE_S = 1.0
_NODE_DIRECTORY = re.compile(r"kvpool-[0-9a-f]{32}")
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_PREPARED_AT_ONCE_BYTES = 64 << 20  # some tens of milliseconds on one thread: how soon preparing ends when it is to
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGES_ASKED_FOR = ("[always]", "[within_size]", "[advise]")
_FREED_AT_ONCE = 8  # segments
_MADV_REMOVE = 9
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14

# Called directly, because mmap.madvise holds the GIL for as long as the kernel fills pages.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """An open segment."""

    path: Path
    fd: int
    memory: mmap.mmap
    view: memoryview


class TmpfsArena:
    """Implements ports.Arena in one directory, which it locks: two owners must never share it.

    directory: on a shared-memory file system; made if needed, mode 0700. It holds the session files too, so that they
    live exactly as long as the memory they speak of.
    """

    def __init__(self, directory: Path, locks: SessionLocks) -> None:
        self._directory = directory
        self._locks = locks
        self._lock_fd = -1
        self._open: dict[int, _Mapping] = {}
        self._old: dict[Path, int] = {}  # descriptors of segments of an earlier process

    def open(self, capacity_bytes: int) -> None:
        """Take the directory and find what an earlier process left. Raises StartupFailed naming the cure."""
        directory = self._directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _lock(self._lock_fd)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise StartupFailed(f"arena {directory} is in use by another pagestore; stop it first") from error
        except OSError as error:
            raise StartupFailed(f"cannot use {directory} for the arena ({error}); configure --shm-dir") from error
        for path in sorted(directory.glob(f"{_PREFIX}*")):
            # Opened, so that the memory can be counted for as long as it exists.
            self._old[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._check_room(capacity_bytes)

    def sweep_abandoned(self) -> int:
        """Empty the arenas beside this one whose owner and peers are all gone: how many.

        A node that was killed and whose data directory was removed never comes back to do it, and shared memory has no
        other end than a reboot. The lock of each is held meanwhile; directory and lock file stay, for an owner that
        starts in this very moment.
        """
        swept = 0
        for sibling in self._directory.parent.glob("kvpool-*"):
            if sibling == self._directory or _NODE_DIRECTORY.fullmatch(sibling.name) is None:
                continue
            try:
                swept += self._sweep(sibling)
            except OSError as error:  # another user's, or gone meanwhile
                _log.info("the abandoned arena %s is left alone: %s", sibling, error)
        return swept

    @property
    def old_bytes(self) -> int:
        """Memory of the segments that an earlier process left behind."""
        return sum(os.fstat(fd).st_size for fd in self._old.values())

    def old_sessions(self) -> list[bytes]:
        """Sessions of an earlier process whose files are there."""
        return [bytes.fromhex(name) for name in self._locks.list_session_files(self._directory)]

    def create_segment(self, segment_id: int, size_bytes: int) -> None:
        path = self._directory / f"{_PREFIX}{segment_id:016x}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserves the memory now. A file that is merely long would end its mappers by SIGBUS when memory runs out.
            os.posix_fallocate(fd, 0, size_bytes)
            memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(fd)
            path.unlink()
            if error.errno in _NO_ROOM:
                raise self._no_room(size_bytes) from error
            raise
        self._open[segment_id] = _Mapping(path, fd, memory, memoryview(memory))

    def prepare_segment(self, segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        path = self._directory / f"{_PREFIX}{segment_id:016x}{_UNSHARED}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
            memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            mapping = _Mapping(path, fd, memory, memoryview(memory))
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        try:
            made = _populate(mapping, is_wanted)
        except OSError as error:
            _discard(mapping)
            if error.errno in _NO_ROOM:
                raise self._no_room(size_bytes) from error
            raise
        if made:
            self._open[segment_id] = mapping
        else:
            _discard(mapping)
        return made

    def view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        return self._open[segment_id].view[offset : offset + size_bytes]

    def descriptor(self, segment_id: int) -> int:
        mapping = self._open[segment_id]
        if mapping.path.suffix == _UNSHARED:
            shared = mapping.path.with_suffix("")
            mapping.path.rename(shared)
            mapping = self._open[segment_id] = replace(mapping, path=shared)
        return mapping.fd

    def destroy_segment(self, segment_id: int) -> None:
        _discard(self._open.pop(segment_id))

    def create_session_file(self, session_id: bytes) -> int:
        return self._locks.create_session_file(self._directory, session_id.hex())

    def gone_sessions(self, session_ids: Sequence[bytes]) -> Sequence[bytes]:
        return [one for one in session_ids if not self._locks.peer_alive(self._directory, one.hex())]

    def forget_sessions(self, session_ids: Sequence[bytes]) -> None:
        for session_id in session_ids:
            self._locks.remove_session_file(self._directory, session_id.hex())

    def destroy_unshared_segments(self) -> int:
        before_bytes = self.old_bytes
        self._destroy_old([path for path in self._old if path.suffix == _UNSHARED])
        return before_bytes - self.old_bytes

    def destroy_old_segments(self) -> None:
        self._destroy_old(list(self._old))

    def close(self, *, remove: bool) -> None:
        """Unmap everything and let go of the directory. Idempotent.

        remove: also delete the segments. Only when no peer can map them; else the next start counts them.
        """
        if self._lock_fd < 0:
            return
        if remove:
            with ThreadPoolExecutor(_FREED_AT_ONCE) as pool:
                list(pool.map(_free_memory, self._open.values()))
        for segment_id in list(self._open):
            if remove:
                self.destroy_segment(segment_id)
            else:
                mapping = self._open.pop(segment_id)
                os.close(mapping.fd)
                mapping.view.release()
                _unmap(mapping)
        if remove:
            self.destroy_old_segments()
            self.forget_sessions(self.old_sessions())
        for fd in self._old.values():
            os.close(fd)
        self._old.clear()
        if remove:
            (self._directory / _LOCK_NAME).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody else keeps something there
                self._directory.rmdir()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _destroy_old(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        with ThreadPoolExecutor(_FREED_AT_ONCE) as pool:
            list(pool.map(os.close, map(self._old.__getitem__, paths)))  # the last reference: frees the memory
        for path in paths:
            del self._old[path]

    def _no_room(self, size_bytes: int) -> ArenaFull:
        return ArenaFull(
            f"{self._directory} has no room for {size_bytes} bytes more; grow /dev/shm or lower --arena-bytes"
        )

    def _sweep(self, sibling: Path) -> bool:
        segments = list(sibling.glob(f"{_PREFIX}*"))
        if not segments:
            return False
        lock_fd = os.open(sibling / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sessions = self._locks.list_session_files(sibling)
            if any(self._locks.peer_alive(sibling, session_id) for session_id in sessions):
                return False
            for segment in segments:
                segment.unlink()
            for session_id in sessions:
                self._locks.remove_session_file(sibling, session_id)
        except BlockingIOError:  # its owner lives
            return False
        finally:
            os.close(lock_fd)
        _log.warning("%d segments of the abandoned arena %s were removed", len(segments), sibling)
        return True

    def _check_room(self, capacity_bytes: int) -> None:
        """Memory is reserved segment by segment, so a budget that can never be filled is refused at once."""
        info = os.statvfs(self._directory)
        free_bytes = info.f_bavail * info.f_frsize + self.old_bytes
        if free_bytes < capacity_bytes:
            self.close(remove=False)
            raise StartupFailed(
                f"{self._directory} has {free_bytes} bytes free, the arena wants {capacity_bytes}; "
                "grow /dev/shm or lower --arena-bytes"
            )


def _lock(fd: int) -> None:
    """Raises BlockingIOError if another owner lives. A neighbour that sweeps holds the lock for a moment only."""
    deadline_s = time.monotonic() + _SWEEP_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_SWEEP_PATIENCE_S / 50)  # at start, before anything is served
        else:
            return


def _populate(mapping: _Mapping, is_wanted: Callable[[], bool]) -> bool:
    """Put all memory of a segment in place, zeroed and mapped here, piece by piece. False if it is not wanted any more.

    The memory is of the NUMA node of the calling thread. A kernel that cannot populate leaves it reserved. Raises
    OSError with ENOSPC when there is not enough of it.
    """
    size_bytes = len(mapping.memory)
    first = ctypes.c_char.from_buffer(mapping.memory)  # keeps the mapping from being closed meanwhile
    address = ctypes.addressof(first)
    # Small pages come faster if they are reserved first, 19 instead of 13 GB/s on 8 threads; huge ones would not come.
    huge = _huge_pages_may_be_asked_for() and not _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
    try:
        for offset in range(0, size_bytes, _PREPARED_AT_ONCE_BYTES):
            if not is_wanted():
                return False
            piece_bytes = min(_PREPARED_AT_ONCE_BYTES, size_bytes - offset)
            if huge:
                _libc.madvise(address + offset, piece_bytes, _MADV_POPULATE_WRITE)
            # Reserves what is not there yet, or says why it cannot: populating does not tell no room from other faults.
            os.posix_fallocate(mapping.fd, offset, piece_bytes)
            if not huge:
                _libc.madvise(address + offset, piece_bytes, _MADV_POPULATE_WRITE)
    finally:
        del first
    return True


def _huge_pages_may_be_asked_for() -> bool:
    with contextlib.suppress(OSError):
        return any(one in _HUGE_PAGES.read_text() for one in _HUGE_PAGES_ASKED_FOR)
    return False


def _free_memory(mapping: _Mapping) -> None:
    """Give the pages of a segment back while it is mapped: unmapping does it too, one segment after another."""
    first = ctypes.c_char.from_buffer(mapping.memory)
    _libc.madvise(ctypes.addressof(first), len(mapping.memory), _MADV_REMOVE)


def _discard(mapping: _Mapping) -> None:
    """Give a segment's memory back."""
    mapping.path.unlink()
    os.close(mapping.fd)
    mapping.view.release()
    _unmap(mapping)


def _unmap(mapping: _Mapping) -> None:
    try:
        mapping.memory.close()
    except BufferError:
        # Someone still looks at a slot, a traceback perhaps; the mapping ends with the last such view.
        _log.warning("segment %s is unmapped late: a view of it is still held", mapping.path.name)
