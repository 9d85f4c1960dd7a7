"""vLLM's store and load jobs: copies between its CPU region and the cluster that end some time after their step."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvpool.client.object_store import AsyncObjects
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_sync import StorePages
from kvpool.client.store_values import KeyspaceShards
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.core.errors import KvPoolError
from kvpool.core.retention import NO_RETENTION, Retention

_log = logging.getLogger(f"vllm.{__name__}")
LACKING_S = 60.0  # prompts that many share come again sooner
FAILED_PAUSE_S = 5.0
ResultT = TypeVar("ResultT")


class ChunkStore(Protocol):
    """Chunks of one size in one keyspace, by key. Each call returns at once; when its future is done nothing of it is
    copied any more. Trouble is False for each key, or the future's exception."""

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]: ...
    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[list[bool]]: ...
    def put(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], written: list[int], retention: Retention
    ) -> Future[list[bool]]: ...


class ClusterChunks:
    """A ChunkStore in the cluster."""

    def __init__(self, pages: StorePages, space: KeyspaceShards, size_bytes: int) -> None:
        self._pages, self._space, self._size_bytes = pages, space, size_bytes

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        return self._start(lambda pages: self._of(pages).exists(keys))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[list[bool]]:
        return self._start(lambda pages: self._of(pages).get(keys, buffers))

    def put(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], written: list[int], retention: Retention
    ) -> Future[list[bool]]:
        return self._start(lambda pages: self._of(pages).put(keys, buffers, written=written, retention=retention))

    def clear(self) -> Future[bool]:
        """Drop all chunks of the keyspace; False if a pagestore could not be asked."""
        return self._start(lambda pages: self._of(pages).clear())

    def _of(self, pages: AsyncStorePages) -> AsyncObjects:
        return AsyncObjects(pages, self._space, self._size_bytes)

    def _start(self, work: Callable[[AsyncStorePages], Awaitable[ResultT]]) -> Future[ResultT]:
        try:
            return self._pages.start(work)
        except KvPoolError as error:  # closed
            failed: Future[ResultT] = Future()
            failed.set_exception(error)
            return failed


@dataclass(slots=True)
class _Job:
    keys: Sequence[bytes]  # those that are copied
    copied: Future[list[bool]] | None  # None: nothing had to be
    is_load: bool
    begun_s: float
    buffers: Sequence[memoryview] = ()  # of vLLM's region; released when it has ended
    refused_count: int = 0
    written: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """stored: keys that were not in the cluster before. loaded, lost: keys of a load that came, and did not."""

    job_id: int
    is_load: bool
    success: bool
    stored: Sequence[bytes] = ()
    loaded: Sequence[bytes] = ()
    lost: Sequence[bytes] = ()
    moved_bytes: int
    seconds: float


