"""What the gpuagent's engine needs from the world: a device that reaches the engine's cache, and a pool of pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.ipc import IpcEvent, IpcMemory
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.launches import Launched, LaunchKind, LaunchPage
from kvpool.core.layout import EngineLayout
from kvpool.core.page import PageFault, PageKey
from kvpool.core.segment import MappedSegment
from kvpool_gpuagent.core.slots import PageWish as PageWish
from kvpool_gpuagent.core.slots import ReadSlot as ReadSlot
from kvpool_gpuagent.core.slots import WriteSlot as WriteSlot

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """One page to move between its slot and the engine's cache.

    page: the whole slot (header + payload + sum table), writable for a gather.
    block_ids: [chunk_tokens / block_tokens] int64, each in [0, block_count), checked before.
    skip_tokens: a scatter leaves the first this many tokens of the chunk untouched.
    """

    key: PageKey
    page: memoryview
    block_ids: BlockIds
    skip_tokens: int = 0


StopFlag = Callable[[], bool]
"""Asked between bursts, from any thread; True means that nothing more may be started."""


class EngineCache(Protocol):
    """One engine rank's paged KV cache, mapped. Called on the event loop; the device has its own threads or streams.

    Several calls may run at once: a device orders, joins and overlaps them as suits it (bursts into scratch, copies on
    its streams). What holds for each: once it has returned, or raised, or its cancelled caller has got CancelledError,
    no work of that call touches cache or slots any more. A device that fails raises KvPoolError.

    Engine events are looked at from the host, and no work is ever enqueued behind one: an event of a hung or dead
    engine may never fire, and a stream that waits for it could be neither cancelled nor closed. So whoever stores or
    loads asks `event_passed` until it says yes, and calls `gather` or `scatter` after that: whatever these launch, in
    whatever order windows overlap, comes after the engine's work.
    """

    batch_bytes: int  # hand page bytes over in calls of about so many: enough to be fast, few enough to overlap

    async def event_passed(self, slot: int) -> bool:
        """Whether the engine's work before the last recording of events[slot] has ended (CUDA: cuEventQuery).

        Looks, never waits. Asked only between the engine's word that it has recorded the event and ours that it may do
        so again: there is exactly one recording that is meant. Several calls may run at once, also for one slot.
        """
        ...

    async def gather(self, copies: Sequence[PageCopy], stop: StopFlag) -> bool:
        """Fill slots from the cache and seal them (sum table, then header).

        The engine's work that these blocks wait for has ended. Returns whether all copies are complete; False only if
        `stop` said so.
        """
        ...

    async def scatter(self, copies: Sequence[PageCopy]) -> Sequence[PageFault | None]:
        """Verify pages and move those that pass into the cache. Per copy, None or why nothing of it was moved.

        A page that fails, in whatever block, leaves the cache as it was.
        """
        ...

    async def close(self) -> None:
        """Unmap memory and close events; no call may be running. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedHandle:
    """Engine memory: CUDA IPC fields, or else shared memory, whose descriptor is the receiver's once it has come."""

    size_bytes: int  # > 0
    descriptor: int | None = None
    file_offset: int = 0
    ipc: IpcMemory | None = None  # size_bytes from its first byte on are inside of its allocation: checked before


