"""What the gpuagent's engine needs from the world: a device that reaches the engine's cache, and a pool of pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.core.cancel import CancelToken
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.ipc import IpcEvent, IpcMemory
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.spans import PageSpan
from kvpool_gpuagent.core.cached_chunks import HeldChunks
from kvpool_gpuagent.core.pages import AcquiredPages, CopyBatch, PageSlots, ReservedPages

BlockIds = npt.NDArray[np.int64]


class EngineCache(Protocol):
    """One engine rank's paged KV cache, mapped. Called on the event loop; the device has its own threads or streams.

    Several calls may run at once: a device orders, joins and overlaps them as suits it (bursts into scratch, copies on
    its streams). What holds for each: once it has returned, or raised, or its cancelled caller has got CancelledError,
    no work of that call touches cache or slots any more. A device that fails raises KvPoolError.

    Engine events are looked at from the host, and no work is ever enqueued behind one: an event of a hung or dead
    engine may never fire, and a stream that waits for it could be neither cancelled nor closed. So a store or a
    load asks `event_passed` until it is true, and calls `gather` or `scatter` after that: whatever these launch, in
    whatever order windows overlap, comes after the engine's work.
    """

    async def event_passed(self, slot: int) -> bool:
        """Whether the engine's work before the last recording of events[slot] has ended (CUDA: cuEventQuery).

        Looks, never waits. Asked only between the engine's word that it has recorded the event and ours that it may do
        so again: there is exactly one recording that is meant. Several calls may run at once, also for one slot.
        """
        ...

    async def gather(self, batch: CopyBatch, stop: CancelToken) -> bool:
        """Fill the payloads of pages from the cache; headers are left to others.

        The engine's work that these blocks wait for has ended. Returns whether all pages are complete; False only if
        `stop` was cancelled: it is asked between bursts, from any thread, and after it nothing more is started.
        """
        ...

    async def scatter(self, batch: CopyBatch) -> None:
        """Move the payloads of pages, which are known to be true, into the cache."""
        ...

    async def close(self) -> None:
        """Unmap memory and close events; no call may be running. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedHandle:
    """Engine memory: CUDA IPC fields, or else shared memory, whose descriptor is the receiver's once it has come."""

    size_bytes: int  # > 0
    descriptor: int | None = None
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


class Device(Protocol):
    """Reaches engine caches."""

    name: str  # "cpu" or "cuda"
    uuid: str  # of the GPU; empty for the CPU

    def check(self, handles: Sequence[MappedHandle], events: Sequence[IpcEvent]) -> None:
        """Refuse what this device cannot map, before anything is mapped or any descriptor has come.

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
    ) -> EngineCache:
        """Map an engine's memory and open its events, which passed `check`; owns the descriptors from the call on.

        Raises InvalidRequest naming the argument; then nothing of it is mapped.
        """
        ...

    async def map_peer(self, spec: KeyspaceSpec, layout: EngineLayout, handles: Sequence[MappedHandle]) -> PeerCache:
        """Map a cache that another agent serves, for reading. Raises as `check` and `map_cache` do."""
        ...

    async def pull(self, destination: EngineCache, parts: Sequence[PullPart], stop: CancelToken) -> PulledBytes:
        """Copy rows of peers' caches, which are other memory, into a cache, in as few launches as can be.

        Sources are caches of `map_cache` or of `map_peer`, each at most once, none of them closed before this has
        ended. Once it has returned, or raised, or its cancelled caller has got CancelledError, it touches no memory any
        more. Raises NotServed without a GPU, or without a link between two of them, Stopped if `stop` was cancelled
        before it began, KvPoolError when the GPU fails; the destination's slots then hold anything.
        """
        ...

    def register_segment(self, segment: memoryview) -> Callable[[], None]:
        """Make an arena segment fast to copy from and to (CUDA: pin it); returns what undoes it.

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
    """The pages of the cluster as one engine session sees them: through the local pagestore's arena, or page streams.

    A broken session raises ServiceUnavailable or SessionUnknown from every call. A caller that asks for more than is
    free waits for what others give back, first come first served, and holds none of it meanwhile. A slot's memory must
    not be touched after its commit, abort or release.
    """

    @property
    def local_node_id(self) -> bytes:
        """Of this host's pagestore once it was reached; empty before and without one."""
        ...

    @property
    def window_pages(self) -> int:
        """Pages of one reserve or acquire at most."""
        ...

    @property
    def arena_bytes(self) -> int:
        """Bytes of this host's staging memory; 0 as long as it was not reached, or cannot keep pages for later."""
        ...

    @property
    def broken(self) -> asyncio.Event:
        """Set when the session of the slots that are out has ended: its successor waits until they are released."""
        ...

    async def reserve(self, span: PageSpan, chain_head_hash: bytes) -> ReservedPages:
        """Slots to write. chain_head_hash: of chunk 0 of the chain, for placement. A cancelled caller holds nothing."""
        ...

    async def commit(self, span: PageSpan, slots: PageSlots) -> Sequence[tuple[int, KvPoolError]]:
        """Make pages visible whose payloads are in place; those that are not, as (index in slots, why). The slots have
        ended whatever happens."""
        ...

    async def abort(self, slots: PageSlots) -> None:
        """Give slots back unwritten. Never raises, never waits."""
        ...

    def acquire(self, span: PageSpan, wait_s: float) -> AsyncGenerator[AcquiredPages, None]:
        """Yield pages as they are answered, each once: true ones under leases, and what is not to be had.

        A consumer that closes the generator early owns what was yielded; what is answered later is released by the
        pool.
        """
        ...

    async def release(self, slots: PageSlots) -> None:
        """End reads. Never raises: a session that broke ends its leases itself."""
        ...

    async def connect(self) -> None:
        """Reach the pagestore now rather than at the first page; a failure is not reported, each call tries again."""
        ...

    async def close(self) -> None:
        """No slot of this pool is leased any more. Never raises."""
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

    def note_stored(self, query: ChainQuery) -> None:
        """Some of these chunks have just been stored by this agent: until the index says so, none is called absent."""
        ...


class PoolFactory(Protocol):
    """Makes the page pool of one engine session."""

    def __call__(self, keyspace: bytes, spec: KeyspaceSpec) -> PagePool: ...


class CacheLoan(Protocol):
    """A cache of another agent's session, for reading. Belongs to one event loop."""

    @property
    def layout(self) -> EngineLayout: ...
    @property
    def handles(self) -> Sequence[MappedHandle]: ...

    @property
    def ended(self) -> asyncio.Event:
        """Set when the owner wants it back or cannot be reached any more, or to give it back."""
        ...

    async def check(self, block_ids: BlockIds, timeout_s: float) -> BlockIds:
        """Return what generations blocks have now, if the session has been alive until now: as many as were asked for.
        Raises Stopped, ServiceUnavailable, DeadlineExceeded; InvalidRequest if the session has no generations.
        """
        ...

    async def close(self) -> None:
        """Give it back: the memory is unmapped. Idempotent, never raises."""
        ...


class PeerAgents(Protocol):
    """Other agents of this host."""

    async def lease(self, endpoint: str, session_id: bytes, keyspace: bytes, timeout_s: float) -> CacheLoan:
        """Raises SessionUnknown, KeyspaceMismatch, TenantDenied, NotServed, ServiceUnavailable, ..."""
        ...

    async def find(self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes, timeout_s: float) -> list[HeldChunks]:
        """Return which chunks caches of their sessions hold, but for those of this engine. Agents that do not answer in
        time are left out, and not asked for a while. Never raises."""
        ...

    async def close(self) -> None:
        """Nothing is asked any more."""
        ...