class TierJobs:
    """Belongs to the scheduler's thread; only `drain` waits. Each job ends exactly once."""

    def __init__(
        self,
        region: memoryview,
        chunk_bytes: int,
        known: KnownChunks,
        store_bytes_max: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """region: vLLM's chunks one after the other, writable bytes. store_bytes_max: read by stores at once."""
        self._region, self._chunk_bytes, self._known = region, chunk_bytes, known
        self._store_bytes_max, self._now_s = store_bytes_max, now_s
        self._open: dict[int, _Job] = {}
        self._storing: set[bytes] = set()
        # Refused or not stored when they were offered last, and when that was; the oldest first, at most as many as
        # vLLM's region has.
        self._lacking: OrderedDict[bytes, float] = OrderedDict()
        self._failed_s = float("-inf")
        self._log_limiter = LogRateLimiter(now_s)
        self.refused_chunks = self.known_chunks = 0  # stores so far

    @property
    def storing_bytes(self) -> int:
        """Of vLLM's region that stores keep pinned now."""
        return len(self._storing) * self._chunk_bytes

    def loads(self) -> list[Future[list[bool]]]:
        """Copies of loads that have not ended."""
        return [
            job.copied
            for job in self._open.values()
            if job.is_load and job.copied is not None and not job.copied.done()
        ]

    def wants_again(self) -> bool:
        """Whether chunks that were not stored are to be offered again: there are some, and there is room.

        While there are, all requests offer all of their chunks. So they are remembered for a time only, and not asked
        for while the cluster takes none.
        """
        now_s = self._now_s()
        while self._lacking and now_s - next(iter(self._lacking.values())) > LACKING_S:
            self._lacking.popitem(last=False)
        has_room = 2 * self.storing_bytes <= self._store_bytes_max
        return bool(self._lacking) and has_room and now_s - self._failed_s > FAILED_PAUSE_S

    def forget(self) -> None:
        """What was offered so far is of no use any more."""
        self._known.clear()
        self._lacking.clear()

    def store(
        self,
        store: ChunkStore,
        job_id: int,
        keys: Sequence[bytes],
        chunk_ids: Iterable[int],
        retention: Retention = NO_RETENTION,
    ) -> None:
        """Begin to store the chunks that the cluster is not known to have, as many as there is room for.

        retention: of all of them; any of its own reaches those that the cluster has, too, as far as there is room.
        """
        new: dict[bytes, int] = {}
        for key, chunk_id in zip(keys, chunk_ids, strict=True):
            is_known = key in self._known
            if is_known:
                self._lacking.pop(key, None)
            if (not is_known or retention != NO_RETENTION) and key not in self._storing:
                new.setdefault(key, chunk_id)
        self.known_chunks += len(keys) - len(new)
        room = max(0, self._store_bytes_max - self.storing_bytes) // self._chunk_bytes
        taken = list(new.items())[:room]
        refused = self.lack(list(new)[room:])
        job = _Job([key for key, _ in taken], None, False, self._now_s(), refused_count=refused)
        self.refused_chunks += refused
        if taken:
            self._storing.update(job.keys)
            job.buffers = [self._chunk(chunk_id) for _, chunk_id in taken]
            job.copied = store.put(job.keys, job.buffers, job.written, retention)
        self._open[job_id] = job

    def load(self, store: ChunkStore, job_id: int, keys: Sequence[bytes], chunk_ids: Iterable[int]) -> None:
        """Begin to read chunks into vLLM's region."""
        buffers = [self._chunk(chunk_id) for chunk_id in chunk_ids]
        self._open[job_id] = _Job(keys, store.get(keys, buffers), True, self._now_s(), buffers)

    def ended(self) -> list[EndedJob]:
        """Jobs that have ended since the last call."""
        ready = [job_id for job_id, job in self._open.items() if job.copied is None or job.copied.done()]
        return [self._end(job_id, self._open.pop(job_id)) for job_id in ready]

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is copied any more; every copy has a time limit of its own."""
        wait([job.copied for job in self._open.values() if job.copied is not None], timeout_s)

    def close(self) -> None:
        """Let go of vLLM's region. Nothing may be begun after it; what has not ended is waited for."""
        self.drain()
        self.ended()
        self._region.release()

    def lack(self, keys: Sequence[bytes]) -> int:
        """Have later requests offer these chunks again, but for those that the cluster has. Returns how many it lacks.

        vLLM offers a chunk of its region once, by the request that computed it: also if that is not to store any.
        """
        lacking, now_s = [key for key in keys if key not in self._known], self._now_s()
        for key in lacking:
            self._lacking[key] = now_s
            self._lacking.move_to_end(key)
        while len(self._lacking) > self._region.nbytes // self._chunk_bytes:
            self._lacking.popitem(last=False)
        return len(lacking)

    def _chunk(self, chunk_id: int) -> memoryview:
        start = int(chunk_id) * self._chunk_bytes
        return self._region[start : start + self._chunk_bytes]

    def _end(self, job_id: int, job: _Job) -> EndedJob:
        good = self._result(job)
        for buffer in job.buffers:
            buffer.release()
        done = [key for key, one in zip(job.keys, good, strict=True) if one]
        failed = [key for key, one in zip(job.keys, good, strict=True) if not one]
        self._known.add(done)
        self._known.drop(failed)
        for key in done:
            self._lacking.pop(key, None)
        seconds = self._now_s() - job.begun_s
        if job.is_load:
            moved_bytes = len(done) * self._chunk_bytes
            return EndedJob(
                job_id=job_id,
                is_load=True,
                success=not failed,
                loaded=done,
                lost=failed,
                moved_bytes=moved_bytes,
                seconds=seconds,
            )
        self._storing.difference_update(job.keys)
        if failed:
            self._failed_s = self._now_s()
            self.lack(failed)
        stored = [job.keys[position] for position in job.written]
        return EndedJob(
            job_id=job_id,
            is_load=False,
            success=not failed and not job.refused_count,
            stored=stored,
            moved_bytes=len(stored) * self._chunk_bytes,
            seconds=seconds,
        )

    def _result(self, job: _Job) -> list[bool]:
        """Per copied key; a copy that ended in an error has copied none."""
        failed = [False] * len(job.keys)
        if job.copied is None or job.copied.cancelled():
            return failed
        error = job.copied.exception()
        if error is None:
            return job.copied.result()
        if self._log_limiter.due(str(error)):
            what = "loaded" if job.is_load else "stored"
            _log.warning("kvpool: %d chunks were not %s: %s", len(job.keys), what, error)
        return failed