class PeerCache(Protocol):
    """A cache that pulls may read, mapped. Its holder closes it when no pull reads it any more."""

    async def close(self) -> None:
        """Unmap memory. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PullPart:
    """Rows that one source gives: of model layers x heads that both caches have.

    slots: [T, 2] int64, row slots (block * rows of a block + row) of source and destination, checked before.
    """

    source: PeerCache
    layers: range
    heads: range
    slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PulledBytes:
    """What a pull moved. copy_s: from its first launch to its end."""

    size_bytes: int
    copy_s: float


class EngineLaunches(Protocol):
    """Kernels that an engine launches for us in its own process. Called on the event loop."""

    scratch: MappedHandle  # GPU memory that it lends for them
    timeout_s: float  # an engine that has not answered by then is asked no more

    def ask(
        self, kind: LaunchKind, pages: Sequence[LaunchPage], block_ids: BlockIds, *, sums: bool
    ) -> asyncio.Future[Launched]:
        """Ask for a launch: see kvpool.core.launches.Launch.

        The answer comes when nothing of the launch is running any more. It is the exception Stopped when the session
        is over: then the engine itself sees to it that its launches end before it uses cache or scratch otherwise.
        """
        ...


class Device(Protocol):
    """Reaches engine caches."""

    name: str  # "cpu" or "cuda"

    def check(
        self,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
    ) -> None:
        """Refuse what this device cannot copy or map, before anything is mapped or any descriptor has come.

        handles: all of one kind; the one that is not this device's is refused. Raises NotServed saying what to do
        instead, InvalidRequest naming the argument (a GPU that is not visible here, say).
        """
        ...

    async def map_cache(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
        launches: EngineLaunches | None = None,
    ) -> EngineCache:
        """Map an engine's memory and open its events, which passed `check`; owns the descriptors from the call on.

        launches: of an engine that offers them, its scratch on the same GPU as the cache; they need not be used.
        Raises InvalidRequest naming the argument; then nothing of it is mapped.
        """
        ...

    async def map_peer(self, spec: KeyspaceSpec, layout: EngineLayout, handles: Sequence[MappedHandle]) -> PeerCache:
        """Map a cache that another agent serves, for reading. Raises as `check` and `map_cache` do."""
        ...

    async def pull(self, destination: EngineCache, parts: Sequence[PullPart], stop: StopFlag) -> PulledBytes:
        """Copy rows of peers' caches, which are other memory, into a cache, in as few launches as can be.

        Sources are caches of `map_cache` or of `map_peer`, each at most once, none of them closed before this has
        ended. Once it has returned, or raised, or its cancelled caller has got CancelledError, it touches no memory any
        more. Raises NotServed where there is no GPU or no way between two of them, Stopped if `stop` said so before it
        began, KvPoolError when the GPU fails; the destination's slots then hold anything.
        """
        ...

    def register_segment(self, segment: MappedSegment) -> Callable[[], None]:
        """Make an arena segment fast to copy from and to (CUDA: pin it) and to sum; returns what undoes it.

        Both block and may run in any thread. The device has nothing of the segment mapped after the undoing.
        """
        ...

    def measure_link(self) -> Mapping[str, float]:
        """Bytes per second of plain copies between engine memory and the host's, by direction. Blocks; for metrics."""
        ...

    async def close(self) -> None:
        """Release the device; every cache is closed."""
        ...


class PagePool(Protocol):
    """Pages of the cluster as one engine session sees them: through the local pagestore's arena, or page streams.

    Leases belong to the pool's session; a broken session raises ServiceUnavailable or SessionUnknown from every call.
    Who asks for more than is free waits for what others give back, first come first served, and holds none of it
    meanwhile. A slot's view dies with its lease: whoever touches it after commit, abort or release gets ValueError.
    """

    @property
    def kind(self) -> str:
        """ "arena" or "remote"."""
        ...

    @property
    def local_node_id(self) -> bytes:
        """Of this host's pagestore once it was reached; empty before and without one."""
        ...

    @property
    def window_pages(self) -> int:
        """Pages of one reserve or acquire at most."""
        ...

    async def reserve(
        self, wishes: Sequence[PageWish], sizes_bytes: Sequence[int]
    ) -> Sequence[WriteSlot | int | KvPoolError]:
        """Per page: a slot, Admission.EXISTS or Admission.PENDING, or why not. A cancelled caller holds nothing."""
        ...

    async def commit(self, slots: Sequence[WriteSlot]) -> Sequence[KvPoolError | None]:
        """Make pages visible; per page None or why not. The slots are gone whatever happens."""
        ...

    async def abort(self, slots: Sequence[WriteSlot]) -> None:
        """Give slots back unwritten. Never raises, never waits."""
        ...

    def acquire(
        self, wishes: Sequence[PageWish], wait_s: float
    ) -> AsyncGenerator[tuple[int, ReadSlot | KvPoolError | None], None]:
        """Yield (position, slot | error | None for a plain miss) as pages settle, each position once.

        A consumer that closes the generator early owns what was yielded; what settles later is released by the pool.
        """
        ...

    async def release(self, slots: Sequence[ReadSlot], corrupt: Sequence[ReadSlot] = ()) -> None:
        """End reads; `corrupt` ones failed verification. Never raises: a session that broke ends its leases itself."""
        ...

    async def connect(self) -> None:
        """Reach the pagestore now rather than at the first page; failing is no error, each call tries again."""
        ...

    async def close(self) -> None:
        """End the session normally: nothing is leased any more. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedKeyspace:
    """What the index answers to an opened keyspace."""

    keyspace: bytes  # 16-byte id
    hash_key: bytes  # 32 bytes


class IndexPort(Protocol):
    """The index as the agent sees it. Every call has a deadline; raises StoreUnavailable, DeadlineExceeded, ..."""

    async def open_keyspace(self, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        """Bind or check a name. Raises KeyspaceMismatch, GeometryUnsupported, NotServed."""
        ...

    async def match(self, query: ChainQuery) -> ChainMatch:
        """The longest covered prefix."""
        ...

    def forget(self, query: ChainQuery) -> None:
        """What was answered about these chunks misled: the next answer must not be a remembered one."""
        ...


class PoolFactory(Protocol):
    """Makes the page pool of one engine session."""

    def __call__(self, keyspace: bytes, spec: KeyspaceSpec, peer_name: str) -> PagePool: ...
