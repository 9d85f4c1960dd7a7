"""Arena segments as sealed memory files, and the session files that show whether a peer still maps them.

A segment has no name: its memory lives for as long as this process or a peer has its descriptor or maps it. So that a
process that follows a killed one knows what peers keep alive, each session has a record of the segments that its peer
got, beside the file whose lock shows whether that peer lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.client.host_memory import cgroup_limit_bytes, meminfo
from kvpool.core.errors import ArenaFull, StartupFailed
from kvpool_server import flock

_log = logging.getLogger(__name__)

_LOCK_NAME = "lock"
_RECORD_PREFIX = "segments-"  # of the file that lists what a session's peer got
_RECORD: Final = struct.Struct("<QQ")  # segment id, size in bytes
# Peers can change neither a segment's size, which would end its mappers by SIGBUS, nor what is allowed with it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_SPARE_BYTES = 512 << 20  # left to others: the kernel kills processes for what a memory file takes beyond what there is
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

    segment_id: int
    fd: int
    memory: mmap.mmap
    view: memoryview


class MemfdArena:
    """Implements ports.Arena. Its session files lie in one directory, which it locks: two owners must never share it.

    directory: on a file system in memory, because session files are written on the event loop; made if needed, mode
    0700. It has to outlive the process, or segments that peers of a killed process map are not counted. root: where
    /proc and /sys are searched for.
    """

    def __init__(self, directory: Path, root: Path = Path("/")) -> None:
        self._directory = directory
        self._root = root
        self._lock_fd = -1
        self._open: dict[int, _Mapping] = {}
        self._recorded: dict[bytes, set[int]] = {}  # segments that peers got, by session

    def open(self, capacity_bytes: int) -> None:
        """Take the directory. Raises StartupFailed naming the cure, also for what the host's memory can never hold."""
        directory = self._directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise StartupFailed(f"arena {directory} is in use by another pagestore; stop it first") from error
        except OSError as error:
            raise StartupFailed(
                f"cannot use {directory} for session files ({error}); configure --session-dir"
            ) from error
        self._check_capacity(capacity_bytes)

    def old_sessions(self) -> dict[bytes, dict[int, int]]:
        """Sessions of an earlier process: sizes, by id, of the segments that the peer of each one got."""
        names = flock.list_session_files(self._directory)
        return {bytes.fromhex(name): self._read_record(bytes.fromhex(name)) for name in names}

    def create_segment(self, segment_id: int, size_bytes: int) -> None:
        def reserve(mapping: _Mapping) -> bool:
            self._check_memory(size_bytes)
            # Now, and not when it is touched, which would end the process that touches it when memory has run out.
            os.posix_fallocate(mapping.fd, 0, size_bytes)
            return True

        self._make(segment_id, size_bytes, reserve)

    def prepare_segment(self, segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        return self._make(segment_id, size_bytes, lambda mapping: _populate(mapping, is_wanted, self._check_memory))

    def view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        return self._open[segment_id].view[offset : offset + size_bytes]

    def descriptor(self, segment_id: int, session_id: bytes) -> int:
        mapping = self._open[segment_id]
        recorded = self._recorded.setdefault(session_id, set())
        if segment_id not in recorded:
            self._record(session_id, segment_id, len(mapping.memory))
            recorded.add(segment_id)
        return mapping.fd

    def destroy_segment(self, segment_id: int) -> None:
        _close(self._open.pop(segment_id))

    def create_session_file(self, session_id: bytes) -> int:
        return flock.create_session_file(self._directory, session_id.hex())

    def gone_sessions(self, session_ids: Sequence[bytes]) -> Sequence[bytes]:
        return [one for one in session_ids if not flock.peer_alive(self._directory, one.hex())]

    def forget_sessions(self, session_ids: Sequence[bytes]) -> None:
        for session_id in session_ids:
            self._recorded.pop(session_id, None)
            self._record_path(session_id).unlink(missing_ok=True)
            flock.remove_session_file(self._directory, session_id.hex())

    def close(self, *, remove: bool) -> None:
        """Unmap everything and let go of the directory. Idempotent.

        remove: also the memory and all session files. Only when no peer can map a segment; else the next start counts
        what peers got.
        """
        if self._lock_fd < 0:
            return
        if remove:
            with ThreadPoolExecutor(_FREED_AT_ONCE) as pool:
                list(pool.map(_free_memory, self._open.values()))
        for segment_id in list(self._open):
            _close(self._open.pop(segment_id))
        if remove:
            self.forget_sessions(list(self.old_sessions()))
            for record in self._directory.glob(f"{_RECORD_PREFIX}*"):
                record.unlink()
            (self._directory / _LOCK_NAME).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there are other files in it
                self._directory.rmdir()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _make(self, segment_id: int, size_bytes: int, fill: Callable[[_Mapping], bool]) -> bool:
        """A new segment, unless `fill` says that it is not wanted any more; nothing is left of it then."""
        mapping = _new_mapping(segment_id, size_bytes)
        is_made = False
        try:
            is_made = fill(mapping)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise ArenaFull(
                    f"there is no memory for {size_bytes} bytes more ({error}); lower --arena-bytes"
                ) from error
            raise
        finally:
            if is_made:
                self._open[segment_id] = mapping
            else:
                _close(mapping)
        return is_made

    def _check_capacity(self, capacity_bytes: int) -> None:
        """Memory files have no file system whose size bounds them: the host and its cgroups do."""
        facts, limit_bytes = meminfo(self._root), cgroup_limit_bytes(self._root)
        total_bytes, available_bytes = facts.get("MemTotal"), facts.get("MemAvailable")
        if limit_bytes is not None and limit_bytes < capacity_bytes:
            found = f"the memory limit of this cgroup is {limit_bytes}; raise it"
        elif total_bytes is not None and total_bytes < capacity_bytes:
            found = f"this host has {total_bytes} bytes of memory; take a larger one"
        else:
            old_bytes = sum(dict(pair for one in self.old_sessions().values() for pair in one.items()).values())
            if available_bytes is not None and available_bytes + old_bytes < capacity_bytes:
                _log.warning(
                    "arena_bytes is %d, but only %d bytes are available on this host (MemAvailable): segments are "
                    "refused while there is no memory for them; lower --arena-bytes",
                    capacity_bytes,
                    available_bytes,
                )
            return
        self.close(remove=False)
        raise StartupFailed(f"arena_bytes is {capacity_bytes}, but {found} or lower --arena-bytes")

    def _check_memory(self, size_bytes: int) -> None:
        available_bytes = meminfo(self._root).get("MemAvailable")
        if available_bytes is not None and available_bytes < size_bytes + _SPARE_BYTES:
            raise ArenaFull(
                f"{available_bytes} bytes of memory are available (MemAvailable): {size_bytes} more for the arena "
                f"would leave less than {_SPARE_BYTES}; lower --arena-bytes"
            )

    def _record_path(self, session_id: bytes) -> Path:
        return self._directory / f"{_RECORD_PREFIX}{session_id.hex()}"

    def _record(self, session_id: bytes, segment_id: int, size_bytes: int) -> None:
        """Note that the session's peer gets a segment, before it does. Not in the session file: the peer has that."""
        try:
            fd = os.open(self._record_path(session_id), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, _RECORD.pack(segment_id, size_bytes))
            finally:
                os.close(fd)
        except OSError as error:
            raise ArenaFull(
                f"{self._directory} has no room for session files ({error}); configure --session-dir"
            ) from error

    def _read_record(self, session_id: bytes) -> dict[int, int]:
        try:
            packed = self._record_path(session_id).read_bytes()
        except FileNotFoundError:
            return {}
        return dict(_RECORD.iter_unpack(packed[: len(packed) - len(packed) % _RECORD.size]))


def _new_mapping(segment_id: int, size_bytes: int) -> _Mapping:
    fd = os.memfd_create(f"kvpool-segment-{segment_id:016x}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # before anything else can have the descriptor
        memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        os.close(fd)
        raise
    return _Mapping(segment_id, fd, memory, memoryview(memory))


def _populate(mapping: _Mapping, is_wanted: Callable[[], bool], check_memory: Callable[[int], None]) -> bool:
    """Put all memory of a segment in place, zeroed and mapped here, piece by piece. False if it is not wanted any more.

    The memory is of the NUMA node of the calling thread. A kernel that cannot populate leaves it reserved. Raises
    OSError with ENOSPC, or what `check_memory` raises, when there is not enough of it.
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
            check_memory(piece_bytes)
            if huge:
                _libc.madvise(address + offset, piece_bytes, _MADV_POPULATE_WRITE)
            # Reserves what is missing, or says why it cannot: populating reports a lack of room like any other fault.
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


def _close(mapping: _Mapping) -> None:
    """Let go of a segment: its memory is free once no peer has it either."""
    os.close(mapping.fd)
    mapping.view.release()
    try:
        mapping.memory.close()
    except BufferError:
        # Someone still looks at a slot, a traceback perhaps; the mapping ends with the last such view.
        _log.warning("segment %016x is unmapped late: a view of it is still held", mapping.segment_id)
