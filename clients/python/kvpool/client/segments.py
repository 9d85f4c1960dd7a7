"""Arena segments of a pagestore mapped into this process, and the session file that says we still map them.

The descriptor of the session file carries a lock that the kernel drops when its last copy is closed. It is kept open
for as long as any mapping is there, so that the pagestore never takes us for gone too early: see kvpool_server.flock.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np

from kvpool.client.fds import FetchedFd, fetch_fd
from kvpool.client.host_memory import fill_page_tables
from kvpool.core.chunks import Int64s
from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import InvalidRequest, LeaseLost, ServiceUnavailable


class FetchFd(Protocol):
    """kvpool.client.fds.fetch_fd, or a stand-in."""

    def __call__(self, path: str, token: bytes, number: int, *, timeout_s: float) -> FetchedFd: ...


MapHook = Callable[[memoryview], Callable[[], None]]
"""Called in a thread with all bytes of a new mapping; returns what undoes it. Must not keep the view.

For what makes a mapping fast to use: filling in its page tables, pinning it for a GPU.
"""


class _SessionFile:
    """Owns the descriptor; it is closed when the last mapping that refers to this object has gone."""

    __slots__ = ("__weakref__",)

    def __init__(self, fd: int) -> None:
        # At exit the kernel closes it, after the mappings; Python might do it before them.
        weakref.finalize(self, os.close, fd).atexit = False


def _forget(session_file: _SessionFile) -> None:
    """Called when a mapping has gone: by being passed here, `session_file` lived until now."""


class SegmentMap:
    """Segments of one session, mapped when first needed. Belongs to one event loop; views may be used in any thread."""

    def __init__(
        self,
        socket_path: str,
        token: bytes,
        *,
        timeout_s: float,
        fetch: FetchFd = fetch_fd,
        on_map: MapHook | None = None,
    ) -> None:
        self._socket_path = socket_path
        self._token = token
        self._timeout_s = timeout_s
        self._fetch = fetch
        self._on_map = on_map
        self._undo: list[Callable[[], None]] = []
        self._session_file: _SessionFile | None = None
        self._mappings: dict[int, mmap.mmap] = {}
        self._addresses: dict[int, int] = {}  # of the first bytes of the mappings
        self._mapping: dict[int, asyncio.Task[None]] = {}
        self._lingering: list[weakref.ref[mmap.mmap]] = []  # closed here, and kept alive by views
        self._closed = False

    async def open(self) -> None:
        """Take the session file. raises: what the pagestore answers, ServiceUnavailable, DeadlineExceeded."""
        fetched = await self._fetch_owned(SESSION_FILE_NUMBER)
        self._session_file = _SessionFile(fetched.fd)

    def is_mapped(self, segment_id: int) -> bool:
        """Whether `view` works now."""
        return segment_id in self._mappings

    async def map(self, segment_ids: Iterable[int]) -> None:
        """Map segments that are not mapped yet; concurrent callers share one fetch each. raises: as `open` does."""
        for segment_id in set(segment_ids):
            if segment_id in self._mappings:  # looked at now: others have mapped some while we waited for the last one
                continue
            task = self._mapping.get(segment_id)
            if task is None:
                task = self._mapping[segment_id] = asyncio.create_task(self._map_one(segment_id))
                task.add_done_callback(partial(self._settled, segment_id))
            await asyncio.shield(task)  # others may wait for it too

    def _settled(self, segment_id: int, task: asyncio.Task[None]) -> None:
        self._mapping.pop(segment_id, None)
        if not task.cancelled():
            task.exception()  # retrieved here; callers that still wait raise it

    async def _map_one(self, segment_id: int) -> None:
        fetched = await self._fetch_owned(segment_id)
        try:
            if self._closed:
                raise ServiceUnavailable("the session was closed")
            _check_size(segment_id, fetched)
            mapping = mmap.mmap(fetched.fd, fetched.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            if self._on_map is not None:
                await self._prepare(mapping, self._on_map)
        finally:
            os.close(fetched.fd)
        assert self._session_file is not None, "open comes first"
        weakref.finalize(mapping, _forget, self._session_file).atexit = False
        self._mappings[segment_id] = mapping
        self._addresses[segment_id] = np.frombuffer(mapping, np.uint8).ctypes.data

    async def _prepare(self, mapping: mmap.mmap, on_map: MapHook) -> None:
        with memoryview(mapping) as view:
            undo = await asyncio.to_thread(on_map, view)
        if self._closed:
            undo()
            mapping.close()
            raise ServiceUnavailable("the session was closed")
        self._undo.append(undo)

    async def _fetch_owned(self, number: int) -> FetchedFd:
        """A descriptor that is not lost when this task is cancelled while the thread still fetches it."""
        loop = asyncio.get_running_loop()
        fetching = loop.run_in_executor(
            None, lambda: self._fetch(self._socket_path, self._token, number, timeout_s=self._timeout_s)
        )
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            fetching.add_done_callback(_close_fetched)
            raise

    def view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes of a slot. raises: LeaseLost after close; InvalidRequest for bytes outside of the segment."""
        mapping = self._mappings.get(segment_id)
        if mapping is None:
            raise LeaseLost(f"segment {segment_id} is not mapped (any more)")
        if offset < 0 or size_bytes < 0 or offset + size_bytes > len(mapping):
            raise InvalidRequest(f"bytes {offset} to {offset + size_bytes} are outside of segment {segment_id}")
        return memoryview(mapping)[offset : offset + size_bytes]

    def addresses(self, segment_ids: Int64s, offsets: Int64s) -> Int64s:
        """Process addresses of bytes of segments, pair by pair. raises: as `view` does."""
        if segment_ids.size and (segment_ids == segment_ids[0]).all():  # mostly: one prompt's slots lie together
            address, mapping = self._addresses.get(int(segment_ids[0])), self._mappings.get(int(segment_ids[0]))
            if address is not None and mapping is not None:
                if int(offsets.min()) < 0 or int(offsets.max()) >= len(mapping):
                    raise InvalidRequest("an offset is outside of its segment")
                return offsets + address
        distinct, which = np.unique(segment_ids, return_inverse=True)
        missing = [one for one in distinct.tolist() if one not in self._mappings]
        if missing:
            raise LeaseLost(f"segment {missing[0]} is not mapped (any more)")
        lengths = np.array([len(self._mappings[one]) for one in distinct.tolist()], np.int64)
        if ((offsets < 0) | (offsets >= lengths[which])).any():
            raise InvalidRequest("an offset is outside of its segment")
        return np.array([self._addresses[one] for one in distinct.tolist()], np.int64)[which] + offsets

    async def stop(self) -> None:
        """Map nothing more; returns once what is being mapped has ended. Before `close`, which may run in a thread."""
        self._closed = True
        if self._mapping:
            await asyncio.wait(self._mapping.values())

    def close(self) -> bool:
        """Unmap everything; True if nothing is mapped any more. May be called again.

        Where views (or arrays over them) still live, the mapping and the lock of the session file live as long as they
        do, and False is returned.
        """
        self._closed = True
        self._session_file = None
        while self._undo:
            self._undo.pop()()
        self._lingering += [weakref.ref(mapping) for mapping in self._mappings.values() if not try_unmap(mapping)]
        self._mappings.clear()
        self._addresses.clear()
        if any(mapping() is not None for mapping in self._lingering):
            gc.collect()  # views that only a reference cycle keeps
        self._lingering = [mapping for mapping in self._lingering if mapping() is not None]
        return not self._lingering


def fill_segment(segment: memoryview) -> Callable[[], None]:
    """A MapHook that fills in the page tables: on the first copy each 4 KiB would cost as much as its copying does."""
    if isinstance(segment.obj, mmap.mmap):
        fill_page_tables(segment.obj)
    return lambda: None


def _check_size(segment_id: int, fetched: FetchedFd) -> None:
    """Touching memory behind the end of its file would kill this process: it has to be there, and to stay."""
    if os.fstat(fetched.fd).st_size < fetched.size_bytes or not fetched.size_bytes:
        raise InvalidRequest(f"segment {segment_id} is shorter than its {fetched.size_bytes} bytes")
    try:
        seals = fcntl.fcntl(fetched.fd, fcntl.F_GET_SEALS)
    except OSError:  # of a file that cannot be sealed
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidRequest(f"segment {segment_id} can be truncated by others who map it; update the pagestore")


def try_unmap(mapping: mmap.mmap) -> bool:
    """Unmap; False while views of the mapping live."""
    try:
        mapping.close()
    except BufferError:
        return False
    return True


def _close_fetched(fetching: asyncio.Future[FetchedFd]) -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        os.close(fetching.result().fd)
